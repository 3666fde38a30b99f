"""What people are shown of a save: its status with a sentence, and without what only processes need. Pure."""

from typing import Final

from pannier.common.units import counted, size_text
from pannier.daemon.rank_phase import has_reached
from pannier.v1 import save_pb2
from pannier.wire.errors import kind_name

_STAGED: Final = save_pb2.RANK_PHASE_STREAMING


def shown(status: save_pb2.SaveStatus) -> save_pb2.SaveStatus:
    """The status for operators; changes the argument.

    A save whose ranks stage by the last plan is STAGING to them, though its plan isn't confirmed yet.
    """
    status.ClearField("plan")
    planning = status.state == save_pb2.SAVE_STATE_PLANNING
    if planning and any(has_reached(rank.phase, _STAGED) for rank in status.ranks):
        status.state = save_pb2.SAVE_STATE_STAGING
    status.summary = f"{status.checkpoint_id.rpartition('/')[2]} {_progress(status)}"
    return status


def _progress(status: save_pb2.SaveStatus) -> str:
    state = status.state
    of = f"of {counted(status.group_size, 'rank')}"
    if state == save_pb2.SAVE_STATE_COMMITTED:
        size = f", {size_text(status.bytes_total)} {of}" if status.bytes_total else ""
        return f"was committed after {status.committed_s:.1f} s{size}"
    if state == save_pb2.SAVE_STATE_ABORTED:
        first = next(iter(status.failures), None)
        if first is None:
            return "was aborted"
        rank = f"rank {first.rank} (host {first.host}): " if first.rank >= 0 else ""
        more = len(status.failures) - 1
        others = f" And {more} more failed." if more else ""
        return f"was aborted, {kind_name(first.kind).lower()}: {rank}{first.message}{others}"
    if state == save_pb2.SAVE_STATE_PREPARED:
        return "is no save: its plan was made ahead"
    word = save_pb2.SaveState.Name(state).removeprefix("SAVE_STATE_").lower().replace("_", " ")
    text = f"is {word}: {status.durable_ranks} {of} durable"
    if status.waiting_on.text:
        text += f"; it waits for {status.waiting_on.text}"
    if status.waiting_on.deadline_s:
        text += f", at most {status.waiting_on.deadline_s:.0f} s more"
    return text
