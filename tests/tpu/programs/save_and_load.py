"""Saves and loads tensors of a device that Pannier doesn't know.

Arguments: the library of the device, a directory.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from pannier import client
from pannier.client.staging import device_stream
from pannier.client.staging.optimizer_guard import Guards
from support.actors.staged import plan, stage_all, write_checkpoint
from support.actors.staged_saves import StagedSaves, assert_same, values_of
from support.processes.absent_ranks import alone_of
from support.states import foreign_device

foreign_device.register(sys.argv[1])
ROOT = Path(sys.argv[2])


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Tied weights, a buffer, small tensors and one that the host would copy by address."""
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(300, 300, bias=False)
    )
    model.tied = model[0].weight
    model = model.to("tpu")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def check(saves: StagedSaves, state: dict[str, Any], *, planned: bool, **options: Any) -> None:
    """Stages a state, and compares what the files hold with its values, brought to the host by torch."""
    save = saves.stage(state, **options)
    assert save.was_planned == planned
    assert save.staged.deferred is None
    assert_same(save.contents(), values_of(state, save.fresh.items))
    saves.release(save)


def plain_tensors() -> None:
    assert "tpu" not in device_stream.ASYNC_DEVICES
    model, optimizer = training()
    guards = Guards()
    guards.add(optimizer, wait=True)
    saves = StagedSaves()
    for number in range(3):
        step(model, optimizer)
        odd = torch.arange(24).reshape(4, 6).to("tpu")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "odd": {
                "strided": odd.t()[1::2],
                "half": odd.to(torch.bfloat16),
                "empty": torch.empty(0, 3, device="tpu"),
                "scalar": torch.tensor(number).to("tpu"),
                "host": torch.full((2,), float(number)),
                "names": ("a", number),
            },
        }
        check(saves, state, planned=number == 0, devices=guards.copies("overlapped"))
    # A tensor that moves to another device is another state.
    check(saves, {**state, "model": model.cpu().state_dict()}, planned=False)
    saves.close()


def distributed_tensors() -> None:
    with alone_of(2):
        mesh = init_device_mesh("tpu", (2,))
        model = torch.nn.Linear(5, 8).to("tpu")
        fully_shard(model, mesh=mesh)
        local = torch.arange(6.0).reshape(3, 2).to("tpu")
        saves = StagedSaves()
        for number in range(2):
            state = {
                "model": model.state_dict(),
                "shard": DTensor.from_local(local + number, mesh, [Shard(0)], run_check=False),
                "whole": DTensor.from_local(local * number, mesh, [Replicate()], run_check=False),
            }
            check(saves, state, planned=number == 0)
        assert isinstance(state["model"]["weight"], DTensor)
        assert state["model"]["weight"].to_local().device.type == "tpu"
        saves.close()


def loads() -> None:
    """From the device to the host and back, also into other dtypes and strides."""
    saves = StagedSaves()
    whole = {"a": torch.randn(300, 300), "b": torch.arange(5), "c": torch.randn(6, 4)}
    for name in ("tpu", "cpu"):
        planning = plan({key: value.to(name) for key, value in whole.items()})
        staged, arena = stage_all(planning, saves.pool)
        write_checkpoint(ROOT / name, planning.message, planning.items, staged)
        saves.pool.release(arena)
        for device in ("tpu", "cpu"):
            target = {
                "a": torch.zeros(300, 300, dtype=torch.float64).to(device),
                "b": torch.zeros(5, dtype=torch.int64).to(device),
                "c": torch.zeros(4, 6).to(device).t(),
            }
            client.load(target, checkpoint_id=ROOT / name, no_dist=True)
            for key, value in whole.items():
                assert torch.equal(target[key].cpu(), value.to(target[key].dtype)), (name, key)
    saves.close()


plain_tensors()
distributed_tensors()
loads()
print("passed")
