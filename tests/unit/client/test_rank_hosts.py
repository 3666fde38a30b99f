import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from torch.distributed import HashStore

from pannier.client.ranks.rank_hosts import RankHosts, RankRecord
from pannier.common import machine


class Hosts(RankHosts):
    """One rank's, on a host of its own choice."""

    def __init__(self, store: HashStore, rank: int, **own: object) -> None:
        super().__init__(rank, store)
        self.own: RankRecord = replace(self.own, first=-1, count=0, **own)  # type: ignore[misc, arg-type]


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_ranks_are_named_by_host_as_far_as_it_is_known(store: HashStore) -> None:
    own = Hosts(store, 0, host="node-0", machine="a")
    Hosts(store, 3, host="node-1", machine="b").register()
    assert own.text([0]) == "rank 0 (host node-0)"
    assert own.text([3, 7, 4]) == "rank 3 (host node-1), ranks [7, 4]"
    assert own.text(range(20, 24)) == "ranks [20, 21, 22, 23]"
    Hosts(store, 4, host="node-1", machine="b").register()
    assert own.text([3, 4]) == "ranks [3, 4] (host node-1)"


def test_a_rank_that_never_called_is_known_by_those_beside_it(store: HashStore) -> None:
    own = RankHosts(0, store)
    own.own = replace(own.own, host="node-0", machine="a", first=0, count=4)  # type: ignore[misc]
    other = RankHosts(5, store)
    other.own = replace(own.own, host="node-1", machine="b", first=4)  # type: ignore[misc]
    other.register()
    assert own.text([1, 3]) == "ranks [1, 3] (host node-0)"
    assert own.text([4, 6, 7]) == "ranks [4, 6, 7] (host node-1)"
    assert own.text([8]) == "rank 8"


def test_what_torchrun_says_counts_only_for_its_own_rank(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert (RankHosts(6, store).own.first, RankHosts(6, store).own.count) == (4, 4)
    assert RankHosts(1, store).own.first == -1
    monkeypatch.setenv("LOCAL_RANK", "")
    assert RankHosts(6, store).own.first == -1


def test_a_process_of_this_machine_that_ended_or_stopped_is_seen(store: HashStore) -> None:
    own = RankHosts(0, store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started_s = psutil.Process(child.pid).create_time() - psutil.boot_time()
        Hosts(store, 1, host="node-0", pid=child.pid, started_s=started_s).register()
        # Another process has its number now.
        Hosts(store, 2, host="node-0", pid=child.pid, started_s=started_s - 9).register()
        # Of another machine.
        Hosts(store, 3, host="node-0", pid=child.pid, machine="b").register()
        assert own.dead(range(4)) == {2: f"its process {child.pid} has ended"}
        child.kill()
        child.wait()
        assert [*own.dead(range(4))] == [1, 2]
        assert own.text([1, 3]) == "rank 1 (host node-0, ended), rank 3 (host node-0)"
    assert machine._exists(1)
