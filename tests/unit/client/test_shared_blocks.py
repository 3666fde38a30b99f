"""Blocks that come through sidecars, or don't."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pannier.client.loading.range_reader import Range, Read, read_ranges
from pannier.client.restore.fetched_blocks import FetchedBlocks
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import ReadCounts, combine
from pannier.client.restore.restore_plan import (
    BlockSource,
    BlockTable,
    LoadName,
    RankPlan,
    SharedBlock,
)
from pannier.client.restore.shared_blocks import FetchedBlock, SharedBlocks
from pannier.client.restore.sources import Sources
from pannier.client.restore.stored_reads import StoredReads
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.v1 import restore_pb2
from pannier.wire.errors import IntegrityError, StorageError, UnavailableError
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S
from support.storage.shared_files import Block, SharedFiles

CONTENT = b"seven bytes and more"
URL = "gs://b/step"


class Storage:
    """Answers when it may."""

    is_local = False

    def __init__(self) -> None:
        self.content = CONTENT
        self.error: StorageError | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.reads = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        target[:] = self.read_range(name, offset, len(target))

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        self.reads += 1
        assert self.may_answer.wait(BOUND_S)
        if self.error is not None:
            raise self.error
        return self.content[offset : offset + size]


@pytest.fixture
def files(tmp_path: Path) -> SharedFiles:
    (tmp_path / "f").write_bytes(CONTENT)
    return SharedFiles(tmp_path)


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def progress() -> LoadProgress:
    return LoadProgress()


@pytest.fixture
def blocks(files: SharedFiles, storage: Storage, progress: LoadProgress) -> Iterator[SharedBlocks]:
    made = SharedBlocks(files, StoredReads(storage.read_range, URL), URL, progress)
    yield made
    storage.may_answer.set()
    made.close()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FETCH_POLL_S", 0.005)
    monkeypatch.setattr(timeouts, "FETCH_STALL_S", 0.02)


def read(blocks: SharedBlocks) -> tuple[bytes, str]:
    memory = bytearray(len(CONTENT))
    source = blocks.read("f", 0, memoryview(memory))
    return bytes(memory), source


def test_a_block_comes_from_where_its_sidecar_had_it(
    blocks: SharedBlocks, files: SharedFiles, storage: Storage
) -> None:
    assert read(blocks) == (CONTENT, "node-7")
    assert (files.released, storage.reads) == (1, 0)


@pytest.mark.parametrize("error", [UnavailableError("gone away"), IntegrityError("wrong")])
def test_a_block_that_fails_is_read_from_storage_and_counted(
    blocks: SharedBlocks,
    files: SharedFiles,
    progress: LoadProgress,
    caplog: pytest.LogCaptureFixture,
    error: UnavailableError | IntegrityError,
) -> None:
    files.error = error
    for _ in range(3):
        assert read(blocks) == (CONTENT, "bucket")
    report = progress.report().status
    is_wrong = isinstance(error, IntegrityError)
    assert (report.rejected_blocks, report.retries) == ((3, 0) if is_wrong else (0, 3))
    # Once for all.
    assert caplog.text.count(str(error)) == 1


def test_a_block_that_is_damaged_in_storage_too_is_not_used(
    blocks: SharedBlocks, files: SharedFiles, storage: Storage
) -> None:
    files.error = UnavailableError("it is damaged")
    storage.content = CONTENT.upper()
    with pytest.raises(IntegrityError, match=r"bytes 0 to 20 of gs://b/step/f have crc32c"):
        read(blocks)


@pytest.mark.usefixtures("_impatient")
def test_a_sidecar_that_stalls_is_not_waited_for_until_it_answers_again(
    blocks: SharedBlocks, files: SharedFiles, progress: LoadProgress
) -> None:
    files.wait = True
    assert read(blocks) == (CONTENT, "bucket")
    assert progress.report().status.hedges == 1
    # No request before there is a sign of life.
    assert read(blocks) == (CONTENT, "bucket")
    assert len(files.requests) == 1
    files.answer(CONTENT)
    assert files.released == 1
    files.wait = False
    assert read(blocks) == (CONTENT, "node-7")


class ComesAfterLooks(Future[FetchedBlock]):
    """Has its block as soon as it was looked at so often."""

    def __init__(self, looks: int, block: FetchedBlock) -> None:
        super().__init__()
        self._looks = looks
        self._block = block

    def done(self) -> bool:
        was_done = super().done()
        self._looks -= 1
        if not self._looks:
            self.set_result(self._block)
        return was_done


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_block_that_comes_while_the_stored_one_is_taken_is_let_go(
    blocks: SharedBlocks, files: SharedFiles, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    request = ComesAfterLooks(looks, Block(files, CONTENT))
    monkeypatch.setattr(files, "request", lambda name, block: request)
    assert read(blocks)[0] == CONTENT
    assert files.released == 1


@pytest.mark.usefixtures("_impatient")
def test_the_first_answer_counts(
    blocks: SharedBlocks, files: SharedFiles, storage: Storage
) -> None:
    files.wait = True
    storage.may_answer.clear()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, blocks)
        wait_until(lambda: storage.reads)
        files.answer(CONTENT)
        assert reading.result(BOUND_S) == (CONTENT, "node-7")


@pytest.mark.usefixtures("_impatient")
def test_what_a_block_waits_for_has_a_name_after_a_while(
    blocks: SharedBlocks,
    files: SharedFiles,
    storage: Storage,
    progress: LoadProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waiting_for() -> str:
        return progress.report().status.waiting_for

    files.wait = True
    storage.may_answer.clear()
    progress.expect({"f": len(CONTENT), "g": 1 << 30, "h": 7})
    progress.add_read("own spool", "h", 7)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, blocks)
        # Then storage is asked, too.
        wait_until(lambda: storage.reads)
        assert waiting_for() == ""
        monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0)
        assert waiting_for() == "bucket (2 of 3 files, 1.0 GiB left)"
        files.answer(CONTENT)
        assert reading.result(BOUND_S) == (CONTENT, "node-7")
        assert waiting_for() == ""
        monkeypatch.setattr(timeouts, "FETCH_STALL_S", 10 * BOUND_S)
        reading = pool.submit(read, blocks)
        wait_until(lambda: files.pending)
        assert waiting_for() == "node-7 (2 of 3 files, 1.0 GiB left)"
        files.answer(CONTENT)
        assert reading.result(BOUND_S) == (CONTENT, "node-7")


@pytest.mark.usefixtures("_impatient")
def test_a_stalled_sidecar_is_waited_for_when_storage_fails(
    blocks: SharedBlocks, files: SharedFiles, storage: Storage
) -> None:
    files.wait = True
    storage.error = StorageError("no storage today")
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, blocks)
        wait_until(lambda: storage.reads)
        files.answer(CONTENT)
        assert reading.result(BOUND_S) == (CONTENT, "node-7")
        files.error = UnavailableError("nor a sidecar")
        with pytest.raises(StorageError, match="no storage today"):
            read(blocks)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("error", [None, UnavailableError("gone away")])
def test_its_end_ends_reads_of_storage_that_never_answers(
    blocks: SharedBlocks, files: SharedFiles, storage: Storage, error: UnavailableError | None
) -> None:
    # The sidecar stalls, or fails.
    files.wait, files.error = error is None, error
    storage.may_answer.clear()
    with ThreadPoolExecutor() as pool:
        memories = [bytearray(len(CONTENT)) for _ in range(12)]
        reading = [pool.submit(blocks.read, "f", 0, memoryview(each)) for each in memories]
        wait_until(lambda: storage.reads)
        blocks.close()
        for each in reading:
            with pytest.raises(StorageError, match=r"reading .*/f was cancelled: the load"):
                each.result(BOUND_S)
    storage.may_answer.set()
    with pytest.raises(StorageError, match="was cancelled: the load has ended"):
        read(blocks)
    assert not any(map(any, memories))


class DamagedFile:
    """As a local file whose content is another save's by now."""

    def read_parts(self, parts: object, cache: object) -> None:
        raise IntegrityError("its blocks have other checksums")


@pytest.mark.parametrize("near", [True, False])
def test_an_interrupt_ends_a_load_whose_nearest_copy_fails_while_storage_does_not_answer(
    files: SharedFiles,
    storage: Storage,
    progress: LoadProgress,
    request: pytest.FixtureRequest,
    near: bool,
) -> None:
    files.error = UnavailableError("it was killed")
    storage.may_answer.clear()
    request.addfinalizer(storage.may_answer.set)
    local: Any = {"f": DamagedFile()} if near else {}
    sources = Sources(storage, URL, local, progress, None if near else files)
    assert sources.fills_targets("f", 0, len(CONTENT))
    target = bytearray(len(CONTENT))

    def press() -> None:
        wait_until(lambda: storage.reads)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        list(
            read_ranges(
                sources,
                [Read(Range("f", 0, len(CONTENT)), lambda _: None, memoryview(target))],
                threads=2,
                memory_bytes=1,
                cancel=sources.cancel,
            )
        )
    presser.join(BOUND_S)
    storage.may_answer.set()
    assert not any(target)


class LivelyFiles(SharedFiles):
    """Shows a sign of life with each look."""

    def message_count(self) -> int:
        self.signs += 1
        return self.signs


@pytest.mark.usefixtures("_impatient")
def test_a_sidecar_that_shows_that_it_is_alive_is_waited_for(
    files: SharedFiles, storage: Storage, progress: LoadProgress
) -> None:
    lively = LivelyFiles(files.directory, wait=True)
    blocks = SharedBlocks(lively, StoredReads(storage.read_range, URL), URL, progress)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, blocks)
        # Many times as many polls as a sidecar may be quiet for.
        wait_until(lambda: lively.signs > 20)
        assert not reading.done()
        lively.answer(CONTENT)
        assert reading.result(BOUND_S) == (CONTENT, "node-7")
    assert storage.reads == 0
    blocks.close()


def test_its_end_ends_reads_that_are_under_way(
    blocks: SharedBlocks, files: SharedFiles, storage: Storage
) -> None:
    files.wait = True
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read, blocks)
        wait_until(lambda: files.pending)
        blocks.close()
        with pytest.raises(StorageError, match="was cancelled: the load has ended"):
            reading.result(BOUND_S)
    assert storage.reads == 0


def test_the_result_names_hosts_and_the_slowest_rank() -> None:
    counts = {rank: ReadCounts(seconds=rank + 1.0, host=f"node-{rank}") for rank in range(3)}
    counts[0].files.update({"own spool": 760, "node-3": 40, "bucket": 4})
    counts[1].files.update({"node-3": 8, "node-2": 1})
    counts[2].bytes.update({"own spool": 3 << 30})
    result = str(combine("gs://b/step", counts))
    assert result == (
        "LoadResult: 813 files of all ranks: 760 own host's spool, 48 node-3, 1 node-2, 4 storage; 1.0 GiB/s; "
        "slowest rank 2 (node-2)"
    )


def test_what_it_took_the_sidecar_to_get_a_block_counts_to_the_load(
    progress: LoadProgress, tmp_path: Path
) -> None:
    channel = SidecarChannel(f"unix://{tmp_path}/s.sock")
    plan = RankPlan(hosts=(), own=None, files={})
    stream = FetchedBlocks(channel, BlockTable(plan), LoadName("l", "gs://b/s", "", 0), progress)
    place = SharedBlock(0, 0, 0, 9, None, BlockSource((), None, 0, 0))
    wanted: Future[FetchedBlock] = Future()
    stream._pending[1] = place, wanted
    stream._answer(restore_pb2.FetchedBlock(id=1, rejected=1, failed=2, hedged=3, error="none"))
    with pytest.raises(UnavailableError, match="none"):
        wanted.result()
    report = progress.report().status
    assert (report.rejected_blocks, report.retries, report.hedges) == (1, 2, 3)
    stream.close()
