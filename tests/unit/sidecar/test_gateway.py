"""The supervisor's reports to the gateway of a node arrive whole; without them no gateway goes on."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job import gateway
from pannier.sidecar.multi_job.reports import ReportSender, read_report
from support.processes.stretch import BOUND_S

MIB = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of the connection: the supervisor's and the gateway's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def report(problem: str = "") -> dict[str, Any]:
    return {"draining": False, "problems": [problem], "jobs": {}}


async def read(connection: socket.socket, count: int) -> list[dict[str, Any]]:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    with closing(writer):
        return [await read_report(reader) for _ in range(count)]


def send_until(
    sender: ReportSender, message: dict[str, Any], reading: "Future[list[dict[str, Any]]]"
) -> list[dict[str, Any]]:
    """Sends it again and again, as the supervisor does; returns what was read."""
    deadline = time.monotonic() + BOUND_S
    while not reading.done():
        assert time.monotonic() < deadline, "no report arrives"
        sender.send(message)
    return reading.result()


def test_a_report_of_any_size_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, large = ReportSender(ends[0]), report("x" * 5 * MIB)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(asyncio.run, read(ends[1], 2))
        assert send_until(sender, large, reading) == [large, large]


def test_a_gateway_that_reads_nothing_for_a_while_gets_no_half_report(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CHECK_S", 0.01)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    sender = ReportSender(ends[0])
    first, left_out, last = (report(text * MIB) for text in "abc")
    # Neither call waits for the gateway.
    sender.send(first)
    sender.send(left_out)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(asyncio.run, read(ends[1], 2))
        assert send_until(sender, last, reading) == [first, last]


def test_a_gateway_that_has_ended_is_no_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    ReportSender(ends[0]).send(report())


def serve(sockets: Path, tmp_path: Path, reports: socket.socket) -> int:
    """Runs a gateway until it ends by itself; in a thread, since it would handle this process's signals."""
    config = SidecarConfig(
        address=f"unix://{sockets}/s.sock", jobs=tmp_path, spool=tmp_path, host="node-0"
    )
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(gateway.run, config, tmp_path, "token", reports).result(BOUND_S)


def test_a_report_that_can_not_be_read_ends_the_gateway(
    ends: tuple[socket.socket, socket.socket], sockets: Path, tmp_path: Path
) -> None:
    """So that the supervisor starts it again, instead of it showing the last state for ever."""
    ReportSender(ends[0]).send(report())
    ends[0].sendall(struct.pack("<I", 3) + b"{{{")
    with pytest.raises(json.JSONDecodeError):
        serve(sockets, tmp_path, ends[1])


def test_the_gateway_ends_with_its_supervisor(
    ends: tuple[socket.socket, socket.socket], sockets: Path, tmp_path: Path
) -> None:
    ReportSender(ends[0]).send(report())
    ends[0].close()
    assert serve(sockets, tmp_path, ends[1]) == 0
