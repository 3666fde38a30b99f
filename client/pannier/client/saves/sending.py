"""From a staged save to one that needs this process no more: copies end, files are sent, and handed over.

In: what the caller's thread has staged, and the plan. Out: an ingested rank, or the error that ends the save. Owned
by a save, on the engine's loop; what blocks runs in workers. Cancelled, it returns once no worker reads the arena.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from pannier.client.engine import engine
from pannier.client.handle import Resolver
from pannier.client.saves.call import Options
from pannier.client.saves.phase_times import PhaseTimes
from pannier.client.saves.plan_in_use import PlanInUse
from pannier.client.saves.streams import Streams
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.stager import Staged, in_attempt
from pannier.client.transport.shared_memory import SpoolMapping
from pannier.v1 import records_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError

_log = logging.getLogger(__name__)


class Sending:
    """See the module."""

    def __init__(
        self,
        staged: Staged,
        plan: PlanInUse,
        options: Options,
        resolver: Resolver,
        times: PhaseTimes,
    ) -> None:
        self._staged: Staged | None = staged
        self._plan = plan
        self._options = options
        self._resolver = resolver
        self._times = times
        self.is_handed_over = False
        """The sidecar received the request to ingest this rank's part, or may have."""
        self.gave_files = False
        """It may have been given the arena's files."""

    async def run(self) -> None:
        """Returns when the sidecar has ingested the rank, and the plan is known or late.

        Raises:
            PannierError: it can't be ingested.
            Exception: of a device whose copies failed.
        """
        assert self._staged is not None
        try:
            await self._send(self._staged)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """References the staging memory no longer, so that it can be unmapped. Idempotent."""
        self._staged = None

    async def _send(self, staged: Staged) -> None:
        if staged.deferred is not None:
            await self._finish_copies(staged.deferred)
        mapped = mapped_files(staged)
        if mapped:
            await engine().in_stoppable_thread(lambda _: _seal(mapped))
        files, _ = await self._stream(staged, mapped)
        while True:
            try:
                await self._hand_over(staged, files, mapped)
                break
            except InvalidRequestError as error:
                # A restarted sidecar may lack files that it had taken before, and knows no leases.
                # What it does hold isn't sent twice.
                if mapped:
                    staged.arena.streaming_reason = f"it was mapped, but {error}"
                    self._resolver.show(transport=transport(staged))
                mapped = {}
                files, lacked = await self._stream(staged, mapped)
                if not lacked:
                    raise
                _log.warning(
                    "save %s: the %s had lost %d bytes, which were sent again",
                    *(self._resolver.handle.status().id, self._plan.sidecar.peer, lacked),
                )
                _log.debug("its error: %s", error)
        # Until then the coordinator may request the local plan, for which this process is needed.
        left_s = min(self._options.plan_timeout_s, self._options.deadline.remaining())
        await asyncio.wait({self._plan.confirmed}, timeout=left_s)
        self._times.end("ingest")

    async def _finish_copies(self, deferred: DeferredCopies) -> None:
        self._resolver.wait_for("copies", f"copies from {deferred.devices}")
        try:
            await engine().in_stoppable_thread(
                lambda stop: deferred.finish(stop=lambda: stop.is_set)
            )
        finally:
            self._resolver.wait_for("copies", "")
        self._times.end("copy")
        await self._resolver.in_worker(self._resolver.staged)

    async def _stream(
        self, staged: Staged, mapped: Mapping[str, SpoolMapping]
    ) -> tuple[list[records_pb2.DataFile], int]:
        """Streams all files but the mapped ones; returns all, and how many bytes the sidecar didn't hold."""
        plan = self._plan
        streams = Streams(plan, self._options, self._resolver, staged.arena.streaming_reason)
        crcs = await streams.send([file for file in staged.files if file.name not in mapped])
        prefix = object_names.data_prefix(plan.attempt)
        files = [
            records_pb2.DataFile(
                name=prefix + each.name, size=each.size, crc32c=crcs.get(each.name, 0)
            )
            for each in staged.files
        ]
        return files, streams.lacked

    async def _hand_over(
        self,
        staged: Staged,
        files: Sequence[records_pb2.DataFile],
        mapped: Mapping[str, SpoolMapping],
    ) -> None:
        plan = self._plan
        prefix = object_names.data_prefix(plan.attempt)
        request = sidecar_pb2.HandOverRequest(
            context=plan.context,
            attempt=plan.attempt,
            plan_id=plan.id,
            claim=plan.claim(),
            files=files,
            varying=in_attempt(staged.varying, prefix),
            extra_files=in_attempt(staged.extra, prefix),
            mapped=[
                sidecar_pb2.MappedFile(name=prefix + name, spool_file=each.file, stamp=each.stamp)
                for name, each in mapped.items()
            ],
            stalled_s=self._times.stalled_s,
            metrics=self._options.metrics,
        )
        # Both stay after an error: a try that failed or timed out may have arrived, or may arrive later.
        self.is_handed_over = True
        self.gave_files = self.gave_files or bool(mapped)
        await plan.sidecar.hand_over(request, self._options.deadline.remaining())
        if mapped:
            self._resolver.show(bytes_ingested=staged.bytes)


async def end_copies(deferred: DeferredCopies) -> None:
    """The save has ended; its memory must not be used again before its copies have ended, too."""
    if deferred.done:
        return
    try:
        await engine().in_thread(partial(deferred.finish, stop=lambda: True))
    except Exception as error:  # noqa: BLE001 - the save has ended for another reason
        _log.debug("copies that a save no longer needs failed: %s", error)


def mapped_files(staged: Staged) -> dict[str, SpoolMapping]:
    """By name, the files that were staged into the sidecar's spool."""
    mappings = {file.name: getattr(file.keepalive, "mapping", None) for file in staged.files}
    return {name: each for name, each in mappings.items() if isinstance(each, SpoolMapping)}


def transport(staged: Staged) -> str:
    """How the bytes reach the sidecar, human-readable."""
    reason = staged.arena.streaming_reason
    return f"streamed: {reason}" if reason else "mapped"


def _seal(mapped: Mapping[str, SpoolMapping]) -> None:
    for mapping in mapped.values():
        mapping.seal()
