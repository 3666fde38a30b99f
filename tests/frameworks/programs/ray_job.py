"""Trains with Ray Train as docs/frameworks.md has it."""

import os
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

STORE, NAME = os.environ["STORE"], os.environ["NAME"]


def train_loop(config: dict[str, Any]) -> None:
    from frameworks.programs import ray_training

    ray_training.train_loop(config)


ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["RAY_TMPDIR"])
trainer = TorchTrainer(
    train_loop,
    train_loop_config={"root": f"{STORE}/{NAME}", "steps": 8, "every": 2},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path=STORE, name=NAME, failure_config=FailureConfig(max_failures=1)
    ),
)
result = trainer.fit()
ray.shutdown()
print(f"newest {result.checkpoint.path}", flush=True)
