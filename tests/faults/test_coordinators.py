"""Coordinators that are killed, stopped, cut off or doubled: what is in storage settles it."""

import json
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pannier.v1 import save_pb2
from support.cli import pannier
from support.daemons import Daemons
from support.gcs_server import GcsServer
from support.hand import Party
from support.scripted_sidecar import wait_until
from support.watching import ABORTED, COMMITTED, all_in, await_save

DURABLE = all_in(save_pb2.RANK_PHASE_DURABLE)
LARGE = 2 << 20
"""Floats of a rank whose data file is uploaded in pieces."""
LIVES = ["manifest.after", "candidate.after", "decision.after", "metadata.after"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


@pytest.fixture
def daemons(server: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    """Two hosts, and a coordinator that isn't started yet."""
    with Daemons(tmp_path, sidecars=2, environment=server.env, start=False) as made:
        for sidecar in made.sidecars:
            sidecar.start()
        yield made
    server.clear()


def party(daemons: Daemons, **settings: object) -> Party:
    return Party([sidecar.address for sidecar in daemons.sidecars], **settings)  # type: ignore[arg-type]


def listed(server: GcsServer, prefix: str) -> list[str]:
    """Names of the bucket's objects, by the documented API."""
    url = f"{server.url}/storage/v1/b/bucket/o?prefix={prefix}/"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return [item["name"] for item in json.load(answer).get("items", [])]


def decisions_alone(server: GcsServer, place: str) -> bool:
    names = listed(server, place)
    return len(names) == 1 and re.search(r"/\.pannier/i[^/]+/decision$", names[0]) is not None


def check_whole(server: GcsServer, checkpoint_id: str) -> None:
    result = pannier("verify", checkpoint_id, env=server.env)
    assert result.code == 0, result


@pytest.mark.slow
def test_a_coordinator_that_is_killed_after_each_of_its_writes_commits_all_the_same(
    daemons: Daemons, server: GcsServer
) -> None:
    target = "gs://bucket/lives/step-1"
    coordinator = daemons.coordinator

    def live(point: str) -> None:
        coordinator.environment["PANNIER_CRASH_AT"] = f"coordinator.{point}" if point else ""
        coordinator.start()

    live(LIVES[0])
    with party(daemons) as ranks, ThreadPoolExecutor(1) as threads:
        agreed = threads.submit(ranks.agree, target, 1)
        for number, point in enumerate(LIVES, 1):
            assert coordinator.process.wait(20) == -signal.SIGKILL, point
            live(LIVES[number] if number < len(LIVES) else "")
            if number == 1:
                # Whoever was not answered is, by the plan that stands.
                ranks.ingest(target, 1, agreed.result(20))
        assert await_save(coordinator.address, target, lambda s: s.state == COMMITTED)
    check_whole(server, target)
