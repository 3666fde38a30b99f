"""Trains with Transformers' Trainer and FSDP2 as docs/frameworks.md has it.

``RESUME`` is what it resumes from. With ``BEST`` it evaluates, and ends with the best model, that of the earliest
evaluation. Rank 1 kills itself where it would save step ``DIE_BEFORE_SAVE``.
"""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from frameworks.progress import digest, documented, resumed, stepped, tensors_of
from pannier import client

WORDS = 2048


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(0, WORDS, (16,), generator=generator)
        return {"input_ids": words, "labels": words}


class Progress(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        resumed(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **others: Any
    ) -> None:
        stepped(state.global_step, tensors_of(model, [optimizer.optimizer]))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **others: Any) -> None:
        metrics["eval_loss"] = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        print(f"ends with {digest(tensors_of(model, []))}", flush=True)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.process_index and str(state.global_step) == os.environ.get("DIE_BEFORE_SAVE"):
            os.kill(os.getpid(), signal.SIGKILL)


def _shard_on_cpu(arguments: TrainingArguments) -> None:
    assert arguments.device.type == "cpu"
    # Accelerate shards on accelerators only, which it infers from this.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


settings = (
    f"use_cpu=True, max_steps={os.environ['STEPS']}, per_device_train_batch_size=1, report_to=[]"
)
if os.environ.get("BEST"):
    settings += ", eval_strategy='steps', eval_steps=2, load_best_model_at_end=True"
changes = {
    "gs://bucket/run": os.environ["ROOT"],
    "/tmp/scratch": os.environ["SCRATCH"],
    "save_steps=500": f"save_steps=2, disable_tqdm=True, {settings}",
    "trainer = Trainer(": "shard_on_cpu(arguments)\ntrainer = Trainer(",
    "train_dataset=data": "train_dataset=data, eval_dataset=data",
    "[pannier]": "[Progress(), pannier]",
    "pannier.latest()": os.environ.get("RESUME", "pannier.latest()"),
}
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    attention_dropout=0.1,
)
names = {
    "model": LlamaForCausalLM(config),
    "data": Sentences(),
    "Progress": Progress,
    "shard_on_cpu": _shard_on_cpu,
}
exec(documented("Transformers", changes), names)
client.close()
dist.destroy_process_group()
