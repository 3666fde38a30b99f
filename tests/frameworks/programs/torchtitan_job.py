"""Trains with torchtitan; ``MODE`` is the checkpointer's async mode."""

import os

import torch

from frameworks.programs.tiny_titan import trainer_config
from pannier.client.integrations.torchtitan import CheckpointManager

config = trainer_config()
config.checkpoint = CheckpointManager.Config(
    enable=True,
    folder=os.environ["ROOT"],
    interval=2,
    last_save_model_only=False,
    async_mode=os.environ["MODE"],
)
trainer = config.build()
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
