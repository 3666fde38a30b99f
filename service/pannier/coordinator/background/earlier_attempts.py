"""Finishes, from storage alone, the saves that earlier starts of a job left undecided below a root.

In: the first save of an incarnation below a root. Out: the end of each undecided attempt of the job's
earlier incarnations: committed once all its receipts are in storage, or aborted, naming the missing ranks,
once its deadline has passed by the store's clock. An attempt without a manifest is aborted a save's default
time after its last object. Status and log name these attempts meanwhile. Attempts whose sidecars report to this coordinator are left to their save's
task. One task for each root and incarnation. Event loop only.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pannier.attempts.decisions import read_decision
from pannier.attempts.leases import store_time
from pannier.common import timeouts
from pannier.common.message_json import timestamp
from pannier.common.retry import RetryPolicy
from pannier.coordinator.background.superseded import Sweeper
from pannier.coordinator.stores import Stores
from pannier.daemon.logging import bind
from pannier.daemon.status_registry import StatusRegistry
from pannier.maintenance.inspect import by_checkpoint
from pannier.maintenance.recover import (
    Build,
    End,
    Found,
    Interrupted,
    Outcome,
    find_interrupted,
    finish_attempt,
    lacks,
)
from pannier.storage import DeniedError, HeldError, NotFoundError, ObjectInfo, StorageError, Store
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import PannierError
from pannier.wire.object_names import save_text

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_ENDED_KEPT: Final = 64
"""Ended attempts that status shows."""
_STATES: Final = {
    End.COMMITTED: save_pb2.SAVE_STATE_COMMITTED,
    End.ABORTED: save_pb2.SAVE_STATE_ABORTED,
    End.REMOVED: save_pb2.SAVE_STATE_ABORTED,
    End.UNDECIDED: save_pb2.SAVE_STATE_IN_DOUBT,
}


@dataclass(eq=False)
class _Earlier:
    """One attempt of an earlier start."""

    checkpoint_id: str
    save: save_pb2.SaveId
    found: Interrupted
    clock: float
    """The store's time at 0 of the monotonic clock."""
    deadline: float = 0.0
    """When it is aborted unless it is complete, on the monotonic clock."""
    outcome: Outcome | None = None
    created_at: float = field(default_factory=time.time)

    @property
    def label(self) -> str:
        return f"save {save_text(self.save)} to {self.checkpoint_id}"

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of its log records (:mod:`pannier.daemon.logging`)."""
        return {
            "job": self.save.job,
            "save": save_text(self.save),
            "checkpoint": self.checkpoint_id,
            "attempt": self.found.attempt,
        }

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def extend(self, seconds: float) -> None:
        """Moves the deadline to at least so many seconds from now."""
        self.deadline = max(self.deadline, time.monotonic() + seconds)

    def update(self, found: Interrupted, objects: Sequence[ObjectInfo]) -> None:
        """Records what storage shows, and extends the deadline accordingly.

        An attempt with recent objects has some more time even if the save's own deadline has passed: a
        restarted sidecar may be uploading what its host had ingested.
        """
        self.found = found
        now = time.monotonic() + self.clock
        self.extend(found.modified + timeouts.RESUMED_SAVE_S - now)
        if found.manifest is None:
            # Of a save that torch plans, the manifest comes last: its own coordinator may be alive, and wait
            # for uploads, which show nothing until a file is complete.
            self.extend(found.modified + timeouts.DEFAULT_SAVE_S - now)
            return
        manifest = object_names.manifest(found.attempt)
        planned = [info.modified for info in objects if info.key == manifest]
        timeout_s = found.manifest.header.timeout_s
        if not 0 < timeout_s <= limits.MAX_TIMEOUT_S:
            timeout_s = timeouts.DEFAULT_SAVE_S
        self.extend(max(planned, default=found.modified) + timeout_s - now)

    def status(self) -> save_pb2.SaveStatus:
        """What ``pannier status`` shows of it."""
        out = save_pb2.SaveStatus(
            save=self.save,
            id=save_text(self.save),
            checkpoint_id=self.checkpoint_id,
            attempt=self.found.attempt,
            state=save_pb2.SAVE_STATE_UPLOADING,
            created_at=timestamp(self.created_at),
            note="left by an earlier start of the job; it is finished from storage",
        )
        durable = self.outcome is not None and self.outcome.end is End.COMMITTED
        for rank, host in self.found.members:
            missing = rank in self.found.missing and not durable
            phase = save_pb2.RANK_PHASE_MISSING if missing else save_pb2.RANK_PHASE_DURABLE
            out.ranks.add(rank=rank, host=host, phase=phase)
        if self.outcome is not None:
            out.state = _STATES[self.outcome.end]
            if self.outcome.end is not End.COMMITTED:
                kind = save_pb2.FAILURE_KIND_LOST
                out.failures.add(rank=-1, kind=kind, message=self.outcome.reason)
        elif self.found.found is Found.UNDECIDED:
            out.waiting_on.ranks.extend(self.found.missing)
            out.waiting_on.text = f"an earlier start left it: {lacks(self.found)}"
            out.waiting_on.deadline_s = self.seconds_left
        return out


class EarlierAttempts:
    """Finishes the attempts of earlier starts in the background.

    Args:
        build: makes the bytes of ``.metadata``.
        host: recorded in decisions.
        is_known: whether sidecars have reported a save to this coordinator.
        sweeper: notified of commits.
    """

    def __init__(
        self,
        stores: Stores,
        status_registry: StatusRegistry,
        *,
        build: Build,
        host: str,
        is_known: Callable[[save_pb2.SaveId], bool],
        sweeper: Sweeper,
    ) -> None:
        self._stores = stores
        self._status_registry = status_registry
        self._build = build
        self._host = host
        self._is_known = is_known
        self._sweeper = sweeper
        self._begun: set[tuple[str, str, str]] = set()
        """Root, job and incarnation."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[str, _Earlier] = OrderedDict()
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether any attempt isn't finished yet."""
        return bool(self._tasks)

    def begin(self, context: sidecar_pb2.SaveContext, attempt: object_names.Attempt) -> None:
        """Looks for such attempts, once below the save's root; ``attempt`` is of the newest incarnation."""
        root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
        key = (root, context.save.job, context.save.incarnation)
        if key in self._begun or self._stopped:
            return
        self._begun.add(key)
        incarnations = self._stores.earlier_incarnations(context, attempt)
        if incarnations:
            self._spawn(self._finish_all(root, incarnations), root)

    async def stop(self) -> None:
        """Leaves all attempts as they are, for good: the job's next start looks for them again."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], where: str) -> None:
        loop = asyncio.get_running_loop()
        # Without the deadline and the log fields of the save that begins it.
        task = Context().run(lambda: loop.create_task(work, name=where))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, ended: "asyncio.Task[None]") -> None:
        self._tasks.discard(ended)
        if ended.cancelled() or (error := ended.exception()) is None:
            return
        what = f"what earlier starts left at {ended.get_name()} is left to the job's next start"
        if isinstance(error, PannierError):
            _log.warning("%s: %s", what, error)
        else:
            _log.error("%s", what, exc_info=error)

    async def _finish_all(self, root: str, jobs: Mapping[str, str]) -> None:
        what = f"what earlier starts left below {root}"
        found = await _retry(what, lambda: self._find(root, jobs))
        if found:
            _log.info(
                "earlier starts of the job left %d saves below %s undecided; they are finished: %s",
                *(len(found), root, "; ".join(each.label for each in found)),
            )
        for each in found:
            if not self._is_known(each.save):
                self._status_registry.put(each.save, each.checkpoint_id, each.status)
                self._spawn(self._finish(each), each.checkpoint_id)

    async def _find(self, root: str, jobs: Mapping[str, str]) -> list[_Earlier]:
        """Lists the root once, and examines the attempts that the listing doesn't show as finished.

        Args:
            jobs: names of the job by the ids of its earlier incarnations.
        """

        def save_of(name: str) -> save_pb2.SaveId:
            save = object_names.Attempt.parse(name).save
            save.job = jobs.get(save.incarnation, "")
            return save

        def wanted(name: str) -> bool:
            save = save_of(name)
            return save.incarnation in jobs and not self._is_known(save)

        store = self._stores.open_root(root)
        try:
            checkpoints = await asyncio.to_thread(by_checkpoint, await store.list())
            found = []
            for name, objects in checkpoints.items():
                attempts = {object_names.attempt_of(info.key) for info in objects} - {""}
                # Checkpoints further down have other roots.
                if name and "/" not in name and any(map(wanted, attempts)):
                    checkpoint_id = f"{root}{'' if root.endswith('/') else '/'}{name}"
                    place = self._stores.open_root(checkpoint_id)
                    try:
                        interrupted = await find_interrupted(place, objects, wanted=wanted)
                    finally:
                        await place.close()
                    found += [(checkpoint_id, each, objects) for each in interrupted]
            if not found:
                return []
            clock = await store_time(store) - time.monotonic()
        finally:
            await store.close()
        earlier = []
        for checkpoint_id, each, objects in found:
            made = _Earlier(checkpoint_id, save_of(each.attempt), each, clock)
            made.update(each, objects)
            # Sidecars on spools of earlier starts may only just be starting.
            made.extend(timeouts.RESUMED_SAVE_S)
            earlier.append(made)
        return earlier

    async def _finish(self, earlier: _Earlier) -> None:
        bind(lambda: earlier.log_fields)
        key = save_text(earlier.save)
        store = self._stores.open_root(earlier.checkpoint_id)
        try:
            outcome = await self._await_end(store, earlier)
        except PannierError as error:
            outcome = Outcome(earlier.found, End.UNDECIDED, str(error))
        finally:
            await store.close()
        if outcome is None:
            return
        earlier.outcome = outcome
        self._status_registry.notify(key)
        _log.log(
            logging.INFO if outcome.end is End.COMMITTED else logging.WARNING,
            "%s, of an earlier start, is %s%s",
            *(earlier.label, outcome.end.value, f": {outcome.reason}" if outcome.reason else ""),
        )
        if outcome.end is End.COMMITTED:
            self._sweeper.committed(earlier.checkpoint_id)
        self._ended[key] = earlier
        while len(self._ended) > _ENDED_KEPT:
            _, oldest = self._ended.popitem(last=False)
            if not self._is_known(oldest.save):
                self._status_registry.remove(save_text(oldest.save))

    async def _await_end(self, store: Store, earlier: _Earlier) -> Outcome | None:
        """Ends the attempt as soon as possible; None: sidecars have reported it."""
        pause = timeouts.RESUME_CHECK_S
        while not self._is_known(earlier.save):
            if earlier.found.found is not Found.UNDECIDED or not earlier.seconds_left:
                outcome = await self._retry(earlier, lambda: self._end(store, earlier))
                if outcome.end is not End.UNDECIDED or not earlier.seconds_left:
                    return outcome
            await asyncio.sleep(min(pause, earlier.seconds_left))
            pause = min(2 * pause, timeouts.RESUME_LONGEST_CHECK_S)
            ended = await self._retry(earlier, lambda: self._look(store, earlier))
            if ended is not None:
                return ended
            self._status_registry.notify(save_text(earlier.save))
        return None

    async def _end(self, store: Store, earlier: _Earlier) -> Outcome:
        return await finish_attempt(
            store,
            earlier.found,
            build=self._build,
            host=self._host,
            abort=not earlier.seconds_left,
            why="an earlier start of the job left it undecided, and its time is over",
        )

    async def _look(self, store: Store, earlier: _Earlier) -> Outcome | None:
        """Reads the attempt's state again, by a single listing while it is unchanged.

        Returns the outcome if the attempt has ended.
        """
        name = earlier.found.attempt
        records = await store.list(object_names.attempt_prefix(name))
        there = {info.key for info in records}
        missing = [object_names.receipt(name, rank) for rank in earlier.found.missing]
        awaited = missing if earlier.found.planned else [object_names.manifest(name)]
        changed = object_names.decision(name) in there or there.issuperset(awaited)
        if not changed and earlier.seconds_left:
            return None
        objects = [*records, *await store.list(object_names.data_prefix(name))]
        found = await find_interrupted(store, objects)
        if found:
            earlier.update(found[0], objects)
            return None
        decision = await read_decision(store, name)
        if decision is None:
            return Outcome(earlier.found, End.REMOVED, "it was removed meanwhile")
        committed = decision.outcome == records_pb2.OUTCOME_COMMIT
        causes = "; ".join(dict.fromkeys(failure.message for failure in decision.failures))
        return Outcome(earlier.found, End.COMMITTED if committed else End.ABORTED, causes)

    async def _retry(self, earlier: _Earlier, step: Callable[[], Awaitable[_Answer]]) -> _Answer:
        # While storage doesn't answer, sidecars can't upload, either.
        return await _retry(
            f"{earlier.label}, of an earlier start,",
            step,
            lambda error: earlier.extend(timeouts.RESUMED_SAVE_S),
        )


async def _retry(
    what: str,
    step: Callable[[], Awaitable[_Answer]],
    on_error: Callable[[BaseException], None] = lambda error: None,
) -> _Answer:
    """Runs a step until storage answers. Raises DeniedError, HeldError and NotFoundError."""

    def note(error: BaseException) -> None:
        _log.warning("%s can't be finished yet, retrying: %s", what, error)
        on_error(error)

    policy = RetryPolicy(
        retriable=lambda error: (
            isinstance(error, StorageError)
            and not isinstance(error, (DeniedError, HeldError, NotFoundError))
        ),
        first_s=timeouts.STEP_AGAIN_S,
        longest_s=timeouts.RESUME_LONGEST_CHECK_S,
        on_retry=note,
    )
    return await policy.run(step)
