"""A small byte-level transformer, trained with FSDP2 and AdamW and saved with Pannier.

Run under torchrun by ``run.py``; readable on its own as an example of a training
loop. Prints one JSON object a line, on rank 0, for ``run.py`` to follow.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pannier import client

CONTEXT = 128
BATCH = 16
WIDTH = 256
LAYERS = 4


def corpus() -> torch.Tensor:
    """The text of the standard library's modules, as bytes: every machine has it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's global batch, the same for every layout: ``[BATCH, CONTEXT]`` inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


class Block(nn.Module):
    """Attention and an MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next byte; its forward pass returns the mean cross entropy."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Training:
    """Everything a restart needs, as one ``Stateful``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def main() -> None:
    """Trains; restores first when asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--restore", help="checkpoint id to begin with")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = corpus()

    def report(**fields: Any) -> None:
        if rank == 0:
            print(json.dumps(fields), flush=True)

    if options.restore:
        loaded = client.load({"training": training}, checkpoint_id=options.restore)
        report(event="restored", step=training.step, world=world, files=dict(loaded.files))

    save = None
    while training.step < options.steps:
        training.step += 1
        begun = time.perf_counter()
        inputs, targets = (part.chunk(world)[rank] for part in batch(text, training.step))
        loss = model(inputs, targets)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        report(
            event="step",
            step=training.step,
            loss=total.item() / world,
            seconds=time.perf_counter() - begun,
            saving=save is not None and not save.done(),
        )
        if options.save_every and training.step % options.save_every == 0:
            checkpoint_id = f"{options.root}/step-{training.step}"
            begun = time.perf_counter()
            save = client.async_save({"training": training}, checkpoint_id=checkpoint_id)
            stall = time.perf_counter() - begun
            report(event="save", step=training.step, checkpoint_id=checkpoint_id, stall=stall)

    client.wait_all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
