"""What earlier starts of a job on several hosts have left on this host: their daemons, or less.

In: the runtime directory of each start. Out: daemons that end what was handed to them. Those that
run are told of the new coordinator, for when theirs is gone; those that were killed are started
again on their spool. Blocking.
"""

import json
import logging
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import (
    DaemonSpec,
    host_daemons,
    read_record,
    write_private_file,
)
from pannier.wire import addresses
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)

_LOG_KEPT_S: Final = 86400.0
"""How long the log of daemons that have ended stays."""


def with_former_daemons(
    settings: Settings, pair: DaemonSpec, job: str, *, successor: str, files: tuple[Path, ...] = ()
) -> DaemonSpec:
    """``pair``, whose start also sees after those of the job's earlier starts, in the background.

    Args:
        job: words that stay the same when the job is started again.
        successor: address of the new coordinator, for this host.
        files: certificate, key and CA for it, if it is on TCP.
    """
    told = {"coordinator": successor}
    told |= dict(zip(("cert", "key", "ca"), map(str, files), strict=False))

    return replace(pair, on_start=lambda: _recover_in_background(settings, pair, job, told))


def recover_former_daemons(settings: Settings, job: str) -> None:
    """The same for a start whose ranks are all on this host, with its usual daemons."""
    if addresses.job_dirs(settings.runtime_dir, job, socket.gethostname()):
        pair = host_daemons(settings)
        told = {"coordinator": addresses.embedded_coordinator(pair.directory)}
        _recover_in_background(settings, pair, job, told)


def _recover_in_background(
    settings: Settings, pair: DaemonSpec, job: str, told: dict[str, str]
) -> None:
    threading.Thread(
        target=_recover, args=(settings, pair, job, told), name="pannier-former", daemon=True
    ).start()


def _recover(settings: Settings, pair: DaemonSpec, job: str, told: dict[str, str]) -> None:
    # Daemons of other hosts aren't ours, even where their directories are to be seen.
    host = socket.gethostname()
    own = addresses.job_dirs(settings.runtime_dir, job, host)
    for directory in addresses.job_dirs(settings.runtime_dir, host=host):
        if directory == pair.directory:
            continue
        try:
            former = read_record(directory)
            if former is None:
                _remove_old_log(directory)
            elif directory in own:
                _hand_over(settings, former, told)
        except (PannierError, OSError, ValueError) as error:
            _log.warning("%s, of an earlier start of this job: %s", directory, error)


def _hand_over(settings: Settings, former: DaemonSpec, told: dict[str, str]) -> None:
    names = launcher.differing_variables(settings, former)
    if names:
        # Other storage: it isn't ours to say how their saves end.
        _log.warning(
            "the daemons in %s, of an earlier start of this job, had another value of %s: they are "
            "left alone",
            *(former.directory, ", ".join(names)),
        )
        return
    write_private_file(former.directory / addresses.SUCCESSOR, json.dumps(told))
    if not launcher.is_up(former):
        _log.info("starting the daemons in %s again, of an earlier start", former.directory)
        launcher.ensure(settings, former)


def _remove_old_log(directory: Path) -> None:
    log = directory / addresses.LOG
    age_s = time.time() - (log if log.exists() else directory).stat().st_mtime
    left = {path.name for path in directory.iterdir()}
    if age_s > _LOG_KEPT_S and left <= {addresses.LOG, f"{addresses.LOG}.1"}:
        shutil.rmtree(directory, ignore_errors=True)
