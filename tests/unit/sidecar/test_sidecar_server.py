"""A sidecar in this process, with a scripted coordinator and scripted trainers, over unix sockets."""

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import crc32c
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.common import timeouts
from pannier.daemon.signals import StopSignals
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.rpc import servicer
from pannier.sidecar.server import Sidecar
from pannier.storage import ObjectInfo, Source, StorageError, Store
from pannier.storage.base import Progress, Retried
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2, status_pb2, status_pb2_grpc
from pannier.wire import errors, object_names
from pannier.wire.version import WIRE_VERSION
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import (
    PLAN_ID,
    Trainer,
    attempt_of,
    data_file,
    status_of,
)
from support.processes.stretch import BOUND_S
from support.storage.checkpoints import write_decision

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


COMMITTED = save_pb2.SAVE_STATE_COMMITTED
ABORTED = save_pb2.SAVE_STATE_ABORTED
LOST = save_pb2.FAILURE_KIND_LOST


# The road.


def test_from_plan_to_commit(host: Host) -> None:
    host.start()
    host.coordinator.files = {0: {"0": 5 * MIB + 7, "1": 3, "objects": 0}}
    trainer = host.trainer()
    context = trainer.context(host.id())
    plan = trainer.plan(context)
    assert (plan.plan_id, plan.attempt) == (PLAN_ID, attempt_of(context.save))
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_PLANNED)
    contents = {"0": os.urandom(5 * MIB + 7), "1": b"abc", "objects": os.urandom(1000)}
    files = [trainer.write(context, name, data) for name, data in contents.items()]
    trainer.hand_over(context, *files)
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)

    assert report.status.bytes_durable == sum(map(len, contents.values()))
    assert {file.name for file in report.receipt.files} == {file.name for file in files}
    attempt = attempt_of(context.save)
    receipt = Path(host.id()) / object_names.receipt(attempt, 0)
    assert records_pb2.Receipt.FromString(receipt.read_bytes()) == report.receipt
    for name, data in contents.items():
        assert (Path(host.id()) / f"__{attempt}_0_{name}.distcp").read_bytes() == data

    host.coordinator.decide(context, COMMITTED)
    status = trainer.await_state(context, COMMITTED)
    assert status.ranks[0].phase == save_pb2.RANK_PHASE_DURABLE
    assert len(host.objects()) == 4


def test_an_upload_follows_the_file_while_it_fills(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    data = os.urandom(40 * MIB)
    header = trainer.header(context, "0", len(data))
    with trainer.stream(header) as stream:
        assert stream.committed() == 0
        for offset in range(0, 20 * MIB, MIB):
            stream.send(data[offset : offset + MIB], offset)
        assert stream.committed() == 16 * MIB
        report = host.coordinator.await_report(lambda r: r.status.bytes_uploaded >= 8 * MIB)
        assert report.status.phase == save_pb2.RANK_PHASE_STREAMING
        for offset in range(20 * MIB, 40 * MIB, MIB):
            stream.send(data[offset : offset + MIB], offset)
        assert [stream.committed(), stream.committed()] == [32 * MIB, 40 * MIB]
    trainer.hand_over(context, data_file(header.name, data))
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert (Path(host.id()) / header.name).read_bytes() == data


def test_clients_get_progress(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with trainer.stream(trainer.header(context, "0", 20 * MIB)) as stream:
        stream.committed()
        trainer.await_state(context, save_pb2.SAVE_STATE_STAGING)
        time.sleep(0.5)
        for offset in range(0, 17 * MIB, MIB):
            stream.send(b"x" * MIB, offset)
        while (event := trainer.events.get(timeout=BOUND_S)).save.ranks[
            0
        ].bytes_ingested < 16 * MIB:
            assert event.save.state == save_pb2.SAVE_STATE_STAGING


def test_a_rank_without_files_writes_a_receipt(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    trainer.hand_over(context)
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert not report.receipt.files
    assert host.objects() == {object_names.receipt(attempt_of(context.save), 0)}


def test_a_save_that_torch_plans(host: Host) -> None:
    host.start()
    first, second = host.trainer(0, (0, 1)), host.trainer(1, (0, 1))
    contexts = [first.context(host.id()), second.context(host.id())]
    begun = first.call("Begin", sidecar_pb2.BeginRequest(context=contexts[0]))
    assert begun.attempt == attempt_of(contexts[0].save)
    for trainer, context in zip((first, second), contexts, strict=True):
        file = trainer.write(context, "0", b"x" * 100)
        trainer.hand_over(context, file, plan_id="")
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    finished = first.call(
        "Finish", sidecar_pb2.FinishRequest(context=contexts[0], timeout_s=BOUND_S)
    )
    assert finished.status.state == COMMITTED


def test_handing_over_twice_is_the_same_as_once(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    file = trainer.write(context, "0", b"x" * 100)
    trainer.hand_over(context, file)
    trainer.hand_over(context, file)
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    host.coordinator.decide(context, COMMITTED)
    trainer.await_state(context, COMMITTED)
    trainer.hand_over(context, file)
    with pytest.raises(errors.InvalidRequestError, match="differently"):
        trainer.hand_over(context)


# Streams.


def test_a_broken_stream_goes_on_where_it_was(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    data = os.urandom(6 * MIB)
    header = trainer.header(context, "0", len(data))
    with trainer.stream(header) as stream:
        assert stream.committed() == 0
        for offset in range(0, 3 * MIB, MIB):
            stream.send(data[offset : offset + MIB], offset)
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_STREAMING)
        rank = host.sidecar.saves.undecided()[0].ranks[0]
        await_true(lambda: rank.files[header.name].held == 3 * MIB, "3 MiB in the spool")
        stream.cut()
    with trainer.stream(header) as stream:
        assert stream.committed() == 3 * MIB
    file = trainer.write(context, "0", data)
    trainer.hand_over(context, file)
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert (Path(host.id()) / header.name).read_bytes() == data


def test_a_new_stream_takes_over_from_one_that_hangs(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    header = trainer.header(context, "0", 2 * MIB)
    with trainer.stream(header) as hanging:
        hanging.committed()
        with trainer.stream(header) as stream:
            assert stream.committed() == 0
            stream.send(b"a" * MIB, 0)
            stream.send(b"b" * MIB, MIB)
            assert stream.committed() == 2 * MIB
        with pytest.raises(errors.PannierError):
            hanging.committed()
    trainer.hand_over(context, data_file(header.name, b"a" * MIB + b"b" * MIB))


def test_a_spool_that_does_not_answer_delays_no_heartbeat_and_no_status(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, answers, pwrite = threading.Event(), threading.Event(), os.pwrite

    def hangs(*arguments: Any) -> int:
        called.set()
        answers.wait()
        return pwrite(*arguments)

    monkeypatch.setattr(timeouts, "HEARTBEAT_S", 0.05)
    host.start()
    monkeypatch.setattr(os, "pwrite", hangs)
    trainer = host.trainer()
    context = trainer.context(host.id())
    header = trainer.header(context, "0", 100)
    try:
        with trainer.stream(header) as stream, grpc.insecure_channel(host.address) as channel:
            stream.send(b"a" * 100, 0)
            assert called.wait(BOUND_S)
            before = len(host.coordinator.requests)
            await_true(lambda: len(host.coordinator.requests) >= before + 3, "heartbeats")
            status = status_pb2_grpc.StatusStub(channel)
            answer = status.ListSaves(status_pb2.ListSavesRequest(), timeout=BOUND_S)
            assert [save.checkpoint_id for save in answer.saves] == [host.id()]
            answers.set()
            while stream.committed() < 100:
                pass
    finally:
        answers.set()


def test_a_sealed_file_is_not_written_again(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    file = trainer.write(context, "0", b"x" * 100)
    header = trainer.header(context, "0", 100)
    with trainer.stream(header) as stream:
        stream.send(b"y" * 100, 0)
        assert stream.committed() == 100
        stream.finish()
    trainer.hand_over(context, file)


@pytest.mark.parametrize(
    ("offset", "length", "crc", "expected", "message"),
    [
        (0, MIB, 1, errors.IntegrityError, "arrived with crc32c"),
        (MIB, MIB, None, errors.InvalidRequestError, "starts at byte 1048576, but 0"),
        (0, 3 * MIB, None, errors.InvalidRequestError, "beyond the 2097152 announced"),
        (0, 5 * MIB, None, errors.InvalidRequestError, "1 to 4194304 are allowed"),
        (0, 0, None, errors.InvalidRequestError, "a chunk has 0 bytes"),
    ],
)
def test_a_wrong_chunk_fails_its_save_and_no_other(
    host: Host,
    offset: int,
    length: int,
    crc: int | None,
    expected: type[errors.PannierError],
    message: str,
) -> None:
    host.start()
    trainer = host.trainer()
    bad, good = trainer.context(host.id(1), 1), trainer.context(host.id(2), 2)
    with trainer.stream(trainer.header(bad, "0", 2 * MIB)) as stream:
        stream.committed()
        stream.send(b"x" * length, offset, crc)
        with pytest.raises(expected, match=message) as raised:
            stream.committed()
    for word in ("job/inc1/", "rank 0 on node-0", host.id(1)):
        assert word in str(raised.value)
    report = host.coordinator.await_phase(bad, save_pb2.RANK_PHASE_FAILED)
    assert message in report.failure.message
    with pytest.raises(errors.SaveAbortedError, match=message):
        trainer.write(bad, "0", b"x" * 2 * MIB)

    trainer.hand_over(good, trainer.write(good, "0", b"x" * MIB))
    host.coordinator.await_phase(good, save_pb2.RANK_PHASE_DURABLE)


def test_a_message_that_is_no_protobuf_is_refused_with_a_reason(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with trainer.stream(trainer.header(context, "0", MIB)) as stream:
        stream.committed()
        stream.send_raw(b"\xff" * 10)
        with pytest.raises(errors.InvalidRequestError, match="malformed"):
            stream.committed()


def test_a_stream_that_is_cancelled_while_it_acknowledges_ends_with_an_error(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = servicer._WriteStream.sending

    @contextmanager
    def interrupted(stream: Any) -> Iterator[None]:
        with sending(stream):
            stream.cancel()
            yield

    monkeypatch.setattr(servicer._WriteStream, "sending", interrupted)
    host.start()
    trainer = host.trainer()
    header = trainer.header(trainer.context(host.id()), "0", MIB)
    with trainer.stream(header) as stream:
        assert stream.committed() == 0
        with pytest.raises(errors.UnavailableError, match="no longer filled by this stream"):
            stream.committed()


def test_chunks_of_any_protobuf_implementation_are_taken(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    header = trainer.header(context, "0", 1000)
    with trainer.stream(header) as stream:
        stream.committed()
        for offset in (0, 500):
            message = sidecar_pb2.WriteRequest(
                data=b"z" * 500, offset=offset, crc32c=crc32c.crc32c(b"z" * 500)
            )
            stream.send_raw(message.SerializeToString())
        assert stream.committed() == 1000
    trainer.hand_over(context, data_file(header.name, b"z" * 1000))


@pytest.mark.parametrize(
    "name",
    [
        "../../escape.distcp",
        "/etc/passwd",
        "__i1-inc1-g5feceb66-s1_0_/../x.distcp",
        "__i1-inc1-g5feceb66-s1_1_0.distcp",
        "__i1-inc1-g5feceb66-s2_0_0.distcp",
        ".metadata",
        "",
    ],
)
def test_a_name_that_is_not_the_ranks_own_is_refused(host: Host, name: str) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    header = trainer.header(context, "0", 10)
    header.name = name
    with trainer.stream(header) as stream, pytest.raises(errors.InvalidRequestError):
        stream.committed()
    assert not list(host.spool.glob("*.data"))


def test_a_size_that_changes_is_refused(host: Host) -> None:
    host.start()
    host.coordinator.files = {0: {"0": 100, "objects": 0}}
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    for middle, problem in (("0", "announced with 99 bytes, before it was 100"), ("7", "isn't in")):
        with (
            trainer.stream(trainer.header(context, middle, 99)) as stream,
            pytest.raises(errors.InvalidRequestError, match=problem),
        ):
            stream.committed()
    trainer.write(context, "objects", b"x" * 50)
    with (
        trainer.stream(trainer.header(context, "objects", 51)) as stream,
        pytest.raises(errors.InvalidRequestError, match="with 51 bytes, before it was 50"),
    ):
        stream.committed()
    # The save itself is unharmed.
    files = [trainer.write(context, "0", b"y" * 100), trainer.write(context, "objects", b"x" * 50)]
    trainer.hand_over(context, *files)


def test_what_is_handed_over_must_be_what_is_there(host: Host) -> None:
    host.start()
    host.coordinator.files = {0: {"0": 100, "1": 100}}
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    first = trainer.write(context, "0", b"x" * 100)
    with pytest.raises(errors.InvalidRequestError, match=r"_1\.distcp was planned but isn't"):
        trainer.hand_over(context, first)
    unseen = data_file(first.name.replace("_0.", "_1."), b"y" * 100)
    with pytest.raises(errors.InvalidRequestError, match="never streamed"):
        trainer.hand_over(context, first, unseen)
    second = trainer.write(context, "1", b"y" * 100)
    with pytest.raises(errors.InvalidRequestError, match=r"_1\.distcp was streamed but isn't"):
        trainer.hand_over(context, first)
    with pytest.raises(errors.InvalidRequestError, match="under plan 'other'"):
        trainer.hand_over(context, first, second, plan_id="other")
    with pytest.raises(errors.InvalidRequestError, match="99 bytes are handed over, 100 of 100"):
        trainer.hand_over(context, first, data_file(second.name, b"y" * 99))
    with pytest.raises(errors.IntegrityError, match="arrived with crc32c"):
        trainer.hand_over(context, first, data_file(second.name, b"z" * 100))
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_INTEGRITY


# Bad contexts.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_id": "relative/path"}, "relative/path"),
        ({"checkpoint_id": "/elsewhere/step-1"}, "not below an allowed root"),
        ({"checkpoint_id": "{root}/../x"}, r"\.\."),
        ({"ranks": [1, 0]}, "not a sorted list of ranks"),
        ({"ranks": []}, "not a sorted list of ranks"),
        ({"world_size": 0}, "not in a world of 0"),
        ({"rank": 5}, "that includes 5"),
    ],
)
def test_a_context_that_makes_no_sense_is_refused(
    host: Host, change: dict[str, object], message: str
) -> None:
    host.start(allow=(str(host.root),))
    trainer = host.trainer()
    context = trainer.context(host.id())
    for field, value in change.items():
        if isinstance(value, list):
            del context.ranks[:]
            context.ranks.extend(value)
        else:
            new = value.format(root=host.root) if isinstance(value, str) else value
            setattr(context, field, new)
    with pytest.raises(errors.InvalidRequestError, match=message):
        trainer.plan(context)
    with pytest.raises(errors.InvalidRequestError, match=message):
        trainer.write(context, "0", b"x")
    with pytest.raises(errors.InvalidRequestError, match=message):
        trainer.hand_over(context)
    assert not host.coordinator.plans
    trainer.plan(trainer.context(host.id(2), 2))


def test_the_memory_of_one_process_is_no_place_for_a_save(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    with pytest.raises(errors.InvalidRequestError, match="one process only"):
        trainer.plan(trainer.context("memory://run/step-1"))


def test_a_malformed_group_name_is_refused(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    context.save.group = "group-0"
    with pytest.raises(errors.InvalidRequestError, match="group 'group-0' is not 'g' and"):
        trainer.plan(context)


# Verdicts.


def ingest(host: Host, trainer: Trainer, number: int, data: bytes) -> sidecar_pb2.SaveContext:
    context = trainer.context(host.id(number), number)
    trainer.hand_over(context, trainer.write(context, "0", data))
    return context


def copied(host: Host) -> list[str]:
    return [copy.checkpoint_id for copy in host.sidecar.local_copies.statuses()]


def test_committed_files_are_used_again_by_the_same_job_only(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    for number in (1, 2, 3):
        context = ingest(host, trainer, number, os.urandom(2 * MIB))
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        host.coordinator.decide(context, COMMITTED)
        trainer.await_state(context, COMMITTED)
        await_true(
            lambda path=context.checkpoint_id: copied(host) == [path], "it is the local copy"
        )
    # One holds the newest save, the other one is used for the next.
    assert len(list(host.spool.glob("*.data"))) == 2
    other = host.trainer(job="other")
    # A number of its own: the scripted coordinator names attempts by it, whatever the job.
    ingest(host, other, 4, os.urandom(2 * MIB))
    assert len(list(host.spool.glob("*.data"))) == 3


def test_an_aborted_save_leaves_no_objects_and_no_spool_files_taken(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = ingest(host, trainer, 1, os.urandom(2 * MIB))
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert len(host.objects()) == 2
    blamed = save_pb2.Failure(rank=3, host="node-9", kind=LOST, message="it vanished")
    host.coordinator.decide(context, ABORTED, blamed)
    status = trainer.await_state(context, ABORTED)
    assert status.failures[0].message == "it vanished"
    await_true(lambda: not host.objects(), "the objects are deleted")
    await_true(lambda: host.sidecar.spool._taken == 0, "the spool is free")
    for late in (
        lambda: trainer.plan(context),
        lambda: trainer.write(context, "1", b"x"),
    ):
        with pytest.raises(
            errors.SaveAbortedError, match="rank 3 \\(host node-9\\): it vanished"
        ) as raised:
            late()
        assert raised.value.failures[3].kind == "LOST"
    assert not host.objects()


def test_an_abort_cuts_streams_and_uploads_under_way(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with trainer.stream(trainer.header(context, "0", 64 * MIB)) as stream:
        stream.committed()
        for offset in range(0, 16 * MIB, MIB):
            stream.send(b"x" * MIB, offset)
        stream.committed()
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_STREAMING)
        host.coordinator.decide(context, ABORTED)
        with pytest.raises(errors.PannierError):
            stream.committed()
    trainer.await_state(context, ABORTED)
    await_true(lambda: host.sidecar.spool._taken == 0, "the spool is free")
    await_true(lambda: not host.objects(), "nothing is left in storage")


def test_nothing_is_deleted_before_the_decision(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = ingest(host, trainer, 1, os.urandom(MIB))
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    host.coordinator.decide(context, save_pb2.SAVE_STATE_IN_DOUBT)
    trainer.await_state(context, save_pb2.SAVE_STATE_IN_DOUBT)
    assert len(host.objects()) == 2
    assert host.sidecar.spool._taken == 1


def test_a_plan_of_an_aborted_save_raises_with_its_failures(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    failure = save_pb2.Failure(rank=1, kind=save_pb2.FAILURE_KIND_SKIPPED, message="busy")
    host.coordinator.plan_error = errors.SaveSkippedError("rank 1 skipped", [failure])
    with pytest.raises(errors.SaveSkippedError) as raised:
        trainer.plan(context)
    assert raised.value.failures[1].message == "busy"
    trainer.await_state(context, ABORTED)
    assert host.sidecar.saves.undecided() == []


def test_a_plan_that_is_refused_fails_its_rank(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    host.coordinator.plan_error = errors.InvalidRequestError("name the planner with --planner")
    with pytest.raises(errors.InvalidRequestError, match="--planner"):
        trainer.plan(context)
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert "--planner" in report.failure.message


def test_fail_is_forwarded_and_reported(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    failure = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_CLIENT, message="planner raised")
    trainer.call("Fail", sidecar_pb2.FailRequest(context=context, failure=failure))
    assert host.coordinator.fails[0].failure.message == "planner raised"
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.message == "planner raised"
    assert (report.failure.rank, report.failure.host) == (0, "node-0")
    with pytest.raises(errors.SaveAbortedError, match="planner raised"):
        trainer.write(context, "0", b"x")


def test_fail_of_a_rank_that_was_never_seen_is_reported(host: Host) -> None:
    host.coordinator.stop()
    host.start(allow=(str(host.root),))
    trainer = host.trainer()
    context = trainer.context("/not/allowed")
    failure = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_SKIPPED, message="busy")
    trainer.call("Fail", sidecar_pb2.FailRequest(context=context, failure=failure))
    host.coordinator.start()
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_SKIPPED
    host.coordinator.decide(context, ABORTED, report.failure)
    trainer.await_state(context, ABORTED)


def test_a_ranks_bytes_go_where_it_said_though_another_rank_said_otherwise_first(
    host: Host, tmp_path: Path
) -> None:
    host.start(allow=(str(host.root),))
    first, second = (host.trainer(rank, (0, 1)) for rank in (1, 0))
    elsewhere = tmp_path / "not-allowed"
    failure = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_CLIENT, message="planner raised")
    failed = sidecar_pb2.FailRequest(context=first.context(str(elsewhere)), failure=failure)
    first.call("Fail", failed)
    header = second.header(second.context(host.id()), "0", 40 * MIB)
    with second.stream(header) as stream:
        assert stream.committed() == 0
        for offset in range(0, 20 * MIB, MIB):
            stream.send(bytes(MIB), offset)
        host.coordinator.await_report(lambda report: report.status.bytes_uploaded >= 8 * MIB)
        assert not elsewhere.exists()
        assert Path(host.id()).exists()


# Trainers that go away.


def test_a_trainer_that_dies_before_ingestion_fails_its_save(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    trainer.die()
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == LOST
    for word in ("4242", "rank 0", "node-0", "planned"):
        assert word in report.failure.message


def test_a_trainer_that_dies_while_planning_gives_its_call_up(host: Host) -> None:
    host.start()
    host.coordinator.hold_plans.clear()
    trainer = host.trainer()
    context = trainer.context(host.id())

    def plan() -> None:
        with suppress(errors.PannierError, ValueError):
            trainer.plan(context)

    planning = threading.Thread(target=plan)
    planning.start()
    await_true(lambda: bool(host.coordinator.plans), "the plan arrived")
    trainer.die()
    planning.join(BOUND_S)
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    await_true(lambda: host.coordinator.cancelled_plans == 1, "the forwarded call is cancelled")


def test_a_trainer_that_dies_after_ingestion_is_not_needed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "TRAINER_RETURN_S", 0.2)
    host.start()
    trainer = host.trainer()
    context = ingest(host, trainer, 1, os.urandom(3 * MIB))
    trainer.die()
    time.sleep(0.7)
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert not any(report.HasField("failure") for report in host.coordinator.reports)
    host.coordinator.decide(context, COMMITTED)
    await_true(lambda: host.sidecar.saves.undecided() == [], "the outcome arrived")


def test_a_trainer_that_connects_again_in_time_keeps_its_save(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "TRAINER_RETURN_S", 5.0)
    host.start()
    host.coordinator.files = {0: {"0": 10}}
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    trainer.disconnect()
    trainer.connect()
    time.sleep(5.2)
    trainer.hand_over(context, trainer.write(context, "0", b"x" * 10), plan_id=PLAN_ID)
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    host.coordinator.decide(context, COMMITTED)
    trainer.await_state(context, COMMITTED)
    # What it missed while it was away is sent when it connects.
    trainer.disconnect()
    trainer.connect()
    trainer.await_state(context, COMMITTED)


# The coordinator.


def test_a_coordinator_that_comes_back_gets_all_reports_again(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    first = ingest(host, trainer, 1, os.urandom(MIB))
    host.coordinator.await_phase(first, save_pb2.RANK_PHASE_DURABLE)
    second = trainer.context(host.id(2), 2)
    trainer.write(second, "0", b"x" * 10)
    host.coordinator.await_phase(second, save_pb2.RANK_PHASE_STREAMING)

    host.coordinator.stop()
    await_true(lambda: not host.sidecar._coordinator.connected, "the stream is down")
    status = host.sidecar.status_registry.get(object_names.save_text(first.save))
    assert "coordinator at unix://" in status.waiting_on.text
    assert "last seen" in status.waiting_on.text
    seen = len(host.coordinator.reports)
    host.coordinator.start()
    again = host.coordinator.await_phase(first, save_pb2.RANK_PHASE_DURABLE, after=seen)
    assert again.receipt.files
    host.coordinator.await_phase(second, save_pb2.RANK_PHASE_STREAMING, after=seen)
    host.coordinator.decide(first, COMMITTED)
    trainer.await_state(first, COMMITTED)


def test_a_plan_waits_for_a_coordinator_that_is_away(host: Host) -> None:
    host.coordinator.stop()
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())

    def come_back() -> None:
        await_true(lambda: bool(host.sidecar.saves.undecided()), "the plan arrived")
        time.sleep(1.0)
        host.coordinator.start()

    away = threading.Thread(target=come_back)
    away.start()
    assert trainer.plan(context, timeout_s=BOUND_S).plan_id == PLAN_ID
    away.join()
    # The remaining time, not the time at the start.
    assert host.coordinator.plans[0].timeout_s < BOUND_S - 0.5


def test_a_plan_gives_up_at_its_deadline_and_says_on_whom(host: Host) -> None:
    host.coordinator.stop()
    host.start()
    trainer = host.trainer()
    with pytest.raises(errors.DeadlineError, match=r"coordinator at unix://.* \(not seen yet\)"):
        trainer.plan(trainer.context(host.id()), timeout_s=1)


def test_heartbeats_come_every_second_and_progress_is_gathered(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    began = time.monotonic()
    file = trainer.write(context, "0", os.urandom(200 * MIB))
    # About five a second, and one for each change of phase.
    assert len(host.coordinator.reports) < 10 + 6 * (time.monotonic() - began)
    trainer.hand_over(context, file)
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    host.coordinator.decide(context, COMMITTED)
    trainer.await_state(context, COMMITTED)
    before, began = len(host.coordinator.requests), time.monotonic()
    await_true(lambda: len(host.coordinator.requests) >= before + 3, "heartbeats come")
    beats = host.coordinator.requests[before:]
    assert len(beats) <= time.monotonic() - began + 2
    assert not any(beat.reports for beat in beats)
    assert (host.coordinator.requests[0].host, host.coordinator.requests[0].wire_version) == (
        "node-0",
        WIRE_VERSION,
    )


# Storage that fails.


class Failing(Store):
    """A store whose uploads end in an error."""

    upload_memory = MIB

    def __init__(self, url: str) -> None:
        self.url = url

    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        retried("503 try later")
        raise StorageError(f"{self.url}/{key}: 403 no permission")

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        raise AssertionError("no receipt without its files")

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        return None

    async def close(self) -> None:
        return None

    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        raise AssertionError

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        raise AssertionError

    async def stat(self, key: str) -> ObjectInfo | None:
        raise AssertionError

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        raise AssertionError

    async def probe(self) -> None:
        raise AssertionError


def test_a_storage_error_fails_the_rank_with_its_reason(host: Host) -> None:
    host.start(store=Failing)
    trainer = host.trainer()
    context = trainer.context(host.id())
    with trainer.stream(trainer.header(context, "0", 2 * MIB)):
        report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_STORAGE
    assert "403 no permission" in report.failure.message
    assert report.status.retries == 1
    with pytest.raises(errors.SaveAbortedError, match="403 no permission"):
        trainer.hand_over(context)
    await_true(lambda: host.sidecar.spool._taken == 0, "the spool is free")


def test_a_scheme_that_has_no_store_fails_the_rank(host: Host) -> None:
    def refuse(url: str) -> Store:
        raise errors.ConfigurationError(f"{url} needs a package that isn't installed")

    host.start(store=refuse)
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.hand_over(context)
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert "isn't installed" in report.failure.message


# The spool.


def test_a_full_spool_says_what_is_needed_and_free(host: Host) -> None:
    host.start(spool_budget=10 * MIB)
    trainer = host.trainer()
    first = ingest(host, trainer, 1, b"x" * 8 * MIB)
    second = trainer.context(host.id(2), 2)
    with (
        trainer.stream(trainer.header(second, "0", 8 * MIB)) as stream,
        pytest.raises(errors.BusyError, match=f"{8 * MIB} bytes needed, {2 * MIB} free"),
    ):
        stream.committed()
    host.coordinator.await_phase(first, save_pb2.RANK_PHASE_DURABLE)
    host.coordinator.decide(first, COMMITTED)
    await_true(lambda: copied(host) == [first.checkpoint_id], "it is the local copy")
    # Which gives way to what has no other room.
    ingest(host, trainer, 2, b"y" * 8 * MIB)
    assert not copied(host)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs: needs root")
def test_a_full_file_system_is_an_error_before_a_byte_comes(host: Host, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        host.spool = small
        host.start()
        trainer = host.trainer()
        first = ingest(host, trainer, 1, b"x" * 10 * MIB)
        second = trainer.context(host.id(2), 2)
        with (
            trainer.stream(trainer.header(second, "0", 10 * MIB)) as stream,
            pytest.raises(errors.BusyError, match=r"10485760 bytes needed, 4\d+ free"),
        ):
            stream.committed()
        host.coordinator.await_phase(first, save_pb2.RANK_PHASE_DURABLE)
        host.stop()
        del host.sidecar
    finally:
        # Also when a failed test still uses it.
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_a_plan_that_never_fits_the_spool_fails_at_once(host: Host) -> None:
    host.start(spool_budget=10 * MIB)
    trainer = host.trainer()
    context = trainer.context(host.id())
    host.coordinator.files[0] = {"0": 12 * MIB}
    with pytest.raises(errors.SaveAbortedError) as raised:
        trainer.plan(context)
    assert f"{12 * MIB} bytes needed" in str(raised.value)
    assert f"{10 * MIB} in its budget in total" in str(raised.value)
    for remedy in (str(host.spool), "--spool-budget", "--spool ", "PANNIER_SPOOL"):
        assert remedy in str(raised.value)
    assert raised.value.failures[0].kind == "SPOOL"
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_SPOOL


def test_ranks_of_one_host_that_never_fit_together_fail_at_once(host: Host) -> None:
    host.start(spool_budget=10 * MIB)
    host.coordinator.files.update({0: {"0": 6 * MIB}, 1: {"0": 6 * MIB}})
    first, second = host.trainer(0, (0, 1)), host.trainer(1, (0, 1), client="c2")
    first.plan(first.context(host.id()))
    context = second.context(host.id())
    with pytest.raises(errors.SaveAbortedError, match=f"{12 * MIB} bytes needed"):
        second.plan(context)
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_SPOOL


def test_files_of_unplanned_sizes_that_never_fit_the_spool_fail_when_opened(host: Host) -> None:
    host.start(spool_budget=10 * MIB)
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.write(context, "0", b"x" * 6 * MIB)
    with (
        trainer.stream(trainer.header(context, "1", 6 * MIB)) as stream,
        pytest.raises(errors.SaveAbortedError, match=f"{12 * MIB} bytes needed"),
    ):
        stream.committed()
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_SPOOL


def test_what_an_earlier_sidecar_left_is_removed(host: Host) -> None:
    host.spool.mkdir(mode=0o700, parents=True)
    (host.spool / "00000007.data").write_bytes(b"old")
    host.start()
    assert not list(host.spool.glob("*.data"))


def test_a_second_sidecar_on_the_spool_is_refused(host: Host) -> None:
    host.start()
    config = SidecarConfig(
        address=host.address + "2", coordinator=host.coordinator.address, spool=host.spool
    )
    holder = rf"another sidecar works on the spool {host.spool} \(process {os.getpid()}: .*python"
    with pytest.raises(errors.ConfigurationError, match=holder):
        host.loop.run(Sidecar(config).__aenter__())


# Connections.


def test_versions_that_differ_are_both_named(host: Host) -> None:
    host.start()
    trainer = Trainer(host.address)
    host._trainers.append(trainer)
    with pytest.raises(
        errors.VersionMismatchError,
        match=rf"9\.9\) speaks wire version 77, .* {WIRE_VERSION}: run the same",
    ):
        trainer.connect(wire_version=77)


def test_the_welcome_says_who_is_there(host: Host) -> None:
    host.start(embedded=True)
    trainer = Trainer(host.address)
    host._trainers.append(trainer)
    welcome = trainer.connect()
    assert (welcome.host, welcome.coordinator) == ("node-0", host.coordinator.address)
    assert (welcome.embedded, welcome.draining) == (True, False)


def test_status_shows_how_far_a_rank_is(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.write(context, "0", b"x" * 1000)
    with grpc.insecure_channel(host.address) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        save = stub.GetSave(status_pb2.GetSaveRequest(id=host.id()), timeout=BOUND_S).save
        assert save.state == save_pb2.SAVE_STATE_STAGING
        (rank,) = save.ranks
        assert (rank.host, rank.phase) == ("node-0", save_pb2.RANK_PHASE_STREAMING)
        assert (rank.bytes_staged, rank.bytes_ingested) == (1000, 1000)
        assert re.search(r"rank 0 \(host node-0, last seen \d+ s ago\)", save.waiting_on.text)
        watched = stub.WatchSave(status_pb2.WatchSaveRequest(id=save.id), timeout=BOUND_S)
        assert next(watched).save.id == save.id
        trainer.hand_over(context, data_file(trainer.header(context, "0", 0).name, b"x" * 1000))
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        host.coordinator.decide(context, COMMITTED)
        assert [answer.save.state for answer in watched][-1] == COMMITTED


# Stopping.


def drain(host: Host) -> None:
    async def drain_until_the_end() -> None:
        await host.sidecar.drain(StopSignals())

    host.loop.run(drain_until_the_end())


def wait_for_exit(host: Host) -> None:
    async def wait() -> None:
        async with StopSignals() as stop:
            await host.sidecar.wait(stop)

    host.loop.run(wait())


def test_draining_takes_no_new_saves_and_finishes_the_old(host: Host) -> None:
    sidecar = host.start(grace_s=BOUND_S)
    host.coordinator.files = {0: {"0": 4 * MIB}}
    trainer = host.trainer()
    old = trainer.context(host.id())
    data = os.urandom(4 * MIB)
    trainer.plan(old)
    draining = threading.Thread(target=drain, args=(host,))
    draining.start()
    await_true(lambda: sidecar.saves.draining, "it drains")
    with pytest.raises(errors.UnavailableError, match="draining"):
        trainer.plan(trainer.context(host.id(2), 2))
    with grpc.insecure_channel(host.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = status_pb2_grpc.StatusStub(channel)
        listed = stub.ListSaves(status_pb2.ListSavesRequest(), timeout=BOUND_S)
        assert listed.daemon_state == "draining"
    assert draining.is_alive()
    trainer.hand_over(old, trainer.write(old, "0", data))
    draining.join(BOUND_S)
    assert not draining.is_alive()
    host.coordinator.await_phase(old, save_pb2.RANK_PHASE_DURABLE)


def test_draining_ends_with_the_grace_period(host: Host) -> None:
    host.start(grace_s=0.5)
    trainer = host.trainer()
    trainer.plan(trainer.context(host.id()))
    began = time.monotonic()
    # The save would never end: it is left at the end of the grace period.
    drain(host)
    assert time.monotonic() - began > 0.4


def test_idle_exit_waits_for_clients_and_outcomes(host: Host) -> None:
    host.start(idle_exit_s=0.5)
    trainer = host.trainer()
    context = ingest(host, trainer, 1, b"x")
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    trainer.die()
    waiting = threading.Thread(target=wait_for_exit, args=(host,))
    waiting.start()
    waiting.join(2.5)
    assert waiting.is_alive()
    host.coordinator.send(status_of(context, COMMITTED))
    waiting.join(BOUND_S)
    assert not waiting.is_alive()


def test_an_idle_sidecar_says_that_it_exits_only_once_it_has_no_replica_to_upload(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(timeouts, "CHECK_S", 0.05)
    said: list[bool] = []

    async def take_over_all() -> bool:
        said.append(": exiting" in caplog.text)
        return len(said) == 1

    host.start(idle_exit_s=0.01)
    monkeypatch.setattr(host.sidecar.replicas.held, "take_over_all", take_over_all)
    wait_for_exit(host)
    assert said == [False, False]
    assert caplog.text.count(": exiting") == 1


@pytest.mark.parametrize("aborted", [False, True])
def test_idle_exit_without_a_coordinator_waits_for_no_outcome(host: Host, aborted: bool) -> None:
    """Of an attempt that was aborted meanwhile it leaves nothing but the decision."""
    host.start(idle_exit_s=0.5)
    trainer = host.trainer()
    context = ingest(host, trainer, 1, b"x")
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    trainer.die()
    host.coordinator.stop()
    (receipt,) = (path for path in Path(host.id()).glob(".pannier/*/receipts/0"))
    attempt = receipt.parents[1].name
    if aborted:
        write_decision(Path(host.id()), attempt, records_pb2.OUTCOME_ABORT)
    waiting = threading.Thread(target=wait_for_exit, args=(host,))
    waiting.start()
    waiting.join(BOUND_S)
    assert not waiting.is_alive()

    def left() -> set[str]:
        return {key for key in host.objects() if Path(key).name != ".pannier-lock"}

    if aborted:
        decision = object_names.decision(attempt)
        await_true(lambda: left() == {decision}, "the decision is all that is left")
    else:
        # The next coordinator finds these.
        assert str(receipt.relative_to(host.id())) in left()
        assert len(left()) == 2
