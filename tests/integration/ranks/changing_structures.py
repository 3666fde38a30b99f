"""Ranks whose structures change independently of each other; each checkpoint is read by torch alone.

Environment: ROOT (directory), SIZES (of the process groups, ``2,4``), STRUCTURES (``2,3``), SAVES (of each
scenario). Prints a line per scenario.
"""

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pannier import client
from pannier.client.handle import SaveHandle
from support.processes.worlds import worlds

warnings.filterwarnings("ignore")
RANK = int(os.environ["RANK"])
ROOT = Path(os.environ["ROOT"])
SIZES, STRUCTURES = (
    [int(each) for each in os.environ[name].split(",")] for name in ("SIZES", "STRUCTURES")
)
SAVES = int(os.environ["SAVES"])


def own_of(kind: str, rank: int, count: int, step: int) -> dict[str, Any]:
    """What only one rank has, in one of several structures: ``count`` is 1 or more."""
    if kind == "tensors":
        return {f"own.{rank}.{i}": torch.full((50,), step + i / 8) for i in range(count)}
    if kind == "objects":
        return {f"own.{rank}.{i}": {"step": step, "i": [i] * (step % 5)} for i in range(count)}
    if kind == "rows":
        return {f"own.{rank}": torch.full((count, 7), float(step))}
    assert kind == "a key"
    return {f"own.{rank}.{count}": torch.full((9,), float(step))} if count > 1 else {}


def state_of(kind: str, rank: int, count: int, step: int) -> dict[str, Any]:
    """With what all ranks have."""
    shared = {"w": torch.arange(4) + step, "big": torch.full((300,), float(step)), "step": step}
    return {**shared, **own_of(kind, rank, count, step)}


def counts_of(scenario: str, structures: int, size: int) -> Iterator[list[int]]:
    """Per save the structure of each rank. The first saves are the smallest case that was lost."""
    chance = random.Random(scenario)
    fixed = [[3, 1], [1, 3], [3, 3]] if structures == 3 else []
    for each in fixed:
        yield [each[rank % 2] for rank in range(size)]
    before = [1] * size
    for _ in range(SAVES - len(fixed)):
        # Some ranks stay as they are, so that plans are made around theirs.
        before = [old if chance.random() < 0.4 else chance.randint(1, structures) for old in before]
        yield before


def check(directory: Path, expected: dict[str, Any]) -> None:
    """The checkpoint has these keys and values, bit for bit."""
    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    flat = dict(expected)
    for key in [key for key, value in expected.items() if isinstance(value, dict)]:
        del flat[key]
        flat.update({f"{key}.{name}": value for name, value in expected[key].items()})
    kept = {name for name in found if not any(name.startswith(f"{key}.i.") for key in expected)}
    assert {name for name in flat if not name.endswith(".i")} <= kept, (directory, kept, set(flat))
    state = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in flat.items()
        if key in found
    }
    assert set(found) - set(state) <= {n for n in found if ".i" in n}, set(found) - set(state)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(found[key], TensorStorageMetadata)
            assert torch.equal(value, flat[key]), (directory, key, value, flat[key])
        else:
            assert value == flat[key], (directory, key, value, flat[key])


def run(size: int, kind: str, structures: int, *, pause: bool) -> None:
    scenario = f"{size} ranks, {structures} structures of {kind}, {'with' if pause else 'no'} pause"
    root = ROOT / scenario.replace(" ", "-").replace(",", "")
    counts = list(counts_of(scenario, structures, size))
    handles: list[SaveHandle] = []
    for step, each in enumerate(counts):
        state = state_of(kind, RANK, each[RANK], step)
        handle = client.async_save(state, checkpoint_id=root / f"step-{step}")
        if pause:
            handle.exception(120)
        handles.append(handle)
    lost = [str(error) for handle in handles if (error := handle.exception(120)) is not None]
    if RANK == 0:
        print(f"{scenario}: {len(lost)} of {len(counts)} saves lost", flush=True)
        for step, each in enumerate(counts):
            if handles[step].exception() is None:
                expected: dict[str, Any] = {}
                for rank, count in enumerate(each):
                    expected.update(state_of(kind, rank, count, step))
                check(root / f"step-{step}", expected)
    assert not lost, lost
    dist.barrier()


for group in worlds(*SIZES):
    for kept in (kind_ for kind_ in ("tensors", "objects", "rows", "a key")):
        for number in STRUCTURES:
            for pauses in (False, True):
                run(group, kept, number, pause=pauses)
client.close()
