"""Sends this host's ingested ranks to the spool of the host that the coordinator names.

In: changes of saves, and the host. Out: replicas there, one stream at a time, those of the newest save first;
``replica_host`` and ``bytes_replicated`` of the ranks. Nothing here fails a save. Ranks of a save that has
ended are no longer sent; of a committed save, the rank that is being sent is finished unless another one
waits. On the event loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pannier.common import timeouts
from pannier.common.units import size_text
from pannier.sidecar.replicas.replica_stream import ReplicaStream, RestagedError, first_message
from pannier.sidecar.restore.peers import Peers
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import Phase, RankSave, Save
from pannier.storage.rate_limit import RateLimit
from pannier.v1 import restore_pb2, save_pb2
from pannier.wire.errors import BusyError, DeadlineError, PannierError, UnavailableError
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)


class ReplicaSender:
    """See the module.

    Args:
        host: the name of this host.
        bytes_per_s: most that is sent; half of it while uploads run.
    """

    def __init__(self, saves: SaveRegistry, peers: Peers, *, host: str, bytes_per_s: int) -> None:
        self._saves = saves
        self._peers = peers
        self._host = host
        self._limit = RateLimit(bytes_per_s)
        self._holder = restore_pb2.FetchHost()
        """Where replicas go; without a host: nowhere."""
        self._notified = False
        """The coordinator has named the holder, or reported that there is none."""
        self._waiting: dict[RankSave, None] = {}
        self._done: set[RankSave] = set()
        """Ranks of undecided saves that are no longer to be sent to the present holder."""
        self._current: tuple[RankSave, asyncio.Task[None]] | None = None
        self._refused = ""
        """Key of the save for which the holder had no room."""
        self._problem = ""
        """The problem with the holder that was logged last."""
        self._wake = asyncio.Event()
        self.sent = 0
        """Bytes."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends as long as the context lasts."""
        task = asyncio.get_running_loop().create_task(self._keep_sending())
        try:
            yield
        finally:
            self._cancel_current()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._peers.close()

    def set_holder(self, holder: restore_pb2.FetchHost) -> None:
        """Where replicas go from now on; without a host: nowhere."""
        if holder == self._holder and self._notified:
            return
        self._notified = True
        if holder.host:
            _log.info(
                "replicas of this host's ranks go to %s at %s", holder.host, holder.peer_address
            )
        else:
            _log.warning(
                "replicas of this host's ranks go nowhere: no host of another failure domain is attached"
            )
        self._holder, self._problem, self._refused = holder, "", ""
        self._cancel_current()
        self._done.clear()
        self._waiting.clear()
        for save in self._saves.undecided():
            self._add(save)

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the registry."""
        if not urgent:
            return
        ranks = [rank] if rank is not None else list(save.ranks.values())
        if save.outcome is not None or (rank is not None and rank.phase is Phase.FAILED):
            self._forget(save, ranks)
        else:
            self._add(save)

    async def tick(self) -> None:
        """Closes connections that aren't used. Every second or so."""
        if self._current is not None:
            with suppress(PannierError):
                # Marks the channel as used as long as a replica is sent.
                self._peers.stub(self._holder)
        await self._peers.tick()

    def _add(self, save: Save) -> None:
        """Queues the save's ranks that are ingested and weren't sent."""
        if not self._holder.host:
            return
        for rank in save.ranks.values():
            # A save that torch plans ends with its trainers: no other host could finish it.
            ready = rank.phase in (Phase.INGESTED, Phase.DURABLE) and bool(rank.plan.id)
            known = rank in self._waiting or rank in self._done or self._is_current(rank)
            if ready and rank.receipt is not None and not (known or rank.replica):
                self._waiting[rank] = None
                self._wake.set()
                if self._current is not None and self._current[0].save.outcome is not None:
                    self._cancel_current()

    def _forget(self, save: Save, ranks: list[RankSave]) -> None:
        outcome = save.outcome
        committed = outcome is not None and outcome.state == save_pb2.SAVE_STATE_COMMITTED
        for rank in ranks:
            self._waiting.pop(rank, None)
            self._done.discard(rank)
        if any(map(self._is_current, ranks)) and (self._waiting or not committed):
            self._cancel_current()

    def _is_current(self, rank: RankSave) -> bool:
        return self._current is not None and self._current[0] is rank

    def _cancel_current(self) -> None:
        if self._current is not None:
            self._current[1].cancel()

    async def _keep_sending(self) -> None:
        while True:
            if not self._waiting or not self._holder.host:
                self._wake.clear()
                await self._wake.wait()
                continue
            # The newest save, and of that the rank that came first.
            rank = max(self._waiting, key=lambda each: each.save.start)
            del self._waiting[rank]
            holder = self._holder
            task = asyncio.get_running_loop().create_task(self._send(rank, holder))
            self._current = rank, task
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self._current = None
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("%s: its replica", rank.label, exc_info=error)
            if rank.save.outcome is not None:
                continue
            if holder is self._holder and not task.cancelled():
                self._done.add(rank)
            elif rank.phase is not Phase.FAILED:
                self._add(rank.save)

    async def _send(self, rank: RankSave, holder: restore_pb2.FetchHost) -> None:
        """Sends one rank; returns when the holder has it, or when it isn't to be sent any more."""
        if rank.save.key == self._refused:
            return
        pause_s = timeouts.REPLICA_AGAIN_S
        while True:
            try:
                await self._try(rank, holder)
                return
            except BusyError as error:
                if holder is self._holder:
                    self._refused = rank.save.key
                problem = f"{holder.host} has no room: {error}"
                self._log(rank, f"save {rank.save.key} has no replicas: {problem}", problem)
                return
            except RestagedError as error:
                _log.info("%s has no replica: %s", rank.label, error, extra=rank.log_fields)
                return
            except (UnavailableError, DeadlineError) as error:
                self._log(rank, f"{rank.label}: its replica is sent again: {error}", str(error))
                if rank.save.outcome is not None:
                    return
            except PannierError as error:
                self._log(
                    rank, f"{rank.label} has no replica on {holder.host}: {error}", str(error)
                )
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, timeouts.REPLICA_LONGEST_AGAIN_S)

    async def _try(self, rank: RankSave, holder: restore_pb2.FetchHost) -> None:
        receipt = rank.receipt
        assert receipt is not None
        began = time.monotonic()
        deadline = rank.deadlines.save
        left_s = max(0.001, deadline - began) if deadline else 0.0
        stream = ReplicaStream(
            rank,
            first_message(rank, receipt, left_s, self._host, WIRE_VERSION),
            peer=f"sidecar of {holder.host} at {holder.peer_address}",
            take=self._take,
            progress=lambda count: self._saves.record_replicated(rank, holder.host, count),
        )
        await stream.run(self._peers.stub(holder))
        self._problem = ""
        _log.info(
            "%s has a replica on %s: %s, in %.1f s",
            *(rank.label, holder.host, size_text(stream.sent), time.monotonic() - began),
            extra=rank.log_fields,
        )

    async def _take(self, count: int) -> None:
        uploading = any(rank.phase is Phase.INGESTED for rank in self._saves.pending())
        await self._limit.take(count, 0.5 if uploading else 1.0)
        self.sent += count

    def _log(self, rank: RankSave, message: str, problem: str) -> None:
        """Logs a problem with the holder, unless it was the last one logged."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s", message, extra=rank.log_fields)
