"""Errors of handlers as callers see them."""

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pannier.common.deadline import within
from pannier.daemon.interceptors import AdmissionInterceptor, ErrorInterceptor
from pannier.v1 import plan_pb2, sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import errors
from support.processes.stretch import BOUND_S


def call(channel: grpc.Channel, method: str, request: Any) -> errors.PannierError:
    stub = sidecar_pb2_grpc.SidecarStub(channel)
    with pytest.raises(grpc.RpcError) as raised:
        getattr(stub, method)(request, timeout=BOUND_S)
    return errors.from_rpc_error(raised.value, peer="sidecar")


def test_errors_cross_with_class_and_failures(channel: grpc.Channel) -> None:
    error = call(channel, "Plan", sidecar_pb2.PlanRequest())
    assert type(error) is errors.SaveSkippedError
    assert str(error) == "rank 2 skipped"
    assert error.failures[2].host == "node-2"


def test_more_failures_than_headers_hold_still_cross(channel: grpc.Channel) -> None:
    error = call(channel, "Begin", sidecar_pb2.BeginRequest())
    assert type(error) is errors.SaveAbortedError
    assert len(error.failures) > 50


def test_a_bug_is_an_internal_error_with_its_message(channel: grpc.Channel) -> None:
    error = call(channel, "Finish", sidecar_pb2.FinishRequest())
    assert type(error) is errors.PannierError
    assert "RuntimeError: a bug" in str(error)


@pytest.mark.parametrize("end", ["send", "receive"])
@pytest.mark.parametrize("server_limit", [True, False])
def test_a_message_above_the_limit_is_reported_as_such(
    sockets: Path, end: str, server_limit: bool
) -> None:
    limit = [(f"grpc.max_{end}_message_length", 1000)]
    ours, theirs = ([], limit) if server_limit else (limit, [])
    servicer = sidecar_pb2_grpc.SidecarServicer()
    servicer.HandOver = lambda *_: sidecar_pb2.HandOverResponse()
    servicer.Plan = lambda *_: sidecar_pb2.PlanResponse(plan=plan_pb2.FinalPlan(plan_id="p" * 2000))
    # What the limited end does with large messages.
    answers = (end == "send") == server_limit
    method, request = (
        ("Plan", sidecar_pb2.PlanRequest())
        if answers
        else ("HandOver", sidecar_pb2.HandOverRequest(plan_id="p" * 2000))
    )
    address = f"unix://{sockets}/limit.sock"
    server = grpc.server(ThreadPoolExecutor(1), options=theirs)
    sidecar_pb2_grpc.add_SidecarServicer_to_server(servicer, server)
    assert server.add_insecure_port(address)
    server.start()
    try:
        with grpc.insecure_channel(address, options=ours) as channel:
            error = call(channel, method, request)
    finally:
        server.stop(None).wait()
    assert type(error) is errors.InvalidRequestError
    assert re.search(r"a message to sidecar is above its limit: .*20\d\d vs. 1000", str(error))


def test_too_many_calls_at_a_time_are_no_fault_of_the_message(sockets: Path) -> None:
    began, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> sidecar_pb2.HandOverResponse:
        began.set()
        done.wait(BOUND_S)
        return sidecar_pb2.HandOverResponse()

    servicer = sidecar_pb2_grpc.SidecarServicer()
    servicer.HandOver = wait
    address = f"unix://{sockets}/busy.sock"
    server = grpc.server(ThreadPoolExecutor(2), maximum_concurrent_rpcs=1)
    sidecar_pb2_grpc.add_SidecarServicer_to_server(servicer, server)
    assert server.add_insecure_port(address)
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            stub = sidecar_pb2_grpc.SidecarStub(channel)
            first = stub.HandOver.future(sidecar_pb2.HandOverRequest())
            assert began.wait(BOUND_S)
            error = call(channel, "HandOver", sidecar_pb2.HandOverRequest())
            done.set()
            first.result(BOUND_S)
    finally:
        done.set()
        server.stop(None).wait()
    assert type(error) is errors.UnavailableError


def test_a_stream_ends_with_its_error(channel: grpc.Channel) -> None:
    stream = sidecar_pb2_grpc.SidecarStub(channel).Connect(
        sidecar_pb2.ConnectRequest(), timeout=BOUND_S
    )
    assert next(stream).welcome.host == "here"
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert type(errors.from_rpc_error(raised.value, peer="sidecar")) is errors.UnavailableError


def test_a_call_that_is_cancelled_between_two_responses_cleans_up_at_once(sockets: Path) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        circles = []

        async def responses(request: object, context: object) -> AsyncIterator[bytes]:
            # A circle, as a traceback makes one: it isn't collected at once.
            circles.append(sys._getframe())
            try:
                while True:
                    yield bytes(1 << 20)
            finally:
                await asyncio.sleep(0)
                closed.set()

        server = grpc.aio.server(interceptors=[ErrorInterceptor(), AdmissionInterceptor({})])
        handler = grpc.method_handlers_generic_handler(
            "pannier.v1.Sidecar", {"Connect": grpc.unary_stream_rpc_method_handler(responses)}
        )
        server.add_generic_rpc_handlers((handler,))
        address = f"unix://{sockets}/cancelled.sock"
        server.add_insecure_port(address)
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream("/pannier.v1.Sidecar/Connect")(b"")
            # It receives nothing more, so that the handler is not running when the call ends.
            assert len(await call.read()) == 1 << 20
            call.cancel()
            await within(BOUND_S, closed.wait())
        await server.stop(None)

    asyncio.run(main())
