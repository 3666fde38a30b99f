"""Which uploads run at the same time: as many as the memory for their buffers allows.

On the event loop. A file that is still growing may wait for its trainer for
long, so such uploads never take all the room from files that are complete. Where several jobs are
served, who has fewest uploads goes first, and none takes the last place from the others.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

MOST: Final = 8
"""Uploads at a time: more gain nothing and keep the loop busy."""


class _Place:
    def __init__(self, weight: int, growing: Callable[[], bool], job: str) -> None:
        self.weight = weight
        self.growing = growing
        self.job = job
        self.admitted = asyncio.Event()


class Slots:
    """Hands out places to uploads.

    Args:
        memory: bytes that the buffers of all running uploads may take together.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.shared = False
        """Several jobs are served."""
        self._running: list[_Place] = []
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def place(
        self, weight: int, growing: Callable[[], bool], job: str = ""
    ) -> AsyncIterator[None]:
        """Waits for room for an upload with buffers of ``weight`` bytes, and holds it.

        Args:
            growing: whether the file still grows; asked again whenever there is room.
        """
        place = _Place(weight, growing, job)
        self._waiting.append(place)
        self.admit()
        try:
            await place.admitted.wait()
            yield
        finally:
            (self._running if place.admitted.is_set() else self._waiting).remove(place)
            self.admit()

    def admit(self) -> None:
        """Lets in who fits; also to be called when a file that waits became complete."""
        while (place := self._next()) is not None:
            self._waiting.remove(place)
            self._running.append(place)
            place.admitted.set()

    def _next(self) -> _Place | None:
        running = Counter(place.job for place in self._running)
        # Of one job, in the order in which they came.
        waiting = sorted(self._waiting, key=lambda place: running[place.job])
        return next((place for place in waiting if self._fits(place)), None)

    def _fits(self, place: _Place) -> bool:
        if not self._running and not place.growing():
            # One must run, however large its buffers are.
            return True
        share, most = (2, MOST // 2) if place.growing() else (1, MOST)
        rivals = [p for p in self._running if p.growing()] if share == 2 else self._running
        return (
            len(self._running) < MOST
            and len(rivals) < most
            and sum(p.weight for p in self._running) + place.weight <= self._memory
            and (sum(p.weight for p in rivals) + place.weight) * share <= self._memory
            and self._leaves_room(place)
        )

    def _leaves_room(self, place: _Place) -> bool:
        """For an upload of another job."""
        own = [each for each in self._running if each.job == place.job]
        return not (self.shared and own) or (
            len(own) < MOST - 1
            and sum(each.weight for each in own) + 2 * place.weight <= self._memory
        )
