"""The spool of a sidecar that is given none: on tmpfs where that has room, else in the runtime directory.

In: the sidecar's runtime directory, which has the path of the spool that it locked last. Out: a locked spool:
that one, or the first of this user's that no other sidecar has locked. So what a killed sidecar left is found also where
its runtime directory is lost, or after an upgrade or rollback, and containers that share /dev/shm don't share a spool.
Blocking.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pannier.common import daemon_record
from pannier.common.cgroup import memory_limit
from pannier.sidecar.spool import journal
from pannier.sidecar.spool.spool import Spool, SpoolInUseError
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

_MEMORY: Final = Path("/dev/shm")
_MOST: Final = 64
"""Spools of one user on tmpfs at a time."""
_ROOM: Final = 4 << 30
"""Free bytes in /dev/shm that suffice for the spool on a host of any size."""


def open_default(directory: Path, budget: int | None) -> Spool:
    """Opens the spool of the sidecar with this runtime directory, and records its path there.

    Raises ConfigurationError: none can be used; says why not the last one.
    """
    problem: ConfigurationError | None = None
    for path in _candidates(directory):
        try:
            journal.check_format(path)
            spool = Spool(path, budget)
        except journal.NewerFormatError as error:
            _log.warning("%s", error)
            problem = error
            continue
        except SpoolInUseError as error:
            problem = error
            continue
        if problem is not None:
            _log.info("using the spool %s: %s", path, problem)
        daemon_record.record_spool(directory, path)
        return spool
    assert problem is not None
    raise problem


def _candidates(directory: Path) -> Iterator[Path]:
    recorded = daemon_record.recorded_spool(directory)
    of_a_job = addresses.is_job_dir(directory)
    if not of_a_job and (recorded is None or not _is_left(recorded)):
        yield from _left_by_other_versions()
    if recorded is not None and recorded.is_dir():
        yield recorded
    roomy = _has_room()
    if of_a_job:
        # Left ones are found by their directory's record, also by other jobs' starts.
        if roomy:
            yield _MEMORY / f"{default_name()}-{directory.name}"
        yield directory / "spool"
        return
    for number in range(1, _MOST + 1):
        path = _MEMORY / f"{default_name()}{'' if number == 1 else f'-{number}'}"
        # One that a killed sidecar left is taken over also if it is what fills the memory.
        if path != recorded and (roomy or _is_left(path)):
            yield path
    yield directory / "spool"


def _left_by_other_versions() -> Iterator[Path]:
    """Spools that sidecars with another wire version have left: what can be read of them is uploaded."""
    usual = f"pannier-{os.getuid()}-v"
    found = [path for path in _MEMORY.glob(f"{usual}*") if "-job-" not in path.name]
    found += [path / "spool" for path in addresses.usual_dirs()]
    for path in sorted(found):
        if not re.search(rf"/{usual}{WIRE_VERSION}\b", str(path)) and _is_left(path):
            yield path


def default_name() -> str:
    """Name of this user's first spool below /dev/shm."""
    return f"pannier-{os.getuid()}-v{WIRE_VERSION}"


def _has_room() -> bool:
    """Whether a state fits twice on tmpfs; memory is in proportion to the states that are trained with it."""
    if not os.access(_MEMORY, os.W_OK):
        return False
    space = os.statvfs(_MEMORY)
    free = space.f_bavail * space.f_frsize
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (limit := memory_limit()) is not None:
        free, whole = min(free, limit.free), limit.limit
    return free >= min(_ROOM, whole // 4)


def _is_left(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid() and any(path.iterdir())
    except OSError:
        return False
