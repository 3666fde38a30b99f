"""When each trainer on this host was last seen, and which of them are dead.

In: connections, pings and ended connections. Out: a warning when a save waits for an unresponsive
trainer, and reports to the coordinator, also about trainers that take part in no save yet. A
stopped process keeps its connection, so only its pings show that it runs. On the event loop.
"""

import logging
from collections import OrderedDict
from typing import Final

from pannier.common import observer_clock, timeouts
from pannier.common.wait_text import aged
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import RankSave
from pannier.v1 import coordinator_pb2, save_pb2, sidecar_pb2

_log = logging.getLogger(__name__)

_DEAD_KEPT: Final = 256

Key = tuple[str, str, int]
"""Job, incarnation, rank."""


class TrainerLiveness:
    """All trainers that are connected, or were until lately."""

    def __init__(self, saves: SaveRegistry) -> None:
        self._saves = saves
        self._last_seen: dict[Key, float] = {}
        self._dead: OrderedDict[Key, tuple[float, str]] = OrderedDict()
        self._unresponsive: set[Key] = set()
        self._waits: dict[Key, save_pb2.TrainingWait] = {}
        """The call in which a trainer waits, as its last ping reported."""

    def note_ping(self, key: Key, request: sidecar_pb2.PingRequest) -> None:
        """The trainer pinged."""
        self.mark_seen(key)
        self._waits.pop(key, None)
        if request.HasField("waiting"):
            self._waits[key] = request.waiting

    def waits(self, job: str = "") -> list[save_pb2.TrainingWait]:
        """The calls in which trainers (of one job) wait."""
        now = observer_clock.now()
        return [
            aged(wait, now - self._last_seen[key])
            for key, wait in self._waits.items()
            if key in self._last_seen and job in ("", key[0])
        ]

    def mark_seen(self, key: Key) -> None:
        """The trainer connected or pinged."""
        now = observer_clock.now()
        self._last_seen[key] = now
        self._dead.pop(key, None)
        for rank in self._saves.of_rank(*key):
            rank.see()

    def remove(self, key: Key) -> None:
        """The trainer has closed its client: it is no longer reported."""
        self._waits.pop(key, None)
        self._last_seen.pop(key, None)

    def mark_dead(self, key: Key, description: str) -> None:
        """The trainer's process has ended; ``description`` names it, human-readable."""
        self._last_seen.pop(key, None)
        self._waits.pop(key, None)
        self._dead[key] = (observer_clock.now(), description)
        self._dead.move_to_end(key)
        while len(self._dead) > _DEAD_KEPT:
            self._dead.popitem(last=False)

    def report(self) -> list[coordinator_pb2.TrainerStatus]:
        """All trainers, for the coordinator."""
        now = observer_clock.now()
        dead = [(key, at, description) for key, (at, description) in self._dead.items()]
        seen = [(key, at, "") for key, at in self._last_seen.items()]
        return [
            coordinator_pb2.TrainerStatus(
                job=job,
                incarnation=incarnation,
                rank=rank,
                seconds_since_seen=now - at,
                death=description,
                waiting=None if description else self._waits.get((job, incarnation, rank)),
            )
            for (job, incarnation, rank), at, description in (*seen, *dead)
            if not description or now - at < timeouts.DEAD_TRAINER_KEPT_S
        ]

    def log_unresponsive(self) -> None:
        """Logs which trainers have become unresponsive. To be called every second or so."""
        now = observer_clock.now()
        found: dict[Key, RankSave] = {}
        for save in self._saves.undecided():
            for rank in save.ranks.values():
                if rank.needs_trainer and now - rank.last_seen > timeouts.UNRESPONSIVE_S:
                    found[(save.id.job, save.id.incarnation, rank.rank)] = rank
        for key in found.keys() - self._unresponsive:
            rank = found[key]
            _log.warning(
                "%s waits for its trainer, last seen %.0f s ago: it is unresponsive, and the save "
                "fails at its deadline",
                *(rank.label, now - rank.last_seen),
            )
        for _, incarnation, number in self._unresponsive - found.keys():
            _log.info("rank %d of incarnation %s is no longer waited for", number, incarnation)
        self._unresponsive = set(found)
