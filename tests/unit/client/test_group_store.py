"""How ranks agree on their start in the process group's store, whatever earlier ranks have left there."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from pannier.client.engine import engine
from pannier.client.ranks import group_store
from pannier.client.ranks.group_store import GroupStore, StartError, StoreFailedError
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.common import machine
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S, stretched


class Ranks:
    """Ranks that are threads here, each on a machine of its choice, and of starts that end."""

    def __init__(
        self, store: Any, size: int = 3, joined: list[dict[str, object]] | None = None
    ) -> None:
        self._store = store
        self._size = size
        self._joined = [{} for _ in range(size)] if joined is None else joined
        self.is_current = True

    def start_again(self) -> "Ranks":
        """Ends these; the next ones have the same store, in other processes."""
        self.is_current = False
        return Ranks(self._store, self._size)

    def form_another_group(self) -> "Ranks":
        """The next process group of the same processes, with the same store."""
        self.is_current = False
        return Ranks(self._store, self._size, self._joined)

    def join(self, rank: int, machine: str, *, timeout_s: float = BOUND_S, **own: Any) -> str:
        hosts = RankHosts(rank)
        hosts.own = replace(hosts.own, host=f"node-{machine}", machine=machine, **own)  # type: ignore[misc]
        agreement = group_store._Agreement(
            hosts,
            self._store,
            size=self._size,
            is_current=lambda: self.is_current,
            joined_by=self._joined[rank],
        )
        return agreement.join(hosts, description=f"start of rank {rank}", timeout_s=timeout_s)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_the_first_rank_to_come_decides_and_confirms_only_until_all_have_joined(
    store: Any,
) -> None:
    before = set(engine().running)
    ranks = Ranks(store)
    assert len({ranks.join(rank, place) for rank, place in ((1, "a"), (0, "b"), (2, "a"))}) == 1
    wait_until(lambda: engine().running <= before)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as made:
        yield made


def read(store: GroupStore, key: str) -> Any:
    return store.run(lambda call: call.get(key))


def awaits_confirmation(waiting: Future[str], *, store: Any, asks: Callable[[str], bool]) -> None:
    here = GroupStore(store, RankHosts(9), description="test", timeout_s=BOUND_S)
    claim = read(here, "start")
    wait_until(lambda: waiting.done() or asks(claim["id"]))
    assert not waiting.done()


def asked(store: Any) -> Callable[[str], bool]:
    return lambda start_id: store.add(f"{start_id}/asked", 0) > 0


def test_a_rank_waits_for_the_one_that_claimed_the_start_however_long_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    store = dist.HashStore()
    going_on = threading.Event()
    run = group_store._Confirming._run

    async def stopped(confirming: group_store._Confirming) -> None:
        await engine().in_thread(lambda: going_on.wait(BOUND_S))
        await run(confirming)

    monkeypatch.setattr(group_store._Confirming, "_run", stopped)
    ranks = Ranks(store)
    first = ranks.join(0, "a")
    others = [pool.submit(ranks.join, rank, "b") for rank in (1, 2)]
    for each in others:
        awaits_confirmation(each, store=store, asks=asked(store))
    with pytest.raises(StartError, match=r"still waiting for rank 0 \(host node-a\) to confirm"):
        ranks.join(1, "b", timeout_s=stretched(4))
    assert not any(each.done() for each in others)
    going_on.set()
    assert [each.result(BOUND_S) for each in others] == [first, first]


def test_a_claim_that_ended_ranks_have_left_is_not_joined_and_the_same_rank_replaces_it(
    pool: ThreadPoolExecutor, store: Any
) -> None:
    former = Ranks(store)
    left = former.join(0, "a")
    # Rank 2 died before its first call.
    assert former.join(1, "b") == left
    ranks = former.start_again()
    # On another machine than rank 0's, it can't know.
    early = pool.submit(ranks.join, 2, "c")
    started = ranks.join(0, "a")
    assert started != left
    assert early.result(BOUND_S) == started
    assert ranks.join(1, "b") == started


def test_a_rank_that_sees_that_the_claiming_process_has_ended_replaces_the_claim() -> None:
    store = dist.HashStore()
    former = Ranks(store)
    here = machine.machine_id()
    left = former.join(0, here, started_s=1.0)
    ranks = former.start_again()
    started = ranks.join(1, here)
    assert started != left
    assert ranks.join(0, here) == started


def test_a_claim_of_a_rank_that_there_is_no_more_or_that_this_process_joined_before_is_an_earlier_one() -> (
    None
):
    store = dist.HashStore()
    large = Ranks(store, size=8)
    left = large.join(7, "a")
    large.is_current = False
    small = Ranks(store, size=2)
    # Rank 7 never comes again.
    assert (first := small.join(1, "b")) != left
    assert small.join(0, "a") == first
    # A new process group of the same processes.
    again = small.form_another_group()
    assert (second := again.join(0, "a")) != first
    assert again.join(1, "b") == second


def test_a_claim_is_confirmed_while_torch_waits_in_the_store() -> None:
    """As when it sets up a communicator whose first rank is not there yet."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
    first = Ranks(store, size=2).join(0, "a")
    waiting = threading.Thread(target=store.get, args=("set by rank 1",), daemon=True)
    waiting.start()
    assert Ranks(other, size=2).join(1, "b") == first
    other.set("set by rank 1", "")
    waiting.join(BOUND_S)
    assert not waiting.is_alive()


def test_calls_are_counted_by_kind_and_group_and_what_they_left_is_removed_once() -> None:
    start = group_store.Start("x")
    assert [start.next_number("0", "load") for _ in range(3)] == [1, 2, 3]
    assert start.next_number("1", "load") == start.next_number("0", "latest") == 1
    start.skip_to("0", "load", 7)
    start.skip_to("0", "load", 5)
    assert start.next_number("0", "load") == 8
    assert list(start.take_done("0", "load", 3)) == [1, 2]
    assert list(start.take_done("0", "load", 5)) == [3, 4]


def test_values_claims_counts_and_what_is_not_there(store: Any) -> None:
    here = GroupStore(store, RankHosts(0), description="test", timeout_s=BOUND_S)
    assert read(here, "key") is None
    assert here.claim("key", ["one"]) == ["one"]
    assert here.claim("key", ["other"]) == ["one"]
    assert here.run(lambda call: call.claim("key", 2, instead_of=["other"])) == ["one"]
    assert here.run(lambda call: call.claim("key", 2, instead_of=["one"])) == 2
    assert read(here, "key") == 2
    counts = [here.run(lambda call, more=more: call.count("n", more)) for more in (0, 1, 2, 0)]  # type: ignore[misc]
    assert counts == [0, 1, 3, 3]
    assert here.await_value("none", 0.05) is None
    keys = [f"many/{number}" for number in range(600)]
    for number, key in enumerate(keys):
        here.put(key, number)
    assert here.run(lambda call: call.get_all(keys)) == list(range(600))


def test_a_store_that_fails_is_named() -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    here = GroupStore(Gone(), RankHosts(3), description="incarnation", timeout_s=5)  # type: ignore[arg-type]
    with pytest.raises(StoreFailedError, match=r"store, which rank 0.*Connection reset by peer"):
        read(here, "key")


def test_when_this_process_began() -> None:
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert uptime_s - machine.process_start_s() == pytest.approx(
        time.time() - psutil.Process(os.getpid()).create_time(), abs=1.5
    )
