"""The demo's transformer as an SPMD program of torch_xla, saved with Pannier.

One process has all devices, real or virtual (``PJRT_DEVICE=CPU CPU_NUM_DEVICES=4``). Run by
``run.py --xla``; prints one JSON object a line for it to follow.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from train import Transformer, batch, corpus

from pannier import client
from pannier.client.xla import prime_optimizer

AXES = ("data", "model")
LAYERS = 2
"""Each is compiled, for many devices that are virtual ones."""


class Training:
    """Everything a restart needs, as one ``Stateful``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def main() -> None:
    """Trains; restores first when asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--restore", help="checkpoint id to begin with")
    parser.add_argument("--mesh", required=True, help="devices by axis: 4x1")
    options = parser.parse_args()

    xr.use_spmd()
    torch.manual_seed(0)
    shape = tuple(int(size) for size in options.mesh.split("x"))
    mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), shape, AXES)
    model = Transformer(LAYERS).to("xla")
    for parameter in model.parameters():
        # Matrices over both axes, vectors over the first.
        xs.mark_sharding(parameter, mesh, AXES[: parameter.dim()])
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = corpus()

    def report(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    if options.restore:
        prime_optimizer(training.optimizer)
        loaded = client.load({"training": training}, checkpoint_id=options.restore)
        report(event="restored", step=training.step, files=dict(loaded.files))

    save = None
    while training.step < options.steps:
        training.step += 1
        begun = time.perf_counter()
        inputs, targets = (part.to("xla") for part in batch(text, training.step))
        for part in (inputs, targets):
            xs.mark_sharding(part, mesh, (AXES[0], None))
        loss = model(inputs, targets)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        torch_xla.sync()
        report(
            event="step",
            step=training.step,
            loss=loss.item(),
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


if __name__ == "__main__":
    main()
