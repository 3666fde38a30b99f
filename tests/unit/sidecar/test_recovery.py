"""What a sidecar makes of the spool that an earlier one left: in this process, with scripted peers."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.sidecar import server
from pannier.sidecar.spool import boot_clock
from pannier.sidecar.spool.journal import FORMAT, header
from pannier.sidecar.spool.journal_state import JournalState
from pannier.storage import ObjectInfo, StorageError, Store, open_store
from pannier.v1 import journal_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors, object_names
from pannier.wire.version import WIRE_VERSION
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import PLAN_ID, Trainer, attempt_of

MIB = 1 << 20
STREAMING = save_pb2.RANK_PHASE_STREAMING
INGESTED = save_pb2.RANK_PHASE_INGESTED
DURABLE = save_pb2.RANK_PHASE_DURABLE
ABORTED = save_pb2.SAVE_STATE_ABORTED
COMMITTED = save_pb2.SAVE_STATE_COMMITTED


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


def begin(host: Host, data: bytes, number: int = 1) -> tuple[Trainer, sidecar_pb2.SaveContext]:
    """A trainer that has sent all but the last MiB of a file."""
    trainer = host.trainer()
    context = trainer.context(host.id(number), number)
    with trainer.stream(trainer.header(context, "0", len(data))) as stream:
        stream.committed()
        for offset in range(0, len(data) - MIB, MIB):
            stream.send(data[offset : offset + MIB], offset)
        while stream.committed() < 16 * MIB:
            pass
    return trainer, context


def stalled(url: str) -> Store:
    """A place that takes no data file, and never says so."""
    store = open_store(url)

    async def upload(*arguments: Any, **more: Any) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError

    store.upload = upload  # type: ignore[method-assign]
    return store


def ingest(host: Host, data: bytes) -> tuple[Trainer, sidecar_pb2.SaveContext]:
    """A rank that is ingested, of which nothing is in storage."""
    host.start(store=stalled)
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.hand_over(context, trainer.write(context, "0", data))
    return trainer, context


def spool_file(host: Host) -> Path:
    (found,) = host.spool.glob("*.data")
    return found


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(MIB + 5)
        byte = file.read(1)
        file.seek(MIB + 5)
        file.write(bytes([byte[0] ^ 1]))


def test_a_rank_whose_trainer_does_not_come_back_is_lost(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RECOVERED_TRAINER_CONNECT_S", 0.3)
    host.start()
    trainer, context = begin(host, bytes(20 * MIB))
    host.end()
    trainer.die()
    host.start()
    report = host.coordinator.await_report(lambda report: report.HasField("failure"))
    assert report.failure.kind == save_pb2.FAILURE_KIND_LOST
    never = "rank 0 on host node-0 sent data but never connected to the sidecar within 0.3 s"
    assert never in report.failure.message
    host.coordinator.decide(context, ABORTED, report.failure)
    await_true(lambda: not host.sidecar.saves.undecided(), "aborted")
    host.end()
    assert not os.listdir(host.spool)
    host.start()


def test_bytes_that_went_bad_before_the_hand_over_are_sent_again(host: Host) -> None:
    host.start()
    data = os.urandom(20 * MIB)
    trainer, context = begin(host, data)
    host.end()
    spoil(spool_file(host))
    host.start()
    trainer.connect()
    with trainer.stream(trainer.header(context, "0", len(data))) as stream:
        assert stream.committed() == 0
    file = trainer.write(context, "0", data)
    trainer.hand_over(context, file)
    host.coordinator.await_phase(context, DURABLE)
    assert (Path(host.id()) / file.name).read_bytes() == data


def test_what_was_ingested_is_uploaded_after_a_restart_without_trainers(host: Host) -> None:
    data = os.urandom(20 * MIB + 5)
    trainer, context = ingest(host, data)
    trainer.die()
    host.end()
    assert sorted(os.listdir(host.spool)) == ["00000001.data", "journal"]
    before = len(host.coordinator.reports)
    host.start()
    report = host.coordinator.await_phase(context, DURABLE, after=before)
    (file,) = report.receipt.files
    assert (Path(host.id()) / file.name).read_bytes() == data
    host.coordinator.decide(context, COMMITTED)
    await_true(lambda: not host.sidecar.saves.undecided(), "committed")
    host.end()
    assert sorted(os.listdir(host.spool)) == ["00000001.data", "journal"]
    host.start()
    (copy,) = host.sidecar.local_copies.statuses()
    assert (copy.checkpoint_id, copy.bytes) == (context.checkpoint_id, len(data))


def test_what_was_ingested_stays_when_the_journal_can_not_be_closed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(MIB)
    trainer, context = ingest(host, data)
    trainer.die()

    async def fail(_: JournalState, *, keep_copies: bool) -> set[str]:
        raise StorageError("no thread for it")

    with monkeypatch.context() as patched:
        patched.setattr(JournalState, "close", fail)
        with pytest.raises(StorageError, match="no thread for it"):
            host.end()
    before = len(host.coordinator.reports)
    host.start()
    host.coordinator.await_phase(context, DURABLE, after=before)


def test_what_was_to_go_to_another_endpoint_is_left_to_a_sidecar_with_that_one(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(2 * MIB)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.1:9000")
    trainer, context = ingest(host, data)
    trainer.die()
    host.end()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.2:9000")
    host.start()
    assert not host.sidecar.saves.undecided()
    assert "rank 0 on node-0 was ingested by a sidecar with another value of AWS_ENDPOINT_URL" in (
        caplog.text
    )
    # The spool is used, and the space that the rank has isn't given to others.
    host.sidecar.spool.measure()
    assert host.sidecar.spool.usage.reserved >= len(data)
    other = host.trainer()
    second = other.context(host.id(2), 2)
    other.hand_over(second, other.write(second, "0", b"x" * MIB))
    host.coordinator.await_phase(second, DURABLE)
    host.coordinator.decide(second, COMMITTED)
    await_true(lambda: not host.sidecar.saves.undecided(), "committed")
    host.end()
    assert not host.objects(1)
    before = len(host.coordinator.reports)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.1:9000")
    host.start()
    report = host.coordinator.await_phase(context, DURABLE, after=before)
    (file,) = report.receipt.files
    assert (Path(host.id()) / file.name).read_bytes() == data


def test_nothing_else_is_kept_for_another_endpoint(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a rank whose trainer had not sent all, nor what is in storage."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.1:9000")
    host.start()
    begin(host, bytes(20 * MIB))
    trainer = host.trainer()
    context = trainer.context(host.id(2), 2)
    trainer.hand_over(context, trainer.write(context, "0", b"x" * MIB))
    host.coordinator.await_phase(context, DURABLE)
    host.end()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.2:9000")
    host.start()
    host.sidecar.spool.measure()
    assert host.sidecar.spool.usage.reserved == 0
    assert not list(host.spool.glob("*.data"))


@pytest.mark.parametrize("gone", [False, True])
def test_ingested_bytes_that_went_bad_or_away_fail_the_rank_by_name(host: Host, gone: bool) -> None:
    ingest(host, os.urandom(4 * MIB))
    host.end()
    spool_file(host).unlink() if gone else spoil(spool_file(host))
    host.start()
    report = host.coordinator.await_report(lambda report: report.HasField("failure"))
    assert "is lost after a restart of the sidecar" in report.failure.message
    expected = (
        (save_pb2.FAILURE_KIND_SPOOL, "00000001.data can't be opened")
        if gone
        else (save_pb2.FAILURE_KIND_INTEGRITY, "the journal says")
    )
    assert report.failure.kind == expected[0]
    assert expected[1] in report.failure.message
    assert not host.objects()


def test_a_failure_is_reported_again_and_its_save_is_not_resumed(host: Host) -> None:
    trainer, context = ingest(host, os.urandom(MIB))
    (save,) = host.sidecar.saves.undecided()
    host.loop.call(
        host.sidecar.saves.fail, save.ranks[0], save_pb2.FAILURE_KIND_STORAGE, "403 no permission"
    )
    host.end()
    assert os.listdir(host.spool) == ["journal"]
    before = len(host.coordinator.reports)
    host.start()
    report = host.coordinator.await_report(lambda r: r.HasField("failure"), after=before)
    assert report.failure.message == "403 no permission"
    trainer.connect()
    # It was ingested: only the coordinator's decision says how the save ends.
    with pytest.raises(errors.InDoubtError, match="403 no permission"):
        trainer.hand_over(context)


def test_a_reported_abort_is_cleaned_up_after_a_restart(host: Host) -> None:
    def immovable(url: str) -> Store:
        store = open_store(url)

        async def delete(*arguments: Any, **more: Any) -> None:
            await asyncio.Event().wait()

        store.delete = delete  # type: ignore[method-assign]
        return store

    host.start(store=immovable)
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.hand_over(context, trainer.write(context, "0", b"x" * MIB))
    host.coordinator.await_phase(context, DURABLE)
    host.coordinator.decide(context, ABORTED)
    trainer.await_state(context, ABORTED)
    assert host.objects()
    before = len(host.coordinator.reports)
    host.end()
    host.start()
    await_true(lambda: not host.objects(), "its objects are removed")
    await_true(lambda: not host.sidecar._journal.states(), "nothing is left to do")
    # The coordinator didn't have to be asked.
    assert len(host.coordinator.reports) == before


def test_a_hand_over_that_the_journal_lost_is_failed_when_its_client_says_so(host: Host) -> None:
    host.start()
    data = bytes(20 * MIB)
    trainer, context = begin(host, data)
    host.end()
    host.start()
    request = sidecar_pb2.ConnectRequest(
        wire_version=WIRE_VERSION,
        job=trainer.job,
        incarnation=trainer.incarnation,
        rank=0,
        world_size=1,
        client="c1",
        pending=[sidecar_pb2.PendingSave(context=context, handed_over=True)],
    )
    stream = trainer.stub.Connect(request, wait_for_ready=True)
    report = host.coordinator.await_report(lambda report: report.HasField("failure"))
    stream.cancel()
    assert report.failure.kind == save_pb2.FAILURE_KIND_SPOOL
    assert "was handed over, but the journal" in report.failure.message


def test_a_rank_without_files_is_recovered_too(host: Host) -> None:
    def slow(url: str) -> Store:
        store = stalled(url)

        async def create(*arguments: Any) -> ObjectInfo:
            await asyncio.Event().wait()
            raise AssertionError

        store.create = create  # type: ignore[method-assign]
        return store

    host.start(store=slow)
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.hand_over(context)
    host.end()
    host.start()
    report = host.coordinator.await_phase(context, DURABLE)
    assert host.objects() == {object_names.receipt(report.attempt, 0)}


def test_only_spool_files_that_no_save_needs_are_removed(host: Host) -> None:
    host.spool.mkdir(mode=0o700)
    (host.spool / "00000007.data").write_bytes(b"of a process without a journal")
    (host.spool / "notes.data").write_bytes(b"somebody's")
    (host.spool / "letter").write_bytes(b"somebody's")
    ingest(host, os.urandom(MIB))
    host.end()
    assert sorted(os.listdir(host.spool)) == ["00000001.data", "journal", "letter", "notes.data"]


def test_a_second_sidecar_on_the_spool_is_refused_and_touches_nothing(host: Host) -> None:
    ingest(host, os.urandom(MIB))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in host.spool.iterdir())
    with pytest.raises(errors.ConfigurationError, match="another sidecar works on the spool"):
        host.loop.run(server.Sidecar(host.sidecar.config).__aenter__())
    assert sorted((p.name, p.stat().st_mtime_ns) for p in host.spool.iterdir()) == before


def test_a_spool_of_a_newer_version_is_refused_and_stays_as_it_is(host: Host) -> None:
    ingest(host, os.urandom(MIB))
    host.end()
    journal = host.spool / "journal"
    journal.write_bytes(header(FORMAT + 1) + b"something new")
    before = {path: path.read_bytes() for path in host.spool.iterdir()}
    with pytest.raises(errors.ConfigurationError, match="a newer version of Pannier"):
        host.start()
    assert {path: path.read_bytes() for path in host.spool.iterdir()} == before
    journal.unlink()
    host.start()


def test_a_rank_that_fails_after_it_was_ingested_is_in_doubt(host: Host) -> None:
    def lossy(url: str) -> Store:
        """A place that keeps receipts, and says that it couldn't."""
        store = open_store(url)
        create = store.create

        async def lose(key: str, data: bytes) -> ObjectInfo:
            await create(key, data)
            raise StorageError(f"{key}: the answer got lost")

        store.create = lose  # type: ignore[method-assign]
        return store

    host.start(store=lossy)
    trainer = host.trainer()
    context = trainer.context(host.id())
    file = trainer.write(context, "0", bytes(MIB))
    trainer.hand_over(context, file)
    host.coordinator.await_report(lambda report: report.HasField("failure"))
    # A trainer whose hand-over was not answered makes it again.
    with pytest.raises(errors.InDoubtError, match=r"failed after it was ingested.*answer got lost"):
        trainer.hand_over(context, file)
    host.coordinator.decide(context, COMMITTED)
    trainer.await_state(context, COMMITTED)


@pytest.mark.parametrize("boot", ["the same", "another"])
def test_a_save_keeps_its_deadline(boot: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.start(store=stalled)
    trainer = host.trainer()
    context = trainer.context(host.id())
    file = trainer.write(context, "0", bytes(MIB))
    request = sidecar_pb2.HandOverRequest(
        context=context,
        attempt=attempt_of(context.save),
        plan_id=PLAN_ID,
        files=[file],
        save_timeout_s=500,
    )
    trainer.call("HandOver", request)
    first = host.coordinator.await_phase(context, INGESTED)
    assert 400 < first.save_timeout_s <= 500
    assert first.timeout_s == 0
    host.end()
    passed = time.clock_gettime(time.CLOCK_BOOTTIME) + 300
    monkeypatch.setattr(boot_clock, "boot_time_s", lambda: passed)
    if boot == "another":
        monkeypatch.setattr(boot_clock, "boot_id", lambda: "of another boot")
    for _ in range(2):
        before = len(host.coordinator.reports)
        host.start(store=stalled)
        again = host.coordinator.await_phase(context, INGESTED, after=before)
        left = again.save_timeout_s
        # What a boot knew is left again on another one, once.
        assert 400 < left <= 500 if boot == "another" else 100 < left <= 200
        host.end()


def test_a_deadline_that_has_passed_stays_known(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot_clock, "boot_time_s", lambda: 1000.0)
    begun = journal_pb2.PartBegun()
    boot_clock.note(begun, time.monotonic() + 10)
    monkeypatch.setattr(boot_clock, "boot_time_s", lambda: 2000.0)
    assert 0 < boot_clock.remaining(begun) < 1
    assert boot_clock.remaining(journal_pb2.PartBegun()) == 0
