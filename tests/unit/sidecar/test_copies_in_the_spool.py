"""Local copies of one spool, without a sidecar around it: what stays, what ends, and why."""

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from pannier.common import timeouts
from pannier.sidecar.replicas.held_replicas import HeldReplicas
from pannier.sidecar.restore import local_copies
from pannier.sidecar.restore.local_copies import LocalCopies, LocalFile
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles, close_all
from pannier.sidecar.spool.recovery import recover
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.v1 import journal_pb2, records_pb2, restore_pb2, save_pb2, sidecar_pb2
from pannier.wire.file_layout import STAMP_BYTES
from support.processes.daemons import memory_directory

Record = journal_pb2.JournalRecord
MIB = 1 << 20
ROOT = "gs://bucket/run"
STAMP = b"s" * STAMP_BYTES
T = TypeVar("T")


class NoUploads:
    """Of committed saves, nothing is uploaded."""


class Copies:
    """The copies of a spool, to which committed saves are added by hand."""

    def __init__(self) -> None:
        self.directory = memory_directory()
        self.loop = asyncio.new_event_loop()
        self.parts = 0
        self._start()

    def _start(self) -> None:
        saves = SaveRegistry()
        uploads: Any = NoUploads()
        self.spool = Spool(self.directory / "spool")
        self.mapped = MappedFiles(self.spool)
        self.journal = JournalState(self.directory / "spool")
        self.copies = LocalCopies(self.mapped, self.journal, saves)
        own = (self.spool, self.mapped, self.journal, self.copies, uploads)
        replicas = HeldReplicas(saves, *own, "node-0")
        self.run(
            recover(self.journal, self.spool, saves, uploads, self.copies, self.mapped, replicas)
        )

    def restart(self) -> None:
        """As a sidecar that stops and starts again."""
        self.spool.close(self.run(self.journal.close(keep_copies=True)))
        self._start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.journal.close(keep_copies=False))
        self.spool.close()
        self.loop.close()
        shutil.rmtree(self.directory)

    def commit(
        self,
        number: int,
        *,
        root: str = ROOT,
        start: int = 1,
        group: str = "g12345678",
        sizes: tuple[int, ...] = (MIB,),
        stamp: bytes = b"",
        handed_over: Sequence[str] | None = None,
        ended_at: float | None = None,
        add: bool = True,
    ) -> list[SpoolFile]:
        """A save whose files have these sizes; its spool files.

        Args:
            handed_over: files of its receipt; None: all.
            ended_at: None: in the order of these calls.
            add: False: the sidecar only records that it is committed.
        """
        self.parts += 1
        save = save_pb2.SaveId(job="job", incarnation=f"{start:04}", group=group, number=number)
        checkpoint_id = f"{root}/step-{number}"
        files = []
        for index, size in enumerate(sizes):
            spool_file = self.run(self.mapped.take("job", size + len(stamp)))
            os.pwrite(spool_file.fd, stamp, spool_file.stageable)
            files.append(LocalFile(f"{number}-{index}", size, spool_file, stamp))
        context = sidecar_pb2.SaveContext(save=save, checkpoint_id=checkpoint_id)
        attempt = f"i{start}-{start:04}-{group}-s{number}"
        receipt = records_pb2.Receipt(
            attempt=attempt,
            files=[
                records_pb2.DataFile(name=each.name, size=each.size)
                for each in files
                if handed_over is None or each.name in handed_over
            ],
        )
        self.record(
            Record(begun=journal_pb2.PartBegun(context=context, attempt=attempt)),
            *(
                Record(
                    opened=journal_pb2.FileOpened(
                        name=each.name,
                        size=each.size,
                        spool_file=each.spool_file.path.name,
                        stamp=stamp,
                    )
                )
                for each in files
            ),
            *([Record(ingested=receipt)] if receipt.files else []),
            Record(ended=journal_pb2.PartEnded(state=save_pb2.SAVE_STATE_COMMITTED)),
        )
        if add:
            state = self.journal._states.by_number[self.parts]
            ended_at = self.parts if ended_at is None else ended_at
            self.run(self.copies.add(save, checkpoint_id, attempt, files, state, ended_at=ended_at))
        return [each.spool_file for each in files]

    def record(self, *records: Record) -> None:
        """Records these of the present part."""
        for each in records:
            each.part = self.parts
            self.journal._journal.append(each)
            self.journal._states.apply(each)

    @property
    def ids(self) -> list[str]:
        """Checkpoints with a copy, newest first."""
        return [each.checkpoint_id.rpartition("/")[2] for each in self.copies.statuses()]

    def locate(self, number: int, *names: str) -> restore_pb2.LocateResponse:
        request = restore_pb2.LocateRequest(attempt=f"i1-0001-g12345678-s{number}", files=names)
        return self.run(self.copies.locate(request))


@pytest.fixture
def made() -> Iterator[Copies]:
    copies = Copies()
    yield copies
    copies.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADF])
def test_a_file_that_cannot_be_read_is_lost_and_the_others_stay(
    made: Copies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    bad, _ = made.commit(1, sizes=(MIB, MIB), stamp=STAMP)
    read_stamp = SpoolFile.read_stamp

    def fail(file: SpoolFile) -> bytes:
        if file is bad:
            raise OSError(error, os.strerror(error))
        return read_stamp(file)

    monkeypatch.setattr(SpoolFile, "read_stamp", fail)
    assert [each.name for each in made.locate(1, "1-0", "1-1").files] == ["1-1"]
    made.run(made.copies.tick(()))
    (copy,) = made.copies.statuses()
    assert copy.files == 1
    assert f"loses 1 files: it can't be read: [Errno {error}]" in caplog.text
    assert not made.mapped.keeps(bad)


def test_a_truncated_file_is_lost_by_that_name_and_not_for_lack_of_room(
    made: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = made.commit(1, stamp=STAMP)
    os.truncate(file.fd, 4096)
    made.run(made.copies.tick(()))
    assert not made.ids
    assert "loses 1 files: it was truncated" in caplog.text
    assert made.copies.evicted == 0


def test_a_file_with_another_stamp_is_lost_to_another_save(
    made: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (file,) = made.commit(1, stamp=STAMP)
    os.pwrite(file.fd, b"t" * STAMP_BYTES, file.stageable)
    made.run(made.copies.tick(()))
    assert not made.ids
    assert "loses 1 files: a trainer stages another save there" in caplog.text
    assert made.copies.evicted == 1


def test_what_ended_early_is_shown_once_until_a_newer_one_is_there(made: Copies) -> None:
    first, second = made.commit(1, sizes=(MIB, MIB))
    for file in (first, second):
        made.run(made.copies.restaged(file))
    (shown,) = made.copies.evictions()
    assert (shown.bytes, shown.reason) == (2 * MIB, "a trainer stages another save there")
    assert shown.checkpoint_id.endswith("/step-1")
    made.commit(2, group="g87654321")
    made.run(made.copies.evict_oldest())
    assert [each.checkpoint_id[-1] for each in made.copies.evictions()] == ["2", "1"]
    made.commit(3)
    assert [each.checkpoint_id[-1] for each in made.copies.evictions()] == ["2"]


def test_what_a_trainer_that_ended_held_for_a_moment_more_costs_no_copy_and_no_more_room(
    made: Copies,
) -> None:
    """Its connection ends before its mappings where a thread of it ends late."""
    made.commit(1)
    earlier, later = (("job", start, 0) for start in ("0001", "0002"))
    lease = made.run(made.mapped.reserve(earlier, "", [MIB]))
    descriptors = made.run(made.mapped.open_descriptors(lease.token, connection := object()))
    made.run(made.mapped.disconnect(connection))
    assert made.mapped.leased_bytes()[1]
    close_all(descriptors)
    made.run(made.mapped.reserve(later, "", [MIB]))
    assert made.mapped.leased_bytes()[1] == 0
    assert made.ids == ["step-1"]
    assert len(list(made.spool.directory.glob("*.data"))) == 2


def test_a_load_whose_descriptors_cannot_be_opened_gets_none(
    made: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.commit(1)
    token = made.locate(1, "1-0").token

    def fail(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        assert made.run(made.copies.open_descriptors(token)) == []
    assert made.copies.served == 0


def test_a_located_file_in_whose_place_another_save_is_by_now_is_not_passed(made: Copies) -> None:
    (first,) = made.commit(1)
    token = made.locate(1, "1-0").token
    assert made.run(made.copies.evict_oldest())
    (second,) = made.commit(2)
    # A spool file of the same job that keeps content, but not what was located.
    assert second is first
    assert made.mapped.keeps(second)
    assert made.run(made.copies.open_descriptors(token)) == []
    (descriptor,) = made.run(made.copies.open_descriptors(made.locate(2, "2-0").token))
    os.close(descriptor)
    assert made.copies.served == MIB


SIZE = 4 * MIB


def reserved(made: Copies, *sizes: int, rank: int = 0) -> Coroutine[Any, Any, object]:
    return made.mapped.reserve(("job", "0002", rank), f"c{rank}", sizes)


@pytest.mark.parametrize("objects", [0, 100])
@pytest.mark.parametrize("less", [0, 8192])
def test_two_sets_of_files_for_a_job_that_starts_again_are_all_that_it_has(
    made: Copies, objects: int, less: int
) -> None:
    copied = (SIZE, objects) if objects else (SIZE,)
    made.commit(7, sizes=copied, stamp=STAMP)
    made.run(reserved(made, SIZE - less))
    assert made.ids == ["step-7"]
    assert made.spool.usage.reserved <= 2.05 * sum(copied)
    made.run(reserved(made, SIZE - less))
    assert not made.ids
    assert made.spool.usage.reserved <= 2.05 * sum(copied)


def test_a_copy_stays_beside_one_set_of_files_in_several_requests(made: Copies) -> None:
    made.commit(7, sizes=(SIZE, SIZE))
    for rank in (0, 1):
        made.run(reserved(made, SIZE, rank=rank))
        assert made.ids == ["step-7"]
    made.run(reserved(made, SIZE))
    assert not made.ids


def test_requests_at_the_same_time_count_together(made: Copies) -> None:
    made.commit(7, sizes=(SIZE, SIZE))

    async def all_ranks() -> None:
        await asyncio.gather(*(reserved(made, SIZE, rank=rank) for rank in (0, 1, 0, 1)))

    made.run(all_ranks())
    assert not made.ids
    assert made.spool.usage.reserved <= 2.05 * 2 * SIZE


def test_the_copies_of_several_groups_of_one_start_stay_beside_one_set_each(made: Copies) -> None:
    made.commit(7, sizes=(SIZE,))
    made.commit(8, sizes=(SIZE,), group="g87654321")
    for _ in range(2):
        made.run(reserved(made, SIZE))
        assert made.ids == ["step-8", "step-7"]
    made.run(reserved(made, SIZE))
    assert made.ids == ["step-8"]


def test_of_copies_of_several_starts_the_oldest_ends_first(made: Copies) -> None:
    made.commit(7, sizes=(SIZE,))
    made.commit(8, sizes=(SIZE,), start=2, group="g87654321")
    made.run(reserved(made, SIZE))
    assert made.ids == ["step-8"]


def test_files_for_a_larger_state_leave_the_copy_of_a_smaller_one(made: Copies) -> None:
    made.commit(7, sizes=(MIB,))
    made.run(reserved(made, SIZE))
    assert made.ids == ["step-7"]


FULL, LIGHT = f"{ROOT}/full", f"{ROOT}/light"


def test_of_several_roots_the_one_that_is_committed_later_stays(made: Copies) -> None:
    # The root "full" has seen five starts of the job, the root "light" one.
    made.commit(1, root=FULL, start=5)
    for number in (2, 3):
        made.commit(number, root=LIGHT)
        assert made.ids == [f"step-{number}"]
    # Below one root, an earlier attempt is the older one whenever it is committed.
    made.commit(1, root=LIGHT)
    assert made.ids == ["step-3"]


def test_a_rank_that_is_cleaned_up_late_does_not_bring_an_older_save_back(made: Copies) -> None:
    made.commit(1, root=FULL, sizes=(MIB, MIB))
    made.commit(2, root=LIGHT)
    (late,) = made.commit(1, root=FULL, ended_at=1)
    assert made.ids == ["step-2"]
    assert not made.mapped.keeps(late)


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_restarted_sidecar_knows_which_root_was_committed_to_last(
    made: Copies, restarts: int
) -> None:
    # It was killed before the first copy ended.
    made.commit(4, root=LIGHT, add=False)
    made.commit(1, root=FULL, start=5, add=False)
    for _ in range(restarts):
        made.restart()
        assert made.ids == ["step-1"]


@pytest.mark.parametrize(
    ("handed_over", "ids", "kept"), [((), [], 0), (("7-1",), ["step-7"], 1), (None, ["step-7"], 2)]
)
def test_a_recovered_file_that_no_copy_has_is_free_again(
    made: Copies, handed_over: Sequence[str] | None, ids: list[str], kept: int
) -> None:
    made.commit(7, sizes=(SIZE, SIZE), handed_over=handed_over, add=False)
    made.restart()
    assert made.ids == ids
    made.spool.measure()
    assert made.spool.usage.reserved == 2 * SIZE
    assert made.spool.usage.spare == (2 - kept) * SIZE


def test_each_file_is_located_once_and_not_too_many(
    made: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_copies, "MOST_LOCATED", 2)
    made.commit(1, sizes=(4096, 4096, 4096))
    found = made.locate(1, *["1-2"] * 50, "1-0", "1-1")
    assert [each.name for each in found.files] == ["1-2", "1-0"]
    descriptors = made.run(made.copies.open_descriptors(found.token))
    assert len(descriptors) == 2
    for each in descriptors:
        os.close(each)


def test_a_copy_of_a_job_without_trainers_ends_after_a_while(
    made: Copies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made.commit(1)
    made.run(made.copies.tick(()))
    assert made.ids == ["step-1"]
    monkeypatch.setattr(timeouts, "LOCAL_COPY_KEPT_S", -1)
    made.run(made.copies.tick({"job"}))
    assert made.ids == ["step-1"]
    made.run(made.copies.tick({"another"}))
    assert not made.ids
    assert "ends: no trainer of its job has been connected for long" in caplog.text
    assert made.copies.evicted == 0
