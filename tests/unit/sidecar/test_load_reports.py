"""The sidecar's part in the view of loads: streams that end too soon, and what the coordinator gets of them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pannier.common import timeouts
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.sidecar.restore.load_reports import LoadReports, Sent
from pannier.v1 import load_status_pb2
from pannier.wire.errors import InvalidRequestError, VersionMismatchError
from pannier.wire.version import WIRE_VERSION
from support.actors.load_reporters import LOADED, READING, ReportingRank
from support.processes.stretch import BOUND_S

LOADING, FAILED = load_status_pb2.LOAD_STATE_LOADING, load_status_pb2.LOAD_STATE_FAILED


class Stream:
    """A trainer's stream, that :meth:`end` ends."""

    def __init__(self, *reports: load_status_pb2.LoadReport, version: int = WIRE_VERSION) -> None:
        self._queue: asyncio.Queue[load_status_pb2.ReportRequest | None] = asyncio.Queue()
        for each in reports:
            self.send(each, version)

    def send(self, report: load_status_pb2.LoadReport, version: int = WIRE_VERSION) -> None:
        self._queue.put_nowait(load_status_pb2.ReportRequest(wire_version=version, report=report))

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[load_status_pb2.ReportRequest]:
        while (message := await self._queue.get()) is not None:
            yield message


async def until_failed(registry: LoadRegistry) -> load_status_pb2.LoadStatus:
    with registry.watch() as watch:
        while registry.get("load-x").state != FAILED:
            assert await watch.wait(BOUND_S)
    return registry.get("load-x")


def test_a_stream_that_ends_before_its_load_is_a_dead_process_unless_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        registry = LoadRegistry()
        reports, rank = LoadReports(registry), ReportingRank(3, "a", of=4)
        first = Stream(rank(load="x", phase=READING))
        first.end()
        await reports.follow(first.__aiter__())
        # It connects again at once, as after a fork.
        second = Stream(rank())
        following = asyncio.ensure_future(reports.follow(second.__aiter__()))
        assert reports.idle_s() >= 0
        await asyncio.sleep(3 * timeouts.LOAD_RETURN_S)
        assert reports.idle_s() == 0
        assert registry.get("load-x").state == LOADING
        second.end()
        await following
        failed = await until_failed(registry)
        assert failed.failures[0].message == (
            "process 103 of rank 3 on host node-3 died while it loaded"
        )
        # The end of one that has loaded is no failure.
        other = ReportingRank(0, "b", of=1, group="b")
        ended = Stream(other(load="y", phase=LOADED))
        ended.end()
        await reports.follow(ended.__aiter__())
        await asyncio.sleep(2 * timeouts.LOAD_RETURN_S)
        assert registry.get("load-y").state == load_status_pb2.LOAD_STATE_LOADED

    monkeypatch.setattr(timeouts, "LOAD_RETURN_S", 0.05)
    asyncio.run(main())


def test_streams_of_another_version_or_of_two_calls_are_refused() -> None:
    async def main() -> None:
        reports = LoadReports(LoadRegistry())
        with pytest.raises(VersionMismatchError, match="wire version"):
            await reports.follow(Stream(ReportingRank(0, "a")(), version=1).__aiter__())
        two = Stream(ReportingRank(0, "a")(), ReportingRank(0, "b")())
        with pytest.raises(InvalidRequestError, match="one call"):
            await reports.follow(two.__aiter__())

    asyncio.run(main())


def test_a_job_with_a_token_can_name_no_other() -> None:
    async def main() -> None:
        registry = LoadRegistry()
        report = ReportingRank(0, "a", of=1)(load="x")
        report.job = "theirs"
        stream = Stream(report)
        stream.end()
        await LoadReports(registry, job="ours").follow(stream.__aiter__())
        assert registry.get("load-x").job == "ours"

    asyncio.run(main())


def test_the_coordinator_gets_running_loads_again_and_ended_ones_once() -> None:
    registry, coordinator = LoadRegistry(), LoadRegistry(sees_all=True)
    reports, sent = LoadReports(registry), Sent()
    assert sent.due
    ranks = [ReportingRank(number, f"c{number}") for number in range(2)]
    for rank in ranks:
        registry.apply(rank(load="x", phase=READING, bytes={"bucket": 7}))

    def report() -> list[load_status_pb2.LoadReport]:
        made = list(reports.reports(sent))
        for each in made:
            coordinator.apply(each)
        return made

    assert [list(each.ranks) for each in report()] == [[0, 1]] * 2
    assert not sent.due
    assert [list(each.ranks) for each in report()] == [[], []]
    registry.apply(ranks[0](phase=LOADED))
    assert len(report()) == 2
    assert [each.status.rank for each in report()] == [1]
    registry.lose("c1", "died while it loaded")
    assert len(report()) == 1
    assert report() == []
    assert coordinator.get("load-x").failures == registry.get("load-x").failures
    assert coordinator.get("load-x").bytes_read == 14
    # It was only cut off; and another coordinator gets everything.
    registry.apply(ranks[1](phase=READING))
    assert len(report()) == 1
    assert coordinator.get("load-x").state == LOADING
    registry.apply(ranks[1](phase=LOADED))
    assert len(report()) == 1
    assert report() == []
    assert len(list(reports.reports(Sent()))) == 2
