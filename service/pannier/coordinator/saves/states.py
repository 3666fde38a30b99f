"""The states of a save, and the moves between them.

A save has four states side by side: how far it has come, who makes its plan, which process began it,
and what of its attempt is in storage. Pure.
"""

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, TypeVar

from pannier.v1 import save_pb2


class State(enum.Enum):
    """States of a save."""

    PLANNING = save_pb2.SAVE_STATE_PLANNING
    STAGING = save_pb2.SAVE_STATE_STAGING
    INGESTED = save_pb2.SAVE_STATE_INGESTED
    UPLOADING = save_pb2.SAVE_STATE_UPLOADING
    COMMITTED = save_pb2.SAVE_STATE_COMMITTED
    ABORTED = save_pb2.SAVE_STATE_ABORTED
    IN_DOUBT = save_pb2.SAVE_STATE_IN_DOUBT
    PREPARED = save_pb2.SAVE_STATE_PREPARED


class PlanMode(enum.Enum):
    """Who makes the plan, and what for."""

    UNDECLARED = enum.auto()
    """No rank has called yet."""
    SAVE = enum.auto()
    PREPARE = enum.auto()
    """Only the plan is made, for later saves."""
    EXTERNAL = enum.auto()
    """torch makes the plan; the save was opened with Begin."""


class Origin(enum.Enum):
    """Whether this process of the coordinator began the save."""

    NEW = enum.auto()
    RESUMED = enum.auto()
    """Another process of a coordinator agreed on the plan: only storage shows what became of it."""
    RECOVERED = enum.auto()
    """Resumed, and its state was read from storage."""


class AttemptState(enum.Enum):
    """What may be in storage of the save's attempt."""

    UNWRITTEN = enum.auto()
    """Nothing that this coordinator knows of: the save may end without a decision."""
    WRITTEN = enum.auto()
    """Something may be there, so that only a decision ends the attempt."""
    DECIDING = enum.auto()
    """A decision is being written or applied: it is too late to abort."""


_MOVES: Final[Mapping[enum.Enum, AbstractSet[enum.Enum]]] = {
    # After a restart a save that still seems to be in planning may turn out to have ended.
    State.PLANNING: {
        State.STAGING,
        State.COMMITTED,
        State.ABORTED,
        State.IN_DOUBT,
        State.PREPARED,
    },
    State.STAGING: {State.INGESTED, State.COMMITTED, State.ABORTED, State.IN_DOUBT},
    State.INGESTED: {State.UPLOADING, State.COMMITTED, State.ABORTED, State.IN_DOUBT},
    State.UPLOADING: {State.COMMITTED, State.ABORTED, State.IN_DOUBT},
    State.IN_DOUBT: {State.COMMITTED, State.ABORTED},
    State.COMMITTED: set(),
    State.ABORTED: set(),
    State.PREPARED: set(),
    # A manifest in storage shows who made the plan, whatever the ranks have called by then.
    PlanMode.UNDECLARED: {PlanMode.SAVE, PlanMode.PREPARE, PlanMode.EXTERNAL},
    PlanMode.SAVE: {PlanMode.EXTERNAL},
    PlanMode.PREPARE: {PlanMode.SAVE, PlanMode.EXTERNAL},
    PlanMode.EXTERNAL: {PlanMode.SAVE},
    Origin.NEW: {Origin.RESUMED},
    Origin.RESUMED: {Origin.RECOVERED},
    Origin.RECOVERED: set(),
    # A manifest that storage refused was not written.
    AttemptState.UNWRITTEN: {AttemptState.WRITTEN, AttemptState.DECIDING},
    AttemptState.WRITTEN: {AttemptState.UNWRITTEN, AttemptState.DECIDING},
    AttemptState.DECIDING: set(),
}
TERMINAL: Final = (State.COMMITTED, State.ABORTED, State.PREPARED)

_Enum = TypeVar("_Enum", bound=enum.Enum)


def moved(old: _Enum, new: _Enum, label: str) -> _Enum:
    """The new state. Raises RuntimeError for an impossible move of the save ``label``: a bug."""
    if new is not old and new not in _MOVES[old]:
        raise RuntimeError(f"{label} is {old.name}: it can't become {new.name}")
    return new
