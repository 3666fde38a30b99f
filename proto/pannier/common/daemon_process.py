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
from pannier.wire import addresses

UP_LOCK: Final = "up.lock"
"""Held by the supervisor of a runtime directory."""
PID: Final = "up.pid"
"""Process of that supervisor, unless it is stopping."""


def sidecar_process(directory: Path) -> int | None:
    """The process of this directory's sidecar that has locked a spool; None: none is here, or it can't be seen.

    Its command line names its socket (``pannier.supervisor.process_title``).
    """
    word = os.fsencode(addresses.embedded_sidecar(directory))
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] != "FLOCK" or not fields[4].isdecimal():
                continue  # it waits, or is of another PID namespace
            with suppress(OSError):
                command = Path(f"/proc/{fields[4]}/cmdline").read_bytes().split(b"\0")
                if word in command and b"sidecar" in command:
                    return int(fields[4])
    return None


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
