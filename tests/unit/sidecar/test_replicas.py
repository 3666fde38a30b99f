"""Replicas between two sidecars over gRPC, with scripted coordinators: what arrives, what stays, who uploads."""

import os
from collections.abc import Iterator

import pytest

from pannier.v1 import save_pb2
from support.actors.hosts import await_true
from support.actors.replica_hosts import ReplicaHosts, replica_hosts

MIB = 1 << 20
DURABLE = save_pb2.RANK_PHASE_DURABLE
ABORTED, COMMITTED = save_pb2.SAVE_STATE_ABORTED, save_pb2.SAVE_STATE_COMMITTED


@pytest.fixture
def hosts() -> Iterator[ReplicaHosts]:
    with replica_hosts() as made:
        yield made


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
    receipt = hosts.origin.sidecar.saves.find(context).receipt
    hosts.origin.end()
    assert not hosts.objects(context)
    hosts.take_over(context)
    report = hosts.holder.coordinator.await_phase(context, DURABLE)
    assert report.receipt == receipt
    assert report.context == context
    found = hosts.objects(context)
    # The origin comes back, and uploads the same.
    hosts.start_origin(store=None)
    again = hosts.origin.coordinator.await_phase(context, DURABLE)
    assert again.receipt == receipt
    assert hosts.objects(context) == found
    hosts.decide(context, COMMITTED)
    await_true(lambda: bool(hosts.holder.sidecar.local_copies.statuses()), "a local copy")


def test_a_restarted_holder_has_its_replica_until_the_save_is_aborted(hosts: ReplicaHosts) -> None:
    hosts.start()
    hosts.assign()
    _, context = hosts.ingest(os.urandom(2 * MIB + 5))
    hosts.await_held(1)
    hosts.holder.end()
    hosts.holder.coordinator.requests.clear()
    hosts.start_holder()
    hosts.await_held(1)
    hosts.decide(context, ABORTED)
    await_true(lambda: not hosts.holder.sidecar.replicas.reserved, "freed")
    hosts.holder.end()
    assert not list(hosts.holder.spool.glob("*.data"))
    hosts.start_holder()
