"""Trains with torchtitan as docs/frameworks.md has it; ``MODE`` is the checkpointer's async mode."""

import os

import torch

from frameworks.programs.tiny_titan import trainer_config
from frameworks.progress import documented

changes = {
    "from torchtitan.models.llama3.config_registry import llama3_8b\n": "",
    "gs://bucket/run": os.environ["ROOT"],
    "interval=500": "interval=2",
    "async_with_pinned_mem": os.environ["MODE"],
}
names = {"llama3_8b": trainer_config}
exec(documented("torchtitan", changes), names)
trainer = names["llama3_8b_pannier"]().build()
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
