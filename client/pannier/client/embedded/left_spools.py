"""Spools that earlier starts of jobs on several hosts have left on this host.

In: the runtime directory of each start. Out: a sidecar on each spool whose daemons were killed; it uploads
what was ingested, writes the receipts and exits. The new start's coordinator finds the receipts in storage.
Daemons that still run do the same by themselves. Runs in a background thread.
"""

import fcntl
import logging
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import DaemonSpec, read_record, write_record
from pannier.common import daemon_record, timeouts
from pannier.common.daemon_process import is_serving
from pannier.wire import addresses
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)


def with_left_spools(settings: Settings, spec: DaemonSpec) -> DaemonSpec:
    """``spec`` with an ``on_start`` that uploads what earlier starts left on this host."""
    return replace(spec, on_start=lambda: upload_left_spools(settings, spec.directory))


def upload_left_spools(settings: Settings, current: Path | None = None) -> None:
    """Starts sidecars on the spools that earlier starts left, in the background.

    Args:
        current: directory of this start's daemons; None: those of the host.
    """
    if addresses.job_dirs(settings.runtime_dir):
        threading.Thread(
            target=_upload, args=(settings, current), name="pannier-left", daemon=True
        ).start()


def _upload(settings: Settings, current: Path | None) -> None:
    for directory in addresses.job_dirs(settings.runtime_dir):
        if directory == current:
            continue
        try:
            left = read_record(directory)
            if left is None:
                _remove_old_log(directory)
            elif (spool := _spool(left)) and spool.is_dir() and not is_serving(directory):
                _start_sidecar(settings, left, spool)
        except _InUseError:
            continue
        except (PannierError, OSError, ValueError) as error:
            _log.warning(
                "saves that an earlier start left in %s are not uploaded: %s", directory, error
            )


class _InUseError(Exception):
    """A sidecar has locked the spool."""


def _spool(left: DaemonSpec) -> Path | None:
    """The spool of these daemons; None: they have locked none.

    Its name is no other start's. So one that is here is this host's, whatever its name is today, also where a
    file system that hosts share has the records of all.
    """
    return left.spool or daemon_record.recorded_spool(left.directory)


def _check_unlocked(spool: Path) -> None:
    fd = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _InUseError from None
    finally:
        os.close(fd)


def _start_sidecar(settings: Settings, left: DaemonSpec, spool: Path) -> None:
    names = launcher.differing_variables(settings, left)
    if names:
        # A sidecar that this process starts would use other storage.
        _log.warning(
            "the daemons in %s, of an earlier start, had another value of %s: what they left is not uploaded",
            *(left.directory, ", ".join(names)),
        )
        return
    _log.info("starting a sidecar on what an earlier start left in %s", left.directory)
    alone = left.without_coordinator()

    def prepare() -> None:
        # Under the lock of their start: no other process of this job starts them meanwhile.
        _check_unlocked(spool)
        # So that a later start doesn't expect a coordinator there.
        write_record(alone)

    launcher.ensure(settings, replace(alone, prepare=prepare))


def _remove_old_log(directory: Path) -> None:
    log = directory / addresses.LOG
    age_s = time.time() - (log if log.exists() else directory).stat().st_mtime
    left = {path.name for path in directory.iterdir()}
    if age_s > timeouts.DAEMON_LOG_KEPT_S and left <= {addresses.LOG, f"{addresses.LOG}.1"}:
        shutil.rmtree(directory, ignore_errors=True)
