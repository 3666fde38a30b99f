"""Plans that were agreed, and what they were made for: later saves of the same go by them.

In: a save's state dict and planner. Out: the plan of an earlier save of the group to the same
root, named for this one, without asking anybody. A ``DefaultSavePlanner`` is not even run when
the state's structure is the one that it planned; what any other planner makes is compared by its
digest. The coordinator still has to agree, in the background: see :class:`Agreement`. Thread-safe.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from pannier.client.planning.state_fingerprint import StateFingerprint, fingerprint
from pannier.client.staging.copy_plan import Route, route
from pannier.client.staging.stager import Staged
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import DeadlineError, InvalidRequestError, PannierError

_MOST_PLANS: Final = 8
"""Plans of all groups and roots; those used last are kept."""
_MOST_ROUTES: Final = 2
"""Structures that one plan is known for: with gradients and without, for example."""
_METHODS: Final = (
    *("set_up_planner", "create_local_plan", "finish_plan"),
    *("resolve_data", "lookup_object", "transform_object"),
)
_OURS: Final = {name: getattr(DefaultSavePlanner, name) for name in _METHODS}


class Owner(NamedTuple):
    """Whose plans are interchangeable: one group's in one incarnation, below one root."""

    incarnation: str
    group: str
    root: str


class Options(NamedTuple):
    """What a ``DefaultSavePlanner``'s local plan depends on besides the state."""

    flatten_sharded_tensors: bool
    dedup_save_to_lowest_rank: bool


def options_of(planner: SavePlanner | None) -> Options | None:
    """None for a planner that must be run: a subclass, a changed one, one that doesn't flatten."""
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
    return Options(bool(planner.flatten_sharded_tensors), bool(planner.dedup_save_to_lowest_rank))


_DEFAULT: Final = DefaultSavePlanner()


class CachedPlan:
    """One rank's part of an agreed plan. Immutable but for what it is known for, and its id.

    Args:
        owner: whose it is.
        message: the local plan.
        digest: its hash.
        final: the answer to it, for an earlier save.

    Raises InvalidRequestError: the answer's names aren't those of its attempt.
    """

    def __init__(
        self, owner: Owner, message: plan_pb2.LocalPlan, digest: str, final: plan_pb2.FinalPlan
    ) -> None:
        self.owner = owner
        self.message = message
        self.digest = digest
        self.plan_id = final.plan_id
        """Of the global plan; may change while this rank's part doesn't."""
        self.sizes = [file.size for file in final.files]
        """Bytes of each data file; 0 for the objects file."""
        self._final = final
        self._attempt = object_names.Attempt.parse(final.attempt)
        self._routes: list[tuple[Options, StateFingerprint, Route]] = []
        prefix = object_names.data_prefix(final.attempt)
        self._endings = [file.name.removeprefix(prefix) for file in final.files]
        if any(not file.name.startswith(prefix) for file in final.files):
            raise InvalidRequestError(f"files of {final.attempt} must begin with {prefix}")

    def attempt(self, number: int) -> str:
        """Name of the attempt that is the group's ``number``-th save."""
        return dataclasses.replace(self._attempt, number=number).name

    def names(self, number: int) -> list[str]:
        """Names of the data files in that save."""
        prefix = object_names.data_prefix(self.attempt(number))
        return [prefix + ending for ending in self._endings]

    def final(self, number: int) -> plan_pb2.FinalPlan:
        """The final plan for that save."""
        plan = plan_pb2.FinalPlan()
        plan.CopyFrom(self._final)
        plan.plan_id = self.plan_id
        plan.attempt = self.attempt(number)
        for file, name in zip(plan.files, self.names(number), strict=True):
            file.name = name
        return plan

    def is_same(self, answer: plan_pb2.FinalPlan, number: int) -> bool:
        """Whether the coordinator's answer to the local plan, for that save, is this."""
        mine = self.final(number)
        mine.plan_id = answer.plan_id
        return mine == answer

    def learn(self, options: Options, state: Mapping[str, Any], items: Sequence[WriteItem]) -> None:
        """Remembers that it is the plan for states like ``state``, of which ``items`` were made."""
        structure = fingerprint(state)
        values = structure.values(state) if structure is not None else None
        if structure is None or values is None:
            return
        found = route(structure.fqns, values, items, self._final)
        if found is not None:
            self._routes = [(options, structure, found), *self._routes[: _MOST_ROUTES - 1]]

    def match(self, options: Options, state: Mapping[str, Any]) -> "Match | None":
        """How to stage ``state`` by this plan; None when it isn't known for such."""
        for planned_with, structure, found in self._routes:
            if planned_with == options:
                values = structure.values(state)
                if values is not None:
                    return Match(self, found, values)
        return None


@dataclass(frozen=True)
class Match:
    """A plan that fits a state dict."""

    plan: CachedPlan
    route: Route
    values: list[Any]


class PlanCache:
    """All cached plans of a client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[Owner, str], CachedPlan] = OrderedDict()

    def match(
        self, owner: Owner, options: Options | None, state: Mapping[str, Any]
    ) -> Match | None:
        """The plan of a state that needs no planner, and its values."""
        if options is None:
            return None
        with self._lock:
            plans = [plan for (whose, _), plan in self._plans.items() if whose == owner]
        for plan in reversed(plans):
            found = plan.match(options, state)
            if found is not None:
                self.keep(plan)
                return found
        return None

    def find(self, owner: Owner, digest: str) -> CachedPlan | None:
        """The plan of a local plan."""
        with self._lock:
            return self._plans.get((owner, digest))

    def keep(self, plan: CachedPlan) -> None:
        """Remembers an agreed plan, as the one used last."""
        key = (plan.owner, plan.digest)
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)

    def drop(self, owner: Owner) -> None:
        """Forgets the owner's plans: its next save is planned anew."""
        with self._lock:
            for key in [key for key in self._plans if key[0] == owner]:
                del self._plans[key]

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._plans.clear()


class Agreement:
    """What a save that was staged by a cached plan has to settle with the coordinator.

    Args:
        plans: forgets the plan when the save fails, so that the next one is planned anew.
        session: whom to ask.
        plan: what it was staged by.
        deadline: of the save.
        wait_s: for what the other ranks say, seconds.
        resume: makes a number the group's next.
    """

    def __init__(
        self,
        plans: PlanCache,
        session: SidecarClient,
        plan: CachedPlan,
        deadline: Deadline,
        wait_s: float,
        resume: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self._plans = plans
        self._session = session
        self._deadline = deadline
        self._wait_s = wait_s
        self._resume = resume

    def settle(self, context: sidecar_pb2.SaveContext) -> str:
        """Returns the id of the plan that all ranks go by. Blocks until all have said so.

        Raises:
            SaveAbortedError: the save ended on all ranks, with failures by rank; or without this
                one, which is at another then.
            DeadlineError: not all have, in time.
            PannierError: the plan is another by now, so that what was staged is of no use.
        """
        plan, number = self.plan, context.save.number
        attempt = plan.attempt(number)
        request = sidecar_pb2.PlanRequest(
            context=context,
            digest=plan.digest,
            cached_plan_id=plan.plan_id,
            attempt=attempt,
        )
        answer = self._ask(request)
        if answer.wanted:
            request.plan.CopyFrom(plan.message)
            request.ClearField("cached_plan_id")
            final = self._ask(request).plan
            agreed = plan.is_same(final, number)
        else:
            final = answer.plan
            agreed = final.attempt == attempt
        if not agreed:
            raise PannierError(
                f"this save was staged as {attempt} by the plan {plan.plan_id[:12]} of an earlier "
                f"one, but the coordinator's answer is {final.attempt} by {final.plan_id[:12]}; "
                "the next save is planned anew"
            )
        plan.plan_id = final.plan_id
        return plan.plan_id

    def become(self, number: int, staged: Staged) -> tuple[str, Staged]:
        """The attempt and what is staged, if this is the group's ``number``-th save."""
        self._resume(number + 1)
        return self.plan.attempt(number), staged.renamed(self.plan.names(number))

    def failed(self) -> None:
        """The save has failed."""
        self._plans.drop(self.plan.owner)

    def _ask(self, request: sidecar_pb2.PlanRequest) -> sidecar_pb2.PlanResponse:
        if self._deadline.passed:
            raise DeadlineError(
                f"save {object_names.save_text(request.context.save)} was staged, but its timeout "
                "passed before the other ranks could be asked"
            )
        request.save_timeout_s = self._deadline.remaining()
        request.timeout_s = min(self._wait_s, request.save_timeout_s)
        return self._session.plan(request, request.timeout_s)
