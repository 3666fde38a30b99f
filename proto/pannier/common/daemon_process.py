"""Embedded daemons whose runtime directory has lost its files, found by the lock on their spool.

In: a runtime directory. Out: the process of its sidecar. A cleaner of ``/tmp`` removes sockets and locks, not
processes: their supervisor makes the files again (``pannier.supervisor.runtime_directory``), for which this module
waits. Any thread.
"""

import fcntl
import os
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


def sidecar_process(directory: Path) -> int | None:
    """The process of this directory's sidecar that has locked a spool; None: none is here, or it can't be seen.

    Its command line names its socket (``pannier.supervisor.process_title``).
    """
    # Not in the supervisor, which stays without gRPC.
    from pannier.wire import addresses

    word = os.fsencode(addresses.embedded_sidecar(directory))
    for process, _ in file_locks():
        with suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if word in command and b"sidecar" in command:
                return int(process)
    return None


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
    """Whether a supervisor holds the lock of a runtime directory."""
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


def await_restored(directory: Path, is_up: Callable[[], bool]) -> None:
    """Where the directory has lost its files, but not its daemons: waits until they are up again.

    At most RUNTIME_DIR_RESTORED_S.
    """
    deadline = time.monotonic() + timeouts.RUNTIME_DIR_RESTORED_S
    while not is_up() and _will_be_up(directory) and time.monotonic() < deadline:
        time.sleep(timeouts.DAEMONS_START_POLL_S)


def _will_be_up(directory: Path) -> bool:
    if is_supervised(directory):
        # Without that file it is stopping.
        return (directory / PID).exists()
    return sidecar_process(directory) is not None
