"""Who has stopped is named at once and given up only at the deadline; who has died is known at once."""

import logging
import re
from pathlib import Path

import pytest
import torch

from pannier.client import Client
from pannier.v1 import save_pb2
from support.actors.scripted_sidecar import wait_until
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.steering import TRAINER, order, outcome
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import all_in, await_save
from support.storage.gcs_server import GcsServer

STATE = {"w": torch.arange(5.0 * 2**20)}


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_a_dead_one_ends_the_save_at_once(
    daemons: Daemons, tmp_path: Path
) -> None:
    environment = daemons.env(GO=str(tmp_path), ROOT=str(tmp_path / "root"))
    with start_ranks(TRAINER, 2, environment, torchrun=False) as ranks:
        for rank in (0, 1):
            order(tmp_path, 1, rank)
        assert outcome(ranks, 1, 0) == "committed"
        ranks.processes[1].pause()
        order(tmp_path, 2, 0, timeout=stretched(20))
        named = re.compile(r"rank 1 \(host node-0, last seen ([5-9]|\d\d) s ago\)")
        target = str(tmp_path / "root" / "step-2")
        await_save(
            daemons.coordinator_address,
            target,
            lambda status: named.search(status.waiting_on.text) is not None,
        )
        wait_until(lambda: "waits for rank 1 (host node-0" in daemons.coordinator.log())
        assert ranks.processes[0].returncode is None
        assert "step 2 failed" not in ranks.output(0)
        assert named.search(outcome(ranks, 2, 0))
        # It wakes up, and comes too late: its error names that, and it is in step again.
        order(tmp_path, 2, 1)
        ranks.processes[1].resume()
        assert re.match(r"failed: .*rank 1 .*when its deadline", outcome(ranks, 2, 1))
        for rank in (0, 1):
            order(tmp_path, 3, rank)
        assert [outcome(ranks, 3, rank) for rank in (0, 1)] == ["committed", "committed"]
        # Before it calls save, so that it has no part in it yet.
        order(tmp_path, 4, 0)
        await_save(
            daemons.coordinator_address,
            str(tmp_path / "root" / "step-4"),
            lambda status: bool(status.waiting_on.ranks),
        )
        ranks.processes[1].kill()
        assert re.search(r"process \d+ of rank 1 on host node-0 is gone", outcome(ranks, 4, 0))
        # Others that come later don't wait for it either.
        order(tmp_path, 5, 0)
        assert "rank 1 on host node-0 is gone" in outcome(ranks, 5, 0)


@pytest.mark.slow
def test_a_stopped_daemon_is_named_and_the_save_goes_on_when_it_does(
    daemons: Daemons, client: Client, server: GcsServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault(kind="status", method="POST", path="uploadType=resumable", status=503, times=-1)
    target = "gs://bucket/stopped/step-1"
    handle = client.async_save(STATE, checkpoint_id=target)
    ingested = all_in(save_pb2.RANK_PHASE_INGESTED)
    await_save(daemons.coordinator_address, target, ingested)

    daemons.coordinator.pause()
    unresponsive = re.compile(r"the coordinator at .* \(last seen ([5-9]|\d\d) s ago\)")
    wait_until(lambda: unresponsive.match(handle.status().waiting_on) is not None)
    wait_until(
        lambda: re.search(r"WARNING .*the coordinator .* is unresponsive", daemons.sidecar.log())
    )
    daemons.coordinator.resume()
    wait_until(lambda: not handle.status().waiting_on.startswith("the coordinator"))

    with caplog.at_level(logging.INFO, "pannier"):
        daemons.sidecar.pause()
        unresponsive = re.compile(
            rf"the sidecar at .* \(last seen ([5-9]|\d\d) s ago; its process {daemons.sidecar.pid} is stopped: `kill"
        )
        wait_until(lambda: unresponsive.match(handle.status().waiting_on) is not None)

        def warned() -> list[str]:
            return [each.message for each in caplog.records if each.levelname == "WARNING"]

        wait_until(lambda: len(warned()) > 0)
        assert len(warned()) == 1
        assert re.match(r"the sidecar at .* does not respond, last seen", warned()[0])
        assert f"its process {daemons.sidecar.pid} is stopped" in warned()[0]
        wait_until(lambda: "node-0 is attached but unresponsive" in daemons.coordinator.log())
        # The rank itself is fine.
        await_save(
            daemons.coordinator_address,
            target,
            lambda status: (
                "(host node-0, whose sidecar does not respond, " in status.waiting_on.text
            ),
        )
        status = pannier("status", "--address", daemons.sidecar_address)
        assert status.code == 3
        assert f"its process {daemons.sidecar.pid} is stopped: `kill -CONT" in status.err
        daemons.sidecar.resume()
        server.clear()
        handle.result(BOUND_S)
        wait_until(lambda: "responds again" in caplog.text)
