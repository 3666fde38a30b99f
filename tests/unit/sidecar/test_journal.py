"""The journal of a spool: what is read of it whole, torn, damaged, older and newer, and what it says."""

import asyncio
import errno
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.sidecar.spool import journal, journal_state
from pannier.sidecar.spool.journal import Contents, Journal, decode, encode, header
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.rank_states import RankState, RankStates
from pannier.v1 import journal_pb2, plan_pb2, records_pb2, save_pb2
from pannier.wire import errors
from pannier.wire.chunk_codec import MAX_MESSAGE_BYTES
from support.actors.ranks_by_hand import context
from support.processes.stretch import BOUND_S

Record = journal_pb2.JournalRecord
PATH = Path("/spool/journal")
ABORTED = journal_pb2.PartEnded(state=save_pb2.SAVE_STATE_ABORTED)
COMMITTED = journal_pb2.PartEnded(state=save_pb2.SAVE_STATE_COMMITTED)


def begun(part: int, rank: int = 0) -> Record:
    return Record(
        part=part,
        begun=journal_pb2.PartBegun(
            context=context(rank, f"gs://b/step-{part}", number=part),
            attempt="i1-a1-g00000000-s1",
            planned=True,
            files=[plan_pb2.PlannedFile(name="f", size=10)],
        ),
    )


def opened(
    part: int, name: str = "f", *, size: int = 10, spool_file: str = "00000001.data"
) -> Record:
    return Record(
        part=part, opened=journal_pb2.FileOpened(name=name, size=size, spool_file=spool_file)
    )


def held(part: int, count: int, crc: int, name: str = "f") -> Record:
    return Record(part=part, held=journal_pb2.FileHeld(name=name, held=count, crc32c=crc))


def ingested(part: int, *, size: int = 10, crc: int = 9) -> Record:
    files = [records_pb2.DataFile(name="f", size=size, crc32c=crc)]
    return Record(part=part, ingested=records_pb2.Receipt(files=files, plan_id="p"))


STORY = [
    begun(1),
    opened(1),
    held(1, 4, 44),
    ingested(1),
    begun(2, 1),
    opened(2, spool_file="00000002.data"),
    held(2, 10, 22),
]


def image(records: list[Record]) -> bytes:
    """A file without space for more."""
    return header() + encode(records)


def write(directory: Path, *records: Record, version: int = journal.FORMAT) -> Path:
    path = directory / journal.NAME
    path.write_bytes(header(version) + encode(records))
    return path


# The file.


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert Journal(tmp_path).read() == Contents()
    first = Journal(tmp_path)
    first.rewrite(STORY[:2])
    first.append(*STORY[2:4])
    first.append(STORY[4])
    first.sync()
    first.close(remove=False)
    assert Journal(tmp_path).read() == Contents(records=STORY[:5], end=len(image(STORY[:5])))
    assert oct((tmp_path / "journal").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("cut", range(1, len(encode(STORY[-1:]))))
def test_a_last_record_torn_at_any_byte_is_cut_off(cut: int) -> None:
    data = image(STORY)
    contents = decode(data[:-cut], PATH)
    assert contents.records == STORY[:-1]
    assert contents.damaged_at is None
    assert 0 < contents.torn <= len(encode(STORY[-1:])) - cut


def test_a_record_that_a_restart_would_not_read_is_refused_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert journal.MAX_RECORD >= MAX_MESSAGE_BYTES, "what was accepted can be recorded"
    large = opened(1, "x" * 1000)
    monkeypatch.setattr(journal, "MAX_RECORD", large.ByteSize())
    assert decode(image([large]), PATH).records == [large]
    monkeypatch.setattr(journal, "MAX_RECORD", large.ByteSize() - 1)
    written = Journal(tmp_path)
    written.rewrite(STORY[:1])
    with pytest.raises(errors.PannierError, match=r"'opened' has \d+ bytes, .* at most \d+"):
        written.append(STORY[1], large)
    written.append(STORY[1])
    assert written.read().records == STORY[:2]


def test_a_last_record_of_zeros_is_cut_off() -> None:
    """As a file system leaves it whose machine lost its power."""
    data = header() + encode(STORY[:-1]) + bytes(len(encode(STORY[-1:])))
    assert decode(data, PATH).records == STORY[:-1]
    assert decode(data, PATH).damaged_at is None


def test_a_flipped_bit_anywhere_is_found_and_ends_what_is_believed() -> None:
    data = image(STORY)
    ends = [len(image(STORY[:count])) for count in range(len(STORY) + 1)]
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << random.Random(at).randrange(8)
        contents = decode(bytes(broken), PATH)
        whole = sum(end <= at for end in ends[1:]) if at >= ends[0] else 0
        assert contents.records == STORY[:whole]
        if at < ends[-2]:
            assert contents.damaged_at == (ends[whole] if at >= ends[0] else 0)
            assert contents.beyond == STORY[whole + (at >= ends[0]) :]
        else:
            assert (contents.damaged_at, contents.end) == (None, ends[-2])


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 400), st.booleans())
def test_no_bytes_make_the_reader_do_anything_but_refuse_or_read(
    noise: bytes, at: int, replace: bool
) -> None:
    data = image(STORY)
    at = min(at, len(data))
    mixed = data[:at] + noise + data[at + (len(noise) if replace else 0) :]
    try:
        contents = decode(mixed, PATH)
    except errors.ConfigurationError:
        return
    parts = RankStates()
    for record in (*contents.records, *contents.beyond):
        parts.apply(record)
        assert record in STORY
    # What is before the noise is always read.
    whole = [r for i, r in enumerate(STORY) if len(image(STORY[: i + 1])) <= at]
    assert contents.records[: len(whole)] == whole


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_record_leaves_the_parts_usable(noise: bytes) -> None:
    """One of a future version, or random bytes."""
    record = Record()
    try:
        record.ParseFromString(noise)
    except journal.DecodeError:
        return
    parts = RankStates()
    for each in (*STORY, record, record):
        parts.apply(each)
    again = RankStates()
    for part in parts:
        for each in part.records():
            again.apply(each)
        assert all(file.held <= file.size for file in part.files.values())
    assert [p.number for p in again] == [p.number for p in parts]


def test_parts_are_in_the_order_of_their_ends_also_in_a_compacted_journal() -> None:
    parts, again = RankStates(), RankStates()
    for record in (begun(1), begun(2), begun(3)):
        parts.apply(record)
    for number in (2, 1):
        parts.apply(Record(part=number, ended=COMMITTED))
    for part in parts:
        for record in part.records():
            again.apply(record)
    for each in (parts, again):
        assert [part.number for part in each] == [3, 2, 1]


def test_a_newer_format_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    path = write(tmp_path, *STORY, version=journal.FORMAT + 1)
    before = path.read_bytes()
    with pytest.raises(errors.ConfigurationError, match=f"has format {journal.FORMAT + 1}, this"):
        JournalState(tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["journal"]


def test_an_older_format_is_read_and_becomes_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, *STORY)
    monkeypatch.setattr(journal, "FORMAT", journal.FORMAT + 1)
    monkeypatch.setattr(journal.header, "__defaults__", (2,))
    found = JournalState(tmp_path)
    assert [part.number for part in found.states()] == [1, 2]
    assert path.read_bytes().startswith(header(2))


@pytest.mark.parametrize("content", [b"hello", b"a letter to a friend", b"\x00" * 100])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(errors.ConfigurationError, match="is not a Pannier journal"):
        JournalState(tmp_path)
    assert (tmp_path / "journal").read_bytes() == content


def test_a_link_or_a_pipe_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "journal").symlink_to("/etc/passwd")
    with pytest.raises(errors.ConfigurationError, match="can't be read"):
        JournalState(tmp_path)
    (tmp_path / "journal").unlink()
    os.mkfifo(tmp_path / "journal")
    with pytest.raises(errors.ConfigurationError, match="is not a file of user"):
        JournalState(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_journal_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *STORY)
    os.chown(path, 12345, -1)
    with pytest.raises(errors.ConfigurationError, match="but of user 12345"):
        JournalState(tmp_path)
    assert path.read_bytes() == image(STORY)


def test_a_directory_that_can_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        assert flags & os.O_CREAT
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self, missing_ok: None)
        patch.setattr(journal.Journal, "read", lambda self: Contents())
        patch.setattr(journal.os, "open", read_only)
        with pytest.raises(
            errors.ConfigurationError, match=r"Read-only file system.* another --sp"
        ):
            JournalState(tmp_path)


def test_what_a_crash_left_of_a_rewrite_goes(tmp_path: Path) -> None:
    path = write(tmp_path, *STORY)
    (tmp_path / "journal.new").write_bytes(b"half")
    assert len(JournalState(tmp_path).states()) == 2
    assert os.listdir(tmp_path) == ["journal"]
    assert len(decode(path.read_bytes(), path).records) == len(STORY)


def test_a_write_that_fails_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Journal(tmp_path)
    written.rewrite(STORY[:1])
    real = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) > 5:
            return real(fd, data[:5], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "pwrite", full)
    with pytest.raises(errors.PannierError, match=r"can't be written: .*No space left"):
        written.append(STORY[1])
    monkeypatch.undo()
    written.append(STORY[2])
    kept = [STORY[0], STORY[2]]
    assert written.read() == Contents(records=kept, end=len(image(kept)))
    written.close(remove=True)
    assert not os.listdir(tmp_path)


def test_a_directory_that_can_not_be_synced_leaves_no_gap_and_is_synced_before_anything_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    # The new file is shorter than the one that it replaces.
    path = write(tmp_path, *STORY, *[held(2, 10, 22)] * 50)
    with monkeypatch.context() as broken:
        broken.setattr(journal, "_sync_directory", fail)
        written = JournalState(tmp_path)._journal
        written.append(begun(3))
        with pytest.raises(errors.PannierError, match=r"fsync failed: .*Input/output error"):
            written.sync()
    last = opened(3, spool_file="00000003.data")
    written.append(last)
    written.sync()
    contents = decode(path.read_bytes(), path)
    assert (contents.torn, contents.damaged_at) == (0, None)
    assert contents.records[-2:] == [begun(3), last]
    assert [state.number for state in JournalState(tmp_path).states()] == [1, 2, 3]


def test_after_an_fsync_that_failed_nothing_counts_until_all_records_are_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports an error of the disk once: the next fsync would succeed without the lost pages."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = write(tmp_path, *STORY)
    state = JournalState(tmp_path)
    for record in (begun(3), opened(3, spool_file="00000003.data")):
        state._journal.append(record)
        state._states.apply(record)
    before = path.stat().st_ino
    with monkeypatch.context() as broken:
        broken.setattr(journal.os, "fdatasync", fail)
        with pytest.raises(errors.PannierError, match=r"fsync failed: .*Input/output error"):
            state._journal.sync()
    for _ in range(2):
        with pytest.raises(errors.PannierError, match="an earlier fsync failed"):
            state._journal.sync()
        with monkeypatch.context() as broken:
            broken.setattr(journal.os, "fsync", fail)
            asyncio.run(state.compact())
    assert path.stat().st_ino == before
    asyncio.run(state.compact())
    state._journal.sync()
    assert path.stat().st_ino != before
    assert [each.number for each in JournalState(tmp_path).states()] == [1, 2, 3]


def test_an_empty_spool_whose_directory_can_not_be_synced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(journal, "_sync_directory", fail)
    with pytest.raises(errors.ConfigurationError, match=r"fsync failed: .*: name another --spool"):
        JournalState(tmp_path)


def test_a_journal_that_was_removed_says_what_to_do(tmp_path: Path) -> None:
    written = Journal(tmp_path)
    written.rewrite(STORY[:1])
    written.path.unlink()
    with pytest.raises(
        errors.PannierError,
        match="restart the sidecar; saves that are not committed must be made again",
    ):
        written.sync()


def test_threads_may_add_and_sync_at_once(tmp_path: Path) -> None:
    written = Journal(tmp_path)
    written.rewrite([])

    def add(number: int) -> None:
        for _ in range(50):
            written.append(begun(number), opened(number))
            written.sync()

    threads = [threading.Thread(target=add, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    contents = written.read()
    assert (len(contents.records), contents.torn) == (400, 0)
    pairs = zip(contents.records[::2], contents.records[1::2], strict=True)
    assert all(a.part == b.part and b.HasField("opened") for a, b in pairs)
    written.close(remove=False)


# What it says.


def parts(*records: Record) -> dict[int, RankState]:
    found = RankStates()
    for record in records:
        found.apply(record)
    again = RankStates()
    for part in found:
        for record in part.records():
            again.apply(record)
    # The short form says the same.
    assert again.by_number == found.by_number
    return found.by_number


def test_what_is_needed_of_a_part() -> None:
    one = parts(begun(1), opened(1), held(1, 4, 44))[1]
    assert [(f.name, f.held, f.crc32c) for f in one.needed] == [("f", 4, 44)]
    one = parts(begun(1), opened(1), held(1, 4, 44), ingested(1))[1]
    assert [(f.held, f.crc32c) for f in one.needed] == [(10, 9)]
    durable = Record(part=1, durable=journal_pb2.FileDurable(name="f"))
    one = parts(begun(1), opened(1), ingested(1), durable)[1]
    assert not one.needed
    assert one.receipt is not None
    failed = Record(part=1, failed=save_pb2.Failure(message="no"))
    assert not parts(begun(1), opened(1), failed)[1].needed


def test_a_failed_part_is_not_ingested_by_a_late_record() -> None:
    failed = Record(part=1, failed=save_pb2.Failure(message="no"))
    one = parts(begun(1), opened(1), failed, ingested(1))[1]
    assert one.receipt is None
    assert one.failure is not None


def test_committed_parts_are_local_copies_until_they_are_forgotten() -> None:
    forgotten = Record(part=1, forgotten=journal_pb2.PartForgotten())
    committed = [begun(1), opened(1), ingested(1), Record(part=1, ended=COMMITTED)]
    state = parts(*committed)[1]
    assert state.committed
    assert not state.needed
    assert [file.spool_file for file in state.in_spool] == ["00000001.data"]
    assert not parts(*committed, forgotten)


def test_aborted_parts_are_gone_once_they_are_cleaned_up() -> None:
    forgotten = Record(part=1, forgotten=journal_pb2.PartForgotten())
    assert parts(begun(1), Record(part=1, ended=ABORTED))[1].ended == ABORTED
    assert not parts(begun(1), Record(part=1, ended=ABORTED), forgotten)


def test_a_spool_file_belongs_to_the_last_data_file_in_it() -> None:
    both = parts(begun(1), opened(1), ingested(1), begun(2), opened(2))
    assert (both[1].files["f"].spool_file, both[2].files["f"].spool_file) == ("", "00000001.data")


def test_nonsense_changes_nothing() -> None:
    expected = parts(begun(1), opened(1), held(1, 4, 44))
    late = [
        opened(1, spool_file="00000009.data"),
        held(1, 3, 3),
        held(1, 11, 3),
        held(1, 5, 5, "g"),
    ]
    assert parts(begun(1), opened(1), held(1, 4, 44), *late, opened(7), begun(1, 5)) == expected


# Damage in the middle.


def test_damage_fails_what_it_may_concern_by_name_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 is ingested before it; of rank 1, and of a later save, something is lost."""
    path = write(tmp_path, *STORY, begun(3), ingested(3))
    data = bytearray(path.read_bytes())
    data[len(image(STORY[:5])) + 14] ^= 0x10
    path.write_bytes(data)
    damaged = JournalState(tmp_path)
    one, two, three = damaged.states()
    assert one.failure is None
    assert one.receipt is not None
    for part in (two, three):
        assert part.failure is not None
        assert part.failure.kind == save_pb2.FAILURE_KIND_SPOOL
        assert "journal is damaged at byte" in part.failure.message
        assert part.receipt is None
    assert two.failure is not None
    assert (two.failure.rank, two.failure.host) == (1, "node-1")
    assert "is damaged at byte" in caplog.text
    # The next process finds a whole file with the same states.
    again = JournalState(tmp_path).states()
    assert again == [one, two, three]


@pytest.mark.parametrize("lost", ["end", "beginning"], ids=["of its owner", "of its next owner"])
def test_a_spool_file_that_was_reused_behind_the_damage_has_one_owner(
    tmp_path: Path, lost: str
) -> None:
    before = [begun(1), opened(1), ingested(1)]
    damaged = Record(part=1, ended=COMMITTED) if lost == "end" else begun(2)
    after = [begun(2), opened(2)] if lost == "end" else [opened(2)]
    path = write(tmp_path, *before, damaged, *after)
    data = bytearray(path.read_bytes())
    data[len(image(before)) + 14] ^= 0x10
    path.write_bytes(data)
    states = JournalState(tmp_path)._states
    owners = [file.spool_file for state in states for file in state.files.values()]
    assert owners == (["", "00000001.data"] if lost == "end" else [""])
    for record in (begun(3), opened(3)):
        states.apply(record)
    owners = [file.spool_file for state in states for file in state.files.values()]
    assert owners == [*[""] * (len(owners) - 1), "00000001.data"]


def test_a_journal_that_grew_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_state, "_GROWTH", 2000)
    path = write(tmp_path, *STORY)
    kept = JournalState(tmp_path)
    short = decode(path.read_bytes(), path).end
    for _ in range(100):
        kept._journal.append(held(2, 10, 22))
    assert decode(path.read_bytes(), path).end > short + 2000
    asyncio.run(kept.compact())
    assert decode(path.read_bytes(), path).end == short
    assert len(JournalState(tmp_path).states()) == 2


def test_a_full_spool_keeps_no_sidecar_from_starting_and_noting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = JournalState(tmp_path)
    first._journal.append(*STORY)
    path = tmp_path / "journal"
    torn = len(image(STORY[:-1]))
    with path.open("r+b") as file:
        file.seek(torn + 20)
        file.write(b"!!")
    blocks = path.stat().st_blocks
    real = os.open

    def full(name: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(28, "No space left on device")
        return real(name, flags, mode)

    monkeypatch.setattr(journal.os, "open", full)
    second = JournalState(tmp_path)
    second._journal.append(STORY[-1])
    asyncio.run(second.compact())
    contents = decode(path.read_bytes(), path)
    assert (contents.records, contents.torn, contents.damaged_at) == (STORY, 0, None)
    # The space had been there all the time.
    assert path.stat().st_blocks == blocks
    assert path.stat().st_size > 2 << 20


def test_an_empty_journal_leaves_nothing_behind(tmp_path: Path) -> None:
    empty = JournalState(tmp_path)
    assert asyncio.run(empty.close(keep_copies=True)) == set()
    assert not os.listdir(tmp_path)
    write(tmp_path, *STORY)
    full = JournalState(tmp_path)
    assert asyncio.run(full.close(keep_copies=True)) == {"00000001.data", "00000002.data"}
    assert os.listdir(tmp_path) == ["journal"]
