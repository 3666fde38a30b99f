"""Saves to any store: many parts at a time, overwrites, daemons that are killed; read by plain DCP and the client.

To S3's double by default, and to the store of ``make test-store URL=...``.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pannier import client
from pannier.client.config import load_settings
from pannier.storage import StorageError, open_store
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks, start_ranks
from support.processes.stretch import BOUND_S
from support.states.dcp_readers import plain_load
from support.storage import given_store
from support.storage.s3_server import S3Server

PARTS = 12 if given_store.URL else 5
"""Of a rank's data file, each of 8 MiB: more than are sent at a time."""
WIDTH = 2048
ROWS = 2 * PARTS * 1024
OVERWRITES = 10


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """URL of a new directory; what reads and writes there finds its endpoint in the environment."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if given_store.URL:
            yield stack.enter_context(given_store.new_directory())
            return
        server = stack.enter_context(S3Server())
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield "s3://bucket/run"
        assert server.sessions() == []


@pytest.fixture(scope="module", autouse=True)
def _takes_saves(place: str) -> None:
    """Skips saves to a store that Pannier refuses: the contract's test of the probe fails there."""

    async def probe() -> None:
        store = open_store(place, storage_options=given_store.options())
        try:
            await store.probe()
        finally:
            await store.close()

    try:
        asyncio.run(probe())
    except StorageError as error:
        pytest.skip(str(error))


@pytest.fixture
def daemons(place: str, tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path) as running:
        yield running


def check(target: str, version: int) -> None:
    """Raises AssertionError unless a process that knows nothing of ranks reads that version in both ways."""
    found = pannier("verify", target, "--json")
    assert found.code == 0, found
    for way in ("dcp", "client"):
        state = {"w": torch.zeros(ROWS, WIDTH), "more": {"step": 0, "b": torch.zeros(7)}}
        if way == "dcp":
            plain_load(state, target.removeprefix("file://"))
        else:
            client.load(state, checkpoint_id=target)
        wanted = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) + version
        assert torch.equal(state["w"], wanted)
        assert state["more"]["step"] == version
        assert torch.equal(state["more"]["b"], torch.ones(7) * version)


def environment(daemons: Daemons, target: str) -> dict[str, str]:
    return {**daemons.env(), "TARGET": target, "ROWS": str(ROWS), "WIDTH": str(WIDTH)}


def save_and_load() -> None:
    """Run by two ranks: saves twice to one id, then reads it in both ways."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from pannier import client
    from support.states.dcp_readers import plain_load

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, width, target = int(os.environ["ROWS"]), int(os.environ["WIDTH"]), os.environ["TARGET"]

    def weights(version: int) -> torch.Tensor:
        return torch.arange(rows * width, dtype=torch.float32).reshape(rows, width) + version

    for version in (1, 2):
        sharded = distribute_tensor(weights(version), mesh, [Shard(0)])
        state = {"w": sharded, "more": {"step": version, "b": torch.ones(7) * version}}
        handle = client.async_save(state, checkpoint_id=target)
        sharded.to_local().zero_()
        assert handle.result(120).checkpoint_id == target
    for load in (plain_load, lambda found, place: client.load(found, checkpoint_id=place)):
        for placement in (Shard(0), Shard(1)):
            empty = distribute_tensor(torch.zeros(rows, width), mesh, [placement])
            found = {"w": empty, "more": {"step": 0, "b": torch.zeros(7)}}
            load(found, target.removeprefix("file://") if load is plain_load else target)
            assert isinstance(found["w"], DTensor)
            assert torch.equal(found["w"].full_tensor(), weights(2))
            assert found["more"]["step"] == 2
            assert torch.equal(found["more"]["b"], torch.ones(7) * 2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_what_ranks_save_in_many_parts_is_read_by_plain_dcp_and_by_the_client(
    daemons: Daemons, place: str
) -> None:
    target = f"{place}/parts/step-1"
    run_ranks(save_and_load, 2, environment(daemons, target), timeout=300, torchrun=False)
    check(target, 2)


def save_three_steps() -> None:
    """Run by two ranks: says when each step is ingested, and when it is committed."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from pannier import client

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, width, target = int(os.environ["ROWS"]), int(os.environ["WIDTH"]), os.environ["TARGET"]
    weights = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    for step in (1, 2, 3):
        sharded = distribute_tensor(weights + step, mesh, [Shard(0)])
        state = {"w": sharded, "more": {"step": step, "b": torch.ones(7) * step}}
        handle = client.async_save(state, checkpoint_id=f"{target}-{step}")
        handle.ingest_completion.result(120)
        print(f"ingested {step}", flush=True)
        handle.result(120)
        print(f"committed {step}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow if given_store.URL else pytest.mark.extended
def test_saves_whose_daemons_are_killed_are_committed_and_leave_no_upload(
    daemons: Daemons, place: str
) -> None:
    target = f"{place}/killed/step"

    killed = {
        1: [daemons.sidecar],
        2: [daemons.coordinator],
        3: [daemons.coordinator, daemons.sidecar],
    }
    env = environment(daemons, target)
    with start_ranks(save_three_steps, 2, env, torchrun=False) as ranks:
        for step, victims in killed.items():
            for rank in (0, 1):
                ranks.wait_for(f"ingested {step}", rank=rank, timeout=120)
            for daemon in victims:
                daemon.kill()
            for daemon in victims:
                daemon.start()
        ranks.wait(300).check()
    for step in killed:
        check(f"{target}-{step}", step)
    left = pannier("gc", target.rpartition("/")[0], "--abandoned-after", "0", "--json")
    assert left.code == 0, left
    assert [line for line in left.json_lines() if line.get("reason") == "upload"] == []


@pytest.mark.slow
def test_the_last_of_many_overwrites_stays_alone(
    daemons: Daemons, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in daemons.env().items():
        monkeypatch.setenv(name, value)
    target = f"{place}/overwritten/step-1"
    with client.Client(load_settings()) as saver:
        for version in range(OVERWRITES):
            state = {"w": torch.full((1000,), float(version)), "step": version}
            saver.save(state, checkpoint_id=target, timeout=BOUND_S)
    swept = pannier("gc", target, "--grace", "0", "--json")
    assert swept.code == 0, swept
    verified = pannier("verify", target, "--json")
    assert verified.code == 0, verified
    found = {"w": torch.zeros(1000), "step": 0}
    plain_load(found, target.removeprefix("file://"))
    assert found["step"] == OVERWRITES - 1
    assert torch.equal(found["w"], torch.full((1000,), float(OVERWRITES - 1)))
    newest = json.loads(verified.out)["attempt"]
    listed = pannier("gc", target, "--grace", "0", "--json", "--dry-run")
    assert [line for line in listed.json_lines() if line["attempt"] != newest] == []
