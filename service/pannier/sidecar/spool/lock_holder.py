"""The process that holds the lock of a spool, for messages.

In: a descriptor of the locked directory. Out: text. No state; thread-safe.
"""

import os
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")


def lock_holder(fd: int) -> str:
    """The process that holds the lock on a file, for an error's text; "" where the kernel doesn't show it."""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        locks = _LOCKS.read_text().splitlines()
    except OSError:  # not there, or not for this user
        return ""
    for line in locks:
        words = line.split()
        if words[1] == "FLOCK" and words[5] == device:
            try:
                arguments = Path(f"/proc/{words[4]}/cmdline").read_bytes()
            except OSError:  # of another user or namespace, or it has just exited
                return f" (process {words[4]})"
            return f" (process {words[4]}: {arguments.rstrip(bytes(1)).replace(bytes(1), b' ').decode(errors='replace')})"
    return ""
