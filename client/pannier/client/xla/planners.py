"""Planners for states with XLA tensors: wrappers around DCP's default planners or torch_xla's own.

In: a ``DefaultSavePlanner`` or ``DefaultLoadPlanner``, or a subclass, and a state dict. Out: the same
planner, with its XLA tensors wrapped (:mod:`pannier.client.xla.shard_tensors`): sharded tensors make
one item for each part that this process's devices hold; the default planner plans all else, and the
global plan is made without torch_xla. Without XLA tensors the wrappers change nothing.

In: an ``SPMDSavePlanner`` or ``SPMDLoadPlanner`` of ``torch_xla.experimental.distributed_checkpoint``,
or a subclass. Out: a planner around it that avoids its defects: its global plan is not used (it
drops chunks that two devices of a host hold, pytorch/xla issue 7919), the shards that it keeps of an
earlier save are freed, and objects of any class are loaded. Its items keep their index, by which it
finds the local shard. Not thread-safe.
"""

import inspect
import io
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint import planner as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pannier.client import torch_compat
from pannier.client.xla import runtime
from pannier.client.xla.shard_tensors import Fetcher, Incoming, Outgoing, on_host
from pannier.wire.errors import InvalidRequestError

_MODULE: Final = "torch_xla.experimental.distributed_checkpoint.planners"


class SavePlanner(dcp.SavePlanner):
    """Plans a state with XLA tensors. For ``dcp.save``; ``client.async_save`` doesn't need it.

    Args:
        planner: the planner to wrap. Default: a ``DefaultSavePlanner``. Its ``lookup_object`` and
            ``transform_object`` get the parts of XLA tensors, in host memory.

    Raises InvalidRequestError: the planner is of another class.
    """

    def __init__(self, planner: DefaultSavePlanner | None = None) -> None:
        self.planner = DefaultSavePlanner() if planner is None else planner
        """The wrapped planner."""
        if not isinstance(self.planner, DefaultSavePlanner):
            raise InvalidRequestError(f"{planner!r} is not a DefaultSavePlanner")
        self._fetcher = Fetcher()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Waits for the devices, and finds what they hold. Raises InvalidRequestError."""
        has_xla = runtime.is_loaded() and runtime.holds_xla(state_dict)
        if has_xla:
            runtime.settle()
        set_up(self.planner, state_dict, storage_meta, is_coordinator)
        if has_xla:
            self._fetcher = Fetcher()
            self.planner.state_dict = {
                key: Outgoing(key, value, self._fetcher, number)
                if runtime.is_xla(value)
                else on_host(value)
                for number, (key, value) in enumerate(self.planner.state_dict.items())
            }

    def create_local_plan(self) -> dcp.SavePlan:
        """The planner's plan, with an item for each part of a sharded tensor, without replicas."""
        return self.planner.create_local_plan()

    def create_global_plan(
        self, all_plans: list[dcp.SavePlan]
    ) -> tuple[list[dcp.SavePlan], Metadata]:
        """The planner's global plan, for ``dcp.save``."""
        return self.planner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        """The planner's final plan; records which tensors will be fetched."""
        plan = self.planner.finish_plan(new_plan)
        state: Mapping[str, Any] = self.planner.state_dict
        values = ((state.get(item.index.fqn), item.index) for item in plan.items)
        self._fetcher.expect(
            value.part_at(index)
            for value, index in values
            if isinstance(value, Outgoing) and value.fetcher is self._fetcher
        )
        return plan

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor | io.BytesIO:
        """The item's value; a part of an XLA tensor is in host memory."""
        return self.planner.resolve_data(write_item)

    def release(self) -> None:
        """Frees what was fetched and not resolved."""
        self._fetcher.clear()


class LoadPlanner(dcp.LoadPlanner):
    """Loads into XLA tensors. For ``dcp.load``; ``client.load`` doesn't need it.

    Tensors keep their identity and their sharding; each gets its new value when all of it has been
    read. Reads only the parts that this process's devices hold.

    Args:
        planner: the planner to wrap. Default: a ``DefaultLoadPlanner``.

    Raises InvalidRequestError: the planner is of another class.
    """

    def __init__(self, planner: DefaultLoadPlanner | None = None) -> None:
        self.planner = DefaultLoadPlanner() if planner is None else planner
        """The wrapped planner."""
        if not isinstance(self.planner, DefaultLoadPlanner):
            raise InvalidRequestError(f"{planner!r} is not a DefaultLoadPlanner")
        self._state: dict[str, Any] = {}
        self._has_xla = False

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Waits for the devices, and finds what they hold. Raises InvalidRequestError."""
        self._state = state_dict
        self._has_xla = runtime.is_loaded() and runtime.holds_xla(state_dict)
        if self._has_xla:
            runtime.settle()
        self.planner.set_up_planner(state_dict, metadata, is_coordinator)
        if self._has_xla:
            self._wrap()

    def create_local_plan(self) -> dcp.LoadPlan:
        """The planner's plan, with items for each part of a sharded tensor, without replicas."""
        plan = self.planner.create_local_plan()
        if self._has_xla and any(map(_is_raw, self.planner.state_dict.values())):
            # The planner flattens the state again for a checkpoint with keys of torch before 2.4.
            self._wrap()
            assert self.planner.metadata is not None
            plan = create_default_local_load_plan(
                self.planner.state_dict, self.planner.metadata, not self.planner.allow_partial_load
            )
        return plan

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """The planner's global plan."""
        return self.planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """The planner's final plan; records how much of each XLA tensor will be read."""
        plan = self.planner.finish_plan(central_plan)
        items: dict[str, int] = {}
        elements: dict[str, int] = {}
        for item in plan.items:
            fqn = item.dest_index.fqn
            items[fqn] = items.get(fqn, 0) + 1
            elements[fqn] = elements.get(fqn, 0) + math.prod(item.lengths)
        for fqn, value in self.planner.state_dict.items():
            if isinstance(value, Incoming):
                value.expect(items.get(fqn, 0), elements.get(fqn, 0))
        return plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        """Puts an object into the state."""
        self.planner.load_bytes(read_item, value)
        if self._has_xla and not self.planner.flatten_state_dict:
            # The planner has put it into the dictionary that _wrap made.
            fqn = read_item.dest_index.fqn
            self._state[fqn] = self.planner.state_dict[fqn]

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        """The memory that an item is to be read into; for an XLA tensor, host memory."""
        target: torch.Tensor = self.planner.resolve_tensor(read_item)
        return target

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        """Called after an item was read."""
        self.planner.commit_tensor(read_item, tensor)
        target = self.planner.state_dict.get(read_item.dest_index.fqn)
        if isinstance(target, Incoming):
            target.committed()

    def _wrap(self) -> None:
        self.planner.state_dict = {
            key: Incoming(key, value) if _is_raw(value) else value
            for key, value in self.planner.state_dict.items()
        }


def _is_raw(value: Any) -> bool:
    return runtime.is_xla(value) and not isinstance(value, Incoming)


def set_up(
    planner: dcp.SavePlanner,
    state: dict[str, Any],
    meta: StorageMeta | None,
    is_coordinator: bool,
) -> None:
    """Sets a planner up as DCP does: planners older than torch 2.3 don't take ``storage_meta``."""
    function: Callable[..., None] = planner.set_up_planner
    if "storage_meta" in inspect.signature(function).parameters:
        function(state_dict=state, storage_meta=meta, is_coordinator=is_coordinator)
    else:
        function(state, is_coordinator)


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


def release(planner: dcp.SavePlanner) -> None:
    """Frees what a planner fetched from devices; to be called once every item of its plan is resolved."""
    if is_save_planner(planner):
        planner = UpstreamSavePlanner(planner)
    if isinstance(planner, SavePlanner | UpstreamSavePlanner):
        planner.release()


def overrides(planner: Any, names: tuple[str, ...]) -> bool:
    """Whether an ``SPMDSavePlanner`` has other methods than torch_xla's."""
    base = _base(planner, "SPMDSavePlanner")
    return any(
        getattr(type(planner), name, None) is not getattr(base, name, None) or name in vars(planner)
        for name in names
    )


class UpstreamSavePlanner(dcp.SavePlanner):
    """Wraps an ``SPMDSavePlanner``."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Waits for the devices; frees the shards of an earlier save."""
        self.release()
        runtime.settle()
        set_up(self._planner, state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> dcp.SavePlan:
        """The planner's local plan."""
        plan: dcp.SavePlan = self._planner.create_local_plan()
        return plan

    def create_global_plan(
        self, all_plans: list[dcp.SavePlan]
    ) -> tuple[list[dcp.SavePlan], Metadata]:
        """The planner's global plan, for ``dcp.save``; in Pannier's saves the coordinator makes it."""
        plans: tuple[list[dcp.SavePlan], Metadata] = self._planner.create_global_plan(all_plans)
        return plans

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        """The planner's final plan."""
        plan: dcp.SavePlan = self._planner.finish_plan(new_plan)
        return plan

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor | io.BytesIO:
        """The local shard, or the object of the item."""
        data: torch.Tensor | io.BytesIO = self._planner.resolve_data(write_item)
        return data

    def release(self) -> None:
        """Frees the local shards that the planner has not resolved, which it would keep."""
        if isinstance(getattr(self._planner, "_local_shards", None), dict):
            self._planner._local_shards = {}


class UpstreamLoadPlanner(dcp.LoadPlanner):
    """Wraps an ``SPMDLoadPlanner``."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Waits for the devices; flattens containers whose values have their own keys in the checkpoint."""
        runtime.settle()
        planner = self._planner
        planner.set_up_planner(state_dict, metadata, is_coordinator)
        held = metadata.state_dict_metadata if metadata is not None else {}
        whole: dict[str, Any] = planner.unsharded_state_dict
        for fqn, value in list(whole.items()):
            if fqn in held or not isinstance(value, Mapping | list):
                continue
            # The planner keeps containers without tensors under one key; DCP has a key for each value.
            parts, paths = torch_compat.flatten_state_dict({fqn: value})
            if held.keys() >= parts.keys():
                del whole[fqn]
                whole.update(parts)
                path = planner.mappings.pop(fqn)
                planner.mappings.update({key: (*path, *paths[key][1:]) for key in parts})

    def create_local_plan(self) -> dcp.LoadPlan:
        """The planner's local plan."""
        plan: dcp.LoadPlan = self._planner.create_local_plan()
        return plan

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """The planner's global plan."""
        plans: list[dcp.LoadPlan] = self._planner.create_global_plan(global_plan)
        return plans

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """The planner's final plan."""
        plan: dcp.LoadPlan = self._planner.finish_plan(central_plan)
        return plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        """Puts an object of any class into the state; the planner's own method refuses most classes."""
        planner = self._planner
        base = _base(planner, "SPMDLoadPlanner")
        if type(planner).load_bytes is not getattr(base, "load_bytes", None):
            planner.load_bytes(read_item, value)
            return
        path = planner.mappings[read_item.dest_index.fqn]
        loaded = torch.load(value, weights_only=False)
        torch_compat.set_element(planner.original_state_dict, path, loaded)

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        """The memory that the planner wants an item to be read into."""
        target: torch.Tensor = self._planner.resolve_tensor(read_item)
        return target

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        """Called after an item was read."""
        self._planner.commit_tensor(read_item, tensor)
