"""Sets the command line that ``ps`` and ``/proc`` show of this process: a fork has its parent's.

In: words. Out: they replace the arguments in this process's memory, as far as there is room. For the main
thread.
"""

import ctypes
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/self/stat")
_ARGUMENTS: Final = 48
"""Number of the field with the address of the first argument (proc(5)); the next one has their end."""


def set_process_title(*words: str) -> None:
    """Shows ``words`` as the command line of this process; longer ones are cut off."""
    # The process name, in brackets, may contain spaces: the first field after it is number 3.
    fields = _STAT.read_bytes().rpartition(b")")[2].split()
    begin, end = (int(fields[number - 3]) for number in (_ARGUMENTS, _ARGUMENTS + 1))
    size = end - begin
    if size <= 0:  # in a sandbox that doesn't report them
        return
    text = b"\0".join(word.encode() for word in words)[: size - 1]
    ctypes.memmove(begin, text.ljust(size, b"\0"), size)
