"""Status, health and reflection of a daemon's server."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pannier.daemon.status_registry import StatusRegistry
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire.errors import PannierError
from support.network.in_process_server import KEY, SAVE, Served
from support.processes.stretch import BOUND_S


def test_status_lists_gets_and_watches(served: Served, channel: grpc.Channel) -> None:
    stub = status_pb2_grpc.StatusStub(channel)
    served.status_registry.put(SAVE, "/c/step-1", served.render)
    listed = stub.ListSaves(status_pb2.ListSavesRequest(job="job"), timeout=BOUND_S)
    assert [save.id for save in listed.saves] == [KEY]
    assert (listed.host, listed.daemon_state) == ("node-0", "serving")
    assert not stub.ListSaves(status_pb2.ListSavesRequest(job="other"), timeout=BOUND_S).saves
    aborted = status_pb2.ListSavesRequest(states=[save_pb2.SAVE_STATE_ABORTED])
    assert not stub.ListSaves(aborted, timeout=BOUND_S).saves
    for name in (KEY, "/c/step-1", "step-1", "c/step-1"):
        found = stub.GetSave(status_pb2.GetSaveRequest(id=name), timeout=BOUND_S)
        assert found.save.checkpoint_id == "/c/step-1"

    watched = stub.WatchSave(status_pb2.WatchSaveRequest(id="/c/step-1"), timeout=BOUND_S)
    assert next(watched).save.state == save_pb2.SAVE_STATE_PLANNING
    for state in (save_pb2.SAVE_STATE_UPLOADING, save_pb2.SAVE_STATE_COMMITTED):
        served.state = state
        served.status_registry.notify(KEY)
        assert next(watched).save.state == state
    assert list(watched) == []

    served.status_registry.remove(KEY)
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetSave(status_pb2.GetSaveRequest(id=KEY), timeout=BOUND_S)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert KEY in raised.value.details()


def test_a_whole_checkpoint_id_comes_before_the_end_of_another() -> None:
    """And the newest save before older ones."""
    registry = StatusRegistry()
    for number, place in enumerate(("/a/step-1", "/b/step-1", "step-1", "/c/xstep-2"), 1):
        save = save_pb2.SaveId(job="job", incarnation="i", group="g", number=number)
        registry.put(save, place, save_pb2.SaveStatus)
    assert registry.find("step-1") == "job/i/g/3"
    registry.remove("job/i/g/3")
    assert registry.find("step-1") == "job/i/g/2"
    assert registry.find("a/step-1") == "job/i/g/1"
    with pytest.raises(PannierError, match="knows no save 'step-2'"):
        registry.find("step-2")


def test_draining_shows_in_health_and_status(served: Served, channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    def health(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return stub.Check(request, timeout=BOUND_S).status

    services = ("", "pannier.v1.Sidecar", "pannier.v1.Status")
    assert {health(service) for service in services} == {health_pb2.HealthCheckResponse.SERVING}
    served.drain()
    assert {health(service) for service in services} == {health_pb2.HealthCheckResponse.NOT_SERVING}
    listed = status_pb2_grpc.StatusStub(channel).ListSaves(
        status_pb2.ListSavesRequest(), timeout=BOUND_S
    )
    assert listed.daemon_state == "draining"


def test_reflection_lists_every_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"pannier.v1.Sidecar", "pannier.v1.Status", "grpc.health.v1.Health"} <= set(
        database.get_services()
    )
    file = database.FindFileContainingSymbol("pannier.v1.Sidecar")
    assert file.name == "pannier/v1/sidecar.proto"
