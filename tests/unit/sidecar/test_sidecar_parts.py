"""The sidecar's parts alone: config, spool, upload slots, phases of a rank, checksums of parts."""

import asyncio
import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import crc32c
import pytest

from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import Phase, RankSave
from pannier.sidecar.spool.data_file import DataFile, SpoolSource
from pannier.sidecar.spool.spool import KEPT_S, Spool
from pannier.sidecar.upload.concurrency import MOST, UploadSlots
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import chunk_codec, errors, object_names
from pannier.wire.chunk_codec import ReceivedChunk
from support.processes.daemons import memory_directory

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    made = memory_directory()
    yield made
    shutil.rmtree(made)


# Config.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "nonsense"}, "--address"),
        ({"coordinator": "host:99999"}, "--coordinator"),
        ({"listen": "unix://relative"}, "--listen"),
        ({"memory": 1000}, "--memory 1000 is too little"),
        ({"spool_budget": 0}, "--spool-budget"),
        ({"grace_s": 0.0}, "--grace"),
        ({"idle_exit_s": -1.0}, "--idle-exit"),
        ({"host": ""}, "--host"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"coordinator": "host:1", "spool": Path("/spool"), **settings}
    with pytest.raises(errors.ConfigurationError, match=message):
        SidecarConfig(**fields)  # type: ignore[arg-type]


# Spool.


def test_space_is_reserved_and_private(memory: Path) -> None:
    spool = Spool(memory / "spool")
    slab = spool.take("job", 3 * MIB + 1)
    status = slab.path.stat()
    assert status.st_blocks * 512 >= 3 * MIB + 1
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    assert spool.reserved == slab.capacity == 3 * MIB + 4096
    spool.close()
    assert not slab.path.exists()


def test_slabs_are_used_again_where_they_fit(memory: Path) -> None:
    spool = Spool(memory / "spool")
    large, small = spool.take("job", 64 * MIB), spool.take("job", 2 * MIB)
    spool.give(large)
    spool.give(small)
    # The small one is extended; the large one waits for a large file.
    assert spool.take("job", 3 * MIB) is small
    assert small.capacity == 3 * MIB
    assert spool.take("job", 100) is not large
    assert spool.take("job", 60 * MIB) is large
    spool.close()


def test_slabs_never_pass_between_jobs(memory: Path) -> None:
    spool = Spool(memory / "spool")
    slab = spool.take("job", MIB)
    os.pwrite(slab.fd, b"secret", 0)
    spool.give(slab)
    other = spool.take("other", MIB)
    assert other is not slab
    assert os.pread(other.fd, 6, 0) == bytes(6)
    spool.close()


def test_free_slabs_make_room_before_the_budget_is_full(memory: Path) -> None:
    spool = Spool(memory / "spool", budget=8 * MIB)
    for job in ("a", "b"):
        spool.give(spool.take(job, 4 * MIB))
    assert spool.reserved == 8 * MIB
    held = spool.take("c", 4 * MIB)
    assert spool.reserved == 8 * MIB
    with pytest.raises(errors.BusyError, match=f"{6 * MIB} bytes needed"):
        spool.take("c", 6 * MIB)
    assert spool.take("c", 4 * MIB) is not held
    with pytest.raises(errors.BusyError, match="0 free of its budget"):
        spool.take("c", 1)
    spool.close()


def test_a_refused_slab_is_not_lost(memory: Path) -> None:
    spool = Spool(memory / "spool", budget=4 * MIB)
    spool.give(spool.take("job", 3 * MIB))
    with pytest.raises(errors.BusyError):
        spool.take("job", 6 * MIB)
    assert spool.take("job", 4 * MIB).capacity == 4 * MIB
    spool.close()


def test_space_of_a_job_that_went_away_is_given_back(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("pannier.sidecar.spool.spool.time.monotonic", lambda: now[0])
    spool = Spool(memory / "spool")
    spool.give(spool.take("job", MIB))
    spool.trim({"job"})
    now[0] += KEPT_S + 1
    spool.trim({"job"})
    assert spool.reserved == MIB
    now[0] += KEPT_S / 2
    spool.trim(set())
    assert spool.reserved == MIB
    now[0] += KEPT_S
    spool.trim(set())
    assert spool.reserved == 0
    assert not list(spool.directory.glob("*.data"))
    spool.close()


def test_a_spool_that_others_may_write_is_refused(memory: Path) -> None:
    (memory / "spool").mkdir()
    (memory / "spool").chmod(0o777)
    with pytest.raises(errors.ConfigurationError, match="others could write there"):
        Spool(memory / "spool")


def test_a_spool_that_is_a_file_is_refused(memory: Path) -> None:
    (memory / "spool").write_text("x")
    with pytest.raises(errors.ConfigurationError, match="can't be used"):
        Spool(memory / "spool")


# Data files.


def test_readers_wait_for_exactly_what_they_need(memory: Path) -> None:
    async def read_while_it_fills() -> None:
        spool = Spool(memory / "spool")
        loop = asyncio.get_running_loop()
        file = DataFile("f", 10, spool.take("job", 10), label="f", loop=loop)
        source = SpoolSource(file)
        writer = object()
        file.begin(writer, lambda: None)
        early = asyncio.create_task(source.read(0, 4))
        late = asyncio.create_task(source.read(2, 8))
        whole = asyncio.create_task(source.crc32c())

        def append(offset: int, data: bytes) -> None:
            chunk = ReceivedChunk(offset, crc32c.crc32c(data), memoryview(data))
            file.append(writer, chunk)

        await asyncio.to_thread(append, 0, b"abcd")
        assert await asyncio.wait_for(early, 5) == b"abcd"
        assert not late.done()
        await asyncio.to_thread(append, 4, b"efghij")
        assert await asyncio.wait_for(late, 5) == b"cdefghij"
        assert await asyncio.wait_for(whole, 5) == crc32c.crc32c(b"abcdefghij")
        spool.close()

    asyncio.run(read_while_it_fills())


def test_readers_of_a_released_file_are_told(memory: Path) -> None:
    async def release_while_it_is_read() -> None:
        spool = Spool(memory / "spool")
        loop = asyncio.get_running_loop()
        file = DataFile("f", 10, spool.take("job", 10), label="file f", loop=loop)
        cut = []
        file.begin(object(), lambda: cut.append(1))
        reading = asyncio.create_task(SpoolSource(file).read(0, 4))
        await asyncio.sleep(0)
        slab = await asyncio.to_thread(file.release)
        assert slab is not None
        assert file.release() is None
        assert cut == [1]
        with pytest.raises(errors.UnavailableError, match="file f isn't needed any more"):
            await asyncio.wait_for(reading, 5)
        spool.close()

    asyncio.run(release_while_it_is_read())


@pytest.mark.parametrize("length", [1, 7, 4096, MIB, 3 * MIB + 5])
def test_the_checksum_of_a_whole_comes_from_its_parts(length: int) -> None:
    generator = random.Random(length)
    first, second = generator.randbytes(1000), generator.randbytes(length)
    combined = chunk_codec.combine_crc32c(crc32c.crc32c(first), crc32c.crc32c(second), length)
    assert combined == crc32c.crc32c(first + second)


# Upload slots.


class Upload:
    """An upload that holds its place until it is told to end."""

    def __init__(self, slots: UploadSlots, weight: int, *, growing: bool) -> None:
        self.growing = growing
        self.running = False
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run(slots, weight))

    async def _run(self, slots: UploadSlots, weight: int) -> None:
        async with slots.slot(weight, lambda: self.growing):
            self.running = True
            await self._end.wait()
        self.running = False

    async def end(self) -> None:
        self._end.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_uploads_stay_within_the_memory() -> None:
    async def check() -> None:
        slots = UploadSlots(3)
        uploads = [Upload(slots, 1, growing=False) for _ in range(5)]
        await settle()
        assert [u.running for u in uploads] == [True, True, True, False, False]
        await uploads[1].end()
        await settle()
        assert [u.running for u in uploads] == [True, False, True, True, False]
        await uploads[4].cancel()
        for index in (0, 2, 3):
            await uploads[index].end()

    asyncio.run(check())


def test_one_upload_runs_however_large_its_buffers_are() -> None:
    async def check() -> None:
        slots = UploadSlots(3)
        first, second = Upload(slots, 10, growing=False), Upload(slots, 10, growing=False)
        await settle()
        assert (first.running, second.running) == (True, False)
        await first.end()
        await settle()
        assert second.running
        await second.end()

    asyncio.run(check())


def test_growing_files_leave_room_for_complete_ones() -> None:
    async def check() -> None:
        slots = UploadSlots(100)
        growing = [Upload(slots, 1, growing=True) for _ in range(MOST)]
        complete = [Upload(slots, 1, growing=False) for _ in range(MOST)]
        await settle()
        assert sum(u.running for u in growing) == MOST // 2
        assert sum(u.running for u in complete) == MOST // 2
        # One that waited has become complete: it may take a place that is free.
        await complete[0].end()
        growing[-1].growing = False
        slots.admit()
        await settle()
        assert sum(u.running for u in growing + complete) == MOST
        for upload in growing + complete:
            await upload.cancel()

    asyncio.run(check())


# Phases.


def rank_save(saves: SaveRegistry, number: int = 1) -> RankSave:
    ranks = [0]
    save = save_pb2.SaveId(
        job="job", incarnation="inc", group=object_names.group_name(ranks), number=number
    )
    return saves.enter(
        sidecar_pb2.SaveContext(
            save=save, checkpoint_id="/c/1", ranks=ranks, world_size=1, rank=0, host="node-0"
        )
    )


def test_a_rank_moves_forward_only() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.set_attempt(rank, "i1-a1-g00000000-s1")
    assert rank.phase is Phase.PLANNED
    receipt = records_pb2.Receipt(attempt="i1-a1-g00000000-s1")
    saves.mark_ingested(rank, receipt)
    with pytest.raises(errors.InvalidRequestError, match="INGESTED: it can't become INGESTED"):
        saves.mark_ingested(rank, receipt)
    saves.mark_durable(rank)
    assert not saves.fail(rank, save_pb2.FAILURE_KIND_STORAGE, "too late")
    assert rank.phase is Phase.DURABLE


def test_a_rank_stays_in_its_attempt() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.set_attempt(rank, "i1-a1-g00000000-s1")
    with pytest.raises(errors.InvalidRequestError, match="belongs to attempt i1-a1-g00000000-s1"):
        saves.set_attempt(rank, "i2-a1-g00000000-s1")


def test_an_ingested_rank_is_never_lost() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.mark_ingested(rank, records_pb2.Receipt())
    assert not saves.fail(rank, save_pb2.FAILURE_KIND_LOST, "gone")
    assert rank.phase is Phase.INGESTED
    assert saves.fail(rank, save_pb2.FAILURE_KIND_STORAGE, "403")
    assert rank.failure is not None
    assert rank.failure.message == "403"


def test_the_first_verdict_is_final() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    for state in (save_pb2.SAVE_STATE_ABORTED, save_pb2.SAVE_STATE_COMMITTED):
        saves.apply_status(save_pb2.SaveStatus(save=rank.save.id, state=state))
    assert rank.save.outcome is not None
    assert rank.save.outcome.state == save_pb2.SAVE_STATE_ABORTED
    assert not saves.fail(rank, save_pb2.FAILURE_KIND_CLIENT, "late")
    with pytest.raises(errors.SaveAbortedError):
        saves.check(rank)


def test_listeners_hear_of_every_change_outside_the_lock() -> None:
    saves = SaveRegistry()
    heard: list[tuple[str, bool]] = []

    def listener(save: object, rank: RankSave | None, urgent: bool) -> None:
        saves.undecided()
        heard.append((rank.phase.name if rank else "", urgent))

    saves.add_listener(listener)
    rank = rank_save(saves)
    saves.set_attempt(rank, "i1-a1-g00000000-s1")
    saves.record_progress(rank)
    saves.apply_status(save_pb2.SaveStatus(save=rank.save.id, state=save_pb2.SAVE_STATE_COMMITTED))
    assert heard == [("", True), ("PLANNED", True), ("PLANNED", False), ("", True)]


def test_only_so_many_ended_saves_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pannier.sidecar.save_registry._ENDED_KEPT", 2)
    saves = SaveRegistry()
    forgotten: list[int] = []
    saves.add_eviction_listener(lambda save: forgotten.append(save.id.number))
    for number in range(1, 5):
        rank = rank_save(saves, number)
        saves.apply_status(
            save_pb2.SaveStatus(save=rank.save.id, state=save_pb2.SAVE_STATE_COMMITTED)
        )
    assert forgotten == [1, 2]
    assert len(saves.of_rank("job", "inc", 0)) == 2
