"""Which uploads run at the same time: as many as the memory for their buffers allows.

On the event loop. A file that is still growing may wait for its trainer for long, so such uploads leave
room for files that are complete. Where several jobs are served, the job with the fewest uploads goes
first, and one slot is left for another job.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

MOST: Final = 8
"""Uploads at a time: more gain nothing and keep the loop busy."""


class _Slot:
    def __init__(self, weight: int, growing: Callable[[], bool], job: str) -> None:
        self.weight = weight
        self.growing = growing
        self.job = job
        self.admitted = asyncio.Event()


class UploadSlots:
    """Limits the uploads of a process.

    Args:
        memory: bytes that the buffers of all running uploads may take together.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._shared = False
        """Several jobs are served."""
        self._running: list[_Slot] = []
        self._waiting: list[_Slot] = []

    def share(self, shared: bool) -> None:
        """Leaves room for uploads of other jobs from now on, or doesn't."""
        self._shared = shared

    @asynccontextmanager
    async def slot(
        self, weight: int, growing: Callable[[], bool], job: str = ""
    ) -> AsyncIterator[None]:
        """Waits until an upload with buffers of ``weight`` bytes may run, and counts it meanwhile.

        Args:
            growing: whether the file still grows; evaluated whenever a slot may be free.
        """
        slot = _Slot(weight, growing, job)
        self._waiting.append(slot)
        self.admit()
        try:
            await slot.admitted.wait()
            yield
        finally:
            (self._running if slot.admitted.is_set() else self._waiting).remove(slot)
            self.admit()

    def admit(self) -> None:
        """Admits waiting uploads that fit; also to be called when the file of one became complete."""
        while (slot := self._next()) is not None:
            self._waiting.remove(slot)
            self._running.append(slot)
            slot.admitted.set()

    def _next(self) -> _Slot | None:
        running = Counter(slot.job for slot in self._running)
        # Of one job, in the order of their requests.
        waiting = sorted(self._waiting, key=lambda slot: running[slot.job])
        return next((slot for slot in waiting if self._fits(slot)), None)

    def _fits(self, slot: _Slot) -> bool:
        if not self._running and not slot.growing():
            # One must run, however large its buffers are.
            return True
        share, most = (2, MOST // 2) if slot.growing() else (1, MOST)
        rivals = [p for p in self._running if p.growing()] if share == 2 else self._running
        return (
            len(self._running) < MOST
            and len(rivals) < most
            and sum(p.weight for p in self._running) + slot.weight <= self._memory
            and (sum(p.weight for p in rivals) + slot.weight) * share <= self._memory
            and self._leaves_room(slot)
        )

    def _leaves_room(self, slot: _Slot) -> bool:
        """Whether an upload of another job still fits."""
        own = [each for each in self._running if each.job == slot.job]
        return not (self._shared and own) or (
            len(own) < MOST - 1
            and sum(each.weight for each in own) + 2 * slot.weight <= self._memory
        )
