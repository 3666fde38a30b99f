"""After each commit: removes the job's checkpoints that no rule of the policy keeps.

In: checkpoint ids of commits, and a policy. Out: storage without these checkpoints, and a log of what
was removed and of what stays although no rule keeps it. Event loop only.
"""

import asyncio
import logging

from pannier.common.units import size_text
from pannier.coordinator.stores import Stores
from pannier.maintenance.retention_policy import Policy
from pannier.maintenance.retention_run import retain
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)


class Retention:
    """One task for each root and job with a commit.

    Args:
        host: recorded in removal marks.
    """

    def __init__(self, stores: Stores, policy: Policy, *, host: str) -> None:
        self._stores = stores
        self._policy = policy
        self._host = host
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._again: dict[tuple[str, str], str] = {}
        """The last committed attempt, where the root is to be checked again."""
        self._warned = False
        """Whether it was logged that a checkpoint doesn't match the pattern."""
        self.failures = 0
        """Checks of a root that failed."""

    def committed(self, checkpoint_id: str, job: str, attempt: str) -> None:
        """Checks the root now, or again after the check that is running.

        Args:
            attempt: the committed one; its checkpoint and newer ones stay this time.
        """
        if not self._policy.limits:
            return
        root = self._policy.pattern.root_of(checkpoint_id)
        if root is None:
            if not self._warned:
                _log.warning(
                    "retention never removes %s and its like: the pattern %s, of --retention-pattern, "
                    "doesn't match them",
                    checkpoint_id,
                    self._policy.pattern.text,
                )
            self._warned = True
            return
        key = (root, job)
        self._again[key] = attempt
        if key not in self._tasks:
            self._begin(key)

    def _begin(self, key: tuple[str, str]) -> None:
        task = asyncio.get_running_loop().create_task(self._keep(*key))
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._ended(key, ended))

    async def stop(self) -> None:
        """Cancels running checks; the check after the next commit finishes their work."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: tuple[str, str], ended: "asyncio.Task[None]") -> None:
        del self._tasks[key]
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            self.failures += 1
            _log.error("retention at %s failed", key[0], exc_info=error)
        if key in self._again:
            # Committed after the task's last check.
            self._begin(key)

    async def _keep(self, root: str, job: str) -> None:
        key = (root, job)
        while (attempt := self._again.pop(key, None)) is not None:
            try:
                await self._keep_once(root, job, attempt)
            except PannierError as error:
                self.failures += 1
                _log.warning("retention at %s is left to the next commit: %s", root, error)

    async def _keep_once(self, root: str, job: str, attempt: str) -> None:
        outcomes = await retain(
            self._stores.open_root,
            root,
            self._policy,
            job=job,
            host=self._host,
            committed=attempt,
        )
        for each in outcomes:
            checkpoint = each.checkpoint
            if not each.reasons:
                _log.info(
                    "retention: %s/%s is removed (%s), as no rule keeps it",
                    root,
                    checkpoint.name,
                    size_text(each.removed),
                )
            else:
                level = logging.INFO if each.spared else logging.DEBUG
                _log.log(level, "retention: %s/%s stays: %s", root, checkpoint.name, each.why)
