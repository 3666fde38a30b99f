"""Whether embedded daemons run in a runtime directory.

In: the directory. Out: whether its sidecar accepts connections (then trainers can use it), and whether a supervisor
holds its lock (then daemons run there, which may be starting or stopping). Both end with the processes; files that
killed ones have left say nothing. A cleaner of ``/tmp`` removes sockets and locks, not processes: their supervisor
makes the files again (``pannier.supervisor.runtime_directory``), for which :func:`await_restored` waits. Any thread.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from pannier.common import timeouts

UP_LOCK: Final = "up.lock"
"""Held by the supervisor of a runtime directory."""
_LOCKS: Final = Path("/proc/locks")
PID: Final = "up.pid"
"""Process of that supervisor, unless it is stopping."""


def is_serving(directory: Path) -> bool:
    """Whether the directory's sidecar accepts connections."""
    return accepts(_sidecar(directory))


def accepts(address: str) -> bool:
    """Whether a process accepts connections on a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeouts.DAEMON_ACCEPT_S)
        try:
            probe.connect(address.removeprefix("unix://"))
        except OSError:
            return False
        return True


def serving_sidecars(directory: Path) -> list[str]:
    """Addresses of the sidecars that accept connections, in the order of :func:`addresses.embedded_sidecars`."""
    from pannier.wire import addresses

    return [address for address in addresses.embedded_sidecars(directory) if accepts(address)]


def file_locks() -> list[tuple[str, str]]:
    """The process and the file of each lock that is held by flock(2), as far as the kernel shows them.

    A process of another PID namespace isn't a number that means anything here. The file is its device and inode,
    as the kernel writes them: ``fe:00:1234``.
    """
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:  # not there, or not for this user
        return []
    locks = map(str.split, lines)
    return [(words[4], words[5]) for words in locks if words[1] == "FLOCK"]


def is_supervised(directory: Path) -> bool:
    """Whether a supervisor holds the directory's lock."""
    try:
        fd = os.open(directory / UP_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def await_restored(directory: Path, is_back: Callable[[Path], bool]) -> None:
    """Where the directory has lost its files, but not its daemons: waits until ``is_back`` is true of it.

    At most RUNTIME_DIR_RESTORED_S; so also for daemons that are starting.
    """
    deadline = time.monotonic() + timeouts.RUNTIME_DIR_RESTORED_S
    while not is_back(directory) and _will_be_back(directory) and time.monotonic() < deadline:
        time.sleep(timeouts.DAEMONS_START_POLL_S)


def _will_be_back(directory: Path) -> bool:
    if is_supervised(directory):
        # Without that file it is stopping.
        return (directory / PID).exists()
    # The sidecar has locked its spool; its command line names its socket (pannier.supervisor.process_title).
    word = os.fsencode(_sidecar(directory))
    for process, _ in file_locks():
        with suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if word in command and b"sidecar" in command:
                return True
    return False


def _sidecar(directory: Path) -> str:
    # Not imported by the supervisor, which stays without gRPC.
    from pannier.wire import addresses

    return addresses.embedded_sidecar(directory)
