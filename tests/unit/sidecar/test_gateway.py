"""A node's gateway and its supervisor: reports arrive whole, and neither ends because of the other's problems."""

import asyncio
import errno
import gc
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job import gateway, supervisor
from pannier.sidecar.multi_job.reports import ReportSender, read_report
from pannier.sidecar.multi_job.supervisor import JobSupervisor
from pannier.supervisor.processes import MISCONFIGURED, OK, ChildProcess, Signals
from support.actors.nodes import JobFiles
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


# The supervisor, with no process in place of its children.


class Played(ChildProcess):
    """A child that has ended with ``code``; None: it runs until it gets a signal."""

    def __init__(self, code: int | None) -> None:
        super().__init__(0)
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int) -> None:
        self.code = -sig


class StopWhen(Signals):
    """Has a stop signal once the condition is true."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition
        self._deadline = time.monotonic() + BOUND_S

    def stop_requested(self, timeout_s: float | None) -> bool:
        assert time.monotonic() < self._deadline
        time.sleep(min(timeout_s or 0.0, 0.01))
        return self._condition()


@pytest.fixture
def node(sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSupervisor:
    """The supervisor of job ``a``."""
    monkeypatch.setattr(timeouts, "DAEMON_AGAIN_S", 0.001)
    monkeypatch.setattr(timeouts, "DAEMON_LONGEST_AGAIN_S", 0.001)
    # Of the tests' own process.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    files = JobFiles(tmp_path / "jobs")
    files.add("a", allow=["/a"])
    config = SidecarConfig(
        address=f"unix://{sockets}/s.sock",
        coordinator=f"unix://{sockets}/c.sock",
        jobs=files.directory,
        spool=tmp_path / "spool",
        host="node-0",
    )
    return JobSupervisor(config, lambda config, job: 0)


def test_a_child_that_can_not_be_forked_ends_neither_the_others_nor_the_supervisor(
    node: JobSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[Played] = []
    problems: list[str] = []
    failures = 6

    def fork(run: Callable[[], int]) -> Played:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        running.append(Played(None))
        return running[-1]

    def both_run() -> bool:
        problems.extend(job.problem for job in node._jobs.values() if not running)
        return len(running) == 2

    monkeypatch.setattr(supervisor, "fork", fork)
    node._signals = StopWhen(both_run)
    assert node.run() == OK
    assert "job a: its sidecar can't be started: [Errno 11]" in problems[-1]


@pytest.mark.parametrize(("codes", "outcome"), [((MISCONFIGURED,), MISCONFIGURED), ((1, 2), OK)])
def test_a_gateway_that_can_not_listen_ends_the_node_at_its_first_start_alone(
    node: JobSupervisor,
    monkeypatch: pytest.MonkeyPatch,
    codes: tuple[int, ...],
    outcome: int,
) -> None:
    gateways = iter([Played(code) for code in codes] + [Played(None)])
    monkeypatch.setattr(supervisor, "fork", lambda run: Played(None))
    launch = node._gateway._launch

    def launch_gateway() -> ChildProcess:
        launch()
        return next(gateways)

    monkeypatch.setattr(node._gateway, "_launch", launch_gateway)
    node._signals = StopWhen(lambda: node._gateway.starts == 3)
    assert node.run() == outcome
    assert node._gateway.starts == (1 if outcome else 3)
