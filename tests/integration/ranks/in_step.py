"""Two ranks save in turn with torch, count what reaches the process group, and fall out of step.

Environment: ROOT (of the checkpoints), REPORT (directory).
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.distributed_c10d import _get_default_store
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from pannier import client

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
root = os.environ["ROOT"]
report: dict[str, Any] = {}
pair = dist.new_group([0, 1])

CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


def attempt(name: str, state: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """How a save ended: "" or what was raised."""
    state = {f"weight.{rank}": torch.full((100,), float(rank))} if state is None else state
    try:
        client.async_save(state, checkpoint_id=f"{root}/{name}", timeout=30, **arguments).result(60)
    except Exception as error:  # noqa: BLE001 - it goes to the report
        return {
            "type": type(error).__name__,
            "message": str(error),
            "failures": sorted(getattr(error, "failures", {})),
        }
    return ""


# torch's own plan cache.


def cached() -> dict[str, dict[str, int]]:
    """What is in the cache, by the objects' identity."""
    return {
        name: {key: id(value) for key, value in getattr(SavePlanner, name).items()}
        for name in CACHES
    }


def save_in_turn() -> list[dict[str, Any]]:
    """With one planner, and the same names and shapes: torch's cache would do for all of them."""
    found = []
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in range(3):
        ours: dict[str, Any] = {f"weight.{rank}": torch.full((8,), 10.0 + step).bfloat16()}
        ours["shared"] = torch.full((5,), 20 + step)
        before = cached()
        client.async_save(ours, checkpoint_id=f"{root}/ours-{step}", planner=planner).result(60)
        found.append({"before": before, "after": cached()})
        theirs = {f"weight.{rank}": torch.full((8,), 30.0 + step), "shared": torch.ones(5) * step}
        dcp.save(theirs, checkpoint_id=f"{root}/theirs-{step}", planner=planner)
    return found


# What reaches the process group.


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of the stores' methods, and the collectives by each group's own count."""
    counts: Counter[str] = Counter()
    originals: dict[str, Any] = {
        name: value
        for name, value in vars(dist.Store).items()
        if callable(value) and not name.startswith("__")
    }

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[f"Store.{name}"] += 1
            return original(*args, **kwargs)

        return call

    groups = {"world": dist.group.WORLD, "pair": pair}
    begun = {name: group._get_sequence_number_for_group() for name, group in groups.items()}
    for name, original in originals.items():
        setattr(dist.Store, name, counting(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist.Store, name, original)
        for name, group in groups.items():
            counts[name] += group._get_sequence_number_for_group() - begun[name]


def count() -> dict[str, Any]:
    handles = []
    # Both groups have saved before.
    with counted() as steady:
        for step in range(3):
            for name, group in (("world", None), ("pair", pair)):
                handles.append(
                    client.async_save(
                        {f"weight.{rank}": torch.ones(50), "step": step},
                        checkpoint_id=f"{root}/steady-{name}-{step}",
                        process_group=group,
                    )
                )
        for handle in handles:
            handle.result(60)
        client.save({"step": 3}, checkpoint_id=f"{root}/steady-3")
    with counted() as seen:
        _get_default_store().add("counted", 1)
        dist.all_reduce(torch.ones(1))
        dist.barrier(pair)
    return {"steady": dict(steady), "seen": dict(seen)}


# Out of step.


def leave_calls_out() -> None:
    for name in ("alone-1", "alone-2"):
        if rank == 0:
            report[name] = attempt(name)
        dist.barrier()
    for name in ("again-1", "again-2"):
        report[name] = attempt(name)


def be_in_different_worlds() -> None:
    """The ranks share a store, and take the world for one of 2 and of 3; then for the same one."""
    for name, backend, size in (("two worlds", "fake", 2 + rank), ("one world", "gloo", 2)):
        dist.destroy_process_group()
        store = dist.FileStore(f"{os.environ['REPORT']}/{name}.store", 2)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        report[name] = attempt(name)
        # A fake group's own barrier waits for no rank.
        store.set(f"done-{rank}", "")
        store.wait(["done-0", "done-1"])


report["in turn"] = save_in_turn()
report["pair"] = attempt("pair", process_group=pair)
report["counts"] = count()
leave_calls_out()
be_in_different_worlds()
client.close()
(Path(os.environ["REPORT"]) / f"{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
