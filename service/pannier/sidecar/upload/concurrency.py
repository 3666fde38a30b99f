"""Which uploads run at the same time: as many as the memory for their buffers allows.

On the event loop. A file that is still growing may wait for its trainer for long, so such uploads leave
room for files that are complete.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

MOST: Final = 8
"""Uploads at a time for each core that they may use: so a core has work while most wait for storage."""


class _Slot:
    def __init__(self, weight: int, growing: Callable[[], bool]) -> None:
        self.weight = weight
        self.growing = growing
        self.admitted = asyncio.Event()


class UploadSlots:
    """Limits the uploads of a process.

    Args:
        memory: bytes that the buffers of all running uploads may take together.
        cores: the cores that uploads may use at a time.
    """

    def __init__(self, memory: int, cores: int = 1) -> None:
        self._memory = memory
        self._most = MOST * cores
        self._running: list[_Slot] = []
        self._waiting: list[_Slot] = []

    @asynccontextmanager
    async def slot(self, weight: int, growing: Callable[[], bool]) -> AsyncIterator[None]:
        """Waits until an upload with buffers of ``weight`` bytes may run, and counts it meanwhile.

        Args:
            growing: whether the file still grows; evaluated whenever a slot may be free.
        """
        slot = _Slot(weight, growing)
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
        while (slot := next(filter(self._fits, self._waiting), None)) is not None:
            self._waiting.remove(slot)
            self._running.append(slot)
            slot.admitted.set()

    def _fits(self, slot: _Slot) -> bool:
        if not self._running and not slot.growing():
            # One must run, however large its buffers are.
            return True
        share, most = (2, self._most // 2) if slot.growing() else (1, self._most)
        rivals = [p for p in self._running if p.growing()] if share == 2 else self._running
        return (
            len(self._running) < self._most
            and len(rivals) < most
            and sum(p.weight for p in self._running) + slot.weight <= self._memory
            and (sum(p.weight for p in rivals) + slot.weight) * share <= self._memory
        )
