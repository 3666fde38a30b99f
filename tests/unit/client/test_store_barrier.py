"""Barriers of ranks in a store of this process: what counts as progress, and by when a step ends."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from pannier.client.ranks import group_store, store_barrier
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.ranks.store_barrier import Missing, Step, StoreBarrier

CALL = Step("call", "to call")


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_barrier, "time", clock)
    monkeypatch.setattr(group_store, "time", clock)
    return clock


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def barrier_of(store: dist.HashStore, rank: int, *, timeout_s: float = 10) -> StoreBarrier:
    return StoreBarrier(
        store,
        [0, 1],
        RankHosts(rank, store),
        name="test",
        number=1,
        description="test",
        timeout_s=timeout_s,
    )


def settle(values: Mapping[int, Any], missing: Missing | None) -> Any:
    return None if missing is None else (missing.ranks, missing.waited_s)


@pytest.mark.usefixtures("clock")
def test_a_rank_that_shows_nothing_is_waited_for_no_longer_than_the_timeout(
    store: dist.HashStore,
) -> None:
    ranks, waited_s = barrier_of(store, 0).arrive(CALL, "here", settle)
    assert ranks == [1]
    assert 10 <= waited_s < 11


@pytest.mark.usefixtures("clock")
def test_progress_extends_the_wait_once_for_each_change(store: dist.HashStore) -> None:
    other = barrier_of(store, 1)
    other.show_progress(CALL, "half")
    ranks, waited_s = barrier_of(store, 0).arrive(CALL, "here", settle)
    assert ranks == [1]
    assert 11 <= waited_s < 12
