"""One block from several sources: the first good one counts, slow and wrong ones cost time only."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import crc32c
import pytest

from pannier.common import timeouts
from pannier.sidecar.restore.block_fetcher import BlockFetcher, SourceRequest
from pannier.wire.errors import IntegrityError, PannierError, StorageError
from support.processes.stretch import BOUND_S, until

DATA = b"block" * 1000
SUM = crc32c.crc32c(DATA)


@dataclass
class Place:
    """A source that does what a test says."""

    host: str = ""
    kind: str = "storage"
    shows_life: bool = False
    answer: bytes | Exception = DATA
    gate: asyncio.Event | None = None
    """It answers when that is set."""
    requests: list[SourceRequest] = field(default_factory=list)
    cancelled: int = 0
    successes: int = 0
    reported: list[PannierError | None] = field(default_factory=list)

    async def read(self, request: SourceRequest) -> Sequence[bytes]:
        self.requests.append(request)
        request.retries += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer[:7], self.answer[7:]]

    def succeeded(self) -> None:
        self.successes += 1

    def failed(self, error: PannierError | None) -> None:
        self.reported.append(error)


@pytest.fixture(autouse=True)
def _never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls isn't a source that does."""
    for name in ("BLOCK_STALL_S", "BLOCK_FIRST_STALL_S", "BLOCK_SLOW_S"):
        monkeypatch.setattr(timeouts, name, BOUND_S)


@pytest.fixture
def peers_stall_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_STALL_S", 0.02)


async def fetch(*places: Place, expected: int | None = SUM) -> tuple[str, int, int, int]:
    """The host that it came from, and what was rejected, failed and hedged."""
    found = await BlockFetcher(1).fetch(places, len(DATA), expected, "block 3 of x")
    assert b"".join(found.pieces) == DATA
    assert found.crc32c == SUM
    assert found.retries == sum(len(place.requests) for place in places)
    return found.source, found.rejected, found.failed, found.hedged


def test_the_first_source_that_has_it_is_asked_alone() -> None:
    first, second = Place("node-1"), Place()
    assert asyncio.run(fetch(first, second)) == ("node-1", 0, 0, 0)
    assert not second.requests


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (b"wrong" * 1000, (1, 0)),
        (DATA[:-1], (1, 0)),
        (StorageError("it is down"), (0, 1)),
        (OSError(5, "input/output error"), (0, 1)),
    ],
)
def test_a_wrong_block_or_an_error_is_followed_by_the_next_source(
    answer: bytes | Exception, counts: tuple[int, int]
) -> None:
    first, second = Place("node-1", answer=answer), Place()
    assert asyncio.run(fetch(first, second)) == ("", *counts, 0)
    (reported,) = first.reported
    assert isinstance(reported, IntegrityError if counts[0] else StorageError)
    # A wrong block that came whole is no success, either.
    assert (first.successes, second.successes) == (0, 1)


def test_when_all_sources_fail_the_error_has_what_each_said() -> None:
    places = Place("node-1", answer=StorageError("it is down")), Place(answer=b"short")
    with pytest.raises(
        IntegrityError,
        match=r"block 3 of x could not be read: it is down; block 3 of x has 5 bytes from storage",
    ):
        asyncio.run(fetch(*places))


@pytest.mark.parametrize(("host", "where"), [("node-1", "node-1"), ("", "storage")])
def test_the_error_of_a_wrong_block_names_its_source_and_both_checksums(
    host: str, where: str
) -> None:
    wrong = b"wrong" * 1000
    sums = f"has crc32c {crc32c.crc32c(wrong):08x} from {where}, the receipt has {SUM:08x}"
    with pytest.raises(IntegrityError, match=sums):
        asyncio.run(fetch(Place(host, answer=wrong)))


def test_a_block_without_a_known_checksum_is_taken_as_storage_has_it() -> None:
    assert asyncio.run(fetch(Place(), expected=None)) == ("", 0, 0, 0)


@pytest.mark.usefixtures("peers_stall_soon")
def test_a_source_that_shows_no_life_is_hedged_and_the_faster_answer_counts() -> None:
    async def main() -> None:
        stuck = Place("node-1", kind="peer", shows_life=True, gate=asyncio.Event())
        assert await fetch(stuck, Place()) == ("", 0, 0, 1)
        assert stuck.cancelled == 1
        assert stuck.reported == [None]

    asyncio.run(main())


@pytest.mark.usefixtures("peers_stall_soon")
def test_the_slow_source_counts_when_it_is_the_first_to_answer_after_all() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        slow = Place("node-1", kind="peer", shows_life=True, gate=gate)
        slower = Place(gate=asyncio.Event())
        running = asyncio.ensure_future(fetch(slow, slower))
        await until(lambda: slower.requests)
        gate.set()
        assert await running == ("node-1", 0, 0, 1)
        assert slower.cancelled == 1

    asyncio.run(main())


def test_a_peer_that_shows_life_is_left_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_STALL_S", 1.0)
    monkeypatch.setattr(timeouts, "BLOCK_SLOW_S", 15.0)
    fetcher, busy = BlockFetcher(1), Place("node-1", kind="peer", shows_life=True)
    request = SourceRequest()
    assert fetcher._due(busy, request) == request.seen + timeouts.BLOCK_STALL_S
    request.seen += 10
    assert fetcher._due(busy, request) == request.seen + timeouts.BLOCK_STALL_S
    request.seen += 10
    assert fetcher._due(busy, request) == request.began + timeouts.BLOCK_SLOW_S


def test_the_last_source_is_asked_a_second_time_when_a_request_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_STALL_S", 0.02)
    monkeypatch.setattr(timeouts, "BLOCK_FIRST_STALL_S", 0.02)

    async def main() -> None:
        gate = asyncio.Event()
        storage = Place(gate=gate)
        running = asyncio.ensure_future(fetch(storage))
        await until(lambda: len(storage.requests) == 2)
        gate.set()
        assert await running == ("", 0, 0, 1)
        assert len(storage.requests) == 2

    asyncio.run(main())


@pytest.mark.usefixtures("peers_stall_soon")
def test_after_storage_has_failed_it_is_asked_again_and_not_the_slow_peer() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        slow = Place("node-1", kind="peer", shows_life=True, gate=gate)
        storage = Place(answer=StorageError("503"))
        running = asyncio.ensure_future(fetch(slow, storage))
        await until(lambda: len(storage.requests) == 2)
        assert len(slow.requests) == 1
        gate.set()
        assert await running == ("node-1", 0, 2, 2)

    asyncio.run(main())


@pytest.mark.usefixtures("peers_stall_soon")
def test_no_more_than_two_requests_are_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_FIRST_STALL_S", 0.02)

    async def main() -> None:
        gate = asyncio.Event()
        peers = [
            Place(f"node-{number}", kind="peer", shows_life=True, gate=asyncio.Event())
            for number in range(3)
        ]
        storage = Place(gate=gate)
        running = asyncio.ensure_future(fetch(*peers, storage))
        # The oldest one ends first.
        await until(lambda: storage.requests and peers[1].cancelled)
        assert peers[0].cancelled == 1
        await until(lambda: len(storage.requests) == 2 and peers[2].cancelled)
        assert storage.cancelled == 0
        gate.set()
        assert await running == ("", 0, 0, 4)

    asyncio.run(main())


@pytest.mark.usefixtures("peers_stall_soon")
def test_without_memory_for_a_second_request_the_slow_one_ends_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "BLOCK_FIRST_STALL_S", 0.02)

    async def main() -> None:
        gate = asyncio.Event()
        fetcher = BlockFetcher(1)
        peers = [
            Place(f"node-{number}", kind="peer", shows_life=True, gate=asyncio.Event())
            for number in range(2)
        ]
        stores = [Place(gate=gate), Place(gate=gate)]
        first = asyncio.ensure_future(fetcher.fetch([peers[0], stores[0]], len(DATA), SUM, "a"))
        await until(lambda: len(stores[0].requests) == 2)
        assert fetcher._spare == 0
        second = asyncio.ensure_future(fetcher.fetch([peers[1], stores[1]], len(DATA), SUM, "b"))
        await until(lambda: peers[1].cancelled and len(stores[1].requests) == 2)
        # Storage, too: its first request ended before the second.
        await until(lambda: stores[1].cancelled == 1)
        gate.set()
        found = [await first, await second]
        assert [each.hedged for each in found] == [2, 2]
        assert fetcher._spare == 1

    asyncio.run(main())


def test_storage_that_asks_for_less_load_gets_no_second_request() -> None:
    request = SourceRequest()
    assert BlockFetcher(1)._due(Place(), request) == request.began + timeouts.BLOCK_FIRST_STALL_S
    request.patient = True
    assert BlockFetcher(1)._due(Place(), request) == math.inf


def test_what_takes_long_is_measured_by_the_median_of_its_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        fetcher = BlockFetcher(1)
        source = Place("node-1", kind="spool")
        for _ in range(5):
            await fetcher.fetch([source], len(DATA), SUM, "block")
        request = SourceRequest()
        assert fetcher._due(source, request) == request.began + timeouts.BLOCK_STALL_S
        monkeypatch.setattr(timeouts, "BLOCK_STALL_S", 1.0)
        fetcher._durations["spool"].extend([3.0] * 64)
        assert fetcher._due(source, request) == request.began + 12.0
        monkeypatch.setattr(timeouts, "BLOCK_STALL_S", 20.0)
        assert fetcher._due(source, request) == request.began + 20.0

    asyncio.run(main())


@pytest.mark.usefixtures("peers_stall_soon")
def test_a_cancelled_fetch_ends_all_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        peer = Place("node-1", kind="peer", shows_life=True, gate=asyncio.Event())
        places = [peer, Place(gate=asyncio.Event())]
        fetcher = BlockFetcher(1)
        running = asyncio.ensure_future(fetcher.fetch(places, len(DATA), SUM, "block"))
        await until(lambda: places[1].requests)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [place.cancelled for place in places] == [1, 1]
        assert fetcher._spare == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert not caplog.records
