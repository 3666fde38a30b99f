"""Two ranks hand in what can't be saved, and after each a save that can.

Environment: ROOT, REPORT (directory).
"""

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from pannier import client

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank, root = dist.get_rank(), os.environ["ROOT"]
mesh = init_device_mesh("cpu", (2,))
report: dict[str, Any] = {}


def moved(item: WriteItem, offset: list[int]) -> WriteItem:
    assert item.tensor_data is not None
    chunk = ChunkStorageMetadata(torch.Size(offset), item.tensor_data.chunk.sizes)
    return dataclasses.replace(
        item,
        index=MetadataIndex(item.index.fqn, offset, item.index.index),
        tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
    )


class Tampering(DefaultSavePlanner):
    """Changes what rank 1 says of its shard."""

    def __init__(self, change: Callable[[WriteItem], list[WriteItem]]) -> None:
        super().__init__()
        self.change = change

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if rank == 1:
            items = [new for item in plan.items for new in self.change(item)]
            self.plan = plan = dataclasses.replace(plan, items=items)
        return plan


class OwnGlobalPlan(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        return super().create_global_plan(all_plans)


class OwnPlannerData(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        return dataclasses.replace(super().create_local_plan(), planner_data={"mine": object()})


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("broken on purpose")


def sharded() -> dict[str, Any]:
    return {"model.weight": distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])}


def tampered(change: Callable[[WriteItem], list[WriteItem]]) -> dict[str, Any]:
    return {"state": sharded(), "planner": Tampering(change)}


def bad(value: Any) -> dict[str, Any]:
    """On rank 1."""
    return {"state": {"fine": torch.ones(2), "model.bad": value if rank == 1 else torch.ones(2, 2)}}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "two types": lambda: {"state": {"model.key": torch.ones(3) if rank else "an object"}},
    "two sizes": lambda: {"state": {"model.key": torch.ones(3 + rank)}},
    "two dtypes": lambda: {
        "state": {"model.key": torch.ones(3, dtype=torch.float64 if rank else torch.float32)}
    },
    "missing shard": lambda: tampered(lambda item: []),
    "overlapping shards": lambda: tampered(lambda item: [moved(item, [2, 0])]),
    "shard out of bounds": lambda: tampered(lambda item: [moved(item, [6, 0])]),
    "two names": lambda: {"state": {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}},
    "sparse": lambda: bad(torch.eye(2).to_sparse()),
    "meta": lambda: bad(torch.ones(2, 2, device="meta")),
    "nested tensor": lambda: bad(
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    ),
    "partial": lambda: {
        "state": {"model.bad": DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])}
    },
    "unpicklable": lambda: {"state": {f"model.bad.{rank}": Unpicklable() if rank == 1 else 1}},
    "too big a message": lambda: {
        "state": {"w": torch.ones(2), ("k" * (90 << 20) if rank == 1 else "k"): 1}
    },
    "own global plan": lambda: {"planner": OwnGlobalPlan()},
    "planner data": lambda: {"planner": OwnPlannerData()},
    "outside": lambda: {"checkpoint_id": f"{root}-outside/step-1"},
    "dots": lambda: {"checkpoint_id": f"file://{root}/../outside/step-1"},
    "symlink": lambda: {"checkpoint_id": f"{root}/link/step-1"},
    "other scheme": lambda: {"checkpoint_id": "ftp://host/run/step-1"},
    "no permission": lambda: {"checkpoint_id": "/sys/kernel/pannier/step-1"},
    "below a file": lambda: {"checkpoint_id": f"{root}/a-file/step-1"},
    "missing bucket": lambda: {"checkpoint_id": "gs://missing/run/step-1"},
    "denied": lambda: {"checkpoint_id": "gs://denied/run/step-1"},
}


def attempt(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    state = arguments.pop("state", {f"weight.{rank}": torch.ones(10), "step": 1})
    began = time.monotonic()
    try:
        client.async_save(state, **{"checkpoint_id": f"{root}/{name}", **arguments}).result(60)
    except Exception as error:  # noqa: BLE001 - it goes to the report
        return {
            "type": type(error).__name__,
            "message": "\n".join([str(error)[:2000], *getattr(error, "__notes__", ())]),
            "failures": sorted(getattr(error, "failures", {})),
            "seconds": time.monotonic() - began,
        }
    return {"type": ""}


(Path(root) / "a-file").parent.mkdir(parents=True, exist_ok=True)
(Path(root) / "a-file").touch()
for name, case in CASES.items():
    report[name] = attempt(name, case())
    report[f"after {name}"] = attempt(f"after {name}", {})
client.close()
(Path(os.environ["REPORT"]) / f"{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
