"""torch_xla's own planners, known by name, as Pannier runs them: without what they lose.

In: an ``SPMDSavePlanner`` or ``SPMDLoadPlanner`` of ``torch_xla.experimental.distributed_checkpoint``,
or a subclass. Out: a planner around it. Its global plan is not asked for (it drops chunks that two
devices of a host hold, pytorch/xla issue 7919); what it holds of an earlier save is let go of; objects
of any class are loaded. Its items keep their index, by which it finds the local shard. Not thread-safe.
"""

import io
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint import planner as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pannier.client import torch_compat
from pannier.client.xla import runtime
from pannier.client.xla.planners import set_up

_MODULE: Final = "torch_xla.experimental.distributed_checkpoint.planners"


def _base(planner: Any, name: str) -> type | None:
    for cls in type(planner).__mro__:
        if cls.__module__ == _MODULE and cls.__qualname__ == name:
            return cls
    return None


def is_save_planner(planner: Any) -> bool:
    """Whether it is an ``SPMDSavePlanner``."""
    return _base(planner, "SPMDSavePlanner") is not None


def is_load_planner(planner: Any) -> bool:
    """Whether it is an ``SPMDLoadPlanner``."""
    return _base(planner, "SPMDLoadPlanner") is not None


def overrides(planner: Any, names: tuple[str, ...]) -> bool:
    """Whether an ``SPMDSavePlanner`` has other methods than torch_xla's."""
    base = _base(planner, "SPMDSavePlanner")
    return any(
        getattr(type(planner), name, None) is not getattr(base, name, None) or name in vars(planner)
        for name in names
    )


class UpstreamSave(dcp.SavePlanner):
    """Runs an ``SPMDSavePlanner``."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Waits for the devices; without shards of an earlier save."""
        self.release()
        runtime.settle()
        set_up(self._planner, state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> dcp.SavePlan:
        """Its own."""
        plan: dcp.SavePlan = self._planner.create_local_plan()
        return plan

    def create_global_plan(
        self, all_plans: list[dcp.SavePlan]
    ) -> tuple[list[dcp.SavePlan], Metadata]:
        """Its own; Pannier's is the coordinator's."""
        plans: tuple[list[dcp.SavePlan], Metadata] = self._planner.create_global_plan(all_plans)
        return plans

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        """Its own."""
        plan: dcp.SavePlan = self._planner.finish_plan(new_plan)
        return plan

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor | io.BytesIO:
        """The local shard, or what else the item is."""
        data: torch.Tensor | io.BytesIO = self._planner.resolve_data(write_item)
        return data

    def release(self) -> None:
        """Lets go of local shards: it keeps those that it wasn't asked for, and their values."""
        if isinstance(getattr(self._planner, "_local_shards", None), dict):
            self._planner._local_shards = {}


class UpstreamLoad(dcp.LoadPlanner):
    """Runs an ``SPMDLoadPlanner``."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Waits for the devices; takes its containers apart where the checkpoint has their parts."""
        runtime.settle()
        planner = self._planner
        planner.set_up_planner(state_dict, metadata, is_coordinator)
        held = metadata.state_dict_metadata if metadata is not None else {}
        whole: dict[str, Any] = planner.unsharded_state_dict
        for fqn, value in list(whole.items()):
            if fqn in held or not isinstance(value, Mapping | list):
                continue
            # It has containers without tensors under one key, where DCP has a key for each value.
            parts, paths = torch_compat.flatten_state_dict({fqn: value})
            if held.keys() >= parts.keys():
                del whole[fqn]
                whole.update(parts)
                path = planner.mappings.pop(fqn)
                planner.mappings.update({key: (*path, *paths[key][1:]) for key in parts})

    def create_local_plan(self) -> dcp.LoadPlan:
        """Its own."""
        plan: dcp.LoadPlan = self._planner.create_local_plan()
        return plan

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Its own."""
        plans: list[dcp.LoadPlan] = self._planner.create_global_plan(global_plan)
        return plans

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Its own."""
        plan: dcp.LoadPlan = self._planner.finish_plan(central_plan)
        return plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        """Puts an object of any class into the state; its own would refuse most of them."""
        planner = self._planner
        base = _base(planner, "SPMDLoadPlanner")
        if type(planner).load_bytes is not getattr(base, "load_bytes", None):
            planner.load_bytes(read_item, value)
            return
        path = planner.mappings[read_item.dest_index.fqn]
        loaded = torch.load(value, weights_only=False)
        torch_compat.set_element(planner.original_state_dict, path, loaded)

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        """Its own."""
        target: torch.Tensor = self._planner.resolve_tensor(read_item)
        return target

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        """Its own."""
        self._planner.commit_tensor(read_item, tensor)
