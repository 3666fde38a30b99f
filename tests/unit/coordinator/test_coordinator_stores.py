"""What the coordinator asks a root for, once for all saves that go there."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.coordinator.stores import Stores
from pannier.storage import StorageError
from pannier.storage.base import UnreachableError, limited
from support.actors.ranks_by_hand import context
from support.processes.stretch import BOUND_S, until
from support.storage.gcs_server import GcsServer

ID = "gs://bucket/run/step-1"


@pytest.fixture
def closed() -> Iterator[socket.socket]:
    """A port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


def of(endpoint: str) -> Stores:
    return Stores(storage_options={"endpoint_url": endpoint, "token": "anon"})


def url(taken: socket.socket) -> str:
    return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("listens", [False, True], ids=["refused", "no answer"])
def test_a_root_that_does_not_answer_is_an_error_soon_for_all_its_saves(
    listens: bool, closed: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is a reason, long enough for it to be known.
    monkeypatch.setattr(timeouts, "STORAGE_CONTACT_S", 2.5 if listens else 5.0)
    if listens:
        closed.listen()

    async def scenario() -> None:
        found = of(url(closed))
        reasons: list[list[str]] = [[], []]

        async def ask(number: int) -> None:
            with limited(retried=reasons[number].append):
                await found.attempt(context(0, ID))

        errors = await asyncio.gather(ask(0), ask(1), return_exceptions=True)
        for error in errors:
            assert isinstance(error, UnreachableError)
            assert "gs://bucket/run can't be reached from this host" in str(error)
            assert ("no answer" if listens else "Cannot connect") in str(error)
        if not listens:
            # Each save gets the reason, also one that came later.
            assert all("Cannot connect" in lines[-1] for lines in reasons)
        # It is asked again for the next save.
        monkeypatch.setattr(timeouts, "STORAGE_CONTACT_S", 0.2)
        with pytest.raises(UnreachableError):
            await found.attempt(context(0, ID))

    asyncio.run(asyncio.wait_for(scenario(), 2 * BOUND_S))


def test_a_root_that_answers_is_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a first answer.
    monkeypatch.setattr(timeouts, "STORAGE_CONTACT_S", 5.0)

    async def scenario(server: GcsServer) -> None:
        found = of(server.url)
        server.fault(kind="status", status=503, times=-1)
        asked = asyncio.ensure_future(found.attempt(context(0, ID)))
        reasons: list[str] = []
        with limited(retried=reasons.append):
            also = asyncio.ensure_future(found.attempt(context(0, ID)))
        given_up = time.monotonic() + timeouts.STORAGE_CONTACT_S + 1
        while not reasons or time.monotonic() < given_up:
            await asyncio.sleep(0.05)
            assert not asked.done()
        server.clear()
        assert (await asked).name == (await also).name

    with GcsServer(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 2 * BOUND_S))


def test_a_root_that_denies_is_judged_by_the_probe(tmp_path: Path) -> None:
    async def scenario(server: GcsServer) -> None:
        server.fault(kind="status", status=403, message="no such right", times=-1)
        with pytest.raises(StorageError, match="no such right"):
            await of(server.url).attempt(context(0, ID))

    with GcsServer(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 2 * BOUND_S))


def test_a_probe_that_failed_after_its_only_save_was_aborted_is_made_again(tmp_path: Path) -> None:
    async def scenario(server: GcsServer) -> None:
        found = of(server.url)
        server.fault(kind="status", status=403, times=-1)
        asked = asyncio.ensure_future(found.contact(context(0, ID)))
        await asyncio.sleep(0)
        (probe,) = found._probes.values()
        asked.cancel()
        await asyncio.wait([asked, probe.task])
        assert asked.cancelled()
        assert probe.failed
        server.clear()
        await found.contact(context(0, ID))

    with GcsServer(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 2 * BOUND_S))


def test_an_incarnation_whose_save_was_aborted_takes_no_number_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be newer than the one that has begun meanwhile, whose saves would all fail."""
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0.01)

    async def scenario(server: GcsServer) -> None:
        found = of(server.url)
        await found.contact(context(0, ID))
        server.fault(kind="status", status=503, times=-1)
        asked = asyncio.ensure_future(found.attempt(context(0, ID, incarnation="aa")))
        await until(lambda: server.faults()[0]["hits"])
        asked.cancel()
        await asyncio.wait([asked])
        server.clear()
        newer = context(0, ID, incarnation="bb")
        attempt = await found.attempt(newer)
        for _ in range(20):  # The first one's requests would be tried again by now.
            await asyncio.sleep(0.02)
            await found.begin(newer, attempt)
        assert attempt.incarnation_number == 1

    with GcsServer(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 2 * BOUND_S))


def test_a_number_that_another_save_waits_for_is_taken(tmp_path: Path) -> None:
    async def scenario(server: GcsServer) -> None:
        found = of(server.url)
        await found.contact(context(0, ID))
        server.fault(kind="status", status=503, times=-1)
        asked = [
            asyncio.ensure_future(found.attempt(context(0, ID, number=number))) for number in (1, 2)
        ]
        await until(lambda: server.faults()[0]["hits"])
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        server.clear()
        assert (await asked[1]).incarnation_number == 1

    with GcsServer(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 2 * BOUND_S))
