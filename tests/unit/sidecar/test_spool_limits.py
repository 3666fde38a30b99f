"""Hosts that lack what a spool is made with."""

import errno
import fcntl
import os
import resource
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pannier.sidecar.spool.spool import Spool
from pannier.wire.errors import ConfigurationError

MIB = 1 << 20


def failing(code: int) -> Any:
    def call(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return call


def test_a_limit_of_file_sizes_is_named_with_its_value_and_is_no_full_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, before[1]))
    try:
        with pytest.raises(ConfigurationError, match=rf"RLIMIT_FSIZE.* is {4 * MIB} bytes; raise"):
            spool.take("job", 8 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        spool.close()


def test_room_is_reserved_where_the_kernel_has_no_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSYS))
    spool = Spool(tmp_path / "spool", None)
    file = spool.take("job", 3 * MIB)
    assert os.fstat(file.fd).st_blocks * 512 >= 3 * MIB
    assert file.capacity >= 3 * MIB
    spool.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_with_the_remedy(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(code))
    with pytest.raises(ConfigurationError, match=r"can't be locked.*Lustre.*--spool"):
        Spool(tmp_path / "spool", None)
