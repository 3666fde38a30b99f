"""Saves of one rank up to its memory, one after the other: planned, or by a cached plan, and staged."""

import copy
import ctypes
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from pannier.client import torch_compat
from pannier.client.planning.local_plan import PlannerRun, expand
from pannier.client.planning.plan_cache import PlanCache, PlanScope, SaveSpec, resolve_plan
from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.stager import Staged
from pannier.v1 import plan_pb2
from pannier.wire import object_names
from pannier.wire.plan_columns import decode_column
from support.actors.staged import ATTEMPT, final_plan, plan
from support.states.bits import bits, differences

Key = tuple[str, tuple[int, ...]]
"""Of an item: its key, and the offset of its part; empty for an object."""
_SCOPE = PlanScope("incarnation", "group", "/checkpoints")


@dataclass(frozen=True)
class StagedSave:
    """A save that is staged."""

    fresh: PlannerRun
    """A plan that was made for it, without any cache."""
    final: plan_pb2.FinalPlan
    """The answer to that."""
    staged: Staged
    was_planned: bool
    """Whether the coordinator was asked."""

    def contents(self) -> dict[Key, Any]:
        """What the staged files hold now, by item, as DCP reads them."""
        files = {file.name: file for file in self.staged.files}
        names = object_names.data_suffixes(ATTEMPT, [file.name for file in self.final.files])
        varying = {v.position: (v.file, v.offset, v.length) for v in self.staged.varying}
        place = self.final.placement
        planned = zip(*map(decode_column, (place.file, place.offset, place.length)), strict=True)
        found = {}
        for position, (item, (number, *span)) in enumerate(
            zip(self.fresh.items, planned, strict=True)
        ):
            name, offset, length = varying.get(position, (names[number], *span))
            data = ctypes.string_at(files[name].address + offset, length)
            found[key_of(item)] = torch.load(io.BytesIO(data), weights_only=False)
        return found


class StagedSaves:
    """The saves of one client."""

    def __init__(self) -> None:
        self.pool = ArenaPool(2)
        self._plans = PlanCache()
        self._number = 0

    def stage(
        self,
        state: Any,
        planner: SavePlanner | None = None,
        devices: DeviceCopies | None = None,
    ) -> StagedSave:
        """Stages a state as ``async_save`` does; its arena is the caller's to release."""
        self._number += 1
        expanded = expand(state)
        fresh = plan(expanded)
        asked = []

        def request_plan(run: PlannerRun) -> plan_pb2.FinalPlan:
            asked.append(run)
            final = final_plan(run.message)
            final.plan_id = run.digest
            return final

        spec = SaveSpec(
            _SCOPE, self._number, f"/checkpoints/{self._number}", True, expanded, planner
        )
        chosen = resolve_plan(self._plans, spec, request_plan)
        if planner is None:
            assert chosen.plan_id == fresh.digest, "a cached plan of another state"
        arena = self.pool.acquire(chosen.sizes)
        staged = chosen.stage(arena, devices)
        return StagedSave(fresh, final_plan(fresh.message), staged, bool(asked))

    def release(self, save: StagedSave) -> None:
        self.pool.release(save.staged.arena)

    def close(self) -> None:
        self.pool.close()


def key_of(item: WriteItem) -> Key:
    return item.index.fqn, tuple(item.index.offset or ())


def values_of(state: Any, save_items: Sequence[WriteItem]) -> dict[Key, Any]:
    """Copies of a state's values now, by item, on the host; of distributed tensors this rank's part."""
    flat, _ = torch_compat.flatten_state_dict(expand(state))
    found = {}
    for item in save_items:
        value = flat[item.index.fqn]
        if isinstance(value, DTensor):
            value = value.to_local()
        found[key_of(item)] = (
            value.detach().to("cpu", copy=True)
            if isinstance(value, torch.Tensor)
            else copy.deepcopy(value)
        )
    return found


def assert_same(found: Mapping[Key, Any], wanted: Mapping[Key, Any]) -> None:
    """Bit for bit."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        got = found[key]
        if isinstance(value, torch.Tensor):
            assert (got.dtype, got.shape) == (value.dtype, value.shape), key
            assert bits(got) == bits(value), key
        else:
            assert differences(got, value) == [], key
