"""What a rank counts of its load, and how it reports that to a sidecar that answers, refuses, or restarts."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pannier.client.config import Settings, load_settings
from pannier.client.interrupts import aside
from pannier.client.restore import load_progress, load_report
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_report import LoadReporter
from pannier.client.restore.load_result import BUCKET, OWN_SPOOL
from pannier.common import timeouts
from pannier.v1 import load_status_pb2, restore_pb2_grpc
from pannier.wire.version import WIRE_VERSION
from support.network.status_pages import until
from support.processes.stretch import BOUND_S


class Recording(restore_pb2_grpc.RestoreServicer):
    """Keeps what it gets, by stream."""

    def __init__(self) -> None:
        self.streams: list[list[load_status_pb2.ReportRequest]] = []
        self.code: grpc.StatusCode | None = None
        """Ends a stream after its first message."""
        self.stuck: threading.Event | None = None
        """No stream ends before it is set."""

    def Report(
        self, requests: Iterator[load_status_pb2.ReportRequest], context: Any
    ) -> load_status_pb2.ReportResponse:
        own: list[load_status_pb2.ReportRequest] = []
        self.streams.append(own)
        for each in requests:
            own.append(each)
            if self.code is not None:
                code, self.code = self.code, None
                context.abort(code, "not now")
        if self.stuck is not None:
            self.stuck.wait(BOUND_S)
        return load_status_pb2.ReportResponse()


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def settings(recording: Recording, sockets: Path) -> Iterator[Settings]:
    """Of a client beside the recording sidecar."""
    server = grpc.server(ThreadPoolExecutor(4))
    restore_pb2_grpc.add_RestoreServicer_to_server(recording, server)
    address = f"unix://{sockets}/s.sock"
    server.add_insecure_port(address)
    server.start()
    yield load_settings(sidecar=address, job="llama")
    server.stop(None).wait()


def test_it_counts_by_source_and_names_the_last_wait() -> None:
    progress = LoadProgress(3, [1, 3], checkpoint_id="/c")
    progress.add_read(OWN_SPOOL, "a", 5)
    progress.add_read("node-2", "a", 6)
    progress.add_read(OWN_SPOOL, "a", 7)
    progress.add_read(BUCKET, "b", 8)
    progress.add_read("node-2", "b", 9)
    for _ in range(2):
        progress.add_hedge()
    progress.add_retry()
    progress.add_rejected()
    counts = progress.counts()
    # A file counts at the farthest place that it was read from.
    assert counts.files == {"node-2": 1, BUCKET: 1}
    assert counts.bytes == {OWN_SPOOL: 12, "node-2": 15, BUCKET: 8}
    with progress.waiting(lambda: "one"), progress.waiting(lambda: "two"):
        assert progress.report().status.waiting_for == "two"
    progress.describe(load="x", attempt="y")
    progress.begin(load_progress.READING)
    report = progress.report()
    assert (report.load, report.attempt, report.checkpoint_id) == ("x", "y", "/c")
    assert list(report.ranks) == [1, 3]
    status = report.status
    assert (status.rank, status.phase, status.waiting_for) == (3, load_progress.READING, "")
    assert (status.retries, status.hedges, status.rejected_blocks) == (1, 2, 1)
    progress.end(ValueError("x" * 5000))
    failed = progress.report().status
    assert failed.phase == load_progress.FAILED
    assert len(failed.last_error) < 2100
    assert progress.report().status.seconds == failed.seconds, "it no longer counts"


def test_begin_and_end_are_reported_and_the_group_of_ranks_once(
    recording: Recording, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LOAD_REPORT_S", 0.01)
    monkeypatch.setattr(timeouts, "LOAD_REPORT_END_S", BOUND_S)
    progress = LoadProgress(1, [0, 1], checkpoint_id="/c")
    with LoadReporter(lambda: settings).reporting(progress):
        until(lambda: sum(map(len, recording.streams)), lambda count: count > 2)
        progress.end()
    [messages] = recording.streams
    first, second, *_, last = messages
    assert (first.wire_version, second.wire_version) == (WIRE_VERSION, 0)
    assert (list(first.report.ranks), list(second.report.ranks)) == ([0, 1], [])
    assert {each.report.call for each in messages} == {progress.call}
    assert (first.report.job, first.report.group) == ("llama", last.report.group)
    assert last.report.status.phase == load_progress.LOADED


def test_of_a_short_load_the_end_alone_is_reported_after_it(
    recording: Recording, settings: Settings
) -> None:
    progress = LoadProgress()
    with LoadReporter(lambda: settings).reporting(progress):
        progress.end()
    [only] = until(lambda: recording.streams[0] if recording.streams else [], bool)
    assert only.report.status.phase == load_progress.LOADED


def test_a_sidecar_that_restarts_gets_the_end_in_another_stream(
    recording: Recording, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LOAD_REPORT_AGAIN_S", 0.01)
    monkeypatch.setattr(timeouts, "LOAD_REPORT_END_S", BOUND_S)
    recording.code = grpc.StatusCode.UNAVAILABLE
    progress = LoadProgress(0, [0, 1])
    with LoadReporter(lambda: settings).reporting(progress):
        until(lambda: len(recording.streams), lambda count: count > 1)
        progress.end()
    assert list(recording.streams[-1][0].report.ranks) == [0, 1]
    assert recording.streams[-1][-1].report.status.phase == load_progress.LOADED


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED])
def test_a_sidecar_that_takes_no_reports_is_asked_once(
    recording: Recording,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    code: grpc.StatusCode,
) -> None:
    monkeypatch.setattr(timeouts, "LOAD_REPORT_AGAIN_S", 0.0)
    monkeypatch.setattr(timeouts, "LOAD_REPORT_END_S", BOUND_S)
    recording.code = code
    progress = LoadProgress()
    # It ends as soon as its threads have.
    with LoadReporter(lambda: settings).reporting(progress):
        until(lambda: len(recording.streams), bool)
    assert len(recording.streams) == 1


def test_a_sidecar_that_is_stopped_costs_no_thread_after_the_load(
    recording: Recording, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LOAD_REPORT_S", 0.01)
    monkeypatch.setattr(timeouts, "LOAD_REPORT_LAST_S", 0.01)
    recording.stuck = threading.Event()
    with LoadReporter(lambda: settings).reporting(LoadProgress()):
        until(lambda: len(recording.streams), bool)
    until(reporting, lambda threads: not threads)
    recording.stuck.set()


def test_an_interrupt_while_reporting_begins_ends_it(
    recording: Recording, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(function: Callable[[], None]) -> None:
        function()
        if not recording.streams:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(load_report, "aside", interrupted)
    with pytest.raises(KeyboardInterrupt), LoadReporter(lambda: settings).reporting(LoadProgress()):
        pass
    until(reporting, lambda threads: not threads)


class AtExit:
    """Keeps what is registered."""

    def __init__(self) -> None:
        self.functions: list[Callable[[], object]] = []

    def register(self, function: Callable[[], object]) -> None:
        self.functions.append(function)

    def unregister(self, function: Callable[[], object]) -> None:
        self.functions.remove(function)


def test_where_no_thread_can_be_started_the_load_goes_on_and_the_exit_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit = AtExit()
    monkeypatch.setattr(load_report, "atexit", at_exit)

    def refuse(function: Callable[[], None]) -> None:
        monkeypatch.setattr(load_report, "aside", aside)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(load_report, "aside", refuse)
    with LoadReporter(lambda: settings).reporting(LoadProgress()):
        pass
    for function in at_exit.functions:
        function()


def reporting() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "pannier-load-report"]


def test_no_sidecar_and_one_that_never_answers_disturb_no_load(
    recording: Recording, settings: Settings, sockets: Path
) -> None:
    recording.stuck = threading.Event()
    with LoadReporter(lambda: settings).reporting(LoadProgress()):
        until(lambda: len(recording.streams), bool)
    recording.stuck.set()
    nowhere = load_settings(sidecar=f"unix://{sockets}/none.sock")
    with LoadReporter(lambda: nowhere).reporting(LoadProgress()):
        pass

    def broken() -> Settings:
        raise ValueError("no settings")

    with (
        pytest.raises(KeyError),
        LoadReporter(broken).reporting(LoadProgress()),
    ):
        raise KeyError("the load's own")
