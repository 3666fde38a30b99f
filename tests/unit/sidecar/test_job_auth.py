"""Sidecars of several jobs of a host: each by its token, and nothing of one is another's."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.sidecar.multi_job.auth import JobAuth, named_jobs
from pannier.sidecar.multi_job.job_config import JobConfig, read_job
from pannier.sidecar.multi_job.sockets import operator_address
from pannier.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    records_pb2,
    save_pb2,
    sidecar_pb2,
    status_pb2,
    status_pb2_grpc,
)
from pannier.wire import auth_token
from pannier.wire.errors import (
    ForbiddenError,
    InvalidRequestError,
    PannierError,
    UnauthenticatedError,
    from_rpc_error,
)
from pannier.wire.version import WIRE_VERSION
from support.actors.nodes import NodeHost, TokenTrainer, ingested
from support.actors.scripted import TIMEOUT_S

COMMITTED = save_pb2.SAVE_STATE_COMMITTED
METHODS = list(sidecar_pb2.DESCRIPTOR.services_by_name["Sidecar"].methods)


def request_of(method: Any, job: str) -> Any:
    """A request of ``pannier.v1.Sidecar`` that names a job, and nothing else of sense."""
    request = message_factory.GetMessageClass(method.input_type)()
    if isinstance(request, sidecar_pb2.WriteRequest):
        request.header.context.save.job = job
    elif "context" in method.input_type.fields_by_name:
        request.context.save.job = job
    else:
        request.job = job
    return request


def outcome(trainer: TokenTrainer, method: Any, job: str) -> PannierError | None:
    """How a call ends."""
    request = request_of(method, job)
    call = getattr(trainer.stub, method.name)
    if method.name == "Write":
        call = trainer.channel.stream_stream(
            "/pannier.v1.Sidecar/Write",
            request_serializer=sidecar_pb2.WriteRequest.SerializeToString,
            response_deserializer=sidecar_pb2.WriteResponse.FromString,
        )
        request = iter([request])
    try:
        answer = call(request, timeout=TIMEOUT_S)
        if method.server_streaming:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return from_rpc_error(error, peer="sidecar")
    return None


def answered(call: Any, request: Any, metadata: Any) -> str:
    """Id of the save that Status returns, or the code of its refusal."""
    try:
        answer = call(request, metadata=metadata, timeout=TIMEOUT_S)
        return str((answer if hasattr(answer, "save") else next(answer)).save.id)
    except grpc.RpcError as error:
        return str(error.code().name)


# Who may call.


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.name)
@pytest.mark.parametrize("shown", ["none", "another's", "wrong"])
def test_no_call_is_accepted_without_the_jobs_token(two: NodeHost, method: Any, shown: str) -> None:
    token = {"none": None, "another's": two.files.tokens["b"], "wrong": "0" * 32}[shown]
    trainer = two.trainer("a", token=token, connect=False)
    error = outcome(trainer, method, "a")
    assert isinstance(error, UnauthenticatedError), error
    assert "job a" in str(error)
    assert "PANNIER_TOKEN_FILE" in str(error)
    for secret in two.files.tokens.values():
        assert secret not in str(error)
    # The answer doesn't reveal either whether that is a token of another job.
    assert "b" not in str(error).split()


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.name)
def test_a_call_never_names_another_job(two: NodeHost, method: Any) -> None:
    trainer = two.trainer("a", connect=False)
    error = outcome(trainer, method, "b")
    assert isinstance(error, ForbiddenError), error
    assert "'b'" in str(error)
    own = outcome(trainer, method, "a")
    assert own is None or not isinstance(own, (ForbiddenError, UnauthenticatedError)), own


def test_what_a_client_asks_after_is_its_jobs_own(two: NodeHost) -> None:
    trainer = two.trainer("a", connect=False)
    request = sidecar_pb2.ConnectRequest(job="a")
    request.pending.add().context.save.job = "b"
    with pytest.raises(grpc.RpcError) as refused:
        next(trainer.stub.Connect(request))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_every_kind_of_message_says_whose_it_is() -> None:
    """A call that is added to the proto isn't let through unseen."""
    for method in METHODS:
        request = request_of(method, "j")
        seen = request.header if isinstance(request, sidecar_pb2.WriteRequest) else request
        assert [job for job, _ in named_jobs(seen)] == ["j"], method.name
    with pytest.raises(ForbiddenError):
        list(named_jobs(status_pb2.ListSavesRequest()))


def test_only_health_is_open(two: NodeHost) -> None:
    with grpc.insecure_channel(two.socket("a")) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        status: Any = status_pb2_grpc.StatusStub(channel)
        diagnosis: Any = diagnosis_pb2_grpc.DiagnosisStub(channel)
        for call, request in (
            (status.ListSaves, status_pb2.ListSavesRequest()),
            (status.GetSave, status_pb2.GetSaveRequest(id="x")),
            (diagnosis.Diagnose, diagnosis_pb2.DiagnoseRequest()),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for method in (
            "/pannier.v1.Status/WatchSave",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tokens_are_compared_whole_and_all() -> None:
    digests = [auth_token.digest(each * 32) for each in "xyz"]
    auth = JobAuth(JobConfig(name="a", digests=frozenset(digests), allow=("/a",)))
    assert all(auth.accepts(each) for each in digests)
    assert not any(auth.accepts(each[:-1] + b"\0") for each in digests)
    assert not auth.accepts(b"")


def test_a_job_that_leaves_accepts_its_operators_alone() -> None:
    digests = [auth_token.digest(each * 32) for each in "xy"]
    job = JobConfig(
        name="a", digests=frozenset(digests[:1]), allow=("/a",), operator=digests[1], leaving=True
    )
    auth = JobAuth(job)
    assert [auth.accepts(each) for each in digests] == [False, True]
    with pytest.raises(UnauthenticatedError, match="no longer served"):
        auth.check_caller([("authorization", f"Bearer {'x' * 32}")])
    auth.check_caller([("authorization", f"Bearer {'y' * 32}")])


def test_a_job_never_accepts_another_jobs_token_from_its_file(tmp_path: Path) -> None:
    tokens = {name: name * 32 for name in "abc"}

    def write(job: str, *names: str) -> None:
        path = tmp_path / f"{job}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"tokens": [name * 32 for name in names], "allow": ["/a"]}))

    def accepted() -> list[str]:
        auth.refresh()
        return [name for name in "abc" if auth.accepts(auth_token.digest(tokens[name]))]

    write("a", "a")
    write("b", "b")
    auth = JobAuth(read_job(tmp_path / "a.json"))
    (tmp_path / "invalid.json").write_text("{")
    write("a", "b", "c")
    assert accepted() == ["a"]
    # Its own file was right all along.
    write("b", "d")
    assert accepted() == ["b", "c"]


def test_a_refusal_is_logged_once_in_a_while_and_without_the_token(
    two: NodeHost, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = two.trainer("a", token="5ecret" * 6, connect=False)
    for _ in range(5):
        assert outcome(trainer, METHODS[-1], "a") is not None
    lines = [each for each in caplog.records if each.getMessage().startswith("refused: ")]
    assert len(lines) == 1
    assert "5ecret" not in caplog.text


# What is seen.


def test_a_jobs_socket_shows_its_own_saves(two: NodeHost) -> None:
    contexts = {}
    for job in "ab":
        trainer = two.trainer(job)
        contexts[job] = ingested(two, trainer, job.encode() * 100)
        two.coordinator.await_phase(contexts[job], save_pb2.RANK_PHASE_DURABLE)
        two.coordinator.decide(contexts[job], COMMITTED)
        trainer.await_state(contexts[job], COMMITTED)
    keys = {job: f"{job}/inc1/{each.save.group}/1" for job, each in contexts.items()}
    shown: dict[str, Any] = {}
    for name in "ab":
        metadata = [("authorization", f"Bearer {two.files.tokens[name]}")]
        with grpc.insecure_channel(two.socket(name)) as channel:
            status: Any = status_pb2_grpc.StatusStub(channel)
            answer = status.ListSaves(status_pb2.ListSavesRequest(), metadata=metadata)
            shown[name] = {save.id for save in answer.saves}
            for job, key in keys.items():
                for id_ in (key, contexts[job].checkpoint_id):
                    found = answered(status.GetSave, status_pb2.GetSaveRequest(id=id_), metadata)
                    watched = answered(
                        status.WatchSave, status_pb2.WatchSaveRequest(id=id_), metadata
                    )
                    assert found == watched == (key if name == job else "NOT_FOUND")
    assert shown == {"a": {keys["a"]}, "b": {keys["b"]}}


def test_checkpoints_lie_below_the_jobs_own_roots(two: NodeHost) -> None:
    trainer = two.trainer("a")
    for place in (two.id("b"), f"{two.root}/a/../b/step-1", str(two.root / "a"), "/elsewhere/x"):
        with pytest.raises(InvalidRequestError):
            trainer.plan(trainer.context(place))
        # A save that is given up ends with an object there.
        with pytest.raises(InvalidRequestError):
            trainer.call("Fail", sidecar_pb2.FailRequest(context=trainer.context(place)))
        # So does one that a client says it had handed over, and asks after.
        request = sidecar_pb2.ConnectRequest(job="a", wire_version=WIRE_VERSION, world_size=1)
        request.pending.add(context=trainer.context(place), handed_over=True)
        with pytest.raises(grpc.RpcError) as refused:
            next(trainer.stub.Connect(request))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (two.coordinator.plans, two.coordinator.fails, two.coordinator.reports) == ([], [], [])
    assert not any(each.watched for each in two.coordinator.requests)
    # Nor does either daemon write there to see whether it could.
    metadata = [("authorization", f"Bearer {two.files.tokens['a']}")]
    with grpc.insecure_channel(two.socket("a")) as channel:
        stub: Any = diagnosis_pb2_grpc.DiagnosisStub(channel)
        answer = stub.Diagnose(
            diagnosis_pb2.DiagnoseRequest(root=str(two.root / "b")), metadata=metadata
        )
    (target,) = (check for check in answer.checks if check.name == "target")
    assert target.result == diagnosis_pb2.CHECK_RESULT_FAILED
    assert not (two.root / "b").exists()


# What lies on the host.


def test_others_on_the_host_cannot_come_by_and_pods_can_connect(two: NodeHost) -> None:
    directory = two.sockets / "jobs"
    assert directory.stat().st_mode & 0o777 == 0o700
    for job in "ab":
        assert (directory / job).stat().st_mode & 0o777 == 0o711
        for name in ("sidecar.sock", "sidecar.sock.fd"):
            assert (directory / job / name).stat().st_mode & 0o777 == 0o666
        assert (two.spool / job).stat().st_mode & 0o777 == 0o700
    # Beside them, where no pod comes by, is the same socket for operators.
    assert {path.name for path in directory.iterdir()} == {"a", "b", ".a.grpc", ".b.grpc"}
    with grpc.insecure_channel(operator_address(directory, "a")) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == 1


def test_what_a_pod_puts_into_its_directory_is_not_followed(host: NodeHost) -> None:
    """A pod that is root and may write there lays links where sockets and locks would be."""
    host.job("a")
    host.start()
    host.stop()
    victim = host.sockets / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    directory = host.sockets / "jobs/a"
    for name in ("sidecar.sock", "sidecar.sock.fd", "sidecar.sock.lock", "sidecar.sock.fd.lock"):
        (directory / name).symlink_to(victim)
    host.start()
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("precious", 0o600)
    host.trainer("a")


def test_records_name_no_token(two: NodeHost) -> None:
    """Neither what goes to the coordinator, nor to the journal, nor into storage."""
    a = two.trainer("a")
    context = ingested(two, a, b"x" * 100)
    two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    secret = two.files.tokens["a"].encode()
    for request in [*two.coordinator.requests, *two.coordinator.plans]:
        assert secret not in request.SerializeToString()
    for top in (two.spool, two.root):
        for path in top.rglob("*"):
            assert not path.is_file() or secret not in path.read_bytes(), path
    assert records_pb2.Receipt.FromString(
        next(Path(two.id("a")).rglob("receipts/*")).read_bytes()
    ).files
