"""Who has gone silent, said aloud: in the log, while status shows it anyway.

In: the saves that wait, and the sidecars that are attached. Out: one warning when a rank or a
sidecar becomes suspect, and one line when it is heard again. Nothing is given up here: that is
for the deadlines. Event loop only; no I/O.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from pannier.common import observer_clock
from pannier.common.wait_text import waiting_text
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Presence
from pannier.wire.failures import ranks_text

_log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
"""Silence has no event of its own."""


class Vigil:
    """Watches over all saves of a coordinator.

    Args:
        present: the sidecars that are attached now.
        suspect_after_s: seconds of silence that make suspect.
    """

    def __init__(
        self,
        registry: Registry,
        present: Callable[[], Iterable[Presence]],
        *,
        suspect_after_s: float,
    ) -> None:
        self._registry = registry
        self._present = present
        self._after_s = suspect_after_s
        self._ranks: dict[str, set[int]] = {}
        """Suspect ranks by key of their save."""
        self._sidecars: set[Presence] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        with observer_clock.clock.watched():
            while True:
                observer_clock.clock.tick(EVERY_S)
                await asyncio.sleep(EVERY_S)
                self.look()

    def look(self) -> None:
        """Tells what has changed since the last look."""
        self._look_at_sidecars()
        known, self._ranks = self._ranks, {}
        for save in self._registry.undecided():
            age = observer_clock.now() - save.known_since
            silent = [
                one
                for one in save.awaited()
                if (age if one.heard_s is None else one.heard_s) > self._after_s
            ]
            ranks = {one.rank for one in silent}
            before = known.get(save.key, set())
            if new := [one for one in silent if one.rank not in before]:
                left = max(0.0, save.next_deadline - time.monotonic())
                _log.warning(
                    "%s, %s, waits for %s: suspect after %.0f s of silence, given up in %.0f s",
                    *(save.label, save.state.name, waiting_text(new), self._after_s, left),
                    extra=save.about,
                )
            if back := sorted(before & {one.rank for one in save.awaited()} - ranks):
                _log.info("%s: %s heard again", save.label, ranks_text(back), extra=save.about)
            if ranks:
                self._ranks[save.key] = ranks

    def _look_at_sidecars(self) -> None:
        now = observer_clock.now()
        silent = {each for each in self._present() if now - each.heard > self._after_s}
        for each in silent - self._sidecars:
            _log.warning(
                "the sidecar on host %s is attached, but was last heard %.0f s ago",
                *(each.host, now - each.heard),
            )
        for each in self._sidecars - silent:
            if each.streams:
                _log.info("the sidecar on host %s is heard again", each.host)
        self._sidecars = silent
