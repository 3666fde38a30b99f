"""Ends the binding to processors and memory that this process has inherited from a rank of a training job.

In: nothing. Out: this process, and those that it starts from now on, may use all processors of its cpuset, and have
no memory policy. To be called before there are threads.

A launcher often binds each rank to its own core and memory (``torchrun --numa-binding``, ``taskset``,
``srun --cpu-bind``). The daemons that a rank starts serve all ranks of the host.
"""

import ctypes
import logging
import os
from typing import Final

_log = logging.getLogger(__name__)

_MOST_PROCESSORS: Final = 8192
"""https://github.com/torvalds/linux/blob/v6.12/arch/x86/Kconfig (NR_CPUS_RANGE_END)"""
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call, which the C library doesn't offer."""
_MPOL_DEFAULT: Final = 0


def leave_binding() -> None:
    """See the module. Where the kernel or a container's seccomp profile forbids it, a binding stays."""
    try:
        # The kernel takes those that are in the cpuset:
        # https://github.com/torvalds/linux/blob/v6.12/kernel/sched/syscalls.c (__sched_setaffinity)
        os.sched_setaffinity(0, range(_MOST_PROCESSORS))
    except OSError as error:
        _log.info("the daemons keep the processors of the trainer that started them: %s", error)
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_DEFAULT, None, 0):
        # ENOSYS: a kernel without NUMA, which has no policies.
        _log.debug("the daemons keep their memory policy: %s", os.strerror(ctypes.get_errno()))
