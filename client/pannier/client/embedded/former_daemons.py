"""The daemons that earlier starts of a job on several hosts have left on this host.

In: the runtime directory of each start. Out: daemons that finish the saves that they hold. Those that
run get the address of the new coordinator, for the case that theirs is dead; those that were killed
are started again on their spool. Runs in a background thread.
"""

import json
import logging
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import (
    DaemonSpec,
    host_daemons,
    read_record,
    write_private_file,
)
from pannier.common import timeouts
from pannier.wire import addresses
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)


def with_former_daemons(
    settings: Settings, spec: DaemonSpec, job: str, *, successor: str, files: tuple[Path, ...] = ()
) -> DaemonSpec:
    """``spec`` with an ``on_start`` that recovers the daemons of the job's earlier starts.

    Args:
        job: see :func:`pannier.client.embedded.rendezvous.job_key`.
        successor: address of the new coordinator, for this host.
        files: certificate, key and CA for it, if it is on TCP.
    """
    coordinator = {"coordinator": successor}
    coordinator |= dict(zip(("cert", "key", "ca"), map(str, files), strict=False))
    return replace(spec, on_start=lambda: _recover_in_background(settings, spec, job, coordinator))


def recover_former_daemons(settings: Settings, job: str) -> None:
    """Recovers them for a start whose ranks are all on this host, and use the host's daemons."""
    if addresses.job_dirs(settings.runtime_dir, job, socket.gethostname()):
        spec = host_daemons(settings)
        coordinator = {"coordinator": addresses.embedded_coordinator(spec.directory)}
        _recover_in_background(settings, spec, job, coordinator)


def _recover_in_background(
    settings: Settings, spec: DaemonSpec, job: str, coordinator: dict[str, str]
) -> None:
    threading.Thread(
        target=_recover, args=(settings, spec, job, coordinator), name="pannier-former", daemon=True
    ).start()


def _recover(settings: Settings, spec: DaemonSpec, job: str, coordinator: dict[str, str]) -> None:
    # Only this host's daemons, even if the directories of other hosts are visible here.
    host = socket.gethostname()
    own = addresses.job_dirs(settings.runtime_dir, job, host)
    for directory in addresses.job_dirs(settings.runtime_dir, host=host):
        if directory == spec.directory:
            continue
        try:
            former = read_record(directory)
            if former is None:
                _remove_old_log(directory)
            elif directory in own:
                _recover_one(settings, former, coordinator)
        except (PannierError, OSError, ValueError) as error:
            _log.warning("%s, of an earlier start of this job: %s", directory, error)


def _recover_one(settings: Settings, former: DaemonSpec, coordinator: dict[str, str]) -> None:
    names = launcher.differing_variables(settings, former)
    if names:
        # They use other storage: this start's coordinator can't finish their saves.
        _log.warning(
            "the daemons in %s, of an earlier start of this job, had another value of %s: they are "
            "not recovered",
            *(former.directory, ", ".join(names)),
        )
        return
    write_private_file(former.directory / addresses.SUCCESSOR, json.dumps(coordinator))
    if not launcher.is_up(former):
        _log.info("starting the daemons in %s again, of an earlier start", former.directory)
        launcher.ensure(settings, former)


def _remove_old_log(directory: Path) -> None:
    log = directory / addresses.LOG
    age_s = time.time() - (log if log.exists() else directory).stat().st_mtime
    left = {path.name for path in directory.iterdir()}
    if age_s > timeouts.DAEMON_LOG_KEPT_S and left <= {addresses.LOG, f"{addresses.LOG}.1"}:
        shutil.rmtree(directory, ignore_errors=True)
