"""Embedded daemons of one measurement: a place for their files, and a look at their processes.

They are started by the client in this process or in a child, as a user's are; everything is gone
when the place is left.
"""

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import psutil

from pannier.client import SaveHandle
from pannier.client.config import load_settings
from pannier.wire.errors import ConfigurationError

RUN = "BENCH_RUN"
"""Environment variable that says which run of the whole bench a process belongs to."""


def transports() -> list[str]:
    """What this version of the client knows: ``mapped``, ``streamed``."""
    known = []
    for name in ("mapped", "streamed"):
        with suppress(ConfigurationError):
            load_settings(transport=name)
            known.append(name)
    return known


def prefix() -> str:
    """Of the names of all directories that this process makes for a while."""
    return f"pannier-bench-{os.environ.get(RUN, os.getpid())}-"


def sweep(run: str) -> None:
    """Ends and removes what a part of the run has left that didn't come to its end."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(RUN) == run:
                process.kill()
    for parent in {"/tmp", "/dev/shm", tempfile.gettempdir()}:
        for path in Path(parent).glob(f"pannier-bench-{run}-*"):
            shutil.rmtree(path, ignore_errors=True)


class Place:
    """``with Place(transport) as place:`` what the client starts lives there and ends with it.

    Sets the environment of this process; its children inherit it.

    Args:
        transport: ``PANNIER_TRANSPORT``.
        storage: more environment, such as the address of a storage server.
        disk: parent of a directory for checkpoints. Default: that of temporary files.
    """

    def __init__(
        self,
        transport: str = "auto",
        *,
        storage: dict[str, str] | None = None,
        disk: str | None = None,
    ) -> None:
        self.transport = transport
        self._root = Path(tempfile.mkdtemp(prefix=prefix(), dir="/tmp"))
        self.runtime = self._root / "run"
        self.disk = Path(tempfile.mkdtemp(prefix=prefix(), dir=disk))
        """A directory on the disk that is measured."""
        self.spool = Path("/dev/shm") / self._root.name
        self._before: dict[str, str | None] = {}
        self._environment = {
            "PANNIER_RUNTIME_DIR": str(self.runtime),
            "PANNIER_SPOOL": str(self.spool),
            "PANNIER_TRANSPORT": transport,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            **(storage or {}),
        }

    def __enter__(self) -> "Place":
        for name, value in self._environment.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from pannier import client

        try:
            client.close()
        finally:
            self._end()

    def end_daemons(self) -> None:
        """Ends them, and so what their spool holds."""
        daemons = self.daemons()
        for process in daemons:
            with suppress(psutil.Error):
                process.terminate()
        _, left = psutil.wait_procs(daemons, timeout=15)
        for process in left:
            with suppress(psutil.Error):
                process.kill()

    def _end(self) -> None:
        self.end_daemons()
        for path in (self._root, self.disk, self.spool):
            shutil.rmtree(path, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @contextmanager
    def checkpoint(self, name: str) -> Iterator[str]:
        """A path to save to, removed (and the disk at rest) when it is left."""
        path = self.disk / name
        try:
            yield str(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()

    def daemons(self) -> list[psutil.Process]:
        """Supervisor, coordinator and sidecar, as far as they run."""
        return daemons(self.runtime)

    def settle(self) -> None:
        """See :func:`settle`."""
        settle(self.runtime)

    @property
    def sidecar(self) -> psutil.Process:
        return find(self.runtime, "sidecar")

    @property
    def niceness(self) -> int:
        """The sidecar's."""
        return os.getpriority(os.PRIO_PROCESS, self.sidecar.pid)


class Ways:
    """How the bytes of a measurement's saves really went."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()

    def add(self, handle: SaveHandle) -> None:
        """Notes the way of a save that is staged."""
        self._found[handle.status().transport.partition(":")[0] or "streamed"] += 1

    def note(self, expected: str) -> str:
        """A remark for the table; empty when all went as ``expected``."""
        if expected == "auto":
            return ""
        other = sum(count for way, count in self._found.items() if way != expected)
        return f"; {other} of {self._found.total()} saves were not {expected}" if other else ""


def daemons(runtime: Path) -> list[psutil.Process]:
    """Supervisor, coordinator and sidecar of a runtime directory, as far as they run."""
    try:
        root = psutil.Process(int((runtime / "up.pid").read_text()))
        return [root, *root.children(recursive=True)]
    except (OSError, ValueError, psutil.Error):
        return []


def find(runtime: Path, role: str) -> psutil.Process:
    """The process of a role, ``sidecar`` or ``coordinator``. Raises RuntimeError."""
    for process in daemons(runtime)[1:]:
        with suppress(psutil.Error):
            if role in process.cmdline():
                return process
    raise RuntimeError(f"no {role} runs in {runtime}")


def settle(runtime: Path) -> None:
    """Returns when the sidecar has moved its files into huge pages, which it does once, between saves."""
    sidecar = find(runtime, "sidecar")
    before, now = 0.0, cpu_seconds(sidecar)
    while now - before > 0.1:
        rest(1.5)
        before, now = now, cpu_seconds(sidecar)


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process so far, threads that ended included."""
    times = process.cpu_times()
    return float(times.user + times.system)


def rest(seconds: float = 0.2) -> None:
    """Lets daemons finish what a save leaves behind, such as putting its files aside."""
    time.sleep(seconds)
