"""What others see of a save: its status, and the ranks that it waits for.

In: a :class:`Save`. Out: messages and texts; changes nothing. Event loop only.
"""

import time

from pannier.common.message_json import timestamp
from pannier.common.wait_text import Awaited, set_times, waiting_on, waiting_text
from pannier.coordinator.saves.participants import RankState
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.states import Origin, State
from pannier.v1 import save_pb2


def awaited(save: Save) -> list[Awaited]:
    """The ranks that the save waits for, in its state."""
    if save.state is State.PLANNING:
        plans = save.plans
        late = plans.requested or plans.missing
        if save.resumed or save.external:
            # No rank hands in a plan: storage has it, or torch makes it.
            late = []
    elif save.ended or save.state is State.IN_DOUBT:
        late = []
    else:
        late = save.participants.late()
        external = save.external_plan
        if not late and save.external and external.metadata is None and external.finisher:
            late = [external.finisher.rank]
    return [save.participants.seen(rank) for rank in late]


def awaited_text(save: Save) -> str:
    """Whom or what the save waits for."""
    return waiting_text(awaited(save)) or save.storage_wait


def status(save: Save, *, ranks: bool = True) -> save_pb2.SaveStatus:
    """The status now; ``ranks``: with every rank's."""
    left = max(0.0, save.next_deadline - time.monotonic())
    waiting = waiting_on(awaited(save), deadline_s=left)
    if not waiting.text and not save.ended:
        waiting.text = save.storage_wait
        # A resumed save has no deadline before its state was read from storage.
        limited = save.state is not State.IN_DOUBT and save.origin is not Origin.RESUMED
        if save.storage_wait and limited:
            waiting.deadline_s = left
    states = save.ranks.values()
    return save_pb2.SaveStatus(
        save=save.context.save,
        id=save.key,
        checkpoint_id=save.context.checkpoint_id,
        attempt=save.attempt.name if save.attempt is not None and save.written else "",
        state=save.state.value,
        ranks=[_rank_status(save, state) for state in states] if ranks else (),
        failures=save.outcome.failures.values(),
        waiting_on=waiting,
        created_at=timestamp(save.deadlines.created_at),
        planned_s=save.durations.get(State.STAGING, 0),
        ingested_s=save.durations.get(State.INGESTED, 0),
        durable_s=save.durations.get("durable", 0),
        committed_s=save.durations.get(State.COMMITTED, 0),
        note=save.note,
        plan=save_pb2.PlanState(
            id=save.records.plan_id, full_plan_requested=save.plans.full_requested
        ),
        group_size=len(states),
        durable_ranks=sum(each.phase == save_pb2.RANK_PHASE_DURABLE for each in states),
        replicated_ranks=sum(
            bool(each.replicas) and (save.ended or each.replica_holder is not None)
            for each in states
        ),
        bytes_total=sum(
            max(
                each.reported.bytes_staged,
                each.reported.bytes_ingested,
                each.reported.bytes_durable,
            )
            for each in states
        ),
    )


def _rank_status(save: Save, state: RankState) -> save_pb2.RankStatus:
    out = save_pb2.RankStatus()
    out.CopyFrom(state.reported)
    out.rank, out.phase = state.rank, state.phase
    seen = save.participants.seen(state.rank)
    out.host = state.host or seen.host
    if seen.last_seen_s is not None:
        out.seconds_since_seen = seen.last_seen_s
    set_times(out, state.reached, save.deadlines.start)
    failure = save.outcome.failures.get(state.rank)
    if failure is not None:
        out.last_error = failure.message
    return out
