"""After a commit: marks the attempts that it superseded, and removes them after the grace period.

In: checkpoint ids of commits. Out: storage without superseded attempts. Attempts that are left when a
coordinator ends are removed after the next commit there, or by ``pannier gc``. Event loop only.
"""

import asyncio
import logging
from typing import Final

from pannier.common import timeouts
from pannier.common.units import counted, size_text
from pannier.coordinator.stores import Stores
from pannier.maintenance.superseded import GRACE_S, Swept, sweep_checkpoint
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)

_TRIES: Final = 10
_PARALLEL: Final = 4
"""Checkpoint ids that are swept at the same time."""


class Sweeper:
    """One task for each checkpoint id that has superseded attempts.

    Args:
        grace_s: seconds that such attempts stay after they were first seen to be superseded.
    """

    def __init__(self, stores: Stores, *, grace_s: float = GRACE_S) -> None:
        self._stores = stores
        self._grace_s = grace_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._limit = asyncio.Semaphore(_PARALLEL)

    def committed(self, checkpoint_id: str) -> None:
        """Sweeps the checkpoint id now, and again as long as superseded attempts wait for their removal."""
        former = self._tasks.pop(checkpoint_id, None)
        if former is not None:
            # The former task only waits, or does what the new one repeats: each step is idempotent.
            former.cancel()
        task = asyncio.get_running_loop().create_task(self._sweep(checkpoint_id))
        self._tasks[checkpoint_id] = task
        task.add_done_callback(lambda ended: self._forget(checkpoint_id, ended))

    def _forget(self, checkpoint_id: str, ended: "asyncio.Task[None]") -> None:
        if self._tasks.get(checkpoint_id) is ended:
            del self._tasks[checkpoint_id]
        if not ended.cancelled() and (error := ended.exception()) is not None:
            _log.error("sweeping %s failed", checkpoint_id, exc_info=error)

    async def stop(self) -> None:
        """Cancels all sweeps."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self, checkpoint_id: str) -> None:
        failed = 0
        while failed < _TRIES:
            try:
                async with self._limit:
                    swept = await self._sweep_once(checkpoint_id)
            except PannierError as error:
                failed += 1
                _log.warning("superseded files are left at %s: %s", checkpoint_id, error)
                await asyncio.sleep(timeouts.SWEEP_AGAIN_S)
                continue
            failed = 0
            for attempt, objects in swept.removed.items():
                _log.info(
                    "%s was superseded and is removed from %s (%s, %s)",
                    attempt,
                    checkpoint_id,
                    counted(len(objects), "object"),
                    size_text(sum(info.size for info in objects)),
                )
            if swept.due_s is None:
                return
            await asyncio.sleep(swept.due_s)

    async def _sweep_once(self, checkpoint_id: str) -> Swept:
        store = self._stores.open(checkpoint_id)
        try:
            return await sweep_checkpoint(store, grace_s=self._grace_s)
        finally:
            await store.close()
