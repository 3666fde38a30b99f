"""On one rank: Lightning's own strategy reads what Pannier's has saved, and the other way round."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import (
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from torch.distributed.fsdp import fully_shard

from frameworks.progress import tensors_of
from pannier import client
from pannier.client.integrations.lightning import ModelParallelStrategy
from support.states.bits import differences

ROOT = os.environ["ROOT"]


class Model(LightningModule):
    seed = 0

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            torch.manual_seed(self.seed)
            self.layer = torch.nn.Linear(8, 8)
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(9, 8), batch_size=1)


def fit(strategy: strategies.Strategy, steps: int, callback: Any = None, **options: Any) -> Any:
    """A trainer that has made so many steps, with the bits of its states."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[callback] if callback else [],
        enable_checkpointing=isinstance(callback, Checkpoint),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
    )
    model = Model()
    model.seed = steps
    trainer.fit(model, **options)
    return trainer, tensors_of(model, trainer.optimizers)


def saving(where: str, **options: Any) -> ModelCheckpoint:
    place = f"{ROOT}/{where}"
    return ModelCheckpoint(place, "{step}", every_n_train_steps=2, save_top_k=-1, **options)


dist.init_process_group("gloo")
theirs = strategies.ModelParallelStrategy
trainer, saved = fit(ModelParallelStrategy(1, 1), 2, saving("ours"))
# As for Slurm's auto-requeue.
trainer.save_checkpoint(f"{ROOT}/hpc_ckpt_1.ckpt")
assert os.path.exists(f"{ROOT}/hpc_ckpt_1.ckpt/.metadata")
print("a requeued job's is committed", flush=True)
# No further step is made: what is there was loaded.
trainer, read = fit(theirs(1, 1), 2, ckpt_path=f"{ROOT}/ours/step=2.ckpt")
assert trainer.global_step == 2
assert not differences(read, saved)
print("Lightning reads Pannier's", flush=True)

for where, whole in (("sharded", False), ("single", True)):
    _, saved = fit(theirs(1, 1, save_distributed_checkpoint=not whole), 2, saving(where))
    path = f"{ROOT}/{where}/step=2.ckpt"
    assert os.path.isfile(path) == whole
    trainer, read = fit(ModelParallelStrategy(1, 1), 2, ckpt_path=path)
    assert trainer.global_step == 2
    assert not differences(read, saved)
    print(f"Pannier reads Lightning's {where}", flush=True)

# A run that goes on comes to steps that Lightning has saved without Pannier.
path = f"{ROOT}/sharded/step=2.ckpt"
assert not os.path.exists(f"{path}/.pannier")
fit(ModelParallelStrategy(1, 1), 2, saving("sharded", enable_version_counter=False))
assert os.path.exists(f"{path}/.pannier")
print("Pannier replaces Lightning's", flush=True)

exceptions = OnExceptionCheckpoint(ROOT)
# Without a checkpoint of an earlier exception, and with one, which stays.
trainer, _ = fit(ModelParallelStrategy(1, 1), 2, exceptions)
trainer.save_checkpoint(exceptions.ckpt_path)
fit(ModelParallelStrategy(1, 1), 3, exceptions, ckpt_path=exceptions.ckpt_path)
assert os.path.exists(f"{exceptions.ckpt_path}/.metadata")
print("OnExceptionCheckpoint ends well", flush=True)

named = ModelCheckpoint(ROOT, save_top_k=-1, save_last=True)
named.CHECKPOINT_NAME_LAST = "{step}-last"
linked = ModelCheckpoint(ROOT, save_top_k=-1, save_last="link")
for callback in (ModelCheckpoint(ROOT), linked, named, LearningRateFinder()):
    try:
        fit(ModelParallelStrategy(1, 1), 2, callback)
    except ValueError as error:
        print(f"refused: {error}", flush=True)
client.close()
dist.destroy_process_group()
