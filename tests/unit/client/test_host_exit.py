"""A host whose coordinator serves others waits for their saves, by what that coordinator says."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pannier.client.embedded.daemon_spec import Pair
from pannier.client.embedded.host_exit import await_others
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from support.processes.daemons import short_directory

SERVING = ("--listen", "10.0.0.1:7070")


class Status(status_pb2_grpc.StatusServicer):
    """A coordinator with one save under way, for so many questions."""

    def __init__(self) -> None:
        self.left = 3
        self.asked: list[status_pb2.ListSavesRequest] = []

    def ListSaves(
        self, request: status_pb2.ListSavesRequest, context: grpc.ServicerContext
    ) -> status_pb2.ListSavesResponse:
        self.asked.append(request)
        self.left -= 1
        saves = [save_pb2.SaveStatus(checkpoint_id="gs://bucket/run/step-1")]
        return status_pb2.ListSavesResponse(saves=saves if self.left > 0 else [])


@pytest.fixture
def directory() -> Iterator[Path]:
    made = short_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def status(directory: Path) -> Iterator[Status]:
    servicer = Status()
    server = grpc.server(ThreadPoolExecutor(2))
    status_pb2_grpc.add_StatusServicer_to_server(servicer, server)
    server.add_insecure_port(addresses.embedded_coordinator(directory))
    server.start()
    yield servicer
    server.stop(0).wait()


def test_it_waits_until_nothing_of_the_job_is_under_way(directory: Path, status: Status) -> None:
    assert await_others(Pair(directory, None, flags=SERVING), "llama", None) == ""
    assert len(status.asked) == 3
    request = status.asked[0]
    assert request.job == "llama"
    ended = {save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED}
    assert set(request.states).isdisjoint(ended)
    assert save_pb2.SAVE_STATE_UPLOADING in request.states


def test_it_names_what_is_left_when_its_time_is_over(directory: Path, status: Status) -> None:
    status.left = 1 << 30
    left = await_others(Pair(directory, None, flags=SERVING), "llama", 0.3)
    assert left == "gs://bucket/run/step-1"


def test_a_coordinator_of_nobody_else_is_not_asked(directory: Path, status: Status) -> None:
    assert await_others(Pair(directory, None), "llama", None) == ""
    assert status.asked == []


def test_one_that_is_gone_is_not_waited_for(directory: Path) -> None:
    assert await_others(Pair(directory, None, flags=SERVING), "llama", None) == ""
