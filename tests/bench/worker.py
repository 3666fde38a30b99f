"""One way of saving, measured in a process of its own; prints one JSON object.

Started by ``run.py``: ``worker.py METHOD TARGET --bytes N --tensors N --saves N``.
The training step is a matrix product of about 4 ms; a save is begun, and steps run on
until it is durable.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

State = dict[str, torch.Tensor]
Save = Callable[[State, str], "Future[Any]"]


def pannier() -> Save:
    """Ours, as a training loop calls it."""
    from pannier import client

    return lambda state, target: client.async_save(state, checkpoint_id=target)


def torch_async(kind: AsyncCheckpointerType) -> Save:
    """``dcp.async_save`` with torch's own writer for the place."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    def save(state: State, target: str) -> "Future[Any]":
        writer = FsspecWriter(target) if "://" in target else dcp.FileSystemWriter(target)
        answer = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        assert isinstance(answer, Future)
        return answer

    return save


METHODS: dict[str, Callable[[], Save]] = {
    "pannier": pannier,
    "torch-thread": lambda: torch_async(AsyncCheckpointerType.THREAD),
    "torch-process": lambda: torch_async(AsyncCheckpointerType.PROCESS),
}


def warm_memcpy(state: State) -> float:
    """Seconds to copy all tensors once into memory that was touched before; best of 5."""
    copies = {name: tensor.clone() for name, tensor in state.items()}
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        for name, tensor in state.items():
            copies[name].copy_(tensor)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def peak_memory(*, reset: bool = False) -> int:
    """This process's peak resident bytes since the last reset (see proc(5), clear_refs)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("target", help="directory or URL for the checkpoints")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--saves", type=int, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    elements = options.bytes // options.tensors // 4
    state = {f"layer.{i}": torch.randn(elements) for i in range(options.tensors)}
    a = torch.randn(416, 416)

    def step() -> float:
        begun = time.perf_counter()
        for _ in range(4):
            torch.mm(a, a)
        return time.perf_counter() - begun

    memcpy = warm_memcpy(state)
    for _ in range(50):
        step()
    quiet = [step() for _ in range(400)]
    before = peak_memory(reset=True)
    save = METHODS[options.method]()
    stalls, durable, busy = [], [], []
    for number in range(options.saves):
        for tensor in state.values():
            tensor.add_(1)
        begun = time.perf_counter()
        handle = save(state, f"{options.target}/step-{number}")
        stalls.append(time.perf_counter() - begun)
        while not handle.done():
            busy.append(step())
        handle.result()
        durable.append(time.perf_counter() - begun)
    after = peak_memory()
    print(
        json.dumps(
            {
                "memcpy_s": memcpy,
                "stall_s": stalls,
                "durable_s": durable,
                "quiet_step_s": quiet,
                "busy_step_s": busy,
                "trainer_growth_bytes": after - before,
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
