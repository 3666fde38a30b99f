"""Whether embedded daemons run: by what ends with the processes, not by files."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.common.daemon_process import is_serving, serving_sidecars
from pannier.wire import addresses
from support.processes.daemons import short_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


def test_the_socket_that_a_killed_sidecar_has_left_is_no_sidecar(directory: Path) -> None:
    for place in (directory, addresses.job_dir(directory, "a job", "1", "a host")):
        place.mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as sidecar:
            sidecar.bind(str(place / "sidecar.sock"))
            sidecar.listen()
            assert is_serving(place)
            assert serving_sidecars(directory) == [addresses.embedded_sidecar(place)]
        assert not is_serving(place)
    assert serving_sidecars(directory) == []
