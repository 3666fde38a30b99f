"""One of two "hosts": runs the whole program on all devices, but sees only its own half of them.

torch_xla's CPU backend has no world of several processes. Here each process computes everything, and the
functions by which a process learns of its own shards show it its half, as they would on a host of that
world. What goes through Pannier (plans, dedup, files, restoring) is then as on real hosts; what is
torch_xla's own (its runtime on several hosts, collectives between them) isn't there at all.

Environment: ROOT (of the checkpoints), REPORT (directory), KINDS (JSON), and a process group's.
"""

import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

from pannier import client
from support.states.bits import differences
from support.states.xla_states import (
    AFTER,
    BEFORE,
    KINDS,
    Kind,
    Layout,
    State,
    is_sharded,
    plain,
    tensors,
)

SEED, OTHER = 3, 987
ROOT = Path(os.environ["ROOT"])

xr.use_spmd()
dist.init_process_group("gloo")
layout = Layout()
bindings = torch_xla._XLAC
_share = layout.devices // dist.get_world_size()
own = slice(dist.get_rank() * _share, (dist.get_rank() + 1) * _share)
all_shards = bindings._get_local_shards
all_indices = bindings._get_local_shard_replica_and_indices
all_devices = bindings._xla_get_runtime_devices
load_all = bindings._load_local_shards


def load_own(tensor: torch.Tensor, shards: list[torch.Tensor], devices: list[str]) -> None:
    """The other host's devices keep what they have."""
    assert devices == all_devices()[own]
    together = [shard for shard, _ in all_shards([tensor])[0]]
    together[own] = shards
    load_all(tensor, together, all_devices())


def own_shards(each: list[torch.Tensor]) -> list[Any]:
    """As torch_xla's, and counts their bytes."""
    global fetched
    found = [shards[own] for shards in all_shards(each)]
    fetched += sum(shard.nbytes for shards in found for shard, _ in shards)
    return found


fetched = 0
bindings._get_local_shards = own_shards
bindings._get_local_shard_replica_and_indices = lambda each: [i[own] for i in all_indices(each)]
bindings._xla_get_runtime_devices = lambda: all_devices()[own]
bindings._load_local_shards = load_own


def seen(state: Any) -> list[torch.Tensor]:
    """What this host's devices hold; of what isn't sharded, everything."""
    found = []
    for tensor in tensors(state):
        if is_sharded(tensor):
            found += [shard for shard, _ in all_shards([plain(tensor)])[0][own]]
        else:
            found.append(plain(tensor).cpu())
    return found


def unseen(state: Any) -> list[torch.Tensor]:
    """What the other host's devices hold of what is sharded."""
    found = []
    for tensor in filter(is_sharded, tensors(state)):
        shards = [shard for shard, _ in all_shards([plain(tensor)])[0]]
        del shards[own]
        found += shards
    return found


def rest(value: Any) -> Any:
    """A state without its XLA tensors."""
    if isinstance(value, dict):
        return {key: rest(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(rest, value))
    return None if tensors(value) else value


def placed(kind: Kind, seed: int, which: str) -> State:
    state = layout.place(kind, seed, which)
    torch_xla.sync()
    return state


def check(name: str) -> list[str]:
    """What is wrong when a kind is saved by both hosts together, and restored by both."""
    kind = KINDS[name]
    found = []
    for number, planner in enumerate((None, SPMDSavePlanner())):
        directory = ROOT / name / str(number)
        for seed in (OTHER, SEED):
            # Then again, by the plan of the first.
            client.save(placed(kind, seed, BEFORE), checkpoint_id=directory, planner=planner)
        state = placed(kind, OTHER, AFTER)
        client.load(state, checkpoint_id=directory)
        wanted, before = placed(kind, SEED, AFTER), placed(kind, OTHER, AFTER)
        found += [f"own part {text}" for text in differences(seen(state), seen(wanted))]
        found += [f"the others' part {text}" for text in differences(unseen(state), unseen(before))]
        found += differences(rest(state), rest(wanted))
    return found


def transferred(name: str) -> float:
    """Bytes that this host fetches for a save of a kind."""
    global fetched
    state = placed(KINDS[name], SEED, BEFORE)
    fetched = 0
    met.clear_all()
    client.save(state, checkpoint_id=ROOT / "transferred" / name)
    if any(map(is_sharded, tensors(state))):
        return fetched
    data = met.metric_data("InboundData")
    return float(data[1]) if data else 0.0


class Losing(DefaultSavePlanner):
    """Forgets what the second host has of one tensor."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if dist.get_rank() == 1:
            plan.items[:] = [item for item in plan.items if item.index.fqn != "16x8"]
        return plan


def incomplete() -> str:
    """What is said of a save that lacks a part."""
    state = placed(KINDS["tiled"], SEED, BEFORE)
    try:
        client.save(state, checkpoint_id=ROOT / "incomplete", planner=Losing())
    except client.PannierError as error:
        return str(error)
    return "saved"


def main() -> None:
    report: dict[str, Any] = {}
    for name in json.loads(os.environ["KINDS"]):
        try:
            report[name] = check(name)
        except Exception:  # noqa: BLE001 - it goes to the report
            report[name] = [traceback.format_exc()]
    fetches = {name: transferred(name) for name in ("tiled", "replicated", "partially replicated")}
    report["transferred"] = fetches
    report["incomplete"] = incomplete()
    path = Path(os.environ["REPORT"]) / f"host-{dist.get_rank()}.json"
    path.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


main()
