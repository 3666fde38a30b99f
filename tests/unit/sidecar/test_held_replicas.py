"""Replicas at the host that holds them, over gRPC with another host's part played: what stays, what ends, and why."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.sidecar.rpc.replicate_stream import ReplicateStream
from pannier.sidecar.spool.spool import SpoolFile
from pannier.v1 import records_pb2, restore_pb2, save_pb2
from pannier.wire.errors import (
    BusyError,
    ConfigurationError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    UnavailableError,
    VersionMismatchError,
)
from support.actors.hosts import await_true
from support.actors.replica_hosts import ReplicaHosts, replica_hosts, replica_start, without_ranks
from support.processes.stretch import BOUND_S
from support.storage.checkpoints import write_decision

MIB = 1 << 20
DURABLE = save_pb2.RANK_PHASE_DURABLE
ABORTED, COMMITTED = save_pb2.SAVE_STATE_ABORTED, save_pb2.SAVE_STATE_COMMITTED
Start = restore_pb2.ReplicaStart


@pytest.fixture
def hosts() -> Iterator[ReplicaHosts]:
    with replica_hosts() as made:
        yield made


@pytest.fixture
def holder(hosts: ReplicaHosts) -> ReplicaHosts:
    hosts.start_holder()
    return hosts


def without_blocks(receipt: records_pb2.Receipt) -> records_pb2.Receipt:
    """As the senders here write it."""
    found = records_pb2.Receipt()
    found.CopyFrom(receipt)
    for each in found.files:
        each.ClearField("block_bytes")
        each.ClearField("block_crc32c")
    return found


def start_of(hosts: ReplicaHosts, *data: bytes, timeout_s: float = 0.0) -> Start:
    return replica_start(hosts.holder.id(), *data, timeout_s=timeout_s)


def await_freed(hosts: ReplicaHosts) -> None:
    await_true(lambda: hosts.holder.sidecar.replicas.reserved == 0, "its room is free")
    hosts.await_held(0)


def copied(hosts: ReplicaHosts) -> dict[str, bytes]:
    """Contents of the files of all local copies."""
    copies = list(hosts.holder.sidecar.local_copies._copies)
    found = {name: file for copy in copies for name, file in copy.files.items()}
    return {
        name: Path(file.spool_file.path).read_bytes()[: file.size] for name, file in found.items()
    }


# Streams.


def test_a_broken_stream_goes_on_where_it_was(holder: ReplicaHosts) -> None:
    data = os.urandom(1000), os.urandom(MIB + 5)
    start = start_of(holder, *data)
    first = holder.call(start)
    assert list(first.response().held) == [0, 0]
    first.send(0, 0, data[0])
    first.send(1, 0, data[1][:MIB])
    await_true(lambda: holder.holder.sidecar.replicas.size == 1000 + MIB, "it arrives")
    first.cut()
    second = holder.call(start)
    assert list(second.response().held) == [1000, MIB]
    second.send(1, MIB, data[1][MIB:])
    second.await_complete()
    holder.await_held(1)
    # Once more: it has everything.
    third = holder.call(start)
    assert list(third.response().held) == [1000, MIB + 5]
    assert third.response().complete


def test_a_second_stream_takes_the_first_ones_place(holder: ReplicaHosts) -> None:
    data = os.urandom(MIB)
    start = start_of(holder, data)
    first = holder.call(start)
    first.send(0, 0, data[:1000])
    await_true(lambda: holder.holder.sidecar.replicas.size == 1000, "it arrives")
    second = holder.call(start)
    assert list(second.response().held) == [1000]
    with pytest.raises(UnavailableError, match=r"another stream fills the replica of .*rank 3"):  # noqa: PT012
        while True:
            first.response()
    second.send(0, 1000, data[1000:])
    second.await_complete()


def test_other_files_of_the_rank_take_the_former_ones_place(holder: ReplicaHosts) -> None:
    former = holder.call(start_of(holder, b"former"))
    former.response()
    holder.send(start_of(holder, b"new", b"files"), b"new", b"files")
    with pytest.raises(UnavailableError, match="its host has other files of that rank now"):
        former.response()
    holder.await_held(1)
    assert holder.holder.sidecar.replicas.size == 8


def test_a_restarted_sidecar_has_it_again(holder: ReplicaHosts) -> None:
    data = os.urandom(1000), os.urandom(MIB), b""
    start = start_of(holder, *data)
    call = holder.call(start)
    call.send(0, 0, data[0])
    call.send(1, 0, data[1][:1000])
    await_true(lambda: holder.holder.sidecar.replicas.size == 2000, "it arrives")
    holder.restart_holder()
    again = holder.call(start)
    # Whole files, and others in large steps.
    assert list(again.response().held) == [1000, 0, 0]
    again.send(1, 0, data[1])
    again.await_complete()
    holder.holder.end()
    before = len(holder.holder.coordinator.requests)
    holder.start_holder()
    # Its first report has the ranks, too.
    report = holder.holder.coordinator.await_request(
        lambda request: any(
            each.complete and each.context.ranks for each in request.copies.replicas
        ),
        after=before,
    )
    (held,) = report.copies.replicas
    assert held.context == start.context
    holder.take_over(start.context)
    report = holder.holder.coordinator.await_phase(start.context, DURABLE)
    assert without_blocks(report.receipt) == start.receipt


def test_a_damaged_file_is_no_replica_after_a_restart(
    holder: ReplicaHosts, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(MIB)
    start = start_of(holder, data)
    holder.send(start, data)
    (replica,) = holder.holder.sidecar.replicas.held._replicas.values()
    (file,) = replica.files
    path = Path(file.spool_file.path)
    holder.holder.end()
    with path.open("r+b") as damaged:
        damaged.seek(5)
        damaged.write(bytes(byte ^ 1 for byte in data[5:6]))
    holder.start_holder()
    assert "is given up" in caplog.text
    call = holder.call(start)
    assert list(call.response().held) == [0]


def changed(start: Start, change: Callable[[Start], object]) -> Start:
    change(start)
    return start


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            lambda start: setattr(start, "wire_version", 3),
            VersionMismatchError,
            "node-9 speaks wire version 3, .* run the same version of Pannier",
        ),
        (
            lambda start: setattr(start.context, "checkpoint_id", "/elsewhere/step-1"),
            InvalidRequestError,
            "'/elsewhere/step-1' is not below an allowed root",
        ),
        (
            lambda start: setattr(start.receipt, "attempt", "i1-other-g00000000-s1"),
            InvalidRequestError,
            "is an attempt of another save",
        ),
        (lambda start: setattr(start.receipt, "rank", 2), InvalidRequestError, "receipt of rank 2"),
        (
            lambda start: setattr(start.receipt.files[0], "name", "../../etc/passwd"),
            InvalidRequestError,
            "passwd",
        ),
        (
            lambda start: start.receipt.files.append(start.receipt.files[0]),
            InvalidRequestError,
            "names a file twice",
        ),
        (
            lambda start: setattr(start, "created_at", float("nan")),
            InvalidRequestError,
            "created at nan",
        ),
    ],
)
def test_what_it_never_takes(
    hosts: ReplicaHosts, change: Callable[[Start], object], kind: type[PannierError], text: str
) -> None:
    hosts.start_holder(allow=(str(hosts.holder.root),))
    call = hosts.call(changed(start_of(hosts, b"data"), change))
    with pytest.raises(kind, match=text):
        call.response()
    assert hosts.holder.sidecar.replicas.reserved == 0


def test_a_host_that_takes_no_part_says_so(hosts: ReplicaHosts) -> None:
    hosts.start_holder(replicas=0)
    call = hosts.call(start_of(hosts, b"data"))
    with pytest.raises(
        ConfigurationError, match=r"node-1 takes no replica from node-9: .*without --replicas 1"
    ):
        call.response()


@pytest.mark.parametrize(
    ("file", "offset", "data", "crc", "kind", "text"),
    [
        (0, 0, b"12345678", 7, IntegrityError, "crc32c"),
        (0, 0, b"87654321", None, IntegrityError, "the receipt has"),
        (0, 0, b"123456789", None, InvalidRequestError, "ends at byte 9, beyond the 8 announced"),
        (0, 4, b"5678", None, InvalidRequestError, "starts at byte 4, but 0 bytes are here"),
        (2, 0, b"1", None, InvalidRequestError, "a chunk of file 2 of .*, which has 1 files"),
    ],
    ids=["damaged", "another content", "too long", "a gap", "an unknown file"],
)
def test_a_wrong_chunk_ends_the_replica(
    holder: ReplicaHosts,
    file: int,
    offset: int,
    data: bytes,
    crc: int | None,
    kind: type[PannierError],
    text: str,
) -> None:
    call = holder.call(start_of(holder, b"12345678"))
    call.response()
    call.send(file, offset, data, crc)
    with pytest.raises(kind, match=text):
        call.response()
    await_freed(holder)


def test_a_stream_begins_with_its_start_and_has_no_other(holder: ReplicaHosts) -> None:
    start = start_of(holder, b"data")
    call = holder.call(start)
    call.response()
    call.send_raw(restore_pb2.ReplicateRequest(start=start))
    with pytest.raises(InvalidRequestError, match="a second `start`"):
        call.response()
    # What the first one has brought stays.
    assert list(holder.call(start).response().held) == [0]


# Room.


def test_no_room(hosts: ReplicaHosts) -> None:
    hosts.start_holder(spool_budget=MIB)
    call = hosts.call(start_of(hosts, bytes(600_000), bytes(600_000)))
    with pytest.raises(BusyError, match="spool"):
        call.response()
    assert hosts.holder.sidecar.replicas.refused == 1
    assert hosts.holder.sidecar.replicas.reserved == 0
    hosts.send(start_of(hosts, bytes(1000)), bytes(1000))


def test_ranks_of_the_host_itself_come_first(
    hosts: ReplicaHosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hosts.start_holder(spool_budget=4 * MIB)
    complete, incomplete = bytes(1 * MIB), bytes(2 * MIB)
    hosts.send(start_of(hosts, complete), complete)
    hosts.await_held(1)
    call = hosts.call(replica_start(hosts.holder.id(2), incomplete, number=2))
    call.response()
    trainer = hosts.holder.trainer()
    context = trainer.context(hosts.holder.id(3), 3)
    trainer.write(context, "0", os.urandom(2 * MIB))
    with pytest.raises(BusyError, match="ranks of this host need its room"):
        call.response()
    assert "(incomplete, 0 B) is given up: ranks of this host need its room" in caplog.text
    hosts.await_held(1)
    trainer.write(context, "1", os.urandom(MIB + MIB // 2))
    assert "(complete, 1.0 MiB) is given up: ranks of this host need its room" in caplog.text
    hosts.await_held(0)
    assert hosts.holder.sidecar.replicas.refused == 2


def test_room_that_is_being_taken_for_a_replica_makes_way_too(
    hosts: ReplicaHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.start_holder(spool_budget=4 * MIB)
    sidecar = hosts.holder.sidecar
    room = sidecar.replicas.held._room
    spool = room._spool
    may_take, waiting = threading.Event(), threading.Event()
    take = spool.take

    def slow(job: str, size: int, **more: Any) -> SpoolFile:
        if size == MIB:
            waiting.set()
            assert may_take.wait(BOUND_S)
        return take(job, size, **more)

    monkeypatch.setattr(spool, "take", slow)
    call = hosts.call(start_of(hosts, bytes(2 * MIB), bytes(MIB)))
    assert waiting.wait(BOUND_S)
    trainer = hosts.holder.trainer()
    context = trainer.context(hosts.holder.id(3), 3)
    with ThreadPoolExecutor() as pool:
        try:
            writing = pool.submit(trainer.write, context, "0", os.urandom(3 * MIB))
            await_true(
                lambda: bool(room.contested) or writing.done(), "the rank waits for the room"
            )
        finally:
            may_take.set()
        writing.result(BOUND_S)
    with pytest.raises(BusyError, match="ranks of node-1 need the spool's room"):
        call.response()
    assert (sidecar.replicas.refused, sidecar.replicas.reserved, room.contested) == (1, 0, 0)


# The end of its save.


def test_a_committed_one_becomes_a_local_copy(holder: ReplicaHosts) -> None:
    data = os.urandom(MIB), os.urandom(5)
    start = start_of(holder, *data)
    holder.send(start, *data)
    holder.holder.coordinator.decide(start.context, COMMITTED)
    expected = {file.name: each for file, each in zip(start.receipt.files, data, strict=True)}
    await_true(lambda: copied(holder) == expected, "a local copy")
    holder.await_held(0)
    # It outlives the sidecar, and isn't sent again.
    holder.restart_holder()
    assert copied(holder) == expected
    assert not holder.objects(start.context)


def test_one_that_completes_after_the_commit_becomes_a_local_copy(holder: ReplicaHosts) -> None:
    data = os.urandom(1000)
    start = start_of(holder, data)
    call = holder.call(start)
    call.response()
    holder.holder.coordinator.decide(start.context, COMMITTED)
    holder.await_held(0)
    call.send(0, 0, data)
    call.await_complete()
    await_true(lambda: list(copied(holder).values()) == [data], "a local copy")


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "incomplete"])
def test_an_abort_frees_it(holder: ReplicaHosts, complete: bool) -> None:
    data = b"12345678"
    start = start_of(holder, data)
    call = holder.call(start)
    call.response()
    if complete:
        call.send(0, 0, data)
        call.await_complete()
    holder.holder.coordinator.decide(start.context, ABORTED)
    await_freed(holder)
    if not complete:
        with pytest.raises(ConfigurationError, match="its save has ended"):
            call.response()
    with pytest.raises(ConfigurationError, match="which has ended"):
        holder.call(start).response()
    # Neither is anything uploaded any more.
    holder.take_over(start.context)
    holder.restart_holder()
    assert holder.holder.sidecar.replicas.reserved == 0
    assert not holder.objects(start.context)


@pytest.mark.parametrize("outcome", [records_pb2.OUTCOME_COMMIT, records_pb2.OUTCOME_ABORT])
def test_storage_is_asked_for_an_outcome_that_the_coordinator_does_not_report(
    holder: ReplicaHosts, outcome: records_pb2.Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(1000)
    start = start_of(holder, data)
    holder.send(start, data)
    monkeypatch.setattr(timeouts, "REPLICA_OUTCOME_S", 0.0)

    def asked() -> bool:
        holder.tick()
        task = holder.holder.sidecar.replicas.held._asking
        return task is not None and task.done()

    await_true(asked, "storage is asked")
    # It is undecided.
    holder.await_held(1)
    write_decision(Path(holder.holder.id()), start.receipt.attempt, outcome)

    def ended() -> bool:
        holder.tick()
        return not holder.held

    await_true(ended, "the outcome is known")
    expected = [data] if outcome == records_pb2.OUTCOME_COMMIT else []
    await_true(lambda: list(copied(holder).values()) == expected, "a local copy, or none")


def test_it_stays_a_while_after_the_deadline_and_an_incomplete_one_after_its_last_chunk(
    holder: ReplicaHosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = b"12345678"
    holder.send(start_of(holder, data, timeout_s=0.001), data)
    call = holder.call(replica_start(holder.holder.id(2), data, number=2))
    call.response()
    holder.tick()
    assert len(holder.holder.sidecar.replicas.held._replicas) == 2
    monkeypatch.setattr(timeouts, "REPLICA_STALE_S", -1.0)
    holder.tick()
    with pytest.raises(UnavailableError, match="nothing of it arrives any more"):
        call.response()
    holder.await_held(1)
    monkeypatch.setattr(timeouts, "REPLICA_KEPT_S", -1.0)
    holder.tick()
    await_freed(holder)
    assert "(complete, 8 B) is given up: its save was over long ago" in caplog.text


def test_its_end_while_a_response_is_being_sent_is_the_streams_error(
    holder: ReplicaHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = holder.holder.sidecar.replicas

    async def requests() -> AsyncIterator[restore_pb2.ReplicateRequest]:
        yield restore_pb2.ReplicateRequest(start=start_of(holder, b"1"))
        await asyncio.Event().wait()

    async def main() -> None:
        responses = ReplicateStream(replicas).responses(requests())
        assert list((await anext(responses)).held) == [0]
        monkeypatch.setattr(timeouts, "REPLICA_STALE_S", -1.0)
        await replicas.tick()
        with pytest.raises(UnavailableError, match="nothing of it arrives any more"):
            await anext(responses)

    holder.holder.loop.run(main())
    assert not replicas.reserved


# Uploads for a lost host.


def test_only_what_is_complete_is_taken_over_and_once(holder: ReplicaHosts) -> None:
    data = os.urandom(MIB), b""
    start = start_of(holder, *data)
    call = holder.call(start)
    call.response()
    holder.take_over(start.context)
    holder.take_over(start.context, rank=2)
    call.send(0, 0, data[0])
    call.await_complete()
    holder.await_held(1)
    assert not holder.holder.coordinator.reports
    holder.take_over(start.context)
    holder.take_over(start.context)
    report = holder.holder.coordinator.await_phase(start.context, DURABLE)
    assert without_blocks(report.receipt) == start.receipt
    assert without_ranks(report.context) == without_ranks(start.context)
    found = holder.objects(start.context)
    assert {key: found[key] for key in found if key.endswith(".distcp")} == {
        file.name: each for file, each in zip(start.receipt.files, data, strict=True)
    }
    assert len(found) == 3
    # It is a rank of this sidecar now.
    with pytest.raises(ConfigurationError, match="node-1 uploads that rank itself"):
        holder.call(start).response()
    holder.holder.coordinator.decide(start.context, COMMITTED)
    await_true(lambda: len(copied(holder)) == 2, "a local copy")


def test_an_idle_exit_waits_for_what_was_taken_over_and_not_for_a_rank_that_is_here_itself(
    holder: ReplicaHosts,
) -> None:
    data = os.urandom(1000)
    own, lost = (replica_start(holder.holder.id(n), data, number=n) for n in (1, 2))
    held = holder.holder.sidecar.replicas.held
    holder.send(own, data)
    trainer = holder.holder.trainer(3, (2, 3))
    trainer.plan(trainer.context(holder.holder.id(1), 1))
    assert not holder.holder.loop.run(held.take_over_all())
    holder.send(lost, data)
    assert holder.holder.loop.run(held.take_over_all())
    holder.holder.coordinator.await_phase(lost.context, DURABLE)
    assert not holder.holder.loop.run(held.take_over_all())


def test_a_take_over_outlives_the_sidecar(holder: ReplicaHosts) -> None:
    data = os.urandom(1000)
    start = start_of(holder, data)
    holder.send(start, data)
    holder.await_held(1)
    holder.take_over(start.context)
    holder.holder.coordinator.await_phase(start.context, DURABLE)
    before = len(holder.holder.coordinator.reports)
    holder.restart_holder()
    report = holder.holder.coordinator.await_phase(start.context, DURABLE, after=before)
    assert without_blocks(report.receipt) == start.receipt
    holder.holder.coordinator.decide(start.context, ABORTED)
    await_true(lambda: not holder.objects(start.context), "its objects are deleted")
