"""The memory limit of this process: that of its control group, which a container, Slurm or systemd has set.

In: /proc/self, and the files of cgroup v1 or v2. Out: the tightest limit, of the group or of one above it. No
state; thread-safe; blocking for well below a millisecond.

Who pays for a page: the group of the process that has touched it first, also when others map it later. The sidecar
reserves the files of its spool (``posix_fallocate``), so a spool on tmpfs counts to the sidecar's group, and a
trainer that maps these files pays nothing. Memory that a trainer stages into before it streams counts to the
trainer's group, and the spool to the sidecar's as well. Embedded daemons are in the group of the trainer that
started them, so one limit pays for both. Pages of files on a disk count, too, but the kernel takes them back.
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-ownership
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from pannier.common.units import size_text


class _Files(NamedTuple):
    """Names in a group's directory."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]
    """Lines of memory.stat: pages of files on disks."""
    events: str


_V2: Final = _Files(
    # Above "high" the kernel holds up each process that allocates, and files on tmpfs can't be reclaimed.
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    "memory.events",
)
_V1: Final = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.oom_control",
)
_SPARE_SHARE: Final = 16
_LEAST_SPARE: Final = 64 << 20
_MOST_SPARE: Final = 256 << 20


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of one control group, and how much of it is in use. Sizes in bytes."""

    limit: int
    used: int
    """Without what the kernel can reclaim: pages of files on disks."""
    group: str
    """Its path, as this process sees it."""
    kills: int = 0
    """Processes of the group that the kernel has killed for lack of memory since the group was made."""

    @property
    def spare(self) -> int:
        """What isn't to be planned with, since processes grow, as by the buffers of uploads: 64 to 256 MiB."""
        return min(max(self.limit // _SPARE_SHARE, _LEAST_SPARE), _MOST_SPARE)

    @property
    def free(self) -> int:
        """What can still be used with the rest spare; below 0 when less than that is left."""
        return self.limit - self.used - self.spare

    def __str__(self) -> str:
        return (
            f"the memory limit of control group {self.group} is {size_text(self.limit)}, "
            f"{size_text(self.used)} of it in use"
        )


def memory_limit(proc: Path = Path("/proc")) -> MemoryLimit | None:
    """The limit that leaves the least memory free, of this process's control group and those above it.

    None: there is none, or it can't be read.

    Args:
        proc: where the proc file system is mounted.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = (_limit_of(*group) for group in _groups(proc))
    limits = [each for each in found if each is not None and each.limit < memory]
    return min(limits, key=lambda each: each.free, default=None)


def _groups(proc: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """This process's group and those above it that are visible: directory, path, and the files there.

    Of both versions: a machine may have both, with memory in one of them.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    paths: dict[str, Path] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = Path(path)
    for line in mounts:
        # https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
        mount, _, file_system = line.partition(" - ")
        root, top = (Path(_unescaped(word)) for word in mount.split(" ")[3:5])
        kind, _, options = file_system.split(" ", 2)
        if kind == "cgroup" and "memory" not in options.split(","):
            continue
        own = paths.pop(kind, None)
        # A group outside of the namespace's root isn't visible.
        if own is None or ".." in own.parts:
            continue
        below = own.relative_to(root) if own.is_relative_to(root) else Path()
        # Else it is a container that sees the machine's paths, and has its own group mounted.
        directory = top / below if (top / below).is_dir() else top
        files = _V2 if kind == "cgroup2" else _V1
        yield directory, own, files
        if directory != top:
            parents = zip(directory.parents, own.parents, strict=False)
            yield from ((*pair, files) for pair in parents if pair[0].is_relative_to(top))


def _limit_of(directory: Path, path: Path, files: _Files) -> MemoryLimit | None:
    try:
        limits = [(directory / name).read_text().strip() for name in files.limits]
        used = int((directory / files.used).read_text())
    except (OSError, ValueError):
        # The root of version 2 has no limit; a sandbox may have no such files.
        return None
    limit = min((int(text) for text in limits if text != "max"), default=0)
    if not limit:
        return None
    statistics = _table(directory / "memory.stat")
    used -= sum(statistics.get(name, 0) for name in files.reclaimable)
    kills = _table(directory / files.events).get("oom_kill", 0)
    return MemoryLimit(limit, max(0, used), str(path), kills)


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in map(str.split, lines)}


def _unescaped(path: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), path)
