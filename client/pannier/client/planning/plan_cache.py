"""Confirmed plans, and the states they were made for: later saves of the same states reuse them.

In: a save's state dict and planner. Out: the plan of an earlier save of the group to the same
root, without an RPC. A ``DefaultSavePlanner`` is not even run when the state has the fingerprint
of one that it planned; the plans of other planners are compared by digest. The coordinator
confirms the reuse once the save's bytes are under way
(:mod:`pannier.client.transport.plan_claim`). Thread-safe.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from pannier.client.planning.state_fingerprint import StateFingerprint, fingerprint
from pannier.client.staging.copy_plan import CopyPlan, make_copy_plan
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names

_MOST_PLANS: Final = 8
"""Cached plans of all groups and roots together; the least recently used are evicted."""
_MOST_STATES: Final = 2
"""States that one plan serves: with gradients and without, for example."""
_METHODS: Final = (
    *("set_up_planner", "create_local_plan", "finish_plan"),
    *("resolve_data", "lookup_object", "transform_object"),
)
_OURS: Final = {name: getattr(DefaultSavePlanner, name) for name in _METHODS}


class PlanScope(NamedTuple):
    """Where a plan can be reused: by one group in one incarnation, below one root."""

    incarnation: str
    group: str
    root: str


class PlannerOptions(NamedTuple):
    """What a ``DefaultSavePlanner``'s local plan depends on besides the state."""

    flatten_sharded_tensors: bool
    dedup_save_to_lowest_rank: bool


def planner_options(planner: SavePlanner | None) -> PlannerOptions | None:
    """The planner's options; None for one that must be run: a subclass, patched, or not flattening."""
    if planner is None:
        planner = _DEFAULT
    own = vars(planner)
    if (
        type(planner) is not DefaultSavePlanner
        or not planner.flatten_state_dict
        or any(
            name in own or getattr(DefaultSavePlanner, name) is not _OURS[name] for name in _OURS
        )
    ):
        return None
    return PlannerOptions(
        bool(planner.flatten_sharded_tensors), bool(planner.dedup_save_to_lowest_rank)
    )


_DEFAULT: Final = DefaultSavePlanner()


class CachedPlan:
    """One rank's part of a confirmed plan. Immutable but for its id and the states it serves.

    Args:
        scope: where it can be reused.
        message: the local plan.
        digest: its hash.
        final: the final plan for it, of an earlier save.
        checkpoint_id: of that save; empty: only the plan was made, so that no manifest has it.

    Raises InvalidRequestError: the final plan's file names aren't those of its attempt.
    """

    def __init__(
        self,
        scope: PlanScope,
        message: plan_pb2.LocalPlan,
        digest: str,
        final: plan_pb2.FinalPlan,
        checkpoint_id: str = "",
    ) -> None:
        self.scope = scope
        self.message = message
        self.digest = digest
        self._source = (final.plan_id, checkpoint_id, final.attempt if checkpoint_id else "")
        """Id of the global plan, and the checkpoint and attempt of a save whose manifest has it."""
        self.sizes = [file.size for file in final.files]
        """Bytes of each data file; 0 for the objects file."""
        self._final = final
        self._attempt = object_names.Attempt.parse(final.attempt)
        self._states: list[tuple[PlannerOptions, StateFingerprint, CopyPlan]] = []
        self.suffixes = object_names.data_suffixes(final.attempt, [f.name for f in final.files])
        """Names of the data files, without the attempt's prefix."""

    @property
    def plan_id(self) -> str:
        """Id of the global plan, which may change while this rank's part doesn't."""
        return self._source[0]

    def claim(self) -> sidecar_pb2.CachedPlanClaim:
        """The claim of a save to use this plan."""
        plan_id, checkpoint_id, attempt = self._source
        return sidecar_pb2.CachedPlanClaim(
            plan_id=plan_id, digest=self.digest, checkpoint_id=checkpoint_id, attempt=attempt
        )

    def confirm(self, plan_id: str, checkpoint_id: str, attempt: str) -> None:
        """Records that this rank's part belongs to that global plan, which is in the attempt's manifest."""
        self._source = (plan_id, checkpoint_id, attempt)

    def attempt(self, number: int) -> str:
        """Name of the attempt that is the group's ``number``-th save."""
        return dataclasses.replace(self._attempt, number=number).name

    def final_plan(self, number: int) -> plan_pb2.FinalPlan:
        """The final plan for the group's ``number``-th save."""
        plan = plan_pb2.FinalPlan()
        plan.CopyFrom(self._final)
        plan.plan_id = self.plan_id
        plan.attempt = self.attempt(number)
        for file, suffix in zip(plan.files, self.suffixes, strict=True):
            file.name = object_names.data_prefix(plan.attempt) + suffix
        return plan

    def equals(self, final: plan_pb2.FinalPlan, number: int) -> bool:
        """Whether ``final`` is this plan for the ``number``-th save, apart from the global plan's id."""
        own = self.final_plan(number)
        own.plan_id = final.plan_id
        return own == final

    def add_state(
        self, options: PlannerOptions, state: Mapping[str, Any], items: Sequence[WriteItem]
    ) -> None:
        """Lets states like ``state``, for which ``items`` were planned, match this plan."""
        known = fingerprint(state)
        values = known.values(state) if known is not None else None
        if known is None or values is None:
            return
        copies = make_copy_plan(known.fqns, values, items, self._final)
        if copies is not None:
            self._states = [(options, known, copies), *self._states[: _MOST_STATES - 1]]

    def match(self, options: PlannerOptions, state: Mapping[str, Any]) -> "Match | None":
        """How to stage ``state`` by this plan; None when no state of its structure was added."""
        for planned_with, known, copies in self._states:
            if planned_with == options:
                values = known.values(state)
                if values is not None:
                    return Match(self, copies, values)
        return None


@dataclass(frozen=True)
class Match:
    """A cached plan that fits a state dict."""

    plan: CachedPlan
    copy_plan: CopyPlan
    values: list[Any]


class PlanCache:
    """All cached plans of a client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[PlanScope, str], CachedPlan] = OrderedDict()

    def match(
        self, scope: PlanScope, options: PlannerOptions | None, state: Mapping[str, Any]
    ) -> Match | None:
        """The plan for a state whose planner needn't be run, and the state's values."""
        if options is None:
            return None
        with self._lock:
            plans = [plan for (each, _), plan in self._plans.items() if each == scope]
        for plan in reversed(plans):
            found = plan.match(options, state)
            if found is not None:
                self.add(plan)
                return found
        return None

    def find(self, scope: PlanScope, digest: str) -> CachedPlan | None:
        """The plan for the local plan with this digest."""
        with self._lock:
            return self._plans.get((scope, digest))

    def add(self, plan: CachedPlan) -> None:
        """Caches a plan, as the one used last."""
        key = (plan.scope, plan.digest)
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)

    def drop(self, scope: PlanScope) -> None:
        """Drops the plans of a scope, whose next save is planned again."""
        with self._lock:
            for key in [key for key in self._plans if key[0] == scope]:
                del self._plans[key]

    def clear(self) -> None:
        """Drops all plans."""
        with self._lock:
            self._plans.clear()
