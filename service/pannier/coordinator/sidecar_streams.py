"""The streams of attached sidecars: reports about their ranks in, status of saves out.

A sidecar gets the status of the saves whose ranks it has reported: at once when the state or the
failures change, else once a second. The same goes for saves that it watches for its clients, except that
an unknown one is resumed from storage only if a client has handed its rank over. For any other unknown
save nothing is sent: its client still reports it itself, and an unknown save has not necessarily ended. A
sidecar that has replicas of other hosts' ranks gets the status of their saves, too; a save is resumed if the
sidecar has all files of one of its ranks. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

from pannier.common import observer_clock, timeouts
from pannier.common.wait_text import aged
from pannier.coordinator.liveness import SidecarPeers, apply_trainer_reports
from pannier.coordinator.replica_holders import ReplicaHolders, Sent
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.admission import admit, check_destination
from pannier.coordinator.saves.participants import CachedPlanClaim, RankState, SidecarPeer
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import DisagreementError
from pannier.coordinator.saves.states import State
from pannier.coordinator.stores import Stores
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.daemon.rank_phase import has_reached
from pannier.v1 import coordinator_pb2, save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import (
    ConfigurationError,
    InvalidRequestError,
    OverloadedError,
    SaveAbortedError,
    UnavailableError,
    check_wire_version,
)

_log = logging.getLogger(__name__)

_STREAMS: Final = 128
"""With more sidecars, each gets the status less often, so that a long save costs no more per second."""
_RENDERED_KEPT: Final = 64
_COPIES_KEPT: Final = 64
"""Local copies recorded of one sidecar, which keeps the newest of each group of ranks."""
_REPLICAS_KEPT: Final = 4096
"""Ranks of other hosts that one sidecar has."""

Requests = AsyncIterator[coordinator_pb2.AttachRequest]
Summary = tuple[object, ...]
"""The parts of a status that are sent at once when they change; () before the first status."""


class _Stream:
    """One sidecar's stream."""

    def __init__(self, peer: SidecarPeer) -> None:
        self.peer = peer
        self.last_sent: dict[str, Summary] = {}
        """By key of a save."""
        self.sent_at: dict[str, float] = {}
        """When its status was last sent, on the monotonic clock."""
        self.pending: dict[str, Save] = {}
        """Saves whose status is to be sent, by key."""
        self.replicas_sent = Sent()
        self.changed = asyncio.Event()

    def add(self, save: Save) -> None:
        """Has the save's status sent."""
        self.pending[save.key] = save
        self.changed.set()


class SidecarStreams:
    """All attached sidecars."""

    def __init__(self, registry: Registry, stores: Stores, loads: LoadRegistry) -> None:
        self._loads = loads
        self._registry = registry
        self._stores = stores
        self._peers = SidecarPeers(registry)
        self.replica_holders = ReplicaHolders(registry, self._peers.attached)
        self._streams: set[_Stream] = set()
        self._summaries: dict[str, Summary] = {}
        """By key of a save: the last one that was passed on to all streams."""
        self._rendered: dict[str, tuple[float, Summary, bytes]] = {}
        self.trainer_seen: float | None = None
        """When a sidecar last reported a connected trainer, on the observer's clock; None: never."""
        registry.listen(self._on_change)

    def attached(self) -> list[SidecarPeer]:
        """The sidecars that are attached now."""
        return self._peers.attached()

    async def serve(self, requests: Requests) -> AsyncIterator[bytes]:
        """Serialised responses of one stream, until the sidecar ends it.

        Raises VersionMismatchError, InvalidRequestError.
        """
        first = await anext(requests, None)
        if first is None:
            return
        check_version(first.wire_version, first.host)
        limits.check_host(first.host)
        limits.check_words(sidecar=first.sidecar, job=first.job)
        limits.check_host(first.replicas.failure_domain)
        stream = _Stream(self._peers.open_stream(first.host, first.sidecar, first.job))
        stream.peer.failure_domain = first.replicas.failure_domain
        self._streams.add(stream)
        _log.info("sidecar %s on %s is attached", first.sidecar[:8], first.host)
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read(stream, first, requests))
        reader.add_done_callback(lambda _: stream.changed.set())
        try:
            # The stream is open: the sidecar waits for this.
            yield b""
            while not reader.done():
                response = self._take_pending(stream)
                if response is not None:
                    yield response
                timer = loop.call_later(timeouts.STATUS_REFRESH_S, stream.changed.set)
                try:
                    await stream.changed.wait()
                finally:
                    timer.cancel()
                stream.changed.clear()
                self._add_due(stream)
            reader.result()
        finally:
            self._streams.discard(stream)
            self._peers.close_stream(stream.peer)
            reader.cancel()
            _log.info("sidecar %s on %s is no longer attached", first.sidecar[:8], first.host)

    # Reports.

    async def _read(
        self, stream: _Stream, first: coordinator_pb2.AttachRequest, requests: Requests
    ) -> None:
        self._apply_request(stream, first)
        async for request in requests:
            self._apply_request(stream, request)

    def _apply_request(self, stream: _Stream, request: coordinator_pb2.AttachRequest) -> None:
        peer = stream.peer
        trainer = any(not trainer.death for trainer in request.trainers)
        peer.note_message(trainer=trainer)
        if trainer:
            self.trainer_seen = peer.trainer_seen
        saves = {}
        for report in request.reports:
            save = self._enter(
                stream,
                report.context,
                # While draining, a save that a rank would begin by a cached-plan claim is refused.
                known=not report.HasField("claim"),
                failing=report.HasField("failure"),
            )
            if save is None:
                continue
            try:
                self._apply_report(save, peer, report)
            except SaveAbortedError as error:
                fields = {**save.log_fields, "rank": report.context.rank}
                _log.warning("host %s: %s", peer.host, error, extra=fields)
            except (InvalidRequestError, ConfigurationError) as error:
                _log.error("a report of host %s is not valid: %s", peer.host, error)
                continue
            saves[save.key] = save
        for each in request.watched:
            known = self._registry.find(each.context.save) is not None
            save = self._enter(stream, each.context) if known or each.handed_over else None
            if save is None:
                continue
            save.deadlines.report(each.context.rank, 0, _checked(each.save_timeout_s))
            if each.handed_over:
                save.resume()
                self._peers.check_handed_over(save, each.context.rank)
            saves[save.key] = save
        apply_trainer_reports(self._registry, peer, request.trainers)
        self._apply_loads(peer, request)
        if request.HasField("copies"):
            # It comes with all trainers.
            peer.waits = [
                (each.job, aged(each.waiting, limits.age(each.seconds_since_seen)))
                for each in request.trainers
                if each.HasField("waiting")
            ]
            del request.copies.copies[_COPIES_KEPT:]
            self._apply_replicas(stream, request.copies.replicas[:_REPLICAS_KEPT])
            del request.copies.replicas[:]
            peer.copies.CopyFrom(request.copies)
        for save in saves.values():
            save.progress()
            last, summary = stream.last_sent[save.key], _summary(save)
            if not last and _is_new(save):
                # The sidecar knows all that the summary has; the missing ranks follow in a second.
                stream.last_sent[save.key], stream.sent_at[save.key] = summary, time.monotonic()
            elif last != summary:
                stream.add(save)

    def _apply_loads(self, peer: SidecarPeer, request: coordinator_pb2.AttachRequest) -> None:
        for report in request.loads:
            try:
                self._loads.apply(report)
            except (InvalidRequestError, OverloadedError) as error:
                _log.error("a report of a load on host %s is not valid: %s", peer.host, error)

    def _apply_replicas(
        self, stream: _Stream, replicas: Iterable[coordinator_pb2.HeldReplica]
    ) -> None:
        """Records the ranks of other hosts of which the sidecar has all files now."""
        held, peer = set(), stream.peer
        for each in replicas if peer.failure_domain else ():
            context = each.context
            save = self._registry.find(context.save)
            if save is None and each.complete and context.ranks:
                # Perhaps no other sidecar is left that could report it.
                save = self._enter(stream, context)
            if save is None or context.rank not in save.ranks:
                continue
            if stream.last_sent.setdefault(save.key, ()) != _summary(save):
                stream.add(save)
            if each.complete and not (save.ended or save.failing):
                if not save.ranks[context.rank].has_live_sidecar:
                    # The save was planned: no rank is sent to another host before that.
                    save.resume()
                if save.attempt is not None and save.attempt.name == each.attempt:
                    held.add((save.key, context.rank))
                    save.note_replica(context.rank, peer, context.host, held=True)
        for key, rank in peer.replicas - held:
            save = self._registry.find_key(key)
            if save is not None and not save.ended:
                save.note_replica(rank, peer, "", held=False)
        peer.replicas = held

    def _enter(
        self,
        stream: _Stream,
        context: sidecar_pb2.SaveContext,
        *,
        known: bool = True,
        failing: bool = False,
    ) -> Save | None:
        """The save, whose status the sidecar gets from now on; None when the rank can't join it."""
        host = stream.peer.host
        try:
            save = self._registry.enter(context, known=known, failing=failing, brief=True)
        except DisagreementError as error:
            _log.warning("host %s: %s", host, error)
            failed = self._registry.find(context.save)
            if failed is not None:
                stream.add(failed)
        except (InvalidRequestError, OverloadedError, UnavailableError) as error:
            _log.error("a report of host %s is not valid: %s", host, error)
        else:
            stream.last_sent.setdefault(save.key, ())
            return save
        return None

    def _apply_report(
        self, save: Save, peer: SidecarPeer, report: coordinator_pb2.RankReport
    ) -> None:
        rank, host = report.context.rank, report.context.host
        state = save.ranks[rank]
        if save.ended:
            return
        if self.replica_holders.is_taken_over(save, rank) and _owner_elsewhere(state, peer):
            # The rank's host came back, and both hosts upload it: only the current owner's reports count.
            return
        check_owner(save, rank, peer)
        if report.HasField("receipt") and report.receipt.rank != rank:
            raise InvalidRequestError(
                f"{save.label}: a receipt of rank {report.receipt.rank} for rank {rank}"
            )
        status = report.status
        save.apply_report(
            rank, peer, status if limits.is_short(status) else limits.shortened_status(status)
        )
        save.deadlines.report(rank, *_deadlines(report))
        peer.replica_host = status.replica_host or peer.replica_host
        if report.HasField("claim"):
            # The claim is repeated until it is confirmed, also while the save is being aborted.
            if not (report.HasField("failure") or save.failing):
                self._admit_claim(save, report)
        elif report.attempt:
            self._check_attempt(save, report)
        if report.HasField("receipt") and state.receipt is None:
            limits.check_metrics(report.receipt.metrics)
            save.add_receipt(report.receipt)
        # Only a receipt makes a rank durable, not the reported phase.
        if state.receipt is not None:
            state.advance(save_pb2.RANK_PHASE_DURABLE)
        elif not has_reached(status.phase, save_pb2.RANK_PHASE_DURABLE):
            state.advance(status.phase)
        if report.HasField("failure"):
            failure = limits.shortened(report.failure)
            failure.rank, failure.host = rank, failure.host or host
            late = failure.kind == save_pb2.FAILURE_KIND_LOST and has_reached(
                state.phase, save_pb2.RANK_PHASE_INGESTED
            )
            if not late:
                save.fail_ranks([failure])

    def _admit_claim(self, save: Save, report: coordinator_pb2.RankReport) -> None:
        rank, host = report.context.rank, report.context.host
        check_destination(save, self._stores, rank)
        given = report.claim
        claim = CachedPlanClaim(
            *(rank, host, given.digest, given.part, report.attempt),
            *(given.checkpoint_id, given.attempt),
        )
        try:
            limits.check_claim(given)
            if save.attempt is None or save.attempt.name != report.attempt:
                object_names.Attempt.parse(report.attempt)
            admit(save, claim)
        except InvalidRequestError as error:
            # The rank makes no call that could raise this: it waits for the end of the save.
            save.fail(save_pb2.FAILURE_KIND_DISAGREEMENT, str(error), rank)
            raise

    def _check_attempt(self, save: Save, report: coordinator_pb2.RankReport) -> None:
        if save.attempt is not None and save.attempt.name == report.attempt:
            save.resume()
            return
        object_names.Attempt.parse(report.attempt)
        if save.attempt is not None:
            save.fail(
                save_pb2.FAILURE_KIND_DISAGREEMENT,
                f"takes part in attempt {report.attempt}, the save is {save.attempt.name}",
                report.context.rank,
            )
        else:
            save.resume()

    # Status, for operators.

    def waits(self, job: str = "") -> list[save_pb2.TrainingWait]:
        """The calls in which trainers (of one job) wait, as the attached sidecars have reported them."""
        return [wait for peer in self.attached() for of, wait in peer.waits if job in ("", of)]

    def _on_change(self, save: Save) -> None:
        summary = _summary(save)
        if self._summaries.get(save.key) == summary:
            # A stream that entered the save since then gets the status as it enters.
            return
        self._summaries[save.key] = summary
        while len(self._summaries) > _RENDERED_KEPT:
            del self._summaries[next(iter(self._summaries))]
        for stream in self._streams:
            last = stream.last_sent.get(save.key)
            if last is not None and last != summary:
                stream.add(save)

    def _add_due(self, stream: _Stream) -> None:
        now = time.monotonic()
        due_s = timeouts.STATUS_DUE_S * max(1.0, len(self._streams) / _STREAMS)
        for key, last in list(stream.last_sent.items()):
            if key in stream.pending or not last:
                continue
            save = self._registry.find_key(key)
            if save is None or save.ended:
                del stream.last_sent[key]
                stream.sent_at.pop(key, None)
            elif now - stream.sent_at.get(key, 0.0) >= due_s:
                stream.pending[key] = save

    def _take_pending(self, stream: _Stream) -> bytes | None:
        pending, stream.pending = list(stream.pending.values()), {}
        for save in pending:
            stream.last_sent[save.key] = _summary(save)
            stream.sent_at[save.key] = time.monotonic()
        # Concatenated serialised responses parse as one merged response.
        parts = [self._render(save) for save in pending]
        parts.append(self.replica_holders.response(stream.peer, stream.replicas_sent))
        return b"".join(parts) or None

    def _render(self, save: Save) -> bytes:
        """The status as part of a response, shared by all streams for a second."""
        summary, now = _summary(save), time.monotonic()
        known = self._rendered.get(save.key)
        if (
            known is not None
            and known[1] == summary
            and (now - known[0] < timeouts.STATUS_DUE_S or save.ended)
        ):
            return known[2]
        response = coordinator_pb2.AttachResponse(saves=[save_view.status(save, ranks=save.ended)])
        status = response.SerializeToString()
        self._rendered[save.key] = (now, summary, status)
        while len(self._rendered) > _RENDERED_KEPT:
            del self._rendered[next(iter(self._rendered))]
        return status


def _summary(save: Save) -> Summary:
    # UPLOADING is for status only: the sidecars know of it before the coordinator.
    state = State.INGESTED if save.state is State.UPLOADING else save.state
    return (
        *(state, len(save.outcome.failures), save.attempt is not None, bool(save.storage_wait)),
        *(save.note, save.records.plan_id, save.plans.full_requested),
    )


def _is_new(save: Save) -> bool:
    """Whether the save is being planned, and its status would show nothing else."""
    shown = save.storage_wait or save.note or save.records.plan_id or save.plans.full_requested
    return save.state is State.PLANNING and not save.outcome.failures and not shown


def _deadlines(report: coordinator_pb2.RankReport) -> tuple[float, float]:
    plan_s, save_s = report.timeout_s, report.save_timeout_s
    if plan_s or save_s:
        limits.check_seconds(timeout_s=plan_s, save_timeout_s=save_s)
    return plan_s, save_s


def _checked(seconds: float) -> float:
    """A remaining time; 0, not known, for a value out of range."""
    return seconds if 0 <= seconds <= limits.MAX_TIMEOUT_S else 0.0


def _owner_elsewhere(state: RankState, peer: SidecarPeer) -> bool:
    owner = state.sidecar
    return owner is not None and owner.host != peer.host and state.has_live_sidecar


def check_owner(save: Save, rank: int, peer: SidecarPeer) -> None:
    """Raises InvalidRequestError when the rank belongs to a live sidecar of another host.

    A rank runs on one host; the sidecar there may be another process after a restart.
    """
    owner = save.ranks[rank].sidecar
    if owner is None or owner.host == peer.host or not owner.streams:
        return
    if observer_clock.now() - owner.last_seen < timeouts.UNRESPONSIVE_S:
        raise InvalidRequestError(
            f"{save.label}: rank {rank} is on host {owner.host}, whose sidecar is attached and "
            f"reports it; host {peer.host} can't. Do two processes run as this rank?"
        )


def check_version(version: int, host: str) -> None:
    """Raises VersionMismatchError unless a host's sidecar has this wire version."""
    check_wire_version(f"the sidecar on {host}", version, "this coordinator")
