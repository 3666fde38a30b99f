"""What ranks write to the store of their process group, and which of it they take for their own's."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from pannier.client.embedded import pg_store
from pannier.client.embedded.pg_store import RankStore, process_start_s
from pannier.common import timeouts
from pannier.wire.errors import DeadlineError
from support.processes.stretch import BOUND_S


def begin(
    store: Any, rank: int, text: str, *, size: int = 4, who: str = "", since: float | None = None
) -> tuple[int, str]:
    return RankStore(rank, timeout_s=BOUND_S, store=store, since=since).begin_incarnation(
        text, size=size, who=who
    )


def uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_first_word_counts_for_all_ranks() -> None:
    store = dist.HashStore()
    found = [begin(store, rank, f"word of {rank}") for rank in (1, 0, 2)]
    assert found == [(1, "word of 1")] * 3
    again = [begin(store, rank, f"again {rank}") for rank in (0, 1, 2)]
    assert again == [(2, "again 0")] * 3


def test_a_rank_that_had_not_come_so_far_joins_the_others_after_a_restart() -> None:
    store = dist.HashStore()
    # Ranks 1 and 3 died before their first save, and 0 began twice: torchrun's store outlives them.
    assert begin(store, 0, "former") == (1, "former")
    assert begin(store, 2, "former") == (1, "former")
    assert begin(store, 0, "second") == (2, "second")
    now = uptime() + 10
    # As it is some seconds later, since processes take their time to start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pg_store, "uptime_s", lambda: now + 5)
        for rank in (1, 0, 2, 3):
            assert begin(store, rank, f"word of {rank}", since=now) == (3, "word of 1")
        # From here on they are in step.
        for rank in (2, 0, 1, 3):
            assert begin(store, rank, f"again {rank}", since=now) == (4, "again 2")


class Elsewhere:
    """Ranks of several machines, each with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self.machine = ""
        monkeypatch.setattr(pg_store, "boot_id", lambda: self.machine)

    def begin(self, rank: int, machine: str, text: str = "", **more: Any) -> tuple[int, str]:
        self.machine = machine
        return begin(self.store, rank, text or f"word of {rank}", **more)


@pytest.mark.parametrize("since", [0.0, 1e9], ids=["an early clock", "a late clock"])
def test_clocks_of_two_machines_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, since: float
) -> None:
    ranks = Elsewhere(monkeypatch)
    monkeypatch.setattr(time, "time", lambda: since)
    before = set(threading.enumerate())
    assert ranks.begin(0, "a", size=4) == (1, "word of 0")
    assert ranks.begin(1, "b", size=4, since=since) == (1, "word of 0")
    assert ranks.begin(2, "a", size=4) == (1, "word of 0")
    assert ranks.begin(3, "c", size=4, since=since) == (1, "word of 0")
    assert ranks.begin(3, "c", size=4, since=since) == (2, "word of 3")
    for rank, machine in enumerate("aba"):
        assert ranks.begin(rank, machine, size=4) == (2, "word of 3")
    # All have asked: no thread polls the store any more.
    for thread in set(threading.enumerate()) - before:
        thread.join(BOUND_S)
        assert not thread.is_alive()


def test_a_rank_of_another_machine_that_ended_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Elsewhere(monkeypatch)
    monkeypatch.setattr(timeouts, "RANK_ANSWER_S", 0.2)
    with pytest.MonkeyPatch.context() as patch:
        # A process that was killed: nothing of it answers.
        patch.setattr(pg_store._Responder, "start", lambda self: None)
        assert ranks.begin(0, "a", "former", who="rank 0 (host node-0)") == (1, "former")
        assert ranks.begin(0, "a", "second") == (2, "second")
    # Both are the same process's, which is waited for once.
    assert ranks.begin(1, "b", since=1.0) == (3, "word of 1")
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "rank 1: rank 0 (host node-0) did not answer within 0.2 s; assuming that the processes of "
        "incarnation 1 in the process group's store have ended"
    ]
    # Rank 0 has counted on, and finds the one that rank 1 began.
    assert ranks.begin(0, "a", since=uptime() + 10) == (3, "word of 1")


def test_an_answer_is_given_while_torch_waits_in_the_store() -> None:
    """As when it sets up a communicator whose first rank is not there yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pg_store, "boot_id", lambda: "a")
        assert begin(store, 0, "word", size=2) == (1, "word")
        waiting = threading.Thread(target=store.get, args=("set by rank 1",), daemon=True)
        waiting.start()
        patch.setattr(pg_store, "boot_id", lambda: "b")
        assert begin(other, 1, "other", size=2) == (1, "word")
        other.set("set by rank 1", "")
        waiting.join(BOUND_S)
        assert not waiting.is_alive()


def test_claims_counts_and_what_is_not_there() -> None:
    here = RankStore(0, timeout_s=BOUND_S, store=dist.HashStore())
    assert here.read("key") is None
    assert here.claim("key", "one") == "one"
    assert here.claim("key", "other") == "one"
    assert here.read("key") == "one"
    assert [here.count("n", more) for more in (0, 1, 2, 0)] == [0, 1, 3, 3]
    assert here.poll(lambda: here.read("key"), BOUND_S) == "one"
    assert here.poll(lambda: here.read("none"), 0.05) is None


def test_a_store_that_fails_is_named(tmp_path: Path) -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    here = RankStore(3, timeout_s=5, store=dist.HashStore())
    here._store = Gone()
    with pytest.raises(DeadlineError, match=r"rank 3 .*store.*Connection reset by peer"):
        here.begin_incarnation("word", size=1)


def test_when_this_process_began() -> None:
    assert uptime() - process_start_s() == pytest.approx(
        time.time() - psutil.Process(os.getpid()).create_time(), abs=1.5
    )
