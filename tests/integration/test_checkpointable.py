"""Ranks that save plain tensors as shards of a global one, which moves between them."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.states.bits import differences
from support.states.contents import described, values

pytestmark = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch 2.14 brought CheckpointableTensor"
)
STEPS = range(1, 6)


def trade_places() -> None:
    import os
    import warnings
    from typing import Any

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from pannier import client

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def shard(values: torch.Tensor, at: int) -> torch.Tensor:
        tensor: Any = values.clone()
        tensor.global_shape = (8, 3)
        tensor.global_offsets = ((at, 0),)
        tensor.local_offsets = ((0, 0),)
        tensor.local_sizes = (tuple(values.shape),)
        return tensor

    # The ranks' halves change places after the second step, and back after the fourth.
    for step in range(1, 6):
        at = 4 * (1 - rank if step in (3, 4) else rank)
        whole = torch.arange(24.0).reshape(8, 3) * step
        state = {"w": shard(whole[at : at + 4], at), "b": torch.full((2,), float(step))}
        dcp.save(state, checkpoint_id=f"{os.environ['REFERENCE']}/step-{step}")
        place = f"{os.environ['ROOT']}/step-{step}"
        client.async_save(state, checkpoint_id=place).result(60)
        # Into a layout that no rank had.
        at = 6 * rank
        target = shard(torch.zeros(6 - 4 * rank, 3), at)
        client.load({"w": target}, checkpoint_id=place)
        assert torch.equal(target, whole[at : at + len(target)]), (step, target)
    client.close()
    dist.destroy_process_group()


def test_what_moves_between_ranks_is_saved_where_it_is(tmp_path: Path) -> None:
    with Daemons(tmp_path) as daemons:
        env = daemons.env(ROOT=str(tmp_path / "ours"), REFERENCE=str(tmp_path / "torch"))
        run_ranks(trade_places, 2, env, timeout=150, torchrun=False)
    for step in STEPS:
        ours, torchs = (tmp_path / side / f"step-{step}" for side in ("ours", "torch"))
        assert described(ours) == described(torchs)
        assert not differences(values(ours), values(torchs))
        loaded = {"w": torch.zeros(8, 3)}
        dcp.load(loaded, checkpoint_id=ours, no_dist=True)
        assert torch.equal(loaded["w"], torch.arange(24.0).reshape(8, 3) * step)
