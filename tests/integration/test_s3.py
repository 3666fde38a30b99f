"""From async_save to a checkpoint in S3 that plain DCP and the client read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier import client
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.processes.watching import COMMITTED, await_save
from support.states.dcp_readers import plain_load
from support.storage.s3_server import S3Server

ROWS = 4400
WIDTH = 2000
"""A rank's half is one multipart upload: more than one buffer."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(scope="module")
def daemons(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("s3"), environment=server.env) as running:
        yield running


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
        assert handle.result(60).checkpoint_id == target
    for load in (plain_load, lambda found, place: client.load(found, checkpoint_id=place)):
        for placement in (Shard(0), Shard(1)):
            empty = distribute_tensor(torch.zeros(rows, width), mesh, [placement])
            found = {"w": empty, "more": {"step": 0, "b": torch.zeros(7)}}
            load(found, target)
            assert isinstance(found["w"], DTensor)
            assert torch.equal(found["w"].full_tensor(), weights(2))
            assert found["more"]["step"] == 2
            assert torch.equal(found["more"]["b"], torch.ones(7) * 2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_what_ranks_save_to_s3_is_read_by_plain_dcp_and_by_the_client(
    daemons: Daemons, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = "s3://bucket/run/step-1"
    env = {**daemons.env(), **server.env, "TARGET": target}
    run_ranks(save_and_load, 2, {**env, "ROWS": str(ROWS), "WIDTH": str(WIDTH)}, torchrun=False)
    assert await_save(daemons.sidecar_address, target, lambda s: s.state == COMMITTED).id
    parts = [path for method, path in server.requests() if "partNumber=" in path]
    assert len(parts) >= 4, "large files go up in parts"
    assert server.sessions() == []
    assert not [name for name in server.names("") if "probe" in name]
    # One process that knows nothing of ranks reads it, too.
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    wanted = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) + 2
    for way in ("dcp", "client"):
        found = {"w": torch.zeros(ROWS, WIDTH), "more": {"step": 0, "b": torch.zeros(7)}}
        if way == "dcp":
            plain_load(found, target)
        else:
            client.load(found, checkpoint_id=target)
        assert torch.equal(found["w"], wanted)
        assert found["more"]["step"] == 2
