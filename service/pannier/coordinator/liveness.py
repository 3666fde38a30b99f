"""Which ranks and sidecars are alive: one module for all that the coordinator concludes about it.

In: streams of sidecars as they open and close, their reports about trainers, and saves as they
change. Out: failures of ranks that are certainly lost; possible losses, which fail a save unless the
rank's receipt is in storage or another host has its replica; log lines about ranks and sidecars that miss
heartbeats. Losing its sidecar doesn't make a rank a possible loss if it was not handed over: its client
streams everything again. Owns the :class:`SidecarPeer` objects. Event loop only; no I/O.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from pannier.common import observer_clock, timeouts
from pannier.common.wait_text import waiting_text
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.participants import RankState, SidecarPeer
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.states import State
from pannier.daemon.rank_phase import has_reached
from pannier.v1 import coordinator_pb2, save_pb2
from pannier.wire import limits, object_names
from pannier.wire.failures import ranks_text

_log = logging.getLogger(__name__)

_HANDED_OVER: Final = save_pb2.RANK_PHASE_HANDED_OVER
_ROOTS_KEPT: Final = 4096
"""Jobs and roots whose newest incarnation is remembered."""


class _DelayedCheck:
    """Calls ``check`` with the hosts that were added, some time later, in batches.

    Each check goes through all ranks, and the sidecars of a large job attach and detach together.
    """

    def __init__(self, delay_s: float, check: Callable[[Collection[str]], None]) -> None:
        self._delay_s = delay_s
        self._check = check
        self._hosts: set[str] = set()
        self._open_until = 0.0

    def add(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._open_until:
            self._hosts = set()
            self._open_until = loop.time() + timeouts.STREAMS_BATCH_S
            observer_clock.call_later(
                timeouts.STREAMS_BATCH_S + self._delay_s, self._check, self._hosts
            )
        self._hosts.add(host)


class SidecarPeers:
    """All sidecars, by host and process id; finds ranks that lost theirs."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._peers: dict[tuple[str, str], SidecarPeer] = {}
        self._return = _DelayedCheck(timeouts.SIDECAR_RETURN_S, self._check_hosts)

    def open_stream(self, host: str, sidecar: str, job: str = "") -> SidecarPeer:
        """Registers a stream; its first request reports all that the sidecar holds."""
        now = observer_clock.now()
        self._peers = {
            name: peer
            for name, peer in self._peers.items()
            if peer.streams or now - peer.last_seen < timeouts.SIDECAR_KEPT_S
        }
        # The key includes the host: no host may claim another's sidecar by sending its id.
        peer = self._peers.setdefault((host, sidecar), SidecarPeer(host, job))
        peer.streams += 1
        peer.attached_at = now
        self._return.add(host)
        return peer

    def close_stream(self, peer: SidecarPeer) -> None:
        """Registers the end of a stream."""
        peer.streams -= 1
        self._return.add(peer.host)

    def attached(self) -> list[SidecarPeer]:
        """Sidecars with an open stream."""
        return [peer for peer in self._peers.values() if peer.streams]

    def check_handed_over(self, save: Save, rank: int) -> None:
        """Checks later whether a handed-over rank that its client's sidecar doesn't hold is lost."""
        observer_clock.call_later(
            timeouts.SIDECAR_RETURN_S, self._report_restart, save, save.ranks[rank]
        )

    def _check_hosts(self, hosts: Collection[str]) -> None:
        """Finds ranks whose sidecar is disconnected, and those whose sidecar was replaced.

        What a disconnected sidecar had finished is known only from the receipts in storage.
        """
        newest: dict[tuple[str, str], float] = {}
        for peer in self.attached():
            # A sidecar of another job on the same host replaces none of this job.
            place = (peer.host, peer.job)
            newest[place] = max(peer.since, newest.get(place, 0.0))
        for save in self._registry.undecided():
            if any(state.host in hosts and state.lost_sidecar for state in save.ranks.values()):
                save.request_storage_check()
            for state in save.ranks.values():
                old = state.sidecar
                if (
                    old is not None
                    and old.host in hosts
                    and old.since < newest.get((old.host, old.job), 0.0)
                    and state.phase in (_HANDED_OVER, save_pb2.RANK_PHASE_INGESTED)
                ):
                    self._report_restart(save, state)

    def _report_restart(self, save: Save, state: RankState) -> None:
        if save.ended or state.receipt is not None or state.has_live_sidecar:
            return
        if state.replica_holder is not None:
            # The replica's holder uploads the rank's data, unless that host is lost, too.
            self.check_handed_over(save, state.rank)
            return
        save.report_possible_loss(
            save_pb2.Failure(
                rank=state.rank,
                host=state.host,
                kind=save_pb2.FAILURE_KIND_LOST,
                message=f"the sidecar on host {state.host} was restarted and no longer holds this "
                "rank's data",
            )
        )


def apply_trainer_reports(
    registry: Registry, sidecar: SidecarPeer, trainers: Iterable[coordinator_pb2.TrainerStatus]
) -> None:
    """Applies what a sidecar reports about the trainers on its host to all undecided saves.

    Trainers count for the saves of their incarnation, whether they have joined these or not. Call
    this after the same message's reports about ranks were applied.
    """
    reported = list(trainers)
    registry.note_trainers(sidecar, (each for each in reported if not each.death))
    for save in registry.undecided() if reported else ():
        expected = save.context.save
        for trainer in reported:
            if (trainer.job, trainer.incarnation) == (expected.job, expected.incarnation) and (
                trainer.rank in save.ranks
            ):
                _apply_trainer_report(save, save.ranks[trainer.rank], sidecar, trainer)


def _apply_trainer_report(
    save: Save, state: RankState, sidecar: SidecarPeer, trainer: coordinator_pb2.TrainerStatus
) -> None:
    if state.has_live_sidecar and state.sidecar is not None and state.sidecar.host != sidecar.host:
        return  # the rank runs on another host
    if trainer.death:
        # If the rank has sent a plan or data, its sidecar reports the outcome.
        took_part = has_reached(state.phase, save_pb2.RANK_PHASE_PLANNED)
        missing = not took_part and state.receipt is None
        if missing and not save.resumed and save.state in (State.PLANNING, State.STAGING):
            save.fail(
                save_pb2.FAILURE_KIND_LOST,
                f"{trainer.death[: limits.MAX_NAME]} is gone: it ended before it took part in this save",
                state.rank,
            )
        return
    state.note_trainer(sidecar, limits.age(trainer.seconds_since_seen))


class IncarnationWatch:
    """Reports possible losses in saves of incarnations that were superseded by a newer one.

    Ranks that were handed over continue. Any other rank without a live sidecar may be lost; an attached
    sidecar itself reports whether the rank's trainer is alive.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._newest: dict[tuple[str, str], int] = {}
        """Highest incarnation number by job and root, of the last ones."""
        self._checked: set[str] = set()
        """Undecided saves whose incarnation number was compared."""
        registry.listen(self._on_change)

    def _on_change(self, save: Save) -> None:
        if save.ended:
            self._checked.discard(save.key)
        elif save.attempt is not None and save.key not in self._checked:
            self._checked.add(save.key)
            self._compare(save, save.attempt.incarnation_number)

    def _compare(self, save: Save, number: int) -> None:
        if save.context.apart:
            return
        line = _job_and_root(save)
        newest = self._newest.get(line, 0)
        if number > newest:
            self._newest[line] = number
            if len(self._newest) > _ROOTS_KEPT:
                del self._newest[next(iter(self._newest))]
            for other in self._registry.undecided():
                older = other.attempt is not None and other.attempt.incarnation_number < number
                if older and not other.context.apart and _job_and_root(other) == line:
                    self._check_later(other, number)
        elif number < newest:
            self._check_later(save, newest)

    def _check_later(self, save: Save, newer: int) -> None:
        observer_clock.call_later(timeouts.SUPERSEDED_RETURN_S, self._check, save, newer)

    def _check(self, save: Save, newer: int) -> None:
        # While a save is being planned, its ranks are reported, or wait in Plan calls, which end with
        # their trainers.
        if save.state is State.PLANNING:
            return
        for state in save.ranks.values():
            if not (has_reached(state.phase, _HANDED_OVER) or state.has_live_sidecar):
                save.report_possible_loss(
                    save_pb2.Failure(
                        rank=state.rank,
                        host=state.host,
                        kind=save_pb2.FAILURE_KIND_LOST,
                        message=f"the job was restarted (incarnation number {newer}) before this "
                        "rank was ingested, and the rank has no live sidecar",
                    )
                )


def _job_and_root(save: Save) -> tuple[str, str]:
    root, _ = object_names.split_checkpoint_id(save.context.checkpoint_id)
    return save.context.save.job, root


class HeartbeatMonitor:
    """Logs ranks and sidecars that miss heartbeats, and when they respond again. Fails no save.

    Args:
        attached: sidecars with an open stream.
        suspect_after_s: seconds without a heartbeat after which a rank or sidecar is logged.
    """

    def __init__(
        self,
        registry: Registry,
        attached: Callable[[], Iterable[SidecarPeer]],
        *,
        suspect_after_s: float,
    ) -> None:
        self._registry = registry
        self._attached = attached
        self._after_s = suspect_after_s
        self._ranks: dict[str, set[int]] = {}
        """Unresponsive ranks by key of their save."""
        self._sidecars: set[SidecarPeer] = set()
        """Unresponsive sidecars."""

    async def run(self) -> None:
        """Checks until it is cancelled."""
        with observer_clock.clock.watched():
            while True:
                observer_clock.clock.tick(timeouts.CHECK_S)
                await asyncio.sleep(timeouts.CHECK_S)
                self.check()

    def check(self) -> None:
        """Logs what has changed since the last check."""
        self._check_sidecars()
        known, self._ranks = self._ranks, {}
        for save in self._registry.undecided():
            before = known.get(save.key, set())
            if ranks := self._check_ranks(save, before):
                self._ranks[save.key] = ranks

    def _check_ranks(self, save: Save, before: set[int]) -> set[int]:
        age = observer_clock.now() - save.deadlines.first_seen
        awaited = save_view.awaited(save)
        late = [
            each
            for each in awaited
            if (age if each.last_seen_s is None else each.last_seen_s) > self._after_s
        ]
        ranks = {each.rank for each in late}
        if new := [each for each in late if each.rank not in before]:
            left = max(0.0, save.next_deadline - time.monotonic())
            _log.warning(
                "%s (%s) waits for %s: no heartbeat for more than %.0f s; it fails in %.0f s",
                *(save.label, save.state.name, waiting_text(new), self._after_s, left),
                extra=save.log_fields,
            )
        if back := sorted(before & {each.rank for each in awaited} - ranks):
            _log.info(
                "%s: heartbeats of %s have resumed",
                save.label,
                ranks_text(back),
                extra=save.log_fields,
            )
        return ranks

    def _check_sidecars(self) -> None:
        now = observer_clock.now()
        late = {peer for peer in self._attached() if now - peer.last_seen > self._after_s}
        for peer in late - self._sidecars:
            _log.warning(
                "the sidecar on host %s is attached but unresponsive: last heartbeat %.0f s ago",
                *(peer.host, now - peer.last_seen),
            )
        for peer in self._sidecars - late:
            if peer.streams:
                _log.info("the sidecar on host %s responds again", peer.host)
        self._sidecars = late
