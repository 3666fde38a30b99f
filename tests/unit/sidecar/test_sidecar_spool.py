"""The spool: reserved space, recycled files, budgets and jobs that go away."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.common import daemon_process, timeouts
from pannier.common.cgroup import MemoryLimit
from pannier.sidecar.spool import spool as spool_module
from pannier.sidecar.spool.spool import Spool
from pannier.wire import errors
from support.actors.hosts import running_host
from support.actors.lease_holder import LeaseHolder
from support.processes.daemons import memory_directory
from support.processes.descriptors import opened

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    made = memory_directory()
    yield made
    shutil.rmtree(made)


def test_space_is_reserved_and_private(memory: Path) -> None:
    spool = Spool(memory / "spool")
    file = spool.take("job", 3 * MIB + 1)
    status = file.path.stat()
    assert status.st_blocks * 512 >= 3 * MIB + 1
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    assert spool.usage.reserved == file.capacity == 3 * MIB + 4096
    spool.close()
    assert not file.path.exists()


def test_files_are_used_again_where_they_fit(memory: Path) -> None:
    spool = Spool(memory / "spool")
    large, small = spool.take("job", 64 * MIB), spool.take("job", 2 * MIB)
    spool.give(large)
    spool.give(small)
    # The small one is extended; the large one waits for a large file.
    assert spool.take("job", 3 * MIB) is small
    assert small.capacity == 3 * MIB
    assert spool.take("job", 100) is not large
    assert spool.take("job", 60 * MIB) is large
    spool.close()


def test_files_never_pass_between_jobs(memory: Path) -> None:
    spool = Spool(memory / "spool")
    file = spool.take("job", MIB)
    os.pwrite(file.fd, b"secret", 0)
    spool.give(file)
    other = spool.take("other", MIB)
    assert other is not file
    assert os.pread(other.fd, 6, 0) == bytes(6)
    spool.close()


def test_unused_files_make_room_before_the_budget_is_full(memory: Path) -> None:
    spool = Spool(memory / "spool", budget=8 * MIB)
    for job in ("a", "b"):
        spool.give(spool.take(job, 4 * MIB))
    assert spool.usage.reserved == 8 * MIB
    held = spool.take("c", 4 * MIB)
    assert spool.usage.reserved == 8 * MIB
    with pytest.raises(errors.BusyError, match=f"{6 * MIB} bytes needed"):
        spool.take("c", 6 * MIB)
    assert spool.take("c", 4 * MIB) is not held
    with pytest.raises(errors.BusyError, match="0 free of its budget"):
        spool.take("c", 1)
    spool.close()


class Group:
    """A control group whose memory is ``other`` bytes and the files of a spool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int, directory: Path) -> None:
        self.limit = limit
        self.other = 0
        self.directory = directory
        monkeypatch.setattr(spool_module, "memory_limit", self.measure)

    def measure(self) -> MemoryLimit:
        files = sum(path.stat().st_blocks * 512 for path in self.directory.glob("*.data"))
        return MemoryLimit(self.limit, self.other + files, "/job")


def test_a_spool_in_memory_stays_within_the_limit_of_the_process(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, 100 * MIB, memory / "spool")
    group.other = 20 * MIB
    spool = Spool(memory / "spool")
    # 64 MiB of the limit are spare.
    assert (spool.usage.capacity, spool.usage.free) == (16 * MIB, 16 * MIB)
    assert "the memory limit of control group /job is 100.0 MiB" in spool.too_large
    with pytest.raises(
        errors.ConfigurationError, match=r"16777216 in memory \(the memory limit of"
    ):
        spool.check_fits([17 * MIB])
    first = spool.take("job", 10 * MIB)
    assert (spool.usage.capacity, spool.usage.free) == (16 * MIB, 6 * MIB)
    with pytest.raises(errors.BusyError, match=f"{7 * MIB} bytes needed, {6 * MIB} free, since"):
        spool.take("job", 7 * MIB)
    spool.give(first)
    # An unused file makes way, unless that doesn't help.
    with pytest.raises(errors.BusyError):
        spool.take("other", 17 * MIB)
    assert spool.usage.spare == 10 * MIB
    spool.give(spool.take("other", 12 * MIB))
    assert spool.usage.reserved == 12 * MIB
    # Other processes of the group take memory.
    spool.trim({"other"})
    assert spool.usage.reserved == 12 * MIB
    group.other = 30 * MIB
    spool.trim({"other"})
    assert (spool.usage.reserved, spool.usage.capacity) == (0, 6 * MIB)
    spool.close()


def test_a_budget_within_the_memory_limit_is_not_too_large(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, 100 * MIB, memory / "spool")
    spool = Spool(memory / "spool", budget=8 * MIB)
    assert not spool.too_large
    assert (spool.usage.capacity, spool.usage.bound) == (8 * MIB, "in its budget")
    spool.close()


def test_a_spool_on_a_disk_has_no_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, MIB, tmp_path / "spool")
    monkeypatch.setattr(spool_module, "is_tmpfs", lambda fd: False)
    spool = Spool(tmp_path / "spool")
    spool.take("job", 2 * MIB)
    assert spool.usage.limit is None
    assert not spool.too_large
    spool.close()


def test_a_refused_file_is_not_lost(memory: Path) -> None:
    spool = Spool(memory / "spool", budget=4 * MIB)
    spool.give(spool.take("job", 3 * MIB))
    with pytest.raises(errors.BusyError):
        spool.take("job", 6 * MIB)
    assert spool.take("job", 4 * MIB).capacity == 4 * MIB
    spool.close()


def test_space_of_a_job_that_went_away_is_given_back(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("pannier.sidecar.spool.spool.time.monotonic", lambda: now[0])
    spool = Spool(memory / "spool")
    spool.give(spool.take("job", MIB))
    spool.trim({"job"})
    now[0] += timeouts.SPOOL_FILE_KEPT_S + 1
    spool.trim({"job"})
    assert spool.usage.reserved == MIB
    now[0] += timeouts.SPOOL_FILE_KEPT_S / 2
    spool.trim(set())
    assert spool.usage.reserved == MIB
    now[0] += timeouts.SPOOL_FILE_KEPT_S
    spool.trim(set())
    assert spool.usage.reserved == 0
    assert not list(spool.directory.glob("*.data"))
    spool.close()


def test_a_spool_that_others_may_write_is_refused(memory: Path) -> None:
    (memory / "spool").mkdir()
    (memory / "spool").chmod(0o777)
    with pytest.raises(errors.ConfigurationError, match="others can write it"):
        Spool(memory / "spool")


def test_a_spool_that_is_a_file_is_refused(memory: Path) -> None:
    (memory / "spool").write_text("x")
    with pytest.raises(errors.ConfigurationError, match="can't be used"):
        Spool(memory / "spool")


def test_a_spool_in_use_is_refused_by_that_name_also_where_the_kernel_shows_no_locks(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_process, "_LOCKS", memory / "none")
    used = Spool(memory / "spool")
    refused = f"another sidecar works on the spool {used.directory}; end it"
    with pytest.raises(errors.ConfigurationError, match=refused):
        Spool(used.directory)
    assert opened().splitlines().count(os.path.realpath(used.directory)) == 1
    used.close()


def test_a_request_that_there_is_no_room_for_is_counted() -> None:
    with running_host() as host:
        sidecar, trainer = host.start(spool_budget=4 * MIB), host.trainer()
        with LeaseHolder(trainer, host.address) as leases:
            leases.reserve(2 * MIB)
            assert sidecar.backlog().refusals == 0
            with pytest.raises(errors.BusyError):
                leases.reserve(3 * MIB)
        assert sidecar.backlog().refusals == 1
