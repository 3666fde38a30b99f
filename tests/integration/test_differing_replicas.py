"""Values that ranks hold under one key, of which a checkpoint keeps one: what differs is named."""

from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks


def save_different_values() -> None:
    import os
    import random

    import torch
    import torch.distributed as dist

    from pannier import client

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {
        "expert": torch.full((3,), float(rank)),
        "shared": torch.ones(3),
        "step": 7,
        "loader": {"rng": random.Random(rank).getstate(), "epoch": 1},
        f"own.{rank}": rank,
    }
    for step in range(3):
        client.save(state, checkpoint_id=f"{os.environ['ROOT']}/step-{step}")
    client.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("check_replicas", ["", "1"])
def test_replicated_keys_with_other_values_are_named_at_the_first_save(
    check_replicas: str, tmp_path: Path
) -> None:
    with Daemons(tmp_path) as daemons:
        env = daemons.env(ROOT=str(tmp_path / "out"), PANNIER_CHECK_REPLICAS=check_replicas)
        finished = run_ranks(save_different_values, 2, env, timeout=150, torchrun=False)
        log = daemons.coordinator.log()
    lines = [line for text in finished.outputs for line in text.splitlines()]
    (warning,) = (line for line in lines if "of which the checkpoint keeps one" in line)
    assert f"{tmp_path}/out/step-0: " in warning
    assert "'loader.rng' (2 values: ranks 0 and 1 differ)" in warning
    assert ("'expert' (2 values: ranks 0 and 1 differ)" in warning) == bool(check_replicas)
    assert not any(key in warning for key in ("'shared'", "'step'", "epoch", "own."))
    assert "'loader.rng' (2 values: ranks 0 and 1 differ)" in log
