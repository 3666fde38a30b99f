"""On one rank: Lightning's own strategy reads what Pannier's has saved, and the other way round."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import ModelCheckpoint
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


def fit(strategy: strategies.Strategy, steps: int, saves: Any = None, **options: Any) -> Any:
    """A trainer that has made so many steps, with the bits of its states."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[saves] if saves else [],
        enable_checkpointing=saves is not None,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
    )
    model = Model()
    model.seed = steps
    trainer.fit(model, **options)
    return trainer, tensors_of(model, trainer.optimizers)


def saving(where: str) -> ModelCheckpoint:
    return ModelCheckpoint(f"{ROOT}/{where}", "{step}", every_n_train_steps=2, save_top_k=-1)


dist.init_process_group("gloo")
theirs = strategies.ModelParallelStrategy
_, saved = fit(ModelParallelStrategy(1, 1), 2, saving("ours"))
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

for saves in (ModelCheckpoint(ROOT), ModelCheckpoint(ROOT, save_top_k=-1, save_last="link")):
    try:
        fit(ModelParallelStrategy(1, 1), 2, saves)
    except ValueError as error:
        print(f"refused: {error}", flush=True)
client.close()
dist.destroy_process_group()
