"""What ranks write to the store of their process group, and which of it they take for their own's."""

import os
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from pannier.client import notes
from pannier.client.notes import Notes, born
from pannier.wire.errors import DeadlineError


def test_the_first_word_counts_for_all_ranks() -> None:
    store = dist.HashStore()
    found = [Notes(rank, timeout_s=5, store=store).begin(f"word of {rank}") for rank in (1, 0, 2)]
    assert found == [(1, "word of 1")] * 3
    again = [Notes(rank, timeout_s=5, store=store).begin(f"again {rank}") for rank in (0, 1, 2)]
    assert again == [(2, "again 0")] * 3


def test_a_rank_that_had_not_come_so_far_joins_the_others_after_a_restart() -> None:
    store = dist.HashStore()
    long_ago = time.time() - 60

    def begin(rank: int, text: str, since: float) -> tuple[int, str]:
        return Notes(rank, timeout_s=5, store=store, since=since).begin(text)

    # Ranks 1 and 3 died before their first save, and 0 began twice: torchrun's store outlives them.
    assert begin(0, "former", long_ago) == (1, "former")
    assert begin(2, "former", long_ago) == (1, "former")
    assert begin(0, "second", long_ago) == (2, "second")
    now = time.time() + 10
    # As it is some seconds later, since processes take their time to start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 5)
        assert begin(1, "word", now) == (3, "word")
        assert begin(0, "other", now) == (3, "word")
        assert begin(2, "other", now) == (3, "word")
        assert begin(3, "other", now) == (3, "word")


def test_clocks_of_machines_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = dist.HashStore(), time.time()
    assert Notes(0, timeout_s=5, store=store).begin("word") == (1, "word")
    # Its clock is fast: this process seems to be younger than what the other one wrote.
    monkeypatch.setattr(notes, "kernel", lambda: "another machine")
    assert Notes(1, timeout_s=5, store=store, since=now + 30).begin("own") == (1, "word")


def test_claims_counts_and_what_is_not_there() -> None:
    here = Notes(0, timeout_s=5, store=dist.HashStore())
    assert here.read("key") is None
    assert here.claim("key", "one") == "one"
    assert here.claim("key", "other") == "one"
    assert here.read("key") == "one"
    assert [here.count("n", more) for more in (0, 1, 2, 0)] == [0, 1, 3, 3]
    assert here.await_one(lambda: here.read("key"), 5) == "one"
    assert here.await_one(lambda: here.read("none"), 0.05) is None


def test_a_store_that_fails_is_named(tmp_path: Path) -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    here = Notes(3, timeout_s=5, store=dist.HashStore())
    here._store = Gone()
    with pytest.raises(DeadlineError, match=r"rank 3 .*store.*Connection reset by peer"):
        here.begin("word")


def test_when_this_process_began() -> None:
    assert born() == pytest.approx(psutil.Process(os.getpid()).create_time(), abs=1.5)
