"""Barriers of many ranks, which are threads here, in one store; and how a load waits beside a collective."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from pannier.client.ranks.group_store import StoreFailedError, StoreUnansweredError, encode
from pannier.client.ranks.load_ranks import LoadRanks
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.ranks.rank_problem import Failed, Problem
from pannier.client.ranks.store_barrier import Missing, Step, StoreBarrier
from pannier.common import timeouts
from pannier.wire.errors import InvalidRequestError
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S, stretched

FIRST = Step("first", "to begin")
SECOND = Step("second", "to go on", is_by_first=True)


def settle(values: Mapping[int, Any], missing: Missing | None) -> Any:
    here = [[rank, values[rank]] for rank in sorted(values)]
    return [here, None if missing is None else missing.ranks]


def barrier(
    store: HashStore, rank: int, size: int, timeout_s: float = BOUND_S, number: int = 1
) -> StoreBarrier:
    return StoreBarrier(
        store,
        range(size),
        RankHosts(rank, store),
        name="test",
        number=number,
        description="test",
        timeout_s=timeout_s,
    )


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

    def call(rank: int, number: int) -> Any:
        own = barrier(store, rank, size, number=number)
        found = own.arrive(FIRST, rank * rank, settle)
        assert found == [[[each, each * each] for each in range(size)], None]
        return own.arrive(SECOND, rank, settle)

    for number in (1, 2):
        # At the second step the first rank alone is waited for.
        outcomes = on_all(pool, range(size), partial(call, number=number))
        assert set(map(str, outcomes.values())) == {"[[[0, 0]], None]"}


def test_those_that_do_not_come_are_named_and_a_late_one_gets_the_same(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_LOOK_S", stretched(0.1))
    store, size, late = HashStore(), 24, {3, 17}

    def call(rank: int, timeout_s: float = BOUND_S) -> Any:
        return barrier(store, rank, size, timeout_s).arrive(FIRST, rank, settle)

    here = [rank for rank in range(size) if rank not in late]
    expected = [[[rank, rank] for rank in here], sorted(late)]
    *waiting, last = here
    outcomes = [pool.submit(call, rank) for rank in waiting]
    wait_until(lambda: store.check([f"test/1/first/rank/{rank}" for rank in waiting]))
    # The last of them waits for the shortest time.
    assert call(last, stretched(5)) == expected
    assert all(outcome.result(BOUND_S) == expected for outcome in outcomes)
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
        "[[[0, 0], [1, 1], [2, 'failed']], None]"
    }
    # Without time for them, it has only what is there.
    assert barrier(store, 2, 3, number=2).fail(FIRST, "again", settle, grace_s=0) == [
        [[2, "again"]],
        [0, 1],
    ]


def test_what_a_call_leaves_goes_with_the_next(pool: ThreadPoolExecutor) -> None:
    store = HashStore()

    def call(rank: int, number: int) -> None:
        own = barrier(store, rank, 4, number=number)
        own.arrive(FIRST, rank, settle)
        own.forget([FIRST, SECOND], range(1, number))
        own.show_progress(FIRST, "half")
        own.arrive(SECOND, rank, settle)

    sizes = []
    for number in range(1, 6):
        on_all(pool, range(4), partial(call, number=number))
        sizes.append(store.num_keys())
    assert len(set(sizes[1:])) == 1


def test_a_store_that_does_not_answer_is_named_with_the_rank_that_serves_it() -> None:
    store, held = HashStore(), threading.Event()
    own = barrier(store, 1, 2, stretched(0.2))

    class Stuck:
        """As that of a stopped process."""

        def check(self, _: Sequence[str]) -> bool:
            return held.wait(BOUND_S)

        def set(self, *_: object) -> None:
            self.check([])

    own._store._store = cast(Any, Stuck())
    with pytest.raises(
        StoreFailedError, match=r"store, which rank 0.* or its launcher serves, has"
    ):
        own.arrive(FIRST, 1, settle)
    held.set()


@pytest.mark.parametrize("size", [64, 4096])
def test_errors_of_many_ranks_with_long_texts_are_one_small_outcome(size: int) -> None:
    problems = {rank: Problem.of(ValueError(f"{rank}: {'x' * 100_000}")) for rank in range(size)}
    sent = {rank: Problem(**json.loads(encode(each.to_json()))) for rank, each in problems.items()}
    assert all(len(encode(each.to_json())) < 2500 for each in problems.values())
    content = encode(Failed(sent).to_json())
    # torch's store closes the connection above 8 MiB, and takes long for megabytes.
    assert len(content) < 2 << 20
    error = Failed.from_json(json.loads(content)).error({7: ValueError("own")})
    assert list(error.failures) == list(range(size))
    assert str(error).startswith("rank 0: ValueError: 0: xxx")
    assert "more bytes, which that rank's own error has" in str(error)
    assert len(str(error)) < 10_000
    assert str(error.failures[7][0]) == "own"


def test_a_value_that_the_store_would_not_take_is_refused_before_it_is_sent() -> None:
    own = barrier(HashStore(), 0, 1)
    with pytest.raises(
        InvalidRequestError, match=r"a value of 8388\d\d\d bytes, which begins with"
    ):
        own.arrive(FIRST, "x" * (8 << 20), settle)
    assert own.arrive(FIRST, "small", settle) == [[[0, "small"]], None]


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
    ranks._barrier._store._store = cast(Any, store)
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
