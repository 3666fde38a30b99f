"""The status of saves, as operators, clients and the coordinator see it.

In: saves, and whether the coordinator answers. Out: messages. On the event loop.
"""

import time
from collections.abc import Iterable
from typing import Final, Protocol

from pannier.common import observer_clock
from pannier.common.message_json import timestamp
from pannier.common.wait_text import Awaited, set_times, waiting_on
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import Backlog
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.save_state import FAILED, Phase, RankSave, Save
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.spool import Spool
from pannier.storage.rate_limit import RateLimit
from pannier.v1 import coordinator_pb2, save_pb2

_EXPIRED_S: Final = 0.001
"""Stands for a remaining time that is over; 0 would mean that it isn't known."""


class Coordinator(Protocol):
    """What is known of the coordinator."""

    @property
    def connected(self) -> bool:
        """Whether it is attached and responsive."""

    @property
    def description(self) -> str:
        """``coordinator at host:port (last seen 12 s ago)``."""


def rank_status(rank: RankSave) -> save_pb2.RankStatus:
    """How far one rank is."""
    files = rank.files.values()
    staged = dict(rank.plan.sizes or {})
    staged.update({file.name: file.size for file in files})
    transfer = rank.transfer
    status = save_pb2.RankStatus(
        rank=rank.rank,
        host=rank.host,
        phase=rank.phase.wire,
        bytes_staged=sum(staged.values()),
        bytes_ingested=sum(file.held for file in files),
        bytes_uploaded=sum(file.upload.uploaded for file in files),
        bytes_durable=sum(file.size for file in files if file.upload.durable),
        retries=transfer.retries,
        last_error=rank.failure.message if rank.failure else transfer.last_error,
        seconds_since_seen=observer_clock.now() - rank.last_seen,
        transport=transfer.transport,
        stalled_s=transfer.stalled_s,
        replica_host=transfer.replica_host,
        bytes_replicated=transfer.replicated,
    )
    set_times(status, rank.reached, rank.save.start)
    return status


def is_reportable(rank: RankSave) -> bool:
    """Whether the coordinator is to get reports of the rank.

    It knows a rank that plans by the rank's call, and a rejected one by its own response.
    """
    planning = rank.phase is Phase.PLANNING and rank.claim is None
    return not planning and rank.phase is not Phase.REJECTED


def rank_report(rank: RankSave) -> coordinator_pb2.RankReport:
    """The report of one rank to the coordinator."""
    report = coordinator_pb2.RankReport(
        context=rank.context, attempt=rank.attempt, status=rank_status(rank)
    )
    now = time.monotonic()
    if rank.unconfirmed is not None:
        report.claim.CopyFrom(rank.unconfirmed)
    if rank.deadlines.plan and rank.unconfirmed is not None:
        report.timeout_s = max(_EXPIRED_S, rank.deadlines.plan - now)
    if rank.deadlines.save:
        report.save_timeout_s = max(_EXPIRED_S, rank.deadlines.save - now)
    # By the phase that is reported: a report of DURABLE must carry the receipt.
    if rank.receipt is not None and report.status.phase == Phase.DURABLE.wire:
        report.receipt.CopyFrom(rank.receipt)
    if rank.failure is not None:
        report.failure.CopyFrom(rank.failure)
    return report


class Replicas(Protocol):
    """The exchange of replicas with other hosts, as :mod:`pannier.sidecar.replicas` counts it."""

    @property
    def size(self) -> int:
        """Bytes of other hosts' ranks here."""

    @property
    def reserved(self) -> int:
        """Bytes of their spool files, which make way for saves of own ranks."""

    @property
    def sent(self) -> int:
        """Bytes of own ranks that were sent to other hosts."""

    @property
    def refused(self) -> int:
        """Replicas that this host had no room for."""


def backlog(
    pending: Iterable[RankSave],
    spool: Spool,
    mapped: MappedFiles,
    blocks: HostBlocks,
    replicas: Replicas,
    limit: RateLimit | None,
) -> Backlog:
    """What these ranks have in the spool that storage hasn't confirmed, and the use of spool and memory."""
    files = [file for rank in pending for file in rank.files.values() if not file.upload.durable]
    now = time.monotonic()
    leased, held = mapped.leased_bytes()
    usage = spool.usage
    # Local copies and replicas, which make way for saves.
    kept = mapped.kept_bytes() + replicas.reserved
    return Backlog(
        bytes_queued=sum(max(0, file.held - file.upload.uploaded) for file in files),
        oldest_s=max((now - file.upload.opened_at for file in files), default=0.0),
        spool_bytes=usage.reserved,
        leased_bytes=leased,
        held_bytes=held,
        # At least 0: a thread may just be taking files back.
        saves_bytes=max(0, usage.reserved - usage.spare - held - kept - mapped.unused()),
        capacity_bytes=usage.capacity,
        free_bytes=min(usage.capacity, usage.free + kept),
        memory_limit=usage.limit.limit if usage.limit is not None else 0,
        memory_used=usage.limit.used if usage.limit is not None else 0,
        refusals=mapped.refusals,
        local_copies=tuple(blocks.copies.statuses()),
        evicted_copies=tuple(blocks.copies.evictions()),
        local_copies_served=blocks.copies.served,
        local_copies_evicted=blocks.copies.evicted,
        blocks_bytes=blocks.cache.used,
        blocks_evicted=blocks.cache.evicted,
        peers_sent=blocks.sent,
        replicas_bytes=replicas.size,
        replicas_sent=replicas.sent,
        replicas_refused=replicas.refused,
        upload_limit=0 if limit is None else limit.bytes_per_s,
        upload_limited=limit is not None and limit.limits,
        upload_limited_s=0.0 if limit is None else limit.waited_s,
    )


def save_status(save: Save, coordinator: Coordinator) -> save_pb2.SaveStatus:
    """State, failures and waits of a save, with the ranks of this host."""
    ranks = [save.ranks[number] for number in sorted(save.ranks)]
    status = save_pb2.SaveStatus()
    known = save.outcome or save.coordinator_status
    if known is not None:
        status.CopyFrom(known)
    status.save.CopyFrom(save.id)
    status.id = save.key
    # The coordinator's id differs from that of a rank which missed a call, and is behind its group.
    status.checkpoint_id = status.checkpoint_id or save.checkpoint_id
    status.attempt = status.attempt or next((r.attempt for r in ranks if r.attempt), "")
    if not status.HasField("created_at"):
        status.created_at.CopyFrom(timestamp(save.created_at))
    durable = sum(rank.phase is Phase.DURABLE for rank in ranks)
    status.durable_ranks = max(status.durable_ranks, durable)
    status.group_size = status.group_size or max((len(r.context.ranks) for r in ranks), default=0)
    status.state = save_state(save)
    if save.outcome is None or not status.ranks:
        del status.ranks[:]
        status.ranks.extend(rank_status(rank) for rank in ranks)
    reported = {failure.rank for failure in status.failures}
    status.failures.extend(
        rank.failure for rank in ranks if rank.failure is not None and rank.rank not in reported
    )
    if save.outcome is not None:
        status.ClearField("waiting_on")
    elif not coordinator.connected:
        status.waiting_on.Clear()
        status.waiting_on.text = f"the {coordinator.description}"
    elif not status.waiting_on.text:
        status.waiting_on.CopyFrom(waiting_on(_awaited(ranks)))
    return status


def save_state(save: Save) -> "save_pb2.SaveState":
    """The coordinator's latest state of the save, else what this host's ranks show."""
    known = save.outcome or save.coordinator_status
    if known is not None and known.state:
        return known.state
    phases = {rank.phase for rank in save.ranks.values() if rank.phase not in FAILED}
    if Phase.PLANNING in phases or not phases:
        return save_pb2.SAVE_STATE_PLANNING
    if phases & {Phase.PLANNED, Phase.STREAMING, Phase.HANDED_OVER}:
        return save_pb2.SAVE_STATE_STAGING
    return save_pb2.SAVE_STATE_UPLOADING


def _awaited(ranks: list[RankSave]) -> list[Awaited]:
    waiting = [rank for rank in ranks if rank.phase not in (Phase.DURABLE, *FAILED)]
    now = observer_clock.now()
    # A rank that doesn't need its trainer waits for daemons only.
    return [Awaited(r.rank, r.host, now - r.last_seen if r.needs_trainer else 0.0) for r in waiting]


class StatusPublisher:
    """Keeps a registry, which operators read, up to date with the saves of this sidecar."""

    def __init__(self, status_registry: StatusRegistry, coordinator: Coordinator) -> None:
        self._status_registry = status_registry
        self._coordinator = coordinator

    def on_change(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """See :data:`pannier.sidecar.save_registry.Listener`."""
        if rank is None:
            self._status_registry.put(
                save.id, save.checkpoint_id, lambda: save_status(save, self._coordinator)
            )
        else:
            self._status_registry.notify(save.key)

    def remove(self, save: Save) -> None:
        """Removes a save that is no longer remembered."""
        self._status_registry.remove(save.key)
