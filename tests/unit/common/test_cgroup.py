"""The memory limit of this process, by files of cgroup v1 and v2 that tests make."""

import os
from pathlib import Path

import pytest

from pannier.common.cgroup import MemoryLimit, memory_limit

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED = 9223372036854771712
"""What version 1 has without a limit."""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has 64 GiB."""
    sizes = {"SC_PHYS_PAGES": 64 * GIB >> 12, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


class Machine:
    """A /proc and a directory for each mounted cgroup file system."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text("22 1 0:21 / /proc rw - proc proc rw\n")
        self.mounted = directory / "cgroup file systems"

    def process_in(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, name: str, kind: str, root: str = "/", options: str = "rw") -> Path:
        place = self.mounted / name
        place.mkdir(parents=True)
        escaped = str(place).replace(" ", "\\040")
        with (self.proc / "self/mountinfo").open("a") as mounts:
            # With and without an optional field.
            shared = "shared:9 " if root == "/" else ""
            mounts.write(
                f"30 22 0:26 {root} {escaped} rw,nosuid {shared}- {kind} cgroup {options}\n"
            )
        return place

    @property
    def limit(self) -> MemoryLimit | None:
        return memory_limit(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2(
    group: Path, limit: int | str, used: int, *, high: int | str = "max", cache: int = 0
) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(
        f"anon 1\nfile {cache + 7}\nshmem 7\ninactive_file {cache // 4}\nactive_file {cache - cache // 4}\n"
    )
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n")


def v1(group: Path, limit: int, used: int, cache: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(
        f"cache 5\ninactive_file 0\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    )
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")


def test_a_container_of_version_2_has_its_group_as_the_root(machine: Machine) -> None:
    machine.process_in("0::/")
    v2(machine.mount("fs", "cgroup2"), 1400 * MIB, 600 * MIB, cache=100 * MIB)
    assert machine.limit == MemoryLimit(1400 * MIB, 500 * MIB, "/", kills=2)
    assert machine.limit.spare == 1400 * MIB // 16
    assert machine.limit.free == 900 * MIB - 1400 * MIB // 16


def test_64_to_256_mib_of_a_limit_are_spare(machine: Machine) -> None:
    machine.process_in("0::/")
    top = machine.mount("fs", "cgroup2")
    v2(top, 32 * GIB, 31 * GIB + 900 * MIB)
    assert machine.limit is not None
    assert machine.limit.spare == 256 * MIB
    assert machine.limit.free == 124 * MIB - 256 * MIB
    v2(top, 338 * MIB, 41 * MIB)
    assert machine.limit.free == (338 - 41 - 64) * MIB


def test_a_group_may_have_less_left_than_the_one_below_it(machine: Machine) -> None:
    """A Slurm step has the limit of its job, which other steps use, too."""
    machine.process_in("0::/system.slice/slurmstepd.scope/job_7/step_0")
    job = machine.mount("fs", "cgroup2") / "system.slice/slurmstepd.scope/job_7"
    v2(job, 8 * GIB, 6 * GIB)
    v2(job / "step_0", 8 * GIB, 2 * GIB)
    assert machine.limit == MemoryLimit(
        8 * GIB, 6 * GIB, "/system.slice/slurmstepd.scope/job_7", kills=2
    )
    v2(job / "step_0", 3 * GIB, 2 * GIB)
    assert machine.limit == MemoryLimit(
        3 * GIB, 2 * GIB, "/system.slice/slurmstepd.scope/job_7/step_0", kills=2
    )


def test_what_the_kernel_slows_processes_above_is_a_limit(machine: Machine) -> None:
    """``systemd-run -p MemoryHigh=2G``, and Kubernetes' MemoryQoS."""
    machine.process_in("0::/user.slice/run-5.scope")
    v2(machine.mount("fs", "cgroup2") / "user.slice/run-5.scope", "max", GIB, high=2 * GIB)
    assert machine.limit == MemoryLimit(2 * GIB, GIB, "/user.slice/run-5.scope", kills=2)


def test_version_1_counts_groups_below(machine: Machine) -> None:
    machine.process_in("9:cpu,cpuacct:/", "4:memory:/slurm/uid_0/job_7/step_0", "0::/")
    machine.mount("cpu", "cgroup", options="rw,cpu,cpuacct")
    machine.mount("unified", "cgroup2")
    top = machine.mount("memory", "cgroup", options="rw,memory")
    v1(top, UNLIMITED, 9 * GIB)
    v1(top / "slurm/uid_0/job_7", 4 * GIB, 2 * GIB, cache=GIB)
    v1(top / "slurm/uid_0/job_7/step_0", UNLIMITED, GIB)
    assert machine.limit == MemoryLimit(4 * GIB, GIB, "/slurm/uid_0/job_7", kills=4)


def test_a_container_of_version_1_sees_the_machines_path_and_its_own_group(
    machine: Machine,
) -> None:
    machine.process_in("4:memory:/docker/31d2")
    v1(machine.mount("memory", "cgroup", "/docker/31d2", "rw,memory"), GIB, 0)
    assert machine.limit == MemoryLimit(GIB, 0, "/docker/31d2", kills=4)


def test_a_container_whose_path_is_not_below_what_is_mounted(machine: Machine) -> None:
    machine.process_in("0::/kubepods/pod1/31d2")
    v2(machine.mount("fs", "cgroup2"), GIB, 0)
    assert machine.limit == MemoryLimit(GIB, 0, "/kubepods/pod1/31d2", kills=2)


@pytest.mark.parametrize("limit", ["max", 64 * GIB, 1 << 50])
def test_no_limit_below_the_machines_memory(machine: Machine, limit: int | str) -> None:
    machine.process_in("0::/user.slice")
    v2(machine.mount("fs", "cgroup2") / "user.slice", limit, GIB)
    assert machine.limit is None


def test_files_that_are_not_there(machine: Machine, tmp_path: Path) -> None:
    """The root of version 2, sandboxes, and a group outside of the cgroup namespace."""
    assert memory_limit(tmp_path / "nothing") is None
    machine.process_in("0::/")
    assert machine.limit is None
    top = machine.mount("fs", "cgroup2")
    assert machine.limit is None
    v2(top, GIB, 0)
    (top / "memory.stat").unlink()
    (top / "memory.events").unlink()
    assert machine.limit == MemoryLimit(GIB, 0, "/")
    machine.process_in("0::/../../user.slice")
    assert machine.limit is None
