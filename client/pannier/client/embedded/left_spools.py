"""Spools that earlier starts of a job on several hosts have left on this host.

In: the runtime directory of each start. Out: a sidecar on each spool whose daemons were killed; it uploads
what was ingested, writes the receipts and exits. The new start's coordinator finds the receipts in storage.
Daemons that still run do the same by themselves. Runs in a background thread.
"""

import logging
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import DaemonSpec, read_record, write_record
from pannier.common import timeouts
from pannier.wire import addresses
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)


def with_left_spools(settings: Settings, spec: DaemonSpec, job: str) -> DaemonSpec:
    """``spec`` with an ``on_start`` that uploads what earlier starts of the job left on this host.

    Args:
        job: see :func:`pannier.client.embedded.rendezvous.job_key`.
    """
    return replace(spec, on_start=lambda: upload_left_spools(settings, job, spec.directory))


def upload_left_spools(settings: Settings, job: str, current: Path | None = None) -> None:
    """Starts sidecars on the spools that earlier starts of the job left, in the background.

    Args:
        current: directory of this start's daemons; None: those of the host.
    """
    if addresses.job_dirs(settings.runtime_dir, host=socket.gethostname()):
        threading.Thread(
            target=_upload, args=(settings, job, current), name="pannier-left", daemon=True
        ).start()


def _upload(settings: Settings, job: str, current: Path | None) -> None:
    # Only this host's spools, even if the directories of other hosts are visible here.
    host = socket.gethostname()
    own = addresses.job_dirs(settings.runtime_dir, job, host)
    for directory in addresses.job_dirs(settings.runtime_dir, host=host):
        if directory == current:
            continue
        try:
            left = read_record(directory)
            if left is None:
                _remove_old_log(directory)
            elif directory in own and not launcher.is_up(left):
                _start_sidecar(settings, left)
        except (PannierError, OSError, ValueError) as error:
            if directory in own:
                _log.warning(
                    "saves that an earlier start of this job left in %s are not uploaded: %s",
                    *(directory, error),
                )
            else:
                _log.warning("%s, which another job left, can't be read: %s", directory, error)


def _start_sidecar(settings: Settings, left: DaemonSpec) -> None:
    names = launcher.differing_variables(settings, left)
    if names:
        # A sidecar that this process starts would use other storage.
        _log.warning(
            "the daemons in %s, of an earlier start of this job, had another value of %s: what they "
            "left is not uploaded",
            *(left.directory, ", ".join(names)),
        )
        return
    _log.info("starting a sidecar on what an earlier start left in %s", left.directory)
    alone = left.without_coordinator()
    # So that a later start doesn't expect a coordinator there.
    write_record(alone)
    launcher.ensure(settings, alone)


def _remove_old_log(directory: Path) -> None:
    log = directory / addresses.LOG
    age_s = time.time() - (log if log.exists() else directory).stat().st_mtime
    left = {path.name for path in directory.iterdir()}
    if age_s > timeouts.DAEMON_LOG_KEPT_S and left <= {addresses.LOG, f"{addresses.LOG}.1"}:
        shutil.rmtree(directory, ignore_errors=True)
