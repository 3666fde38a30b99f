"""Named points at which a test can kill or stop a daemon, to check what it leaves behind.

In: ``PANNIER_CRASH_AT=name`` or ``name:n``, and likewise ``PANNIER_PAUSE_AT``, read once. Out: SIGKILL or
SIGSTOP to this process when it passes that point for the n-th time (default: the first). Each point is
directly before or after a change of state that outlives the process: spool, journal, objects in storage.
Thread-safe.
"""

import os
import signal
import threading
from typing import Final

from pannier.wire.errors import ConfigurationError

VARIABLE: Final = "PANNIER_CRASH_AT"
PAUSE_VARIABLE: Final = "PANNIER_PAUSE_AT"

POINTS: Final = frozenset(
    {
        "coordinator.incarnation.before",
        "coordinator.incarnation.after",
        "coordinator.manifest.before",
        "coordinator.manifest.after",
        "coordinator.candidate.before",
        "coordinator.candidate.after",
        "coordinator.decision.before",
        "coordinator.decision.after",
        "coordinator.extra_file.before",
        "coordinator.extra_file.after",
        "coordinator.metadata.before",
        "coordinator.metadata.after",
        "coordinator.removal.before",
        "coordinator.removal.after",
        "sidecar.compaction.before",
        "sidecar.compaction.after",
        "sidecar.opened.before",
        "sidecar.opened.after",
        "sidecar.held.before",
        "sidecar.held.after",
        "sidecar.ingested.before",
        "sidecar.ingested.after",
        "sidecar.ingested.synced",
        "sidecar.confirmed.before",
        "sidecar.confirmed.after",
        "sidecar.durable.before",
        "sidecar.durable.after",
        "sidecar.stored.before",
        "sidecar.stored.after",
        "sidecar.failed.before",
        "sidecar.failed.after",
        "sidecar.ended.before",
        "sidecar.ended.after",
        "sidecar.forgotten.before",
        "sidecar.forgotten.after",
        "sidecar.spool_file.created",
        "sidecar.spool_file.removed",
        "sidecar.receipt.before",
        "sidecar.deletion.before",
        "sidecar.deletion.after",
        "sweep.mark.before",
        "sweep.mark.after",
        "sweep.deletion.before",
        "sweep.deletion.after",
        "sweep.decision.before",
        "sweep.decision.after",
        "sweep.removal.before",
        "sweep.removal.after",
        "sweep.metadata.before",
        "sweep.metadata.after",
        "sweep.leftover.before",
        "sweep.leftover.after",
    }
)
"""All points: ``daemon.what.when``."""


class _Armed:
    def __init__(self, variable: str, number: signal.Signals) -> None:
        text = os.environ.get(variable, "")
        self.name, _, count = text.partition(":")
        if text and (self.name not in POINTS or not (count or "1").isdigit()):
            raise ConfigurationError(
                f"{variable}={text!r} is not a fault point; these are {sorted(POINTS)}, "
                "each with an optional :n for the n-th pass"
            )
        self._number = number
        self._left = int(count or "1")
        self._lock = threading.Lock()

    def passed(self) -> None:
        with self._lock:
            self._left -= 1
            now = self._left == 0
        if now:
            # To this thread, so that it goes no further: a signal to the process may reach another thread first.
            signal.pthread_kill(threading.get_ident(), self._number)


_armed: Final = (
    _Armed(VARIABLE, signal.SIGKILL),
    _Armed(PAUSE_VARIABLE, signal.SIGSTOP),
)


def point(name: str) -> None:
    """Kills or stops the process here if it is armed for ``name``. Raises KeyError for unknown names."""
    if name not in POINTS:
        raise KeyError(name)
    for each in _armed:
        if each.name == name:
            each.passed()
