"""Memory limits as a container has them: control groups of version 1 or 2, where this machine lets us.

What a process reserves in a memory-backed spool counts to its group, whichever process writes there later.
"""

import os
import time
from pathlib import Path

from support.processes.stretch import BOUND_S

_ROOT = Path("/sys/fs/cgroup")
_V1 = _ROOT / "memory"


class MemoryLimit:
    """One group. Processes join by writing their number to :attr:`members`."""

    def __init__(self, name: str, limit: int) -> None:
        """Raises OSError where groups can't be made."""
        old = _V1.is_dir()
        self._path = (_V1 if old else _ROOT) / f"pannier-test-{os.getpid()}-{name}"
        self._peak = "memory.max_usage_in_bytes" if old else "memory.peak"
        if not old:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        self._events = "memory.oom_control" if old else "memory.events"
        self.file = self._path / ("memory.limit_in_bytes" if old else "memory.max")
        """Takes another limit, bytes."""
        self._path.mkdir()
        try:
            self.file.write_text(str(limit))
        except OSError:
            self._path.rmdir()
            raise

    @property
    def members(self) -> Path:
        return self._path / "cgroup.procs"

    @property
    def peak(self) -> int:
        """Most bytes at any time so far, the page cache's included."""
        return int((self._path / self._peak).read_text())

    @property
    def kills(self) -> int:
        """Processes that the kernel has killed because of the limit."""
        lines = (self._path / self._events).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Its processes have ended, or are just about to."""
        deadline = time.monotonic() + BOUND_S
        while True:
            try:
                self._path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return


def limited(name: str, limit: int) -> MemoryLimit | None:
    """A group with that limit, bytes; None where this machine has none to give."""
    try:
        return MemoryLimit(name, limit)
    except OSError:
        return None
