"""When each trainer on this host was last seen, and which of them are gone.

In: what sessions see of them. Out: a warning when a save waits for one that is silent, and
reports for the coordinator, also of trainers that take part in no save yet. A stopped process
keeps its connection, so that only its pings tell whether it lives. Thread-safe.
"""

import logging
import threading
from collections import OrderedDict
from typing import Final

from pannier.common import observer_clock
from pannier.sidecar.save_state import BEFORE_INGESTION, RankSave, Saves
from pannier.v1 import coordinator_pb2

_log = logging.getLogger(__name__)

SUSPECT_S: Final = 5.0
"""Silence that makes a trainer suspect; it is given up at a deadline alone."""
_GONE_KEPT: Final = 256
_GONE_KEPT_S: Final = 600.0
"""How long the coordinator is told of a trainer that is gone: others may wait for it."""

Key = tuple[str, str, int]
"""Job, incarnation, rank."""


class Trainers:
    """All trainers that are connected, or were until lately."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._lock = threading.Lock()
        self._heard: dict[Key, float] = {}
        self._gone: OrderedDict[Key, tuple[float, str]] = OrderedDict()
        self._suspects: set[Key] = set()

    def heard(self, key: Key) -> None:
        """The trainer connected or pinged."""
        now = observer_clock.now()
        with self._lock:
            self._heard[key] = now
            self._gone.pop(key, None)
        for rank in self._saves.of_rank(*key):
            rank.heard = now

    def left(self, key: Key) -> None:
        """The trainer is no longer connected; nobody is told."""
        with self._lock:
            self._heard.pop(key, None)

    def gone(self, key: Key, who: str) -> None:
        """The trainer's process is gone; ``who`` is its name for people."""
        with self._lock:
            self._heard.pop(key, None)
            self._gone[key] = (observer_clock.now(), who)
            self._gone.move_to_end(key)
            while len(self._gone) > _GONE_KEPT:
                self._gone.popitem(last=False)

    def report(self) -> list[coordinator_pb2.TrainerStatus]:
        """All of them, for the coordinator."""
        now = observer_clock.now()
        with self._lock:
            gone = [(key, at, who) for key, (at, who) in self._gone.items()]
            heard = [(key, at, "") for key, at in self._heard.items()]
        return [
            coordinator_pb2.TrainerStatus(
                job=job, incarnation=incarnation, rank=rank, seconds_since_heard=now - at, gone=who
            )
            for (job, incarnation, rank), at, who in (*heard, *gone)
            if not who or now - at < _GONE_KEPT_S
        ]

    def look(self) -> None:
        """Says which trainers are suspect now. To be called every second or so."""
        now = observer_clock.now()
        silent: dict[Key, RankSave] = {}
        for save in self._saves.undecided():
            for rank in list(save.ranks.values()):
                if rank.phase in BEFORE_INGESTION and now - rank.heard > SUSPECT_S:
                    silent[(save.id.job, save.id.incarnation, rank.rank)] = rank
        for key in silent.keys() - self._suspects:
            rank = silent[key]
            _log.warning(
                "%s waits for its trainer, last seen %.0f s ago: suspect, and given up at the "
                "save's deadline",
                *(rank.label, now - rank.heard),
            )
        for _, incarnation, number in self._suspects - silent.keys():
            _log.info("rank %d of incarnation %s is no longer waited for", number, incarnation)
        self._suspects = set(silent)
