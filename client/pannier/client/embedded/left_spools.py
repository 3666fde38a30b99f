"""Spools that earlier starts of jobs on several hosts have left on this host.

In: the runtime directory of each start. Out: a sidecar on each spool whose daemons were killed; it uploads
what was ingested, writes the receipts and exits. The new start's coordinator finds the receipts in storage.
Daemons that still run do the same by themselves. Blocking, besides :func:`upload_aside`.
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import DaemonSpec, read_record
from pannier.client.interrupts import Call
from pannier.common import daemon_record, timeouts
from pannier.common.daemon_process import await_restored, is_serving
from pannier.wire import addresses
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)


def upload_aside(settings: Settings, current: DaemonSpec) -> None:
    """Calls :func:`upload` in another thread for all earlier starts, if there are any.

    Args:
        current: this start's daemons.
    """
    earlier = [
        path for path in addresses.job_dirs(settings.runtime_dir) if path != current.directory
    ]
    if earlier:
        with suppress(RuntimeError):  # the interpreter is ending and starts no threads
            Call(lambda: upload(settings, earlier))


def upload(settings: Settings, directories: Sequence[Path]) -> None:
    """Starts sidecars on the spools that the starts with these runtime directories have left."""
    for directory in directories:
        try:
            left = read_record(directory)
            if left is None:
                _remove_old_log(directory)
            elif (spool := _spool(left)) and not is_serving(directory):
                _start_sidecar(settings, left, spool)
        except (PannierError, OSError, ValueError) as error:
            _log_once_per_host(
                "saves that an earlier start left in %s are not uploaded: %s", directory, error
            )


def _spool(left: DaemonSpec) -> Path | None:
    """The spool of these daemons; None: they have locked none, or it isn't here.

    Its name is no other start's. So one that is here is this host's, whatever its name is today, also where a
    file system that hosts share has the records of all.
    """
    spool = left.spool or daemon_record.recorded_spool(left.directory)
    return spool if spool is not None and spool.is_dir() else None


def _is_locked(spool: Path) -> bool:
    """Whether a sidecar has locked it: one that is ending, or on another host or in another container.

    Under the lock of the daemons' start: a sidecar that starts meanwhile would find it locked by this process.
    """
    fd = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _start_sidecar(settings: Settings, left: DaemonSpec, spool: Path) -> None:
    difference = launcher.compare(settings, left)
    if difference is None:
        raise FileNotFoundError("they left no record of their environment")
    if difference.variables:
        # A sidecar that this process starts would use other storage.
        _log_once_per_host(
            "the daemons in %s, of an earlier start, had another value of %s: what they left is not uploaded",
            *(left.directory, ", ".join(difference.variables)),
        )
        return
    with launcher.start_lock(left):
        await_restored(left.directory, is_serving)
        if not is_serving(left.directory) and not _is_locked(spool):
            _log.info("starting a sidecar on what an earlier start left in %s", left.directory)
            # Its record then says so: a later start doesn't expect a coordinator there.
            launcher.start(settings, left.without_coordinator())


def _log_once_per_host(text: str, *values: object) -> None:
    # All ranks of the host look at what is left.
    level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG
    _log.log(level, text, *values)


def _remove_old_log(directory: Path) -> None:
    log = directory / addresses.LOG
    age_s = time.time() - (log if log.exists() else directory).stat().st_mtime
    left = {path.name for path in directory.iterdir()}
    if age_s > timeouts.DAEMON_LOG_KEPT_S and left <= {addresses.LOG, f"{addresses.LOG}.1"}:
        shutil.rmtree(directory, ignore_errors=True)
