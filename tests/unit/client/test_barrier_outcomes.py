"""Barriers of many ranks, which are threads here, in one store; and how a load waits beside a collective."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from traceback import FrameSummary, StackSummary
from types import CodeType
from typing import Any

import pytest
from torch.distributed import HashStore

from pannier.client.ranks.load_ranks import LoadRanks
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.ranks.rank_problem import Problem
from pannier.client.ranks.store_barrier import (
    Missing,
    Step,
    StoreBarrier,
)
from pannier.client.ranks.store_calls import StoreFailedError, StoreUnansweredError
from pannier.common import timeouts
from support.processes.stretch import BOUND_S, stretched

FIRST = Step("first", "to begin")
SECOND = Step("second", "to go on", is_by_first=True)


def settle(values: Mapping[int, Any], missing: Missing | None) -> Any:
    return dict(values), None if missing is None else missing.ranks


def barrier(store: HashStore, rank: int, size: int, timeout_s: float = BOUND_S) -> StoreBarrier:
    hosts = RankHosts(rank, store)
    ranks = range(size)
    return StoreBarrier(store, ranks, hosts, name="test", description="test", timeout_s=timeout_s)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as made:
        yield made


def on_all(
    pool: ThreadPoolExecutor, ranks: Sequence[int], call: Callable[[int], Any]
) -> dict[int, Any]:
    return dict(zip(ranks, pool.map(call, ranks), strict=True))


def test_all_ranks_get_one_outcome_of_all_values(pool: ThreadPoolExecutor) -> None:
    store, size = HashStore(), 32

    def call(rank: int) -> Any:
        own = barrier(store, rank, size)
        found = own.arrive(FIRST, rank * rank, settle)
        assert found == ({each: each * each for each in range(size)}, None)
        return own.arrive(SECOND, rank, settle)

    for _ in range(2):
        # At the second step the first rank alone is waited for.
        assert set(map(str, on_all(pool, range(size), call).values())) == {"({0: 0}, None)"}


def test_those_that_do_not_come_are_named_and_a_late_one_gets_the_same(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_LOOK_S", stretched(0.1))
    store, size, late = HashStore(), 24, {3, 17}

    def call(rank: int) -> Any:
        return barrier(store, rank, size, stretched(0.3)).arrive(FIRST, rank, settle)

    here = [rank for rank in range(size) if rank not in late]
    expected = ({rank: rank for rank in here}, sorted(late))
    outcomes = on_all(pool, here, call)
    assert all(outcome == expected for outcome in outcomes.values())
    assert call(3) == expected


def test_a_failure_ends_a_step_and_gives_others_time_for_theirs(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    failing = threading.Event()

    def call(rank: int) -> Any:
        own = barrier(store, rank, 3)
        if rank == 2:
            return own.fail(FIRST, "failed", settle, grace_s=BOUND_S)
        assert failing.wait(BOUND_S) or rank == 0
        return own.arrive(FIRST, rank, settle)

    failing.set()
    assert set(map(str, on_all(pool, range(3), call).values())) == {
        "({0: 0, 1: 1, 2: 'failed'}, None)"
    }
    # Without time for them, it has only what is there.
    assert barrier(store, 2, 3).fail(FIRST, "again", settle, grace_s=0) == (
        {2: "again"},
        [0, 1],
    )


def test_what_a_call_leaves_goes_with_the_next(pool: ThreadPoolExecutor) -> None:
    store = HashStore()

    def call(rank: int) -> None:
        own = barrier(store, rank, 4)
        own.arrive(FIRST, rank, settle)
        own.forget_previous([FIRST, SECOND])
        own.show_progress(FIRST, "half")
        own.arrive(SECOND, rank, settle)

    sizes = []
    for _ in range(5):
        on_all(pool, range(4), call)
        sizes.append(store.num_keys())
    assert len(set(sizes[1:])) == 1


def test_a_store_that_does_not_answer_is_named_with_the_rank_that_serves_it() -> None:
    store, held = HashStore(), threading.Event()
    own = barrier(store, 1, 2, stretched(0.2))

    class Stuck:
        """As that of a stopped process."""

        def check(self, _: Sequence[str]) -> bool:
            return held.wait(BOUND_S)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    own._store = Stuck()
    with pytest.raises(
        StoreFailedError, match=r"store, which rank 0.* or its launcher serves, has"
    ):
        own.arrive(FIRST, 1, settle)
    held.set()


class Frame(FrameSummary):
    """A frame that refers to its code, as those of newer Pythons."""

    _code: CodeType


def test_a_failure_reaches_other_ranks_with_its_stack_though_frames_refer_to_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = traceback.extract_tb

    def extract(*arguments: Any) -> StackSummary:
        frames = []
        for each in original(*arguments):
            frame = Frame(each.filename, each.lineno, each.name, line=each.line)
            frame._code = extract.__code__
            frames.append(frame)
        return StackSummary.from_list(frames)

    monkeypatch.setattr(traceback, "extract_tb", extract)

    def fail() -> None:
        raise ValueError("no plan")

    try:
        fail()
    except ValueError as error:
        problem = Problem.of(error)
    values, _ = barrier(HashStore(), 0, 1).fail(FIRST, problem, settle, grace_s=0)
    stack = values[0].stack
    assert stack[-1].name == "fail"
    assert stack[-1].line == 'raise ValueError("no plan")'


class BusyStore:
    """A store that answers no look until ``free``, or fails them with an error."""

    def __init__(self, error: str = "") -> None:
        self.free = threading.Event()
        self.looks: list[float] = []
        self.seen_twice = threading.Event()
        self._error = error

    def check(self, _: Sequence[str]) -> bool:
        self.looks.append(time.monotonic())
        if self._error:
            raise RuntimeError(self._error)
        if len(self.looks) > 1:
            self.seen_twice.set()
        self.free.wait(BOUND_S)
        return False


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "WAIT_LOOK_S", 0.02)
    monkeypatch.setattr(timeouts, "ANSWER_SLACK_S", 0.05)


def exchange(store: BusyStore, collective: Callable[[], object], timeout_s: float) -> None:
    ranks = LoadRanks(None, alone=True, timeout_s=timeout_s, description="test")
    ranks._barrier = barrier(HashStore(), 1, 2)
    ranks._barrier._store = store
    try:
        ranks._exchange(collective)
    finally:
        store.free.set()


@pytest.mark.usefixtures("quick_looks")
def test_a_store_that_is_busy_does_not_end_a_load_whose_collective_runs() -> None:
    """As with NCCL, whose first collective waits for a key on the same connection."""
    store = BusyStore()
    exchange(store, lambda: store.seen_twice.wait(BOUND_S), BOUND_S)
    assert store.seen_twice.is_set()


@pytest.mark.usefixtures("quick_looks")
def test_a_store_that_never_answers_ends_a_collective_at_the_deadline() -> None:
    store, timeout_s = BusyStore(), stretched(0.3)
    began = time.monotonic()
    with pytest.raises(StoreUnansweredError, match=r"store, which rank 0.* has not answered"):
        exchange(store, lambda: store.free.wait(BOUND_S), timeout_s)
    assert time.monotonic() - began >= timeout_s


@pytest.mark.usefixtures("quick_looks")
def test_a_store_whose_server_has_ended_ends_a_collective_at_once() -> None:
    store = BusyStore("Connection reset by peer")
    with pytest.raises(StoreFailedError, match=r"rank 0.* can't be used: Connection reset by peer"):
        exchange(store, lambda: store.free.wait(BOUND_S), BOUND_S)
    assert len(store.looks) == 1
