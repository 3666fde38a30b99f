"""From a staged save to one that needs this process no more: copies end, files are sent, and handed over.

In: what the caller's thread has staged, and the plan. Out: an ingested rank, or the error that ends the save. Owned
by a save, on the engine's loop; what blocks runs in workers. Cancelled, it returns once no worker reads the arena.
"""

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import crc32c

from pannier.client import exit_hooks
from pannier.client.engine import engine, side_by_side
from pannier.client.handle import Resolver
from pannier.client.saves.call import Options
from pannier.client.saves.phase_times import PhaseTimes
from pannier.client.saves.plan_in_use import PlanInUse
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.stager import Staged, StagedFile, in_attempt
from pannier.client.transport.shared_memory import SpoolMapping
from pannier.common import timeouts
from pannier.v1 import records_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import BusyError, InvalidRequestError, SaveSkippedError

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
        inlined = _inlined(staged, mapped)
        files, _ = await self._stream(staged, mapped, inlined)
        while True:
            try:
                await self._hand_over(staged, files, mapped, inlined)
                break
            except BusyError:
                # Streams wait for room in the spool.
                if not inlined:
                    raise
                inlined = {}
                files, _ = await self._stream(staged, mapped, inlined)
            except InvalidRequestError as error:
                # A restarted sidecar may lack files that it had taken before, and knows no leases.
                # What it does hold isn't sent twice.
                if mapped:
                    staged.arena.streaming_reason = f"it was mapped, but {error}"
                    self._resolver.show(transport=transport(staged))
                mapped, inlined = {}, {}
                files, lacked = await self._stream(staged, mapped, inlined)
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
        self, staged: Staged, mapped: Mapping[str, SpoolMapping], inlined: Mapping[str, bytes]
    ) -> tuple[list[records_pb2.DataFile], int]:
        """Streams all other files; returns all, and how many bytes of these the sidecar didn't hold."""
        plan = self._plan
        streams = Streams(plan, self._options, self._resolver, staged.arena.streaming_reason)
        others = [file for file in staged.files if file.name not in {*mapped, *inlined}]
        crcs = await streams.send(others)
        crcs |= {name: crc32c.crc32c(data) for name, data in inlined.items()}
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
        inlined: Mapping[str, bytes],
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
            inlined=[
                sidecar_pb2.InlinedFile(name=prefix + name, data=data)
                for name, data in inlined.items()
            ],
            stalled_s=self._times.stalled_s,
            metrics=self._options.metrics,
        )
        before, tries = self.is_handed_over, 0

        def begin_try() -> None:
            nonlocal tries
            tries += 1

        # Both stay after an error: a try that failed or timed out may have arrived, or may arrive later.
        self.is_handed_over = True
        self.gave_files = self.gave_files or bool(mapped)
        left_s = self._options.deadline.remaining()
        try:
            await plan.sidecar.hand_over(request, left_s, begin_try)
        except BusyError:
            # Refused: only another try could arrive later.
            self.is_handed_over = before or tries > 1
            raise
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


def _inlined(staged: Staged, mapped: Mapping[str, SpoolMapping]) -> dict[str, bytes]:
    """By name, the files that travel with the hand-over: objects and extra files beside mapped ones, if small."""
    others = [file for file in staged.files if file.name not in mapped]
    if not mapped or sum(file.size for file in others) > limits.MAX_INLINED_BYTES:
        return {}
    return {file.name: ctypes.string_at(file.address, file.size) for file in others}


def _seal(mapped: Mapping[str, SpoolMapping]) -> None:
    for mapping in mapped.values():
        mapping.seal()


class Streams:
    """One try of a save to send its files that aren't mapped; their records have checksums once the sidecar holds them.

    Args:
        plan: of the save.
        options: of the save.
        resolver: shows how much the sidecar holds, and waits for room in its spool.
        reason: why the files aren't mapped, human-readable.
    """

    def __init__(self, plan: PlanInUse, options: Options, resolver: Resolver, reason: str) -> None:
        self._plan = plan
        self._options = options
        self._resolver = resolver
        self._reason = reason
        self._held: dict[str, int] = {}
        """Bytes of each file that the sidecar holds."""
        self._no_room: dict[str, BusyError] = {}
        """The files that wait for room in the spool."""
        self._last_progress = time.monotonic()
        self.lacked = 0
        """Bytes that the sidecar didn't hold before."""

    async def send(self, files: Sequence[StagedFile]) -> dict[str, int]:
        """Sends them; returns their crc32c by name.

        Raises:
            SaveSkippedError, caused by a BusyError: the spool is full, and ``on_busy`` is ``"skip"``.
            BusyError: it is full, with ``"raise"`` or until the deadline.
            PannierError: what :meth:`SidecarClient.send` raises.
        """
        crcs = await side_by_side(map(self._send_file, files))
        return dict(zip((file.name for file in files), crcs, strict=True))

    async def _send_file(self, file: StagedFile) -> int:
        deadline, plan = self._options.deadline, self._plan
        accepted: Callable[[int], None] = partial(engine().post, self._accepted, file)
        while True:
            try:
                return await plan.sidecar.send(
                    plan.context,
                    plan.attempt,
                    file,
                    reason=self._reason,
                    claim=plan.claim(),
                    timeout=deadline.remaining(),
                    progress=accepted,
                )
            except BusyError as error:
                if self._options.on_busy == "skip":
                    raise SaveSkippedError(str(error)) from error
                # Early enough for the other ranks to get this reason, not a passed deadline.
                is_late = deadline.remaining() <= 2 * timeouts.BUSY_AGAIN_S
                if self._options.on_busy == "raise" or is_late or self._is_stuck_at_exit(error):
                    self._has_room(file)
                    raise
                self._no_room[file.name] = error
                self._show_room()
                await asyncio.sleep(timeouts.BUSY_AGAIN_S)

    def _accepted(self, file: StagedFile, held: int) -> None:
        if file.name not in self._held:
            self.lacked += file.size - held
        self._held[file.name] = held
        self._last_progress = time.monotonic()
        self._has_room(file)
        self._resolver.show(bytes_ingested=sum(self._held.values()))

    def _has_room(self, file: StagedFile) -> None:
        if self._no_room.pop(file.name, None) is not None:
            self._show_room()

    def _show_room(self) -> None:
        error = next(iter(self._no_room.values()), None)
        self._resolver.wait_for("room", "" if error is None else f"room ({error})")

    def _is_stuck_at_exit(self, error: BusyError) -> bool:
        """Whether the ending interpreter has waited for this save too long without progress."""
        if not exit_hooks.is_ending():
            self._last_progress = time.monotonic()
        if time.monotonic() - self._last_progress < timeouts.EXIT_S:
            return False
        status = self._resolver.handle.status()
        _log.error(
            "save %s to %s is given up, because the process is ending: %s",
            *(status.id, status.checkpoint_id, error),
        )
        return True
