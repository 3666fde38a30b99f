"""The ranks of one load: what they exchange, and how each of them learns that another one failed.

In: what each rank does at a step. Out: what the ranks make of it together, on all of them, or one error on
all of them. Before each collective all ranks meet at a barrier with names (:mod:`store_barrier`), and the
collective itself is waited for in another thread, so that a rank that doesn't come, ends or stops is a
LoadError with its number and host on the others. Blocking; for one load of one rank.
"""

import base64
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar, cast

import torch.distributed as dist

from pannier.client import console, torch_compat
from pannier.client.engine import engine
from pannier.client.interrupts import Call, UnansweredError
from pannier.client.ranks.group_store import StoreUnansweredError, encode, join_start
from pannier.client.ranks.rank_hosts import default_hosts
from pannier.client.ranks.rank_problem import (
    Failed,
    Problem,
    error_to_json,
    failed_without,
    lost,
)
from pannier.client.ranks.store_barrier import Missing, Step, StoreBarrier
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.wire import errors
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CALL: Final = Step("call", "to call load")
METADATA: Final = Step("metadata", "to read .metadata from storage", is_by_first=True)
PLAN: Final = Step("plan", "to plan what it reads")
GLOBAL_PLAN: Final = Step("global-plan", "to put the ranks' plans together", is_by_first=True)
READ: Final = Step("read", "to read its part")
END: Final = Step("end", "to take over what was read")
STEPS: Final = (CALL, METADATA, PLAN, GLOBAL_PLAN, READ, END)
"""In their order."""
ShowWait = Callable[[Callable[[], str]], contextlib.AbstractContextManager[None]]
"""Shows what a rank waits for, as its argument describes it, as long as the context lasts."""
_KIND: Final = "load"
"""Of calls that ranks count."""
_INLINE_BYTES: Final = 1 << 16
"""What the store itself carries to all ranks; more goes through a collective."""


@dataclass(frozen=True)
class _Shared:
    """The outcome of a step that succeeded."""

    value: Any


_Outcome = _Shared | Failed | PannierError
_Settle = Callable[[Mapping[int, Any], Missing | None], _Outcome]
"""Makes the outcome of the ranks' values, or problems; with missing ranks, of a step that failed."""


def _to_json(outcome: _Outcome) -> dict[str, Any]:
    if isinstance(outcome, _Shared):
        return {"value": outcome.value}
    if isinstance(outcome, Failed):
        return {"failed": outcome.to_json()}
    return {"error": error_to_json(outcome)}


def _from_json(content: Mapping[str, Any]) -> _Outcome:
    if "failed" in content:
        return Failed.from_json(content["failed"])
    if "error" in content:
        return errors.rebuild(content["error"]["type"], content["error"]["message"])
    return _Shared(content["value"])


class LoadRanks:
    """The ranks that load together; one rank by itself waits for no other.

    Args:
        process_group: None: all ranks.
        alone: this process loads by itself.
        timeout_s: how long other ranks are waited for at each step, as long as none shows progress.
        description: of the load, for messages.

    Raises:
        LoadError: from all methods: a rank failed, ended or was not there in time.
    """

    def __init__(
        self, process_group: Any, *, alone: bool, timeout_s: float, description: str
    ) -> None:
        self._description = description
        self._process_group = process_group
        self._timeout_s = timeout_s
        self.rank: Final = 0 if alone else dist.get_rank()
        """Global rank."""
        self.ranks: Final = (
            [0]
            if alone
            else dist.get_process_group_ranks(
                dist.group.WORLD if process_group is None else process_group
            )
        )
        """Global ranks, in the group's order."""
        self._ahead = list(STEPS)
        """Steps to which this rank hasn't come yet; none after the load has failed."""
        self._step = CALL
        """The last one to which it came."""
        self._show_wait: ShowWait = lambda _: contextlib.nullcontext()
        self._barrier: StoreBarrier | None = None
        if len(self.ranks) > 1:
            hosts = default_hosts()
            self._start = join_start(hosts, description=description, timeout_s=timeout_s)
            self._barrier = StoreBarrier(
                self._start.prefix(torch_compat.group_store(process_group)),
                self.ranks,
                hosts,
                name=_KIND,
                number=self._start.next_number(torch_compat.group_name(process_group), _KIND),
                description=description,
                timeout_s=timeout_s,
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first rank, DCP's coordinator."""
        return self.rank == self.ranks[0]

    def __enter__(self) -> "LoadRanks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Lets the other ranks know of an exception between two steps."""
        if error is not None:
            self._report(error)

    def show_waits(self, show: ShowWait) -> None:
        """Waits are shown by ``show``, too; before the first step."""
        self._show_wait = show

    def together(
        self, step: Step, make: Callable[[], T], settle: Callable[[Mapping[int, T]], R]
    ) -> R:
        """What ``settle`` makes of all ranks' values, by global rank.

        Args:
            make: this rank's value, small and for JSON; what it raises is raised on all ranks.
            settle: called on any rank, or several; its value is for JSON, too. What it raises is raised on
                all ranks.
        """
        found: R = self._come(step, make, settle).value
        return found

    def from_first(self, step: Step, make: Callable[[], tuple[bytes, Any]]) -> tuple[bytes, Any]:
        """What the first rank makes, or its error, on all ranks.

        Args:
            make: bytes, of any number, and a small value for JSON.
        """
        made: list[tuple[bytes, Any]] = []
        raised: list[PannierError] = []

        def at_first() -> Any:
            if not self.is_first:
                return None
            try:
                content, facts = make()
            except PannierError as error:
                # On all ranks as it is.
                raised.append(error)
                return {"error": error_to_json(error)}
            made.append((content, facts))
            is_small = len(content) <= _INLINE_BYTES
            return {
                "content": base64.b64encode(content).decode() if is_small else None,
                "facts": facts,
            }

        shared = self._come(step, at_first, lambda values: values[self.ranks[0]]).value
        if "error" in shared:
            outcome = _from_json(shared)
            assert isinstance(outcome, PannierError)
            self._raise(raised[0] if raised else outcome)
        if shared["content"] is not None:
            return base64.b64decode(shared["content"]), shared["facts"]
        return self._broadcast(made[0][0] if made else None), shared["facts"]

    def plan(self, make: Callable[[], T], make_global: Callable[[list[T]], Sequence[T]]) -> T:
        """This rank's part of the global plan.

        Args:
            make: this rank's local plan.
            make_global: called on the first rank alone, with all ranks' plans.
        """
        local: list[T] = []
        final: list[T] = []

        def plan_globally() -> None:
            if self.is_first:
                final.extend(make_global(plans))

        self._come(PLAN, lambda: local.append(make()), _nothing)
        plans = self._gather(local[0])
        self._come(GLOBAL_PLAN, plan_globally, _nothing)
        return self._scatter(final)

    @contextlib.contextmanager
    def showing_progress(self, step: Step, describe: Callable[[], str]) -> Iterator[None]:
        """Shows the other ranks, while this block runs, how far this rank is before a step."""
        barrier = self._barrier
        if barrier is None:
            yield
            return
        timer = engine().every(
            timeouts.READ_PROGRESS_S, lambda: barrier.show_progress(step, describe())
        )
        try:
            yield
        finally:
            timer.cancel()

    def _come(
        self, step: Step, make: Callable[[], T], settle: Callable[[Mapping[int, T]], R]
    ) -> _Shared:
        """Comes to a step; raises its failure."""
        self._step = step
        if step is CALL and self._barrier is not None:
            number = self._barrier.catch_up(
                CALL, lambda found: "failed" in found and bool(found["failed"]["is_absence"])
            )
            self._start.skip_to(torch_compat.group_name(self._process_group), _KIND, number)
        settled = self._settling(step, settle)
        try:
            value = make()
            encode(value)  # one that is too large is this rank's error
        except Exception as error:
            outcome = self._report(error)
            if isinstance(outcome, _Shared):
                # Another rank has ended the step without this one.
                raise
            self._raise(outcome, error)
        self._ahead.remove(step)
        if self._barrier is None:
            outcome = settled({self.rank: value}, None)
        else:
            with self._waited(step):
                arrived = {"value": value}
                outcome = _from_json(self._barrier.arrive(step, arrived, _for_json(settled)))
        shared = self._succeeded(outcome)
        if step is END and self._barrier is not None:
            self._barrier.leave(END)
        if step is CALL and self._barrier is not None:
            group = torch_compat.group_name(self._process_group)
            numbers = self._start.take_done(group, _KIND, self._barrier.number)
            self._barrier.forget(STEPS, numbers)
        return shared

    def _succeeded(self, outcome: _Outcome) -> _Shared:
        if not isinstance(outcome, _Shared):
            self._raise(outcome)
        return outcome

    def _raise(self, outcome: Failed | PannierError, own: Exception | None = None) -> NoReturn:
        self._ahead.clear()
        if self._barrier is not None:
            self._barrier.leave(self._step)
        if isinstance(outcome, PannierError):
            raise outcome
        raised = {} if own is None else {self.rank: own}
        raise outcome.error(raised) from outcome.first_cause(raised)

    def _settling(self, step: Step, settle: Callable[[Mapping[int, Any]], Any]) -> _Settle:
        def settled(values: Mapping[int, Any], missing: Missing | None) -> _Outcome:
            problems = {rank: each for rank, each in values.items() if isinstance(each, Problem)}
            if missing is not None:
                return failed_without(self._description, step, missing, problems)
            if problems:
                return Failed(problems)
            try:
                return _Shared(settle(values))
            except PannierError as error:
                return error

        return settled

    def _report(self, error: BaseException | Problem) -> _Outcome:
        """Lets the other ranks know why this one failed; the outcome of the step that it ended.

        A step that the others have ended without this rank is over: then it is the next one.
        """
        problem = error if isinstance(error, Problem) else Problem.of(error)
        outcome: _Outcome = Failed({self.rank: problem})
        while self._ahead:
            step = self._step = self._ahead.pop(0)
            if self._barrier is None:
                break
            is_awaited = not step.is_by_first or self.is_first or problem.is_lost
            # An interrupted process shall end soon.
            is_patient = is_awaited and isinstance(error, Exception | Problem)
            try:
                content = self._barrier.fail(
                    step,
                    {"problem": problem.to_json()},
                    _for_json(self._settling(step, _nothing)),
                    grace_s=timeouts.CAUSES_S if is_patient else 0.0,
                )
                outcome = _from_json(content)
            except PannierError as unreported:
                _log.warning(
                    "%s: the other ranks can't be notified: %s", self._description, unreported
                )
                break
            if not isinstance(outcome, _Shared):
                break
        self._ahead.clear()
        return outcome

    @contextlib.contextmanager
    def _waited(self, step: Step) -> Iterator[None]:
        """Logs and shows the wait in this block."""

        def reason() -> str:
            assert self._barrier is not None
            others = f"rank {self.ranks[0]}" if step.is_by_first else "all ranks of the group"
            return f"{self._barrier.waiting_for or others} {step.action}"

        with console.logged(self._description, reason), self._show_wait(reason):
            yield

    # Collectives, once all ranks have come.

    def _gather(self, value: T) -> list[T]:
        """All ranks' values, on the first rank; elsewhere empty."""
        if self._barrier is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks) if self.is_first else []

        def gather() -> None:
            dist.gather_object(
                value,
                values if self.is_first else None,
                dst=self.ranks[0],
                group=self._process_group,
            )

        self._exchange(gather)
        return values

    def _scatter(self, values: Sequence[T]) -> T:
        """This rank's one of the first rank's values."""
        if self._barrier is None:
            return values[0]
        found: list[Any] = [None]

        def scatter() -> None:
            dist.scatter_object_list(
                found,
                list(values) if self.is_first else None,
                src=self.ranks[0],
                group=self._process_group,
            )

        self._exchange(scatter)
        return cast("T", found[0])

    def _broadcast(self, value: T | None) -> T:
        """The first rank's value."""
        if self._barrier is None:
            return cast("T", value)
        values = [value]
        self._exchange(
            lambda: dist.broadcast_object_list(values, src=self.ranks[0], group=self._process_group)
        )
        return cast("T", values[0])

    def _exchange(self, collective: Callable[[], object]) -> None:
        """Runs a collective in another thread: torch's can't be interrupted, and end late.

        A rank that ends or stops within is named by those that come to the next step.
        """
        assert self._barrier is not None
        on_device = torch_compat.on_current_device()

        def run() -> None:
            with on_device():
                collective()

        deadline = Deadline(self._timeout_s)
        call = Call(run)
        problem: Problem | None = None
        while problem is None:
            try:
                call.result(timeouts.WAIT_LOOK_S)
                return
            except UnansweredError:
                try:
                    outcome = self._barrier.outcome(self._ahead[0])
                except StoreUnansweredError:
                    # The collective may hold the store's connection, as NCCL's first one does.
                    if deadline.passed:
                        raise
                    continue
                if outcome is not None:
                    self._succeeded(_from_json(outcome))
                if deadline.passed:
                    problem = lost(
                        f"the exchange between the ranks did not end within {self._timeout_s:g} s"
                    )
            except RuntimeError as error:
                problem = lost(f"the exchange between the ranks broke off: {error}")
        outcome = self._report(problem)
        if isinstance(outcome, _Shared):
            outcome = Failed({self.rank: problem})
        self._raise(outcome)


def _for_json(settle: _Settle) -> Callable[[Mapping[int, Any], Missing | None], dict[str, Any]]:
    """The same, of what the ranks have sent."""

    def settled(sent: Mapping[int, Any], missing: Missing | None) -> dict[str, Any]:
        values = {
            rank: Problem(**each["problem"]) if "problem" in each else each["value"]
            for rank, each in sent.items()
        }
        outcome = _to_json(settle(values, missing))
        try:
            encode(outcome)
        except PannierError as error:
            outcome = _to_json(error)
        return outcome

    return settled


def _nothing(values: Mapping[int, Any]) -> None:
    """The outcome of a step that has none."""
