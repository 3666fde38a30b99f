"""Peers that take more than their share of a sidecar: refused with the limit, and others go on."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import grpc
import pytest

from pannier.common import timeouts
from pannier.daemon import listeners
from pannier.sidecar.rpc import connections, servicer
from pannier.sidecar.spool import fd_server
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import addresses, chunk_codec, errors, limits
from support.actors.hosts import Host, await_true, running_host
from support.actors.nodes import raw_connection
from support.actors.scripted import PLAN_ID, Trainer, WriteStream, attempt_of
from support.processes.stretch import BOUND_S

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


def serves(host: Host, number: int = 900) -> None:
    """Another rank's save goes through."""
    trainer = host.trainer(7, (7,), client="other", incarnation="inc7")
    context = trainer.context(host.id(number), 1)
    trainer.hand_over(context, trainer.write(context, "0", b"x" * 1000))
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)


def test_a_message_above_the_limit_is_refused_by_size(host: Host) -> None:
    host.start()
    options = [
        each for each in addresses.channel_options() if each[0] != "grpc.max_send_message_length"
    ]
    options.append(("grpc.max_send_message_length", -1))
    too_big = chunk_codec.MAX_MESSAGE_BYTES + 1
    with grpc.insecure_channel(host.address, options=options) as channel:
        call = channel.unary_unary("/pannier.v1.Sidecar/HandOver")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(too_big), timeout=BOUND_S)
    error = errors.from_rpc_error(caught.value, peer="the sidecar")
    assert isinstance(error, errors.InvalidRequestError)
    for word in ("above its limit", str(too_big), str(chunk_codec.MAX_MESSAGE_BYTES)):
        assert word in str(error)
    serves(host)


def test_write_streams_have_a_limit_that_leaves_other_calls_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(servicer.LIMITS, "/pannier.v1.Sidecar/Write", 4)
    host.start()
    greedy = host.trainer()
    context = greedy.context(host.id())
    with ExitStack() as stack:
        held = [
            stack.enter_context(greedy.stream(greedy.header(context, str(number), MIB)))
            for number in range(4)
        ]
        for stream in held:
            assert stream.committed() == 0
        one_more = stack.enter_context(greedy.stream(greedy.header(context, "9", MIB)))
        with pytest.raises(errors.UnavailableError) as caught:
            one_more.committed()
        for word in ("4 calls of /pannier.v1.Sidecar/Write", "the limit", "try again later"):
            assert word in str(caught.value)
        # Whatever isn't that call is served.
        other = host.trainer(1, (1,), client="c2")
        other.plan(other.context(host.id(2)))
    await_true(lambda: not host.sidecar._servicer._writes, "the streams have ended")
    serves(host)


def test_streams_that_say_nothing_are_cut(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "WRITE_IDLE_S", 0.3)
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with trainer.stream(trainer.header(context, "0", MIB)) as begun:
        assert begun.committed() == 0
        with pytest.raises((errors.PannierError, AssertionError)):
            begun.committed()
    monkeypatch.setattr(timeouts, "WRITE_HEADER_S", 0.3)
    mute = trainer.channel.stream_stream("/pannier.v1.Sidecar/Write")(
        iter(threading.Event().wait, True), timeout=BOUND_S
    )
    with pytest.raises(grpc.RpcError):
        next(mute)
    # An honest one that was stopped meanwhile goes on with another stream.
    monkeypatch.setattr(timeouts, "WRITE_HEADER_S", BOUND_S)
    monkeypatch.setattr(timeouts, "WRITE_IDLE_S", BOUND_S)
    trainer.hand_over(context, trainer.write(context, "0", b"x" * MIB))


def test_saves_of_one_group_have_a_limit(host: Host) -> None:
    host.start()
    greedy = host.trainer()
    for number in range(1, limits.MAX_SAVES + 1):
        greedy.plan(greedy.context(host.id(number), number))
    with pytest.raises(errors.OverloadedError) as caught:
        greedy.plan(greedy.context(host.id(999), limits.MAX_SAVES + 1))
    for word in (f"{limits.MAX_SAVES} saves of group", "job job", "the limit", "try again when"):
        assert word in str(caught.value)
    serves(host)


def test_ranks_files_and_names_have_limits(host: Host) -> None:
    host.start()
    trainer = host.trainer()

    def refused(context: sidecar_pb2.SaveContext, said: str) -> None:
        with pytest.raises(errors.InvalidRequestError, match=said):
            trainer.plan(context)

    crowd = trainer.context(host.id())
    crowd.ranks[:] = range(limits.MAX_RANKS + 1)
    crowd.world_size = limits.MAX_RANKS + 1
    refused(crowd, f"{limits.MAX_RANKS + 1} ranks of a group: at most {limits.MAX_RANKS}")
    world = trainer.context(host.id())
    world.world_size = limits.MAX_WORLD + 1
    refused(world, f"{limits.MAX_WORLD + 1} processes of a job: at most {limits.MAX_WORLD}")
    refused(
        trainer.context("/" + "x" * limits.MAX_CHECKPOINT_ID),
        f"{limits.MAX_CHECKPOINT_ID + 1} bytes of a checkpoint id: at most",
    )
    context = trainer.context(host.id())
    request = sidecar_pb2.HandOverRequest(
        context=context,
        attempt=attempt_of(context.save),
        plan_id=PLAN_ID,
        files=[records_pb2.DataFile(name=str(n)) for n in range(limits.MAX_FILES + 1)],
    )
    with pytest.raises(errors.InvalidRequestError, match=r"1025 data files of a rank: at most"):
        trainer.call("HandOver", request)
    serves(host)


def test_data_files_of_a_rank_have_a_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FILES", 3)
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    for number in range(3):
        trainer.write(context, str(number), b"x")
    with pytest.raises(errors.InvalidRequestError, match="has 3 data files, at most 3 are allowed"):
        trainer.write(context, "3", b"x")
    assert len(list(host.spool.glob("*.data"))) == 3


def test_connections_of_one_rank_have_a_limit(host: Host) -> None:
    host.start()
    for number in range(connections._MAX_CONNECTIONS_PER_RANK):
        host.trainer(client=f"c{number}")
    one_more = Trainer(host.address, client="more")
    host._trainers.append(one_more)
    with pytest.raises(errors.OverloadedError) as caught:
        one_more.connect()
    for word in ("rank 0 of job job", "connected 16 times", "the limit", "does a process"):
        assert word in str(caught.value)
    serves(host)


def test_connections_have_a_limit_and_those_within_it_are_served(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "MAX_CONNECTIONS", 8)
    host.start()
    trainer = host.trainer()
    path = host.address.removeprefix("unix://")
    with ExitStack() as stack:

        def knock() -> socket.socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(BOUND_S)
            connection.connect(path)
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _settings())
            return connection

        closed = 0
        for _ in range(20):
            with suppress(ConnectionError):
                closed += knock().recv(1) == b""
                continue
            closed += 1
        assert closed >= 12
        # Who is in stays in.
        context = trainer.context(host.id())
        trainer.hand_over(context, trainer.write(context, "0", b"x"))
    serves(host)


def test_connections_for_descriptors_have_a_limit_that_the_log_names(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fd_server, "MAX_CONNECTIONS", 1)
    host.start()
    with raw_connection(host.address), raw_connection(host.address) as one_more:
        assert one_more.recv(1) == b""
    assert (
        "1 connections for descriptors are open, which is the limit: the one of process "
        f"{os.getpid()} is closed"
    ) in caplog.text
    assert "may not lease" not in caplog.text


def _settings() -> bytes:
    return struct.pack(">I", 0)[1:] + bytes([4, 0]) + struct.pack(">I", 0)


def test_a_flood_of_pings_keeps_no_client_out(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    request = sidecar_pb2.PingRequest(job="job", incarnation="inc1", rank=0, client="c1")
    answers = [trainer.stub.Ping.future(request, timeout=BOUND_S) for _ in range(2000)]
    serves(host)
    codes = {answer.code() for answer in answers}
    # The last one: more calls on a connection than it takes, before it could say so.
    refused = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert codes <= {grpc.StatusCode.OK} | refused


def test_the_space_of_a_save_that_was_only_announced_comes_back(host: Host) -> None:
    host.start(spool_budget=8 * MIB)
    greedy = host.trainer()
    context = greedy.context(host.id())
    stream: WriteStream = greedy.stream(greedy.header(context, "0", 8 * MIB))
    assert stream.committed() == 0
    stream.cut()
    greedy.die()
    report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
    host.coordinator.decide(context, save_pb2.SAVE_STATE_ABORTED, report.failure)
    await_true(lambda: host.sidecar.spool._taken == 0, "the spool is free")
    serves(host)
