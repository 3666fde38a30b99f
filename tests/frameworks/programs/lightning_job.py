"""Trains with Lightning as docs/frameworks.md has it."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from frameworks.progress import documented, resumed, stepped, tensors_of
from pannier import client

WIDTH = 1024


class Numbers(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(Numbers(), batch_size=1, shuffle=False)


class Progress(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        resumed(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        stepped(trainer.global_step, tensors_of(module, trainer.optimizers))


settings = f"accelerator='cpu', devices=2, max_steps={os.environ['STEPS']}, logger=False"
changes = {
    "gs://bucket/run": os.environ["ROOT"],
    "every_n_train_steps=500": "every_n_train_steps=2",
    "ModelParallelStrategy()": f"ModelParallelStrategy(2, 1), enable_progress_bar=False, {settings}",
    "[saves]": "[Progress(), saves]",
}
exec(documented("Lightning", changes), {"MyModel": Model, "Progress": Progress})
client.close()
dist.destroy_process_group()
