"""Replicas between two sidecars over gRPC, with scripted coordinators: what is sent, what isn't, and who uploads."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.sidecar.replicas.replica_stream import ReplicaStream
from pannier.v1 import restore_pb2, save_pb2, sidecar_pb2
from pannier.wire.file_layout import STAMP_BYTES
from support.actors.hosts import await_true
from support.actors.lease_holder import LeaseHolder, hand_over, staged
from support.actors.replica_hosts import ReplicaHosts, replica_hosts, without_ranks

MIB = 1 << 20
INGESTED, DURABLE = save_pb2.RANK_PHASE_INGESTED, save_pb2.RANK_PHASE_DURABLE
ABORTED, COMMITTED = save_pb2.SAVE_STATE_ABORTED, save_pb2.SAVE_STATE_COMMITTED


@pytest.fixture
def hosts() -> Iterator[ReplicaHosts]:
    with replica_hosts() as made:
        yield made


@pytest.fixture
def slow(hosts: ReplicaHosts) -> ReplicaHosts:
    """The origin sends a MiB per second."""
    hosts.start_holder()
    hosts.start_origin(replicas_limit=MIB)
    return hosts


def test_a_lost_host_is_uploaded_for_with_the_same_objects(hosts: ReplicaHosts) -> None:
    hosts.start()
    hosts.assign()
    data = os.urandom(20 * MIB + 5), os.urandom(3), b""
    _, context = hosts.ingest(*data)
    hosts.await_held(1)
    report = hosts.origin.coordinator.await_report(
        lambda report: report.status.bytes_replicated == sum(map(len, data))
    )
    assert report.status.replica_host == "node-1"
    rank = hosts.origin.sidecar.saves.find(context)
    assert rank is not None
    receipt = rank.receipt
    hosts.origin.end()
    assert not hosts.objects(context)
    hosts.take_over(context)
    report = hosts.holder.coordinator.await_phase(context, DURABLE)
    assert report.receipt == receipt
    assert without_ranks(report.context) == without_ranks(context)
    found = hosts.objects(context)
    assert sorted(found[key] for key in found if key.endswith(".distcp")) == sorted(data)
    # The origin comes back, and uploads the same.
    hosts.start_origin(store=None)
    again = hosts.origin.coordinator.await_phase(context, DURABLE)
    assert again.receipt == receipt
    assert hosts.objects(context) == found


def test_what_is_sent_is_said(hosts: ReplicaHosts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hosts.start()
    hosts.assign("")
    hosts.assign("")
    # Before a holder is known.
    trainer, context = hosts.ingest(bytes(1000))
    hosts.assign()
    hosts.await_held(1)
    hosts.ingest(bytes(2000), number=2)
    hosts.await_held(2)
    assert hosts.origin.sidecar.replicas.sent == 3000
    assert caplog.text.count("replicas of this host's ranks go nowhere") == 1
    assert caplog.text.count("replicas of this host's ranks go to node-1") == 1
    # They go with their saves.
    hosts.decide(context, ABORTED)
    hosts.await_held(1)
    hosts.decide(trainer.context(hosts.origin.id(2), 2), COMMITTED)
    hosts.await_held(0)
    await_true(lambda: bool(hosts.holder.sidecar.local_copies.statuses()), "a local copy")
    assert hosts.holder.sidecar.replicas.reserved == 0


def test_the_next_holder_gets_what_the_former_one_was_getting(slow: ReplicaHosts) -> None:
    slow.assign()
    data = os.urandom(2 * MIB)
    slow.ingest(data)
    await_true(lambda: slow.holder.sidecar.replicas.size > 0, "it arrives")
    slow.assign("")
    await_true(lambda: not open_calls(slow), "the stream has ended")
    assert slow.holder.sidecar.replicas.size < len(data)
    slow.assign()
    slow.await_held(1)
    # It went on where it was.
    assert slow.origin.sidecar.replicas.sent <= len(data) + MIB


def test_what_has_waited_for_a_former_holder_is_sent_to_the_next(slow: ReplicaHosts) -> None:
    slow.assign()
    _, first = slow.ingest(os.urandom(2 * MIB))
    await_true(lambda: slow.holder.sidecar.replicas.size > 0, "it arrives")
    _, second = slow.ingest(bytes(1000), number=2)
    slow.origin.coordinator.await_phase(second, INGESTED)
    slow.assign("")
    await_true(lambda: not open_calls(slow), "the stream has ended")
    rank = slow.origin.sidecar.saves.find(first)
    assert rank is not None
    slow.decide(first, COMMITTED)
    await_true(lambda: rank.save.outcome is not None, "the first save has ended")
    slow.assign()
    slow.await_held(1)
    assert slow.held[0].context.save == second.save


def test_a_rank_that_was_sent_to_a_former_holder_just_before_goes_to_the_next(
    hosts: ReplicaHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.start()
    peers: list[str] = []

    async def run(stream: ReplicaStream, stub: object) -> None:
        sender = hosts.origin.sidecar.replicas.sender
        peers.append(sender._holder.host)
        following = restore_pb2.FetchHost(host="node-2", peer_address="127.0.0.1:1")
        asyncio.get_running_loop().call_soon(sender.set_holder, following)

    monkeypatch.setattr(ReplicaStream, "run", run)
    hosts.assign()
    hosts.ingest(bytes(1000))
    await_true(lambda: peers == ["node-1", "node-2"], "it is sent to both")


def open_calls(hosts: ReplicaHosts) -> bool:
    held = hosts.holder.sidecar.replicas.held._replicas.values()
    return any(each._stream is not None for each in held)


def test_a_holder_that_is_not_there_is_tried_again(
    hosts: ReplicaHosts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "REPLICA_AGAIN_S", 0.01)
    monkeypatch.setattr(timeouts, "REPLICA_LONGEST_AGAIN_S", 0.01)
    hosts.start_origin()
    hosts.assign()
    hosts.ingest(bytes(1000))
    await_true(lambda: "its replica is sent again" in caplog.text, "it says what is wrong")
    hosts.start_holder()
    hosts.await_held(1)


def test_without_room_a_save_goes_on_and_it_is_said_once(
    hosts: ReplicaHosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.start_holder(spool_budget=MIB)
    hosts.start_origin(store=None)
    hosts.assign()
    trainer, context = hosts.ingest(bytes(2 * MIB))
    hosts.origin.coordinator.await_phase(context, DURABLE)
    trainer, context = hosts.ingest(bytes(2 * MIB), number=2)
    hosts.origin.coordinator.await_phase(context, DURABLE)
    await_true(lambda: hosts.holder.sidecar.replicas.refused == 2, "both were refused")
    hosts.decide(context, COMMITTED)
    trainer.await_state(context, COMMITTED)
    said = [each.getMessage() for each in caplog.records if "has no room" in each.getMessage()]
    assert len(said) == 1
    assert "has no replicas: node-1 has no room: " in said[0]


def test_an_abort_ends_what_is_being_sent(slow: ReplicaHosts) -> None:
    slow.assign()
    trainer, context = slow.ingest(os.urandom(2 * MIB))
    await_true(lambda: slow.holder.sidecar.replicas.size > 0, "it arrives")
    slow.origin.coordinator.decide(context, ABORTED)
    trainer.await_state(context, ABORTED)
    await_true(lambda: not open_calls(slow), "the stream has ended")

    def freed() -> bool:
        # A thread may have read the file when it was given back.
        slow.origin.loop.run(slow.origin.sidecar.tick())
        return slow.origin.sidecar.spool.taken_by("job") == 0

    await_true(freed, "the origin's files are free")
    slow.holder.coordinator.decide(context, ABORTED)
    await_true(lambda: slow.holder.sidecar.replicas.reserved == 0, "the holder's are, too")


def test_a_sidecar_that_ends_leaves_no_file_open(slow: ReplicaHosts) -> None:
    slow.assign()
    slow.ingest(os.urandom(2 * MIB))
    await_true(lambda: slow.holder.sidecar.replicas.size > 0, "it arrives")
    slow.origin.end()
    spool = str(slow.origin.spool)
    assert [path for path in open_files() if path.startswith(spool)] == []
    await_true(lambda: not open_calls(slow), "the stream has ended")
    # What has arrived stays for the sidecar that comes back.
    slow.start_origin()
    slow.assign()
    slow.await_held(1)


def open_files() -> Iterator[str]:
    for each in Path("/proc/self/fd").iterdir():
        try:
            yield os.readlink(each)
        except FileNotFoundError:
            continue


def test_a_file_into_which_a_trainer_stages_another_save_is_not_sent_on(
    slow: ReplicaHosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow.assign()
    trainer = slow.origin.trainer(0, (0, 1))
    context = trainer.context(slow.origin.id())
    with LeaseHolder(trainer, slow.origin.address) as leases:
        (leased,) = leases.lease(8 * MIB)
        name = trainer.header(context, "0", 0).name
        hand_over(trainer, context, [staged(leased, name, os.urandom(8 * MIB))])
        await_true(lambda: slow.holder.sidecar.replicas.size > 0, "it arrives")
        # As a trainer does before it stages there.
        os.pwrite(leased.fd, os.urandom(STAMP_BYTES), leased.capacity)
        await_true(lambda: "has no replica: " in caplog.text, "it isn't sent on")
    assert "a trainer stages another save there" in caplog.text
    assert slow.held == [] or not slow.held[0].complete


def test_a_save_that_torch_plans_is_not_sent(
    hosts: ReplicaHosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.start()
    hosts.assign()
    trainer = hosts.origin.trainer(0, (0, 1))
    context = trainer.context(hosts.origin.id())
    trainer.call("Begin", sidecar_pb2.BeginRequest(context=context))
    trainer.hand_over(context, trainer.write(context, "0", bytes(1000)), plan_id="")
    hosts.origin.coordinator.await_phase(context, INGESTED)
    hosts.ingest(bytes(2000), number=2)
    hosts.await_held(1)
    assert hosts.origin.sidecar.replicas.sent == 2000
    assert "replica" not in caplog.text


def test_the_newest_save_goes_first(hosts: ReplicaHosts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hosts.start()
    for number in 1, 2, 3:
        _, context = hosts.ingest(bytes(1000 + number), number=number)
        hosts.origin.coordinator.await_phase(context, INGESTED)
    hosts.assign()
    hosts.await_held(3)

    def said() -> list[str]:
        lines = [each.getMessage() for each in caplog.records]
        return [each.split(" to ")[0][-2:] for each in lines if "has a replica on" in each]

    await_true(lambda: len(said()) == 3, "all are said")
    assert said() == ["/3", "/2", "/1"]
