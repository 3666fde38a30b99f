"""Planners that override global planning: those that the operator names, or, where ranks and coordinator are
processes of one user's job, those that the ranks use.

In: ``module:Class`` names, and the local plans of a save. Out: the save's global plan, made by its custom
planner if it has one. Imports torch only for such a planner. CPU-bound; any thread.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, TypeVar

from pannier.coordinator.planning.arrays import Ints
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.dtypes import torch_for
from pannier.coordinator.planning.global_plan import GlobalPlan, Written, make_global_plan
from pannier.v1 import plan_pb2
from pannier.wire.errors import ConfigurationError, InvalidRequestError

T = TypeVar("T")


class Planners:
    """The classes that may run here.

    Args:
        names: of those that may, and are imported now. Raises ConfigurationError for one that can't run.
        on_demand: any may, and is imported when the first save needs it: an import that fails must end that
            save, with its reason, and not the daemon, whose log a user doesn't see.
    """

    def __init__(self, names: Sequence[str] = (), *, on_demand: bool = False) -> None:
        self._on_demand = on_demand
        self._classes = {} if on_demand else {name: _load(name) for name in names}

    def check(self, options: plan_pb2.PlannerOptions) -> None:
        """Raises InvalidRequestError, with the setting to add, for a planner that isn't named."""
        if options.custom_global_plan and not (self._on_demand or options.planner in self._classes):
            raise InvalidRequestError(
                f"{_overriding(options.planner)}: start it with --planner {options.planner}, or "
                f"PANNIER_PLANNER={options.planner} in its environment (its class must be importable there)"
            )

    def make(
        self,
        plans: Sequence[RankPlan],
        attempt: str,
        *,
        staged: Mapping[int, Ints] = MappingProxyType({}),
        before: Written = MappingProxyType({}),
    ) -> GlobalPlan:
        """The global plan of these ranks, which agree on their planner.

        Args:
            staged: the positions of what ranks have staged already, by rank. A custom planner doesn't
                get them, and may assign something else to such a rank, which it can't write.
            before: what the other ranks wrote by the last plan.

        Raises InvalidPlanError, also for any exception of a custom planner; InvalidRequestError if that
        can't be imported.
        """
        options = plans[0].plan.options
        if not options.custom_global_plan:
            return make_global_plan(plans, attempt, staged=staged, before=before)
        self.check(options)
        from pannier.coordinator.planning.custom_plan import make_custom_plan

        return make_custom_plan(self._class(options.planner), plans, attempt)

    def _class(self, name: str) -> type[Any]:
        if name not in self._classes:
            try:
                self._classes[name] = _load(name)
            except ConfigurationError as error:
                raise InvalidRequestError(f"{_overriding(name)}, and {error}") from error
        return self._classes[name]


def _load(name: str) -> type[Any]:
    with torch_for(f"--planner {name}"):
        from pannier.coordinator.planning.custom_plan import load
    return load(name)


def _overriding(name: str) -> str:
    return f"the planner {name} overrides global planning, which happens in the coordinator"


async def in_own_thread(make: Callable[[], T]) -> T:
    """Runs ``make()`` in a separate thread: when a user's code hangs there, neither other plans nor the end
    of the process wait for it.
    """
    made: Future[T] = Future()
    # Otherwise cancelling the caller would cancel the future, and the thread could not set its result.
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001 - raised by the caller
            made.set_exception(error)

    threading.Thread(target=run, name="pannier-planner", daemon=True).start()
    return await asyncio.wrap_future(made)
