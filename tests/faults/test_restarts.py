"""Daemons that are killed while a save is under way: it is committed, or fails soon and by name."""

import json
import re
import shutil
import urllib.request

import pytest
import torch

from pannier.client import Client, SaveAbortedError
from pannier.v1 import save_pb2
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.processes.watching import all_in, await_save
from support.storage.gcs_server import GcsServer

INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)


def listed(server: GcsServer, prefix: str) -> list[str]:
    """Names of the bucket's objects, by the documented API."""
    url = f"{server.url}/storage/v1/b/bucket/o?prefix={prefix}"
    with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
        return [item["name"] for item in json.load(answer).get("items", [])]


def hold_up(server: GcsServer) -> None:
    """Uploads of large files are refused, and tried again, until ``server.clear()``."""
    server.fault(kind="status", method="POST", path="uploadType=resumable", status=503, times=-1)


def decisions_alone(server: GcsServer, prefix: str) -> bool:
    names = listed(server, prefix)
    return (
        len(names) == 1
        and re.fullmatch(rf"{prefix}/\.pannier/i[^/]+/decision", names[0]) is not None
    )


STATE = {"w": torch.arange(5.0 * 2**20), "step": 7}
"""Its tensors are a large file, its objects a small one."""


@pytest.mark.slow
@pytest.mark.parametrize("coordinator_too", [False, True])
def test_a_sidecar_that_lost_its_spool_fails_what_it_held_soon_and_by_name(
    daemons: Daemons, client: Client, server: GcsServer, coordinator_too: bool
) -> None:
    name = f"lost-{coordinator_too}"
    target = f"gs://bucket/{name}/step-1"
    hold_up(server)
    handle = client.async_save(STATE, checkpoint_id=target)
    await_save(daemons.coordinator_address, target, INGESTED)
    wait_until(lambda: any(".distcp" in found for found in listed(server, name)))
    daemons.sidecar.kill()
    shutil.rmtree(daemons.spool / "0")
    if coordinator_too:
        # Only the rank's client still knows that it was ingested.
        daemons.coordinator.restart()
    server.clear()
    daemons.sidecar.start()
    with pytest.raises(SaveAbortedError, match=r"rank 0 .*no longer holds") as caught:
        handle.result(BOUND_S)
    assert {r: f.kind for r, f in caught.value.failures.items()} == {0: "LOST"}
    wait_until(lambda: decisions_alone(server, f"{name}/step-1"))
    client.save(STATE, checkpoint_id=f"gs://bucket/{name}/step-2", timeout=BOUND_S)
    assert f"{name}/step-2/.metadata" in listed(server, name)


@pytest.mark.slow
def test_a_receipt_in_the_bucket_counts_though_its_sidecar_was_killed(
    daemons: Daemons, client: Client, server: GcsServer
) -> None:
    target = "gs://bucket/durable/step-1"
    hold_up(server)
    handle = client.async_save(STATE, checkpoint_id=target)
    await_save(daemons.coordinator_address, target, INGESTED)
    # No coordinator gets the report of the rank's receipt.
    daemons.coordinator.kill()
    server.clear()
    wait_until(lambda: any("/receipts/0" in name for name in listed(server, "durable")))
    daemons.sidecar.kill()
    daemons.coordinator.start()
    daemons.sidecar.start()
    assert handle.result(BOUND_S).checkpoint_id == target
    assert "durable/step-1/.metadata" in listed(server, "durable")


@pytest.mark.slow
def test_a_killed_coordinator_commits_what_was_ingested(
    daemons: Daemons, client: Client, server: GcsServer
) -> None:
    target = "gs://bucket/resumed/step-1"
    hold_up(server)
    handle = client.async_save(STATE, checkpoint_id=target)
    await_save(daemons.coordinator_address, target, INGESTED)
    daemons.coordinator.restart()
    await_save(daemons.coordinator_address, target, INGESTED)
    assert not handle.done()
    server.clear()
    assert handle.result(BOUND_S).checkpoint_id == target
    loaded = {"w": torch.zeros(5 * 2**20), "step": 0}
    client.load(loaded, checkpoint_id=target)
    assert torch.equal(loaded["w"], STATE["w"])
    assert loaded["step"] == 7
