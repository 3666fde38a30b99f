"""Loads as a daemon shows them: whose reports belong together, whom they wait for, and how they end."""

import pytest
from prometheus_client import CollectorRegistry

from pannier.common import timeouts
from pannier.daemon.loads import load_metrics, load_registry, load_state
from pannier.daemon.loads.load_registry import LoadRegistry, UnknownLoadError
from pannier.v1 import load_status_pb2, save_pb2
from pannier.wire.errors import InvalidRequestError
from support.actors.load_reporters import LOADED, READING, ReportingRank

LOADING, DONE, FAILED = (
    load_status_pb2.LOAD_STATE_LOADING,
    load_status_pb2.LOAD_STATE_LOADED,
    load_status_pb2.LOAD_STATE_FAILED,
)


class Clock:
    """An observer's clock that tests move."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (load_registry, load_state):
        monkeypatch.setattr(module, "observer_clock", clock)
    monkeypatch.setattr(timeouts, "STATUS_CACHED_S", 0.0)
    return clock


def test_reports_of_several_ranks_are_one_load(clock: Clock) -> None:
    loads = LoadRegistry(sees_all=True)
    first, second = ReportingRank(0, "a"), ReportingRank(1, "b")
    loads.apply(first())
    [status] = loads.list()
    assert status.waiting_on.text == "rank 1 to call load"
    assert list(status.waiting_on.ranks) == [1]
    loads.apply(second())
    name = loads.list()[0].id
    for rank in (first, second):
        loads.apply(
            rank(
                load="0123-4567-89abcdef",
                phase=READING,
                bytes_total=100,
                bytes={"own spool": 30, "bucket": 20},
                hedges=1,
                waiting_for="node-3 (4 of 812 files, 1.2 GiB left)",
            )
        )
    [status] = loads.list()
    assert status.id == "load-0123456789ab"
    last = status.checkpoint_id.rpartition("/")[2]
    assert loads.find(last) == loads.find(status.checkpoint_id) == loads.find(status.id)
    assert loads.find(name) == loads.find(status.id) == loads.find("/c/step-1")
    assert (status.state, status.group_size, status.checkpoint_id) == (LOADING, 2, "/c/step-1")
    assert (status.bytes_read, status.bytes_total, status.hedges) == (100, 200, 2)
    assert {each.source: each.bytes for each in status.sources} == {"own spool": 60, "bucket": 40}
    assert status.waiting_on.text == "node-3 (4 of 812 files, 1.2 GiB left)"
    assert not status.ranks
    assert [each.rank for each in loads.get(status.id).ranks] == [0, 1]
    loads.apply(first(phase=LOADED, seconds=3.0))
    assert loads.get(status.id).state == LOADING
    loads.apply(second(phase=LOADED, seconds=4.0))
    ended = loads.get(status.id)
    assert (ended.state, ended.seconds, ended.waiting_on.text) == (DONE, 4.0, "")
    assert loads.ended == {DONE: 1}
    assert loads.totals == {"bytes own spool": 60, "bytes bucket": 40, "hedges": 2}
    assert not loads.running


def test_a_rank_that_was_not_seen_is_named_and_then_lost(clock: Clock) -> None:
    loads = LoadRegistry(sees_all=True)
    first, second = ReportingRank(0, "a"), ReportingRank(1, "b")
    loads.apply(first(load="x", phase=READING))
    loads.apply(second(load="x", phase=READING))
    clock.seconds += timeouts.UNRESPONSIVE_S + 1
    loads.apply(first())
    late = timeouts.UNRESPONSIVE_S + 1
    assert (
        loads.get("load-x").waiting_on.text == f"rank 1 (host node-1, last seen {late:.0f} s ago)"
    )
    clock.seconds += timeouts.LOAD_LOST_S
    loads.apply(first())
    loads._check()
    status = loads.get("load-x")
    assert status.state == FAILED
    [failure] = status.failures
    assert (failure.rank, failure.host, failure.kind) == (1, "node-1", save_pb2.FAILURE_KIND_LOST)
    assert "process 101 of rank 1 on host node-1 was last seen" in failure.message
    # It was only cut off.
    loads.apply(second(phase=READING))
    assert loads.get("load-x").state == LOADING


def test_a_stopped_rank_whose_sidecar_reports_it_is_named_but_not_lost(clock: Clock) -> None:
    loads = LoadRegistry(sees_all=True)
    rank = ReportingRank(0, "a", of=1)
    loads.apply(rank(load="x", phase=READING))
    for unseen in range(1, 100, 10):
        clock.seconds += 10
        loads.apply(rank(seconds_since_seen=float(unseen)))
        loads._check()
    status = loads.get("load-x")
    assert status.state == LOADING
    assert status.waiting_on.text == "rank 0 (host node-0, last seen 91 s ago)"


def test_one_failure_on_all_ranks_is_shown_once(clock: Clock) -> None:
    loads = LoadRegistry()
    for number in range(4):
        rank = ReportingRank(number, f"c{number}", of=4)
        loads.apply(rank(load="x", phase=READING))
        failed = rank(phase=load_status_pb2.LOAD_PHASE_FAILED, last_error="rank 3: no such object")
        loads.apply(failed)
    status = loads.get("load-x")
    assert status.state == FAILED
    [failure] = status.failures
    assert failure.message == "rank 3: no such object"
    assert failure.kind == save_pb2.FAILURE_KIND_CLIENT
    assert loads.ended == {FAILED: 1}


def test_a_rank_that_begins_another_load_has_left_the_former_one(clock: Clock) -> None:
    loads = LoadRegistry()
    loads.apply(ReportingRank(0, "a")())
    loads.apply(ReportingRank(1, "b")())
    # The processes were killed and started again.
    loads.apply(ReportingRank(1, "d")())
    again = ReportingRank(0, "c")
    loads.apply(again())
    newest, former = loads.list()
    assert (newest.state, former.state) == (LOADING, FAILED)
    assert "another load" in former.failures[0].message
    assert {each.rank for each in loads.get("/c/step-1").ranks} == {0, 1}
    # A load by itself doesn't belong to it, even at the same place.
    loads.apply(ReportingRank(0, "z", of=1, group="z")())
    assert len(loads.list()) == 3


def test_a_load_has_ended_when_all_hosts_have_reported_their_ranks(clock: Clock) -> None:
    loads = LoadRegistry(sees_all=True)
    first, second = ReportingRank(0, "a"), ReportingRank(1, "b")
    loads.apply(first(load="x", phase=LOADED))
    status = loads.get("load-x")
    assert (status.state, status.waiting_on.text) == (LOADING, "rank 1 to be reported")
    assert not loads.ended
    loads.apply(second(load="x", phase=LOADED))
    assert loads.get("load-x").state == DONE
    assert loads.ended == {DONE: 1}
    # The other host has no sidecar.
    loads.apply(ReportingRank(0, "c")(load="y", phase=LOADED))
    loads._check()
    assert loads.get("load-y").state == LOADING
    clock.seconds += timeouts.LOAD_LOST_S + 1
    loads._check()
    assert loads.get("load-y").state == DONE
    assert loads.ended == {DONE: 2}


def test_a_rank_may_begin_its_next_load_before_others_have_reported_the_end_of_the_former_one(
    clock: Clock,
) -> None:
    loads = LoadRegistry()
    first, second = ReportingRank(0, "a"), ReportingRank(1, "b")
    loads.apply(first(load="model", phase=READING))
    loads.apply(second(load="model", phase=READING))
    loads.apply(first(phase=LOADED))
    third = ReportingRank(0, "c")
    loads.apply(third())
    assert loads.get("load-model").state == LOADING
    loads.apply(third(load="optim"))
    loads.apply(second(phase=LOADED))
    loads.apply(ReportingRank(1, "d")(load="optim", phase=LOADED))
    loads.apply(third(phase=LOADED))
    assert {each.id: each.state for each in loads.list()} == {
        "load-model": DONE,
        "load-optim": DONE,
    }
    assert loads.ended == {DONE: 2}


def test_ids_tell_loads_apart_that_the_group_does_not(clock: Clock) -> None:
    loads = LoadRegistry()
    first, second = ReportingRank(0, "a"), ReportingRank(1, "b")
    loads.apply(first())
    loads.apply(second())
    assert len(loads.list()) == 1
    loads.apply(first(load="one"))
    loads.apply(second(load="two"))
    assert {each.id for each in loads.list()} == {"load-one", "load-two"}
    # A rank that reports late, after its load's id is known and others have ended.
    loads.apply(first(phase=LOADED))
    loads.apply(ReportingRank(1, "c")(load="one", phase=LOADED))
    assert [each.rank for each in loads.get("load-one").ranks] == [0, 1]


def test_a_lost_process_is_named_and_ended_loads_are_forgotten(clock: Clock) -> None:
    loads = LoadRegistry()
    loads.apply(ReportingRank(0, "a", of=1)(load="x"))
    loads.lose("a", "died while it loaded")
    loads.lose("unknown", "died while it loaded")
    assert loads.get("load-x").failures[0].message == (
        "process 100 of rank 0 on host node-0 died while it loaded"
    )
    key = loads.find("load-x")
    for number in range(100):
        rank = ReportingRank(0, f"c{number}", of=1, group=f"c{number}")
        loads.apply(rank(load=f"l{number}", phase=LOADED))
    assert len(loads.list(limit=1000)) <= 65
    assert len(loads.list()) == len(loads._by_call)
    with pytest.raises(UnknownLoadError, match="load-x"):
        loads.get("load-x")
    # As a watch that began before asks.
    forgotten = "this daemon has forgotten load 'load-x': it keeps at most 64 loads that have ended"
    with pytest.raises(UnknownLoadError, match=forgotten):
        loads.status_of(key, "load-x")


def test_reports_without_a_call_or_of_endless_texts_are_refused_or_cut(clock: Clock) -> None:
    loads = LoadRegistry()
    with pytest.raises(InvalidRequestError, match="no call"):
        loads.apply(ReportingRank(0, "")())
    with pytest.raises(InvalidRequestError, match="characters"):
        loads.apply(ReportingRank(0, "a" * 1000)())
    loads.apply(ReportingRank(0, "a")(waiting_for="x" * 100_000, seconds_since_seen=float("nan")))
    [rank] = loads.get("/c/step-1").ranks
    assert len(rank.waiting_for) < 20_000
    assert rank.seconds_since_seen == 0


def test_metrics_have_what_loads_did_by_source_and_outcome(clock: Clock) -> None:
    loads, registry = LoadRegistry(), CollectorRegistry()
    load_metrics.observe_seconds(loads, registry)
    first, second = ReportingRank(0, "a", of=1, group="a"), ReportingRank(0, "b", of=1, group="b")
    loads.apply(first(load="x", bytes={"own spool": 5, "node-2": 7, "node-3": 4}))
    loads.apply(first(phase=LOADED, seconds=3.0, bytes={"own spool": 6, "bucket": 1}))
    loads.apply(second(load="y", retries=3, rejected_blocks=1))

    def value(name: str, **labels: str) -> float:
        families = [*load_metrics.load_families(loads), *load_metrics.read_families(loads)]
        samples = [sample for each in (*families, *registry.collect()) for sample in each.samples]
        [found] = [each.value for each in samples if (each.name, each.labels) == (name, labels)]
        return float(found)

    assert value("pannier_loads") == 1
    assert value("pannier_loads_ended_total", outcome="loaded") == 1
    assert value("pannier_loads_ended_total", outcome="failed") == 0
    assert value("pannier_load_bytes_total", source="own_spool") == 6
    assert value("pannier_load_bytes_total", source="peer") == 11
    assert value("pannier_load_bytes_total", source="bucket") == 1
    assert value("pannier_load_retries_total") == 3
    assert value("pannier_load_hedges_total") == 0
    assert value("pannier_load_rejected_blocks_total") == 1
    assert (value("pannier_load_seconds_count"), value("pannier_load_seconds_sum")) == (1, 3.0)


def test_lists_are_cached_and_an_ended_load_is_rendered_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "STATUS_CACHED_S", 3600.0)
    rendered: list[str] = []
    original = load_state.Load.status

    def status(load: load_state.Load, *, ranks: bool = True) -> load_status_pb2.LoadStatus:
        rendered.append(load.id)
        return original(load, ranks=ranks)

    monkeypatch.setattr(load_state.Load, "status", status)
    loads, rank = LoadRegistry(), ReportingRank(0, "a", of=1)
    loads.apply(rank(load="x", phase=READING))
    for _ in range(3):
        assert loads.list()[0].state == LOADING
    assert len(rendered) == 1
    # Its end is shown at once.
    loads.apply(rank(phase=LOADED))
    for _ in range(3):
        assert loads.list()[0].state == DONE
    assert len(rendered) == 2
