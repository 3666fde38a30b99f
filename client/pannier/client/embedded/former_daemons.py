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
from pannier.client.embedded.daemon_spec import Pair, leave, recorded, usual
from pannier.wire import addresses
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)

_LOG_KEPT_S: Final = 86400.0
"""How long the log of daemons that have ended stays."""


def tending(
    settings: Settings, pair: Pair, job: str, *, successor: str, files: tuple[Path, ...] = ()
) -> Pair:
    """``pair``, whose start also sees after those of the job's earlier starts, in the background.

    Args:
        job: words that stay the same when the job is started again.
        successor: address of the new coordinator, for this host.
        files: certificate, key and CA for it, if it is on TCP.
    """
    told = {"coordinator": successor}
    told |= dict(zip(("cert", "key", "ca"), map(str, files), strict=False))

    return replace(pair, started=lambda: _tend_soon(settings, pair, job, told))


def tend(settings: Settings, job: str) -> None:
    """The same for a start whose ranks are all on this host, with its usual daemons."""
    if addresses.job_dirs(settings.runtime_dir, job, socket.gethostname()):
        pair = usual(settings)
        told = {"coordinator": addresses.embedded_coordinator(pair.directory)}
        _tend_soon(settings, pair, job, told)


def _tend_soon(settings: Settings, pair: Pair, job: str, told: dict[str, str]) -> None:
    threading.Thread(
        target=_tend, args=(settings, pair, job, told), name="pannier-former", daemon=True
    ).start()


def _tend(settings: Settings, pair: Pair, job: str, told: dict[str, str]) -> None:
    # Daemons of other hosts aren't ours, even where their directories are to be seen.
    host = socket.gethostname()
    own = addresses.job_dirs(settings.runtime_dir, job, host)
    for directory in addresses.job_dirs(settings.runtime_dir, host=host):
        if directory == pair.directory:
            continue
        try:
            former = recorded(directory)
            if former is None:
                _forget(directory)
            elif directory in own:
                _look_after(settings, former, told)
        except (PannierError, OSError, ValueError) as error:
            _log.warning("%s, of an earlier start of this job: %s", directory, error)


def _look_after(settings: Settings, former: Pair, told: dict[str, str]) -> None:
    names = launcher.differing(settings, former)
    if names:
        # Other storage: it isn't ours to say how their saves end.
        _log.warning(
            "the daemons in %s, of an earlier start of this job, had another value of %s: they are "
            "left alone",
            *(former.directory, ", ".join(names)),
        )
        return
    leave(former.directory / addresses.SUCCESSOR, json.dumps(told))
    if not launcher.is_up(former):
        _log.info("starting the daemons in %s again, of an earlier start", former.directory)
        launcher.ensure(settings, former)


def _forget(directory: Path) -> None:
    log = directory / addresses.LOG
    age_s = time.time() - (log if log.exists() else directory).stat().st_mtime
    left = {path.name for path in directory.iterdir()}
    if age_s > _LOG_KEPT_S and left <= {addresses.LOG, f"{addresses.LOG}.1"}:
        shutil.rmtree(directory, ignore_errors=True)
