"""The streams of attached sidecars: reports of their ranks in, news of saves out.

A sidecar hears of the saves it has reported ranks of: at once when the state or the
failures change, else once a second. The same goes for the saves that it watches for its
clients, with this difference: one that the coordinator doesn't know is taken up from storage
only if a client has handed its rank over. Of any other nothing is said: its client still
speaks of it by itself, and that it ended is never concluded from not knowing it.
Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Final

from pannier.common import observer_clock
from pannier.coordinator.liveness import SidecarPeers, apply_trainer_reports
from pannier.coordinator.planning import varints
from pannier.coordinator.saves.admission import check_place, join
from pannier.coordinator.saves.participants import DisagreementError, Proposal
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Presence, Save, State
from pannier.coordinator.stores import Places
from pannier.v1 import coordinator_pb2, save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import (
    ConfigurationError,
    InvalidRequestError,
    OverloadedError,
    SaveAbortedError,
    UnavailableError,
    VersionMismatchError,
)
from pannier.wire.version import WIRE_VERSION, package_version

_log = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""How often a sidecar hears of a save that only grows older."""
_STREAMS: Final = 128
"""Of more sidecars each hears of it more rarely: a save that lasts must not cost more by the second
the more there are."""

_DUE_S: Final = 0.9
"""After so long it is due: the timer that asks is no more exact than that."""
_WELL_S: Final = 5.0
"""A sidecar that was heard so lately still speaks for its ranks."""

Requests = AsyncIterator[coordinator_pb2.AttachRequest]


class _Stream:
    """One sidecar's stream."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.told: dict[str, tuple[object, ...]] = {}
        """By key of a save: what was last told of it; () for nothing yet."""
        self.told_at: dict[str, float] = {}
        """When that was, on the monotonic clock."""
        self.news: dict[str, Save] = {}
        self.bell = asyncio.Event()

    def add(self, save: Save) -> None:
        """There is something to tell of the save."""
        self.news[save.key] = save
        self.bell.set()


class Attachments:
    """All sidecars that are attached now."""

    def __init__(self, registry: Registry, places: Places) -> None:
        self._registry = registry
        self._places = places
        self._peers = SidecarPeers(registry)
        self._streams: set[_Stream] = set()
        self._essences: dict[str, tuple[object, ...]] = {}
        """By key of a save: of what all streams were told last."""
        self._rendered: dict[str, tuple[float, tuple[object, ...], bytes]] = {}
        self.attended: float | None = None
        """When a sidecar last reported a connected trainer, on the monotonic clock; None: never."""
        registry.listen(self._changed)

    def present(self) -> list[Presence]:
        """The sidecars that are attached now."""
        return self._peers.attached()

    async def serve(self, requests: Requests) -> AsyncIterator[bytes]:
        """Answers of one stream, serialised, until the sidecar ends it.

        Raises VersionMismatchError, InvalidRequestError.
        """
        first = await anext(requests, None)
        if first is None:
            return
        check_version(first.wire_version, first.host)
        limits.check_host(first.host)
        limits.check_words(sidecar=first.sidecar)
        stream = _Stream(self._peers.open_stream(first.host, first.sidecar))
        self._streams.add(stream)
        _log.info("sidecar %s on %s is attached", first.sidecar[:8], first.host)
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(stream, first, requests))
        reading.add_done_callback(lambda _: stream.bell.set())
        try:
            # Says that the stream stands.
            yield b""
            while not reading.done():
                response = self._take_news(stream)
                if response is not None:
                    yield response
                timer = loop.call_later(REFRESH_S, stream.bell.set)
                try:
                    await stream.bell.wait()
                finally:
                    timer.cancel()
                stream.bell.clear()
                self._refresh(stream)
            reading.result()
        finally:
            self._streams.discard(stream)
            self._peers.close_stream(stream.presence)
            reading.cancel()
            _log.info("sidecar %s on %s is no longer attached", first.sidecar[:8], first.host)

    # Reports.

    async def _read(
        self, stream: _Stream, first: coordinator_pb2.AttachRequest, requests: Requests
    ) -> None:
        self._take(stream, first)
        async for request in requests:
            self._take(stream, request)

    def _take(self, stream: _Stream, request: coordinator_pb2.AttachRequest) -> None:
        stream.presence.heard = observer_clock.now()
        saves = {}
        for report in request.reports:
            save = self._enter(
                stream,
                report.context,
                # One that a rank would begin with a plan of its own is refused while draining.
                known=not (report.plan_id and _proposes(report)),
                failing=report.HasField("failure"),
            )
            if save is None:
                continue
            try:
                self._report(save, stream.presence, report)
            except SaveAbortedError as error:
                about = {**save.about, "rank": report.context.rank}
                _log.warning("host %s: %s", stream.presence.host, error, extra=about)
            except (InvalidRequestError, ConfigurationError) as error:
                _log.error("a report of host %s is not valid: %s", stream.presence.host, error)
                continue
            saves[save.key] = save
        for each in request.watched:
            known = self._registry.find(each.context.save) is not None
            save = self._enter(stream, each.context) if known or each.handed_over else None
            if save is None:
                continue
            save.set_deadlines(each.context.rank, 0, _checked(each.save_timeout_s))
            if each.handed_over:
                save.resume()
                self._peers.check_handed_over(save, each.context.rank)
            saves[save.key] = save
        apply_trainer_reports(self._registry, stream.presence, request.trainers)
        if any(not trainer.gone for trainer in request.trainers):
            stream.presence.attended = self.attended = stream.presence.heard
        for save in saves.values():
            save.progress()
            told, essence = stream.told[save.key], _essence(save)
            if not told and _is_young(save):
                # Nothing that the sidecar doesn't know: whom it waits for is told in a moment.
                stream.told[save.key], stream.told_at[save.key] = essence, time.monotonic()
            elif told != essence:
                stream.add(save)

    def _enter(
        self,
        stream: _Stream,
        context: sidecar_pb2.SaveContext,
        *,
        known: bool = True,
        failing: bool = False,
    ) -> Save | None:
        """The save, of which the sidecar hears from now on; None when this can't be part of it."""
        try:
            save = self._registry.enter(context, known=known, failing=failing, brief=True)
        except DisagreementError as error:
            _log.warning("host %s: %s", stream.presence.host, error)
            doomed = self._registry.find(context.save)
            if doomed is not None:
                stream.add(doomed)
        except (InvalidRequestError, OverloadedError, UnavailableError) as error:
            _log.error("a report of host %s is not valid: %s", stream.presence.host, error)
        else:
            stream.told.setdefault(save.key, ())
            return save
        return None

    def _report(self, save: Save, presence: Presence, report: coordinator_pb2.RankReport) -> None:
        rank, host = report.context.rank, report.context.host
        part = save.parts[rank]
        if save.ended:
            return
        check_speaker(save, rank, presence)
        if report.HasField("receipt") and report.receipt.rank != rank:
            raise InvalidRequestError(
                f"{save.label}: a receipt of rank {report.receipt.rank} for rank {rank}"
            )
        part.sidecar = presence
        save.suspects.pop(rank, None)
        status = report.status
        part.told = status if limits.is_short(status) else limits.shortened_status(status)
        save.uploading = save.uploading or status.bytes_uploaded > 0
        part.heard = observer_clock.now() - part.told.seconds_since_heard
        save.set_deadlines(rank, *_deadlines(report))
        if report.plan_id and _proposes(report):
            self._propose(save, report)
        elif report.attempt:
            self._check_attempt(save, report)
        if report.HasField("receipt") and part.receipt is None:
            limits.check_metrics(report.receipt.metrics)
            save.take_receipt(report.receipt)
        # DURABLE is what the receipt says, not the phase.
        phase = save_pb2.RANK_PHASE_DURABLE if part.receipt is not None else report.status.phase
        if phase < save_pb2.RANK_PHASE_DURABLE or part.receipt is not None:
            part.advance(phase)
        if report.HasField("failure"):
            failure = limits.shortened(report.failure)
            failure.rank, failure.host = rank, failure.host or host
            late = failure.kind == save_pb2.FAILURE_KIND_LOST and (
                part.phase >= save_pb2.RANK_PHASE_INGESTED
            )
            if not late:
                save.doom([failure])

    def _propose(self, save: Save, report: coordinator_pb2.RankReport) -> None:
        """The rank goes by a plan that it was given for an earlier save."""
        rank, host = report.context.rank, report.context.host
        limits.check_words(plan_id=report.plan_id, digest=report.digest)
        check_place(save, self._places, rank)
        proposal = Proposal(rank, host, report.digest, report.plan_id, report.attempt)
        try:
            if save.attempt is None or save.attempt.name != report.attempt:
                object_names.Attempt.parse(report.attempt)
            join(save, proposal)
        except InvalidRequestError as error:
            # It waits for an answer, which is the save's end.
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

    # News.

    def _changed(self, save: Save) -> None:
        essence = _essence(save)
        if self._essences.get(save.key) == essence:
            # Whoever entered it since is told what it is then.
            return
        self._essences[save.key] = essence
        while len(self._essences) > _RENDERED_KEPT:
            del self._essences[next(iter(self._essences))]
        for stream in self._streams:
            told = stream.told.get(save.key)
            if told is not None and told != essence:
                stream.add(save)

    def _refresh(self, stream: _Stream) -> None:
        now = time.monotonic()
        due_s = _DUE_S * max(1.0, len(self._streams) / _STREAMS)
        for key, told in list(stream.told.items()):
            if key in stream.news or not told:
                continue
            save = self._registry.find_key(key)
            if save is None or save.ended:
                del stream.told[key]
                stream.told_at.pop(key, None)
            elif now - stream.told_at.get(key, 0.0) >= due_s:
                stream.news[key] = save

    def _take_news(self, stream: _Stream) -> bytes | None:
        if not stream.news:
            return None
        news, stream.news = list(stream.news.values()), {}
        for save in news:
            stream.told[save.key] = _essence(save)
            stream.told_at[save.key] = time.monotonic()
        return b"".join([self._render(save) for save in news])

    def _render(self, save: Save) -> bytes:
        """The status as part of an answer, shared by all streams for a moment."""
        essence, now = _essence(save), time.monotonic()
        known = self._rendered.get(save.key)
        if known is not None and known[1] == essence and (now - known[0] < _DUE_S or save.ended):
            return known[2]
        status = varints.field(_SAVES, save.status(ranks=save.ended).SerializeToString())
        self._rendered[save.key] = (now, essence, status)
        while len(self._rendered) > _RENDERED_KEPT:
            del self._rendered[next(iter(self._rendered))]
        return status


_RENDERED_KEPT: Final = 64
_SAVES: Final = coordinator_pb2.AttachResponse.DESCRIPTOR.fields_by_name["saves"].number


def _essence(save: Save) -> tuple[object, ...]:
    """What is told at once when it changes."""
    # That uploads have begun is for people to see; their sidecars know it before.
    state = State.INGESTED if save.state is State.UPLOADING else save.state
    return (
        *(state, len(save.failures), save.attempt is not None, bool(save.problem)),
        *(save.note, save.plan_id, save.plan_wanted),
    )


def _is_young(save: Save) -> bool:
    """Whether it is just being planned, and nothing is the matter."""
    return (
        save.state is State.PLANNING
        and not save.failures
        and not (save.problem or save.note or save.plan_id or save.plan_wanted)
    )


def _proposes(report: coordinator_pb2.RankReport) -> bool:
    """Whether it goes by a cached plan that wasn't agreed for this save yet."""
    early = report.status.phase < save_pb2.RANK_PHASE_PLANNED
    return bool(report.plan_id) and early and not report.HasField("failure")


def _deadlines(report: coordinator_pb2.RankReport) -> tuple[float, float]:
    plan_s, save_s = report.timeout_s, report.save_timeout_s
    if plan_s or save_s:
        limits.check_seconds(timeout_s=plan_s, save_timeout_s=save_s)
    return plan_s, save_s


def _checked(seconds: float) -> float:
    """A remaining time; what can't be one counts as not known."""
    return seconds if 0 <= seconds <= limits.MAX_TIMEOUT_S else 0.0


def check_speaker(save: Save, rank: int, presence: Presence) -> None:
    """Raises InvalidRequestError when a sidecar of another host speaks for the rank and is well.

    A rank lives on one host; its sidecar may be another one there, after a restart.
    """
    owner = save.parts[rank].sidecar
    if owner is None or owner.host == presence.host or not owner.streams:
        return
    if observer_clock.now() - owner.heard < _WELL_S:
        raise InvalidRequestError(
            f"{save.label}: rank {rank} is on host {owner.host}, whose sidecar is attached and "
            f"speaks for it; host {presence.host} can't. Do two processes run as this rank?"
        )


def check_version(version: int, host: str) -> None:
    """Raises VersionMismatchError unless a host's sidecar speaks this wire version."""
    if version != WIRE_VERSION:
        raise VersionMismatchError(
            f"the sidecar on {host} speaks wire version {version}, this coordinator (pannier "
            f"{package_version()}) version {WIRE_VERSION}: install the same version on both"
        )
