"""The checks of ``pannier doctor`` that a daemon runs: its state, its spool, and storage.

In: the daemon's own state and its storage options. Out: checks, each with what was found and what
to do about it. A failed check is a result, never an exception. Coroutines run on the daemon's event
loop.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pannier.common import timeouts
from pannier.common.cgroup import MemoryLimit
from pannier.common.deadline import within
from pannier.storage import (
    DeniedError,
    NotFoundError,
    check_allowed_in_time,
    check_shared,
    open_store,
)
from pannier.v1 import diagnosis_pb2
from pannier.wire.errors import (
    ConfigurationError,
    InvalidRequestError,
    PannierError,
    UnavailableError,
)
from pannier.wire.version import WIRE_VERSION, package_version

NAME: Final = "pannier.v1.Diagnosis"
LIMITS: Final = {f"/{NAME}/Diagnose": 4}
"""Calls at a time: each writes to storage."""

Check = diagnosis_pb2.Check
RestoreCheck = Callable[[str, float], Awaitable[Check]]
"""Checks what a restore from a root would use, within so many seconds."""
_MEMORY: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def ok(name: str, found: str) -> Check:
    """A check that passed."""
    return Check(name=name, result=diagnosis_pb2.CHECK_RESULT_OK, found=found)


def warning(name: str, found: str, hint: str) -> Check:
    """A check of something that works, but slowly or not for long."""
    return Check(name=name, result=diagnosis_pb2.CHECK_RESULT_WARNING, found=found, hint=hint)


def failed(name: str, found: str, hint: str) -> Check:
    """A check of something without which every save fails."""
    return Check(name=name, result=diagnosis_pb2.CHECK_RESULT_FAILED, found=found, hint=hint)


async def diagnose(
    request: diagnosis_pb2.DiagnoseRequest,
    *,
    daemon: str,
    host: str,
    own_checks: Callable[[], Iterable[Check]],
    allow: Sequence[str],
    storage_options: Mapping[str, Any],
    restore: RestoreCheck | None = None,
) -> diagnosis_pb2.DiagnoseResponse:
    """Runs all checks of a daemon.

    Args:
        daemon: ``sidecar`` or ``coordinator``.
        own_checks: the daemon's own ones, without I/O.
        allow, storage_options: the daemon's settings.
        restore: what a restore would use; called where the root can be used.
    """
    response = diagnosis_pb2.DiagnoseResponse(
        daemon=daemon,
        host=host,
        version=package_version(),
        wire_version=WIRE_VERSION,
        checks=own_checks(),
    )
    if request.root:
        timeout_s = min(request.timeout_s or timeouts.DOCTOR_S, timeouts.DOCTOR_LONGEST_S)
        target = await check_target(request.root, allow, storage_options, timeout_s)
        response.checks.append(target)
        if restore is not None and target.result == diagnosis_pb2.CHECK_RESULT_OK:
            response.checks.append(await restore(request.root, timeout_s))
    return response


async def check_target(
    root: str, allow: Sequence[str], storage_options: Mapping[str, Any], timeout_s: float
) -> Check:
    """Creates, lists, replaces, reads and removes an object below ``root``."""
    begun = time.monotonic()
    try:
        await _check_root(root, allow)
        store = open_store(root, storage_options=storage_options, deadline_s=timeout_s, allow=allow)
        try:
            await within(timeout_s, store.probe())
        finally:
            await store.close()
    except asyncio.TimeoutError:
        return failed(
            "target",
            f"{root}: storage did not answer within {timeout_s:.0f} s",
            "can this host reach it? Check STORAGE_EMULATOR_HOST, endpoint_url, proxies and "
            "NetworkPolicies",
        )
    except InvalidRequestError as error:
        return failed("target", str(error), "name a directory or URL that --allow covers")
    except ConfigurationError as error:
        return failed("target", str(error), "")
    except DeniedError as error:
        return failed(
            "target",
            f"{error}",
            f"this daemon (user {os.geteuid()}) needs the rights to create, read, list and delete "
            "objects there; its credentials come from its environment and --storage-options",
        )
    except NotFoundError as error:
        return failed("target", str(error), "create the bucket, or correct its name")
    except PannierError as error:
        return failed("target", str(error), "")
    took = time.monotonic() - begun
    return ok("target", f"{root}: written, replaced, read, listed and removed in {took:.1f} s")


async def is_allowed(root: str, allow: Sequence[str]) -> bool:
    """Whether checkpoints may be written below ``root``."""
    try:
        await _check_root(root, allow)
    except (InvalidRequestError, UnavailableError):
        return False
    return True


def check_spool(
    directory: Path,
    *,
    budget: int | None,
    reserved: int,
    gone: bool,
    limit: MemoryLimit | None,
    too_large: str,
) -> Check:
    """Whether the spool can be used and has space for saves; sizes in bytes.

    Args:
        limit: of the process's memory, where the spool's files count to it.
        too_large: why the spool can't have what its settings allow; empty: it can.
    """
    if gone:
        return failed("spool", f"{directory} was removed", "restart the sidecar, which is exiting")
    try:
        space = os.statvfs(directory)
        mode = directory.stat().st_mode & 0o777
    except OSError as error:
        return failed("spool", f"{directory} can't be used: {error}", "restart the sidecar")
    free = space.f_bavail * space.f_frsize
    kind = file_system(directory)
    medium = "memory" if kind in _MEMORY else "a disk"
    room = min(free, budget - reserved) if budget is not None else free
    room = min(room, limit.free) if limit is not None else room
    found = (
        f"{directory}: {medium} ({kind}), mode {mode:04o}, {_gib(free)} GiB free, "
        f"{_gib(reserved)} GiB reserved"
        + (f", at most {_gib(budget)} GiB (--spool-budget)" if budget is not None else "")
        + (f"; {limit}" if limit is not None else "")
    )
    if mode & 0o022:
        return failed("spool", found, "other users may write to it: chmod 0700")
    if too_large:
        return warning("spool", found, too_large)
    if room + reserved < 1 << 30:
        return warning(
            "spool",
            found,
            "it needs the bytes of this host's ranks, and twice those for two saves in flight",
        )
    return ok("spool", found)


def check_state(*, draining: bool) -> Check:
    """Whether new saves are taken."""
    if draining:
        return warning("state", "draining: takes no new saves", "wait until it is restarted")
    return ok("state", f"serving, process {os.getpid()} of user {os.geteuid()}")


def file_system(path: Path) -> str:
    """Type of the file system that ``path`` lies on, as /proc/self/mounts has it; "unknown"."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, where, found, *_ = line.split(" ")
        # Spaces and the like are octal escapes there.
        where = where.encode("latin-1", "backslashreplace").decode("unicode_escape")
        below = real == where or real.startswith(where.rstrip("/") + "/")
        if below and len(where) >= len(best):
            best, kind = where, found
    return kind


async def _check_root(root: str, allow: Sequence[str]) -> None:
    check_shared(root)
    # A checkpoint's own id lies below its root, which may be the allowed one itself.
    await check_allowed_in_time(f"{root.rstrip('/')}/checkpoint", allow)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f}"
