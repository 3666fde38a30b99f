"""Reads of storage on another host, some of which hang."""

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pannier.client.restore.stored_reads import StoredReads
from pannier.common import timeouts
from pannier.wire.errors import IntegrityError, StorageError
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S

CONTENT = bytes(range(100))
URL = "gs://b/step"


class Storage:
    """Gives each request the next of its answers, once there is one."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, int]] = []
        self.answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        self.requests.append((name, offset, size))
        answer = self.answers.get(timeout=BOUND_S)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def hedged() -> list[bool]:
    """One for each second request."""
    return []


@pytest.fixture
def reads(storage: Storage, hedged: list[bool]) -> Iterator[StoredReads]:
    made = StoredReads(storage.read_range, URL, lambda: hedged.append(True))
    yield made
    made.close()
    for _ in storage.requests:
        storage.answers.put(CONTENT)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def read(reads: StoredReads, size: int = len(CONTENT)) -> bytes:
    target = bytearray(size)
    reads.read_into("f", 7, memoryview(target))
    return bytes(target)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STORED_FIRST_STALL_S", 0)


def begun(pool: ThreadPoolExecutor, reads: StoredReads, storage: Storage) -> "Future[bytes]":
    """A read, of which both requests are under way."""
    before = len(storage.requests)
    reading = pool.submit(read, reads)
    wait_until(lambda: len(storage.requests) == before + 2)
    return reading


@pytest.mark.usefixtures("_impatient")
def test_a_request_that_hangs_is_made_a_second_time_and_no_third(
    reads: StoredReads, storage: Storage, hedged: list[bool], pool: ThreadPoolExecutor
) -> None:
    reading = begun(pool, reads, storage)
    assert storage.requests == [("f", 7, 100)] * 2
    assert not reading.done()
    storage.answers.put(CONTENT)
    assert reading.result(BOUND_S) == CONTENT
    assert hedged == [True]


@pytest.mark.usefixtures("_impatient")
def test_an_error_counts_when_no_other_request_is_under_way(
    reads: StoredReads, storage: Storage, pool: ThreadPoolExecutor
) -> None:
    reading = begun(pool, reads, storage)
    storage.answers.put(StorageError("reset"))
    storage.answers.put(CONTENT)
    assert reading.result(BOUND_S) == CONTENT
    reading = begun(pool, reads, storage)
    storage.answers.put(StorageError("reset"))
    storage.answers.put(StorageError("gone"))
    with pytest.raises(StorageError, match="gone"):
        reading.result(BOUND_S)


@pytest.mark.usefixtures("_impatient")
def test_a_wrong_answer_counts_as_an_error(
    reads: StoredReads, storage: Storage, pool: ThreadPoolExecutor
) -> None:
    def check(content: bytes | memoryview) -> None:
        if content != CONTENT:
            raise IntegrityError("other bytes")

    target = memoryview(bytearray(100))
    reading = pool.submit(reads.read_into, "f", 0, target, check)
    wait_until(lambda: len(storage.requests) == 2)
    storage.answers.put(b"x" * 100)
    storage.answers.put(CONTENT)
    reading.result(BOUND_S)
    assert target == CONTENT


def test_what_takes_long_is_measured_by_the_median_of_requests_of_like_sizes(
    reads: StoredReads,
    storage: Storage,
    hedged: list[bool],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "STORED_FIRST_STALL_S", 10 * BOUND_S)
    monkeypatch.setattr(timeouts, "STORED_STALL_S", 0)
    for _ in range(5):
        storage.answers.put(CONTENT)
        assert read(reads) == CONTENT
    assert not hedged
    # Four times nearly nothing.
    reading = begun(pool, reads, storage)
    wait_until(lambda: hedged == [True])
    storage.answers.put(CONTENT)
    assert reading.result(BOUND_S) == CONTENT
    storage.answers.put(CONTENT)
    # A larger one may take longer.
    assert reads._long_s(1 << 20) == 10 * BOUND_S


@pytest.mark.usefixtures("_impatient")
def test_its_end_ends_reads_whose_requests_hang(
    reads: StoredReads, storage: Storage, pool: ThreadPoolExecutor
) -> None:
    reading = begun(pool, reads, storage)
    reads.close()
    with pytest.raises(StorageError, match=f"reading {URL}/f was cancelled: the load has ended"):
        reading.result(BOUND_S)
    with pytest.raises(StorageError, match="was cancelled: the load has ended"):
        read(reads)
    assert len(storage.requests) == 2
