"""This machine and its processes, as the kernel shows them, and the cloud that it is in.

In: nothing, a process number, or environment variables. Out: ids that are equal for processes of one kernel, when a
process started, and whether it has ended; whether credentials come late here. No state; thread-safe.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_S: Final = 0.05
"""Rounding of two times on one machine: the kernel gives a process's start in ticks of mostly 10 ms."""
_VARIABLES: Final = (
    "KUBERNETES_SERVICE_HOST",
    "GCE_METADATA_HOST",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
"""Set where a metadata server has the credentials."""
_VENDOR: Final = Path("/sys/class/dmi/id/sys_vendor")
_VENDORS: Final = ("Google", "Amazon EC2")


def boot_id() -> str:
    """An id of the machine's kernel since its boot; processes with the same id share a clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # a sandbox without it
        return socket.gethostname()


def machine_id() -> str:
    """The same for processes that see each other: of one kernel and PID namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # a sandbox without it
        namespace = socket.gethostname()
    return f"{boot_id()} {namespace}"


def process_start_s(pid: int | None = None) -> float:
    """When a process started (None: this one), in seconds since the machine's boot."""
    return _started_s(_stat(os.getpid() if pid is None else pid))


def process_state(pid: int, started_s: float) -> str:
    """``ended`` or ``stopped``, of a process of this machine; empty: it runs, or that can't be seen.

    Args:
        started_s: when it started; another one may have its number now.
    """
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "" if _exists(pid) else "ended"
    except OSError:
        return ""
    if fields[0] in (b"Z", b"X") or abs(_started_s(fields) - started_s) > _CLOCK_S:
        return "ended"
    return "stopped" if fields[0] in (b"T", b"t") else ""


def credentials_may_be_late(environment: Mapping[str, str]) -> bool:
    """Whether credentials that weren't found may be there within seconds, from a metadata server.

    GKE's serves no sooner than some seconds after a pod has started: requests are refused or get 503
    (https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity#limitations). EKS Pod Identity's
    agent may be as late. So "no credentials" isn't final there at first.
    """
    if any(environment.get(name) for name in _VARIABLES):
        return True
    with suppress(OSError):
        return _VENDOR.read_text().strip() in _VENDORS
    return False


def _stat(pid: int) -> list[bytes]:
    # The process name, in brackets, may contain spaces.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _started_s(fields: list[bytes]) -> float:
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _exists(pid: int) -> bool:
    """Also where /proc hides processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
