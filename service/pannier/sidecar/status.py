"""A save as operators and clients see it: the coordinator's word, and this host's own ranks.

In: saves and how the link to the coordinator is. Out: messages. Thread-safe.
"""

import time
from collections.abc import Iterable
from typing import Protocol

from pannier.common import observer_clock
from pannier.common.wait_text import Awaited, set_times, waiting_on
from pannier.daemon.status_service import Backlog
from pannier.sidecar.save_state import Phase, RankSave, Save
from pannier.sidecar.spool.mapped_files import Lending
from pannier.sidecar.spool.spool import Spool
from pannier.v1 import save_pb2


class Coordinator(Protocol):
    """What is known of the coordinator."""

    @property
    def connected(self) -> bool:
        """Whether it is attached."""

    @property
    def description(self) -> str:
        """``coordinator at host:port (last seen 12 s ago)``."""


def rank_status(rank: RankSave) -> save_pb2.RankStatus:
    """How far one rank is."""
    files = list(rank.files.values())
    staged = dict(rank.planned or {})
    staged.update({file.name: file.size for file in files})
    status = save_pb2.RankStatus(
        rank=rank.rank,
        host=rank.host,
        phase=rank.phase.value,
        bytes_staged=sum(staged.values()),
        bytes_ingested=sum(file.held for file in files),
        bytes_uploaded=sum(file.uploaded for file in files),
        bytes_durable=sum(file.size for file in files if file.durable),
        retries=rank.retries,
        last_error=rank.failure.message if rank.failure else rank.last_error,
        seconds_since_heard=observer_clock.now() - rank.heard,
        transport=rank.transport,
        stalled_s=rank.stalled_s,
    )
    set_times(status, rank.reached, rank.save.start)
    return status


def backlog(pending: Iterable[RankSave], spool: Spool, lending: Lending) -> Backlog:
    """What these ranks have in the spool and storage hasn't confirmed, and what the spool takes."""
    files = [file for rank in pending for file in list(rank.files.values()) if not file.durable]
    now = time.monotonic()
    lent, held = lending.lent()
    capacity, free = spool.room()
    return Backlog(
        # The two are read while other threads move them.
        bytes_queued=sum(max(0, file.held - file.uploaded) for file in files),
        oldest_s=max((now - file.since for file in files), default=0.0),
        spool_bytes=spool.reserved,
        lent_bytes=lent,
        held_bytes=held,
        saves_bytes=max(0, spool.reserved - spool.spare - held - lending.unused()),
        capacity_bytes=capacity,
        free_bytes=free,
    )


def save_status(save: Save, coordinator: Coordinator) -> save_pb2.SaveStatus:
    """State, failures and waits of a save, with the ranks of this host."""
    ranks = [save.ranks[number] for number in sorted(save.ranks)]
    status = save_pb2.SaveStatus()
    known = save.verdict or save.coordinator
    if known is not None:
        status.CopyFrom(known)
    status.save.CopyFrom(save.id)
    status.id = save.key
    status.checkpoint_id = save.checkpoint_id
    status.attempt = status.attempt or next((r.attempt for r in ranks if r.attempt), "")
    status.created_at = status.created_at or save.created_at
    status.state = state_of(save)
    if save.verdict is None or not status.ranks:
        del status.ranks[:]
        status.ranks.extend(rank_status(rank) for rank in ranks)
    blamed = {failure.rank for failure in status.failures}
    status.failures.extend(
        rank.failure for rank in ranks if rank.failure is not None and rank.rank not in blamed
    )
    if save.verdict is not None:
        status.ClearField("waiting_on")
    elif not coordinator.connected:
        status.waiting_on.Clear()
        status.waiting_on.text = f"the {coordinator.description}"
    elif not status.waiting_on.text:
        status.waiting_on.CopyFrom(waiting_on(_awaited(ranks)))
    return status


def state_of(save: Save) -> "save_pb2.SaveState":
    """What the coordinator said of it last, else what this host's ranks tell."""
    known = save.verdict or save.coordinator
    if known is not None and known.state:
        return known.state
    return _local_state(list(save.ranks.values()))


def _local_state(ranks: list[RankSave]) -> "save_pb2.SaveState":
    """What this host's ranks tell while the coordinator hasn't."""
    phases = {rank.phase for rank in ranks if rank.phase is not Phase.FAILED}
    if Phase.PLANNING in phases or not phases:
        return save_pb2.SAVE_STATE_PLANNING
    if phases & {Phase.PLANNED, Phase.STREAMING}:
        return save_pb2.SAVE_STATE_STAGING
    return save_pb2.SAVE_STATE_UPLOADING


def _awaited(ranks: list[RankSave]) -> list[Awaited]:
    waiting = [rank for rank in ranks if rank.phase not in (Phase.DURABLE, Phase.FAILED)]
    now = observer_clock.now()
    # Of an ingested rank nothing but this sidecar's own work is awaited.
    return [
        Awaited(r.rank, r.host, 0.0 if r.phase is Phase.INGESTED else now - r.heard)
        for r in waiting
    ]
