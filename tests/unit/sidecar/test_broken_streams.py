"""Trainers whose streams break more than once: each time they get all of the time to come back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.sidecar.liveness import TrainerLiveness
from pannier.sidecar.restore.load_reports import LoadReports
from pannier.sidecar.rpc.connections import Connections, Watches
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import RankSave
from pannier.v1 import load_status_pb2, save_pb2, sidecar_pb2
from pannier.wire.object_names import group_name
from pannier.wire.version import WIRE_VERSION
from support.actors.load_reporters import READING, ReportingRank

LOADING, FAILED = load_status_pb2.LOAD_STATE_LOADING, load_status_pb2.LOAD_STATE_FAILED


@pytest.fixture(autouse=True)
def _grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "TRAINER_RETURN_S", 10.0)
    monkeypatch.setattr(timeouts, "LOAD_RETURN_S", 10.0)


class Clock:
    """The running loop's time, which passes only in :meth:`wait`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self._now)

    async def wait(self, seconds: float) -> None:
        self._now += seconds
        for _ in range(5):
            await asyncio.sleep(0)


class Client:
    """Rank 0 of a job, which takes part in a save."""

    def __init__(self) -> None:
        saves = SaveRegistry()
        self.trainers = TrainerLiveness(saves)
        self.connections = Connections(
            saves,
            host="node-0",
            welcome=sidecar_pb2.Welcome,
            render=lambda _: save_pb2.SaveStatus(),
            watches=Watches(saves, lambda: None),
            trainers=self.trainers,
        )
        save = save_pb2.SaveId(job="job", incarnation="inc", group=group_name([0]), number=1)
        self.rank: RankSave = saves.enter(
            sidecar_pb2.SaveContext(
                save=save, checkpoint_id="/c/1", ranks=[0], world_size=1, rank=0, host="node-0"
            )
        )

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Callable[..., None]]:
        """What sends pings; the stream breaks in the end."""
        fields: dict[str, Any] = {"job": "job", "incarnation": "inc", "rank": 0, "client": "c"}
        request = sidecar_pb2.ConnectRequest(
            wire_version=WIRE_VERSION, world_size=1, pid=42, **fields
        )

        async def receive() -> None:
            async with aclosing(self.connections.connect(request)) as responses:
                async for _ in responses:
                    pass

        stream = asyncio.ensure_future(receive())
        yield lambda **more: self.connections.ping(sidecar_pb2.PingRequest(**fields, **more))
        stream.cancel()
        await asyncio.wait([stream])

    @property
    def deaths(self) -> list[str]:
        return [each.death for each in self.trainers.report()]


def test_a_client_that_breaks_twice_has_all_its_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock, client = Clock(monkeypatch), Client()
        async with client.connected():
            await clock.wait(1)
        await clock.wait(2)
        async with client.connected():
            await clock.wait(7.5)
        await clock.wait(9)
        assert (client.rank.failure, client.deaths) == (None, [""])
        await clock.wait(2)
        assert client.rank.failure is not None
        assert client.rank.failure.kind == save_pb2.FAILURE_KIND_LOST
        assert "process 42 of rank 0 on host node-0 is gone: its" in client.rank.failure.message
        assert client.deaths == ["the process 42 of rank 0 on host node-0"]

    asyncio.run(main())


def test_a_client_that_broke_once_and_then_closed_is_not_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        clock, client = Clock(monkeypatch), Client()
        async with client.connected():
            await clock.wait(1)
        await clock.wait(2)
        async with client.connected() as ping:
            await clock.wait(1)
            ping(closing=True)
        await clock.wait(30)
        assert client.deaths == []

    asyncio.run(main())


def test_a_rank_that_is_expected_again_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock, client = Clock(monkeypatch), Client()
        client.connections.expect(client.rank, 10)
        await clock.wait(9)
        client.connections.expect(client.rank, 10)
        await clock.wait(2)
        assert client.rank.failure is not None
        never = "rank 0 on host node-0 sent data but never connected to the sidecar within 10 s"
        assert never in client.rank.failure.message

    asyncio.run(main())


def test_nothing_fails_once_the_sidecar_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock, client = Clock(monkeypatch), Client()
        client.connections.expect(client.rank, 10)
        client.connections.close()
        await clock.wait(30)
        client.connections.expect(client.rank, 10)
        await clock.wait(30)
        assert client.rank.failure is None

    asyncio.run(main())


def test_a_load_that_breaks_twice_has_all_its_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        registry, clock, rank = LoadRegistry(), Clock(monkeypatch), ReportingRank(0, "a", of=1)
        reports = LoadReports(registry)

        @asynccontextmanager
        async def connected() -> AsyncIterator[None]:
            async def stream() -> AsyncIterator[load_status_pb2.ReportRequest]:
                yield load_status_pb2.ReportRequest(
                    wire_version=WIRE_VERSION, report=rank(load="x", phase=READING)
                )
                await asyncio.Future[None]()

            following = asyncio.ensure_future(reports.follow(stream()))
            yield
            following.cancel()
            await asyncio.wait([following])

        async with connected():
            await clock.wait(1)
        await clock.wait(2)
        async with connected():
            await clock.wait(7.5)
        await clock.wait(9)
        assert registry.get("load-x").state == LOADING
        await clock.wait(2)
        assert registry.get("load-x").state == FAILED

    asyncio.run(main())
