"""What ``pannier watch`` shows of a save under way: bars, rates, and who is late."""

import pytest
from rich.console import Console

from pannier.cli.bars import ALL, rows_of
from pannier.cli.load_view import LoadProgress
from pannier.cli.progress import SaveProgress
from pannier.common import timeouts
from pannier.v1 import load_status_pb2, save_pb2

MIB = 1 << 20


class Watched:
    """A save of ``ranks`` ranks, four per host, with ``size`` bytes each, on a clock of its own."""

    def __init__(self, ranks: int, size: int = 1000 * MIB) -> None:
        self.now = 100.0
        self.progress = SaveProgress(lambda: self.now)
        self.save = save_pb2.SaveStatus(
            id="job/inc/g1/7",
            checkpoint_id="gs://bucket/run/step-100",
            state=save_pb2.SAVE_STATE_UPLOADING,
            group_size=ranks,
        )
        for rank in range(ranks):
            self.save.ranks.add(
                rank=rank,
                host=f"node-{rank // 4}",
                phase=save_pb2.RANK_PHASE_INGESTED,
                bytes_staged=size,
            )
            self.save.waiting_on.ranks.append(rank)
        self.save.waiting_on.text = "all of them"
        self.save.waiting_on.deadline_s = 60
        self.progress.update(self.save)

    def upload(self, *ranks: int, seconds: int) -> None:
        """100 MiB per second and rank of ``ranks``."""
        for _ in range(seconds):
            self.now += 1
            for rank in ranks:
                self.save.ranks[rank].bytes_uploaded += 100 * MIB
            self.progress.update(self.save)

    def lines(self, *, width: int = 80, height: int = 40) -> list[str]:
        console = Console(width=width)
        with console.capture() as captured:
            console.print(self.progress.render(height))
        out = [line.rstrip() for line in captured.get().splitlines()]
        assert all(len(line) <= width for line in out), out
        return out


def test_each_rank_has_a_bar_with_percent_rate_and_time_left() -> None:
    watched = Watched(2)
    watched.upload(0, 1, seconds=4)
    head, place, first, _, whole = watched.lines()
    assert (head, place) == ("step-100  UPLOADING  job/inc/g1/7", "gs://bucket/run/step-100")
    assert first.startswith("rank 0  node-0 INGESTED ━")
    assert first.endswith(" 40 % 100.0 MiB/s 6 s left")
    assert whole.startswith("all ")
    assert whole.endswith(" 40 % 200.0 MiB/s 6 s left")


def test_above_sixteen_ranks_each_host_has_a_bar() -> None:
    assert len(Watched(16).lines()) == 2 + 16 + 1
    watched = Watched(20)
    watched.upload(*range(20), seconds=2)
    _, _, *hosts, _ = watched.lines()
    assert [line.split()[0] for line in hosts] == [f"node-{host}" for host in range(5)]
    assert all("400.0 MiB/s" in line for line in hosts)


def test_hosts_of_one_domain_have_a_bar_each() -> None:
    watched = Watched(20)
    # The bars of the names that the status had before are removed.
    for rank in watched.save.ranks:
        rank.host = f"ip-10-0-1-{rank.rank // 4}.us-west-2.compute.internal"
    watched.upload(*range(20), seconds=2)
    _, _, *hosts, _ = watched.lines()
    assert [line.split()[0] for line in hosts] == [f"ip-10-0-1-{host}" for host in range(5)]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("10.0.1.{}", "10.0.1.{}"),
        ("ip-10-0-1-{}.us-west-2.compute.internal", "ip-10-0-1-{}"),
        ("node-pool-of-the-training-cluster-{}.internal", "…he-training-cluster-{}"),
        ("trainer.us-west-{}.compute.internal", "…st-{}.compute.internal"),
        ("trainer-{}-of-the-pool.of-eight.us-west-2.internal", "trainer-{}-of-the-pool"),
        ("node.pool-{}.us-west-2.compute.internal", "node.pool-{}.us-west-2.compute.internal"),
    ],
)
def test_labels_of_hosts_are_short_where_they_still_differ(name: str, label: str) -> None:
    ranks = [save_pb2.RankStatus(rank=rank, host=name.format(rank // 4)) for rank in range(20)]
    assert list(rows_of(ranks)) == [*(label.format(host) for host in range(5)), ALL]


def test_a_load_of_which_little_is_read_is_at_0_percent() -> None:
    progress = LoadProgress()
    load = load_status_pb2.LoadStatus(
        id="load-1234", state=load_status_pb2.LOAD_STATE_LOADING, bytes_total=100, bytes_read=5
    )
    progress.update(load)
    assert progress.line() == "load-1234 LOADING: 0 % read"


def test_a_low_terminal_shows_those_that_are_behind() -> None:
    watched = Watched(40)
    watched.upload(*range(36), seconds=3)
    _, _, *hosts, _, more = watched.lines(height=10)
    assert [line.split()[0] for line in hosts] == ["node-9", "node-0"]
    assert more == "and 8 more, at 30 % and above"


def test_only_what_makes_no_progress_is_waited_for() -> None:
    watched = Watched(2)
    assert timeouts.UNRESPONSIVE_S > 2
    watched.upload(0, seconds=2)
    assert not watched.progress.late()
    watched.upload(0, seconds=int(timeouts.UNRESPONSIVE_S))
    assert watched.progress.late() == "rank 1 (host node-0, not seen yet)"
    assert watched.lines()[-1].startswith("waiting for rank 1 (host node-0, not seen yet), at most")
    assert watched.progress.line().endswith("waiting for ranks [1]")
    # Its rate is forgotten, not kept.
    assert watched.lines()[3].endswith(" 0 %")
    watched.upload(1, seconds=1)
    assert not watched.progress.late()
    assert watched.progress.line().endswith("40 % uploaded")


def test_a_rank_that_was_not_seen_before_the_watch_began_is_late_at_once() -> None:
    watched = Watched(2)
    watched.save.ranks[1].seconds_since_seen = 60
    progress = SaveProgress(lambda: watched.now)
    progress.update(watched.save)
    assert progress.late() == "rank 1 (host node-0, last seen 60 s ago)"


def test_a_rank_on_another_host_is_late_though_this_sidecar_does_not_list_it() -> None:
    watched = Watched(2)
    watched.save.waiting_on.ranks[:] = [7]
    watched.save.waiting_on.text = "rank 7 (not seen yet)"
    watched.upload(0, 1, seconds=int(timeouts.UNRESPONSIVE_S) + 1)
    assert watched.progress.late() == "rank 7 (not seen yet)"


def test_storage_that_does_not_respond_is_named_at_once() -> None:
    watched = Watched(1)
    watched.save.waiting_on.ClearField("ranks")
    watched.save.waiting_on.text = "storage: 503"
    watched.progress.update(watched.save)
    assert watched.lines()[-1] == "waiting for storage: 503, at most 60 s more"
    assert watched.progress.line().endswith("waiting for storage: 503")


def test_ranks_without_data_are_whole_when_they_are_durable() -> None:
    watched = Watched(1, size=0)
    assert "%" not in watched.lines()[2]
    watched.save.ranks[0].phase = save_pb2.RANK_PHASE_DURABLE
    watched.progress.update(watched.save)
    assert watched.lines()[2].endswith("100 %")


def test_what_another_host_has_is_a_line_below_the_bars() -> None:
    watched = Watched(2)
    assert not any("replicated" in line for line in watched.lines())
    watched.save.ranks[0].replica_host = "node-1"
    watched.progress.update(watched.save)
    assert "replicated 0 of 2 ranks" in watched.lines()
    watched.save.replicated_ranks = 2
    watched.progress.update(watched.save)
    assert "2 of 2 replicated" in watched.progress.line()
