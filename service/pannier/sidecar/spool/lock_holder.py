"""The process that holds the lock of a spool, for messages.

In: a descriptor of the locked directory. Out: text. No state; thread-safe.
"""

import os
from pathlib import Path

from pannier.common.daemon_process import file_locks


def lock_holder(fd: int) -> str:
    """The process that holds the lock on a file, for an error's text; "" where the kernel doesn't show it."""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for process, file in file_locks():
        if file == device:
            try:
                arguments = Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:  # of another user or namespace, or it has just exited
                return f" (process {process})"
            return f" (process {process}: {arguments.rstrip(bytes(1)).replace(bytes(1), b' ').decode(errors='replace')})"
    return ""
