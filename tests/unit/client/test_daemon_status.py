"""What embedded daemons report of themselves, by a Status service in their place."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pannier.client.embedded.daemon_spec import DaemonSpec
from pannier.client.embedded.launcher import await_others, is_idle
from pannier.common import timeouts
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses

SERVING = ("--listen", "10.0.0.1:7070")


class Status(status_pb2_grpc.StatusServicer):
    """A coordinator with one save under way, for so many questions."""

    def __init__(self) -> None:
        self.left = 3
        self.trainers: int | None = None
        self.bytes_queued = 0
        self.asked: list[status_pb2.ListSavesRequest] = []

    def ListSaves(
        self, request: status_pb2.ListSavesRequest, context: grpc.ServicerContext
    ) -> status_pb2.ListSavesResponse:
        self.asked.append(request)
        self.left -= 1
        saves = [
            save_pb2.SaveStatus(
                checkpoint_id="gs://bucket/run/step-1", save=save_pb2.SaveId(incarnation="aa")
            )
        ]
        return status_pb2.ListSavesResponse(
            saves=saves if self.left > 0 else [],
            trainers=self.trainers,
            bytes_queued=self.bytes_queued,
        )


@pytest.fixture
def status(sockets: Path) -> Iterator[Status]:
    """Of both daemons."""
    servicer = Status()
    server = grpc.server(ThreadPoolExecutor(2))
    status_pb2_grpc.add_StatusServicer_to_server(servicer, server)
    server.add_insecure_port(addresses.embedded_coordinator(sockets))
    server.add_insecure_port(addresses.embedded_sidecar(sockets))
    server.start()
    yield servicer
    server.stop(0).wait()


def test_exit_waits_until_nothing_of_the_job_is_under_way(sockets: Path, status: Status) -> None:
    assert await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "aa", None) == ""
    assert len(status.asked) == 3
    request = status.asked[0]
    assert request.job == "llama"
    ended = {save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED}
    assert set(request.states).isdisjoint(ended)
    assert save_pb2.SAVE_STATE_UPLOADING in request.states


def test_exit_names_saves_still_under_way_at_its_deadline(sockets: Path, status: Status) -> None:
    status.left = 1 << 30
    left = await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "aa", 0.3)
    assert left == "gs://bucket/run/step-1"


def test_exit_waits_a_while_for_what_earlier_starts_left(
    sockets: Path, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RESUMED_SAVE_S", 1.0)
    status.left = 1 << 30
    assert await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "bb", None) == ""
    assert len(status.asked) >= 2


def test_exit_does_not_ask_a_coordinator_that_serves_this_host_alone(
    sockets: Path, status: Status
) -> None:
    assert await_others(DaemonSpec(sockets, None), "llama", "aa", None) == ""
    assert status.asked == []


def test_exit_does_not_wait_for_a_coordinator_that_is_gone(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await_others(DaemonSpec(sockets, None, flags=SERVING), "llama", "aa", None) == ""
    assert "this host's coordinator may end before they are committed" in caplog.text


@pytest.mark.parametrize(
    ("trainers", "saves", "bytes_queued", "idle"),
    [
        (0, 0, 0, True),
        (1, 0, 0, False),
        (0, 1, 0, False),
        (0, 0, 1, False),
        (None, 0, 0, False),  # a version that doesn't report them
    ],
)
def test_daemons_without_trainers_saves_and_uploads_are_idle(
    sockets: Path,
    status: Status,
    trainers: int | None,
    saves: int,
    bytes_queued: int,
    idle: bool,
) -> None:
    status.trainers, status.left, status.bytes_queued = trainers, 1 + saves, bytes_queued
    assert is_idle(DaemonSpec(sockets, None)) == idle


def test_daemons_that_do_not_answer_may_be_busy(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not is_idle(DaemonSpec(sockets, None))
    assert "can't see whether the daemons are idle" in caplog.text
    assert "they are not replaced" in caplog.text
