"""One run of a planner on one state dict: DCP's local plan as a message, and back.

In: a state dict, expanded, and a ``SavePlanner``. Out: the ``LocalPlan`` message for the
coordinator and, given the final plan, the values of the items this rank writes. What DCP can't store
or Pannier can't honour is refused here, by key, before anything is staged. Also hashes of replicated values, by which
the coordinator finds keys whose values differ by rank: of content alone, where a pickle also depends on which objects
are shared. Values of types that have no rule here have no hash, and aren't compared. Not thread-safe.
"""

import dataclasses
import enum
import hashlib
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, TypeVar

import crc32c
import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from pannier.client import torch_compat
from pannier.client.staging import archives
from pannier.client.staging.layout import PlannerValues
from pannier.client.user_errors import located
from pannier.client.xla import planners, runtime
from pannier.v1 import plan_pb2
from pannier.wire import plan_codec
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import encode_column

_RESOLUTION: Final = ("resolve_data", "lookup_object", "transform_object")
_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_NOT_STATEFUL: Final = _PLAIN_TYPES | {dict, list, tuple, int, float, bool, str, type(None)}
_T = TypeVar("_T")


class PlannerRun:
    """One planner run on one state dict. Not thread-safe.

    torch's own plan cache is neither read nor filled.

    Args:
        state: from :func:`expand`.
        planner: None for a ``DefaultSavePlanner``.
        is_coordinator: whether this is the first rank of the group.
        checkpoint_id: passed to the planner.

    Raises:
        InvalidRequestError: the state dict holds what DCP can't store (the
            message names the key), or the planner needs what Pannier can't
            honour.
        Exception: whatever the planner raises, with a note of the method.
    """

    def __init__(
        self,
        state: dict[str, Any],
        planner: SavePlanner | None,
        *,
        is_coordinator: bool,
        checkpoint_id: str,
    ) -> None:
        self._planner = DefaultSavePlanner() if planner is None else bare(planner)
        if not isinstance(self._planner, SavePlanner):
            raise InvalidRequestError(f"planner {planner!r} is not a SavePlanner")
        self._name = _class_name(type(self._planner))
        self._runner = _runner(self._planner, state)
        meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=str(uuid.uuid4()))
        try:
            with torch_compat.without_plan_cache(self._planner):
                self._set_up(state, meta, is_coordinator)
                self._plan = self._call("create_local_plan", self._runner.create_local_plan)
        except Exception as error:
            # torch's error doesn't always name the tensor that it could not plan.
            self._refuse_values(self._planned_state(state), cause=error)
            raise
        self._check_plan()
        self.items: list[WriteItem] = list(self._plan.items)
        """What this rank holds, in the planner's order."""
        values = self._planned_state({})
        self._refuse_values(
            {i.index.fqn: values[i.index.fqn] for i in self.items if i.index.fqn in values}
        )
        self._refuse_properties()
        self.message = self._message(values)
        """The plan as sent to the coordinator."""
        self.digest = plan_codec.plan_digest(self.message)
        """Hash of ``message``, hex."""

    def finish(self, positions: Sequence[int]) -> PlannerValues:
        """The values of this rank's own items at these positions, after the planner's ``finish_plan``.

        Raises InvalidRequestError when the planner changes them; and whatever it raises.
        """
        own = [self.items[position] for position in positions]
        plan = dataclasses.replace(self._plan, items=list(own))
        with torch_compat.without_plan_cache(self._planner):
            finished = self._call("finish_plan", lambda: self._runner.finish_plan(plan))
        items = list(finished.items) if isinstance(finished, SavePlan) else []
        if len(items) != len(own) or not all(map(_same, items, own)):
            changed = next((b for a, b in zip(items, own, strict=False) if not _same(a, b)), None)
            what = f"item {changed.index.fqn!r}" if changed else f"{len(own)} items to {len(items)}"
            raise InvalidRequestError(
                f"planner {self._name} changes {what} in finish_plan, after all ranks' plans were made: "
                "change it in create_local_plan"
            )
        is_wrapped = self._runner is not self._planner
        return PlannerValues(items, self._runner, runtime.COPY_DESCRIPTION if is_wrapped else "")

    def value_hashes(self, *, tensors: bool) -> dict[str, int]:
        """See :func:`pannier.client.planning.local_plan.value_hashes`; of the state's values now."""
        if not resolves_as_planned(self._planner):
            return {}
        return value_hashes(self.items, self._planned_state({}), tensors=tensors)

    def _set_up(self, state: dict[str, Any], meta: StorageMeta, is_coordinator: bool) -> None:
        self._call(
            "set_up_planner",
            lambda: planners.set_up(self._runner, state, meta, is_coordinator),
        )

    def _call(self, method: str, function: Callable[[], _T]) -> _T:
        with located(f"planner {self._name}: {method}"):
            return function()

    def _check_plan(self) -> None:
        if not isinstance(self._plan, SavePlan) or not self._plan.usable:
            raise InvalidRequestError(
                f"planner {self._name}: create_local_plan returned {self._plan!r:.120} instead of "
                "a usable SavePlan; Pannier keeps its own plan cache, so the planner's must be off"
            )
        for item in self._plan.items:
            if not isinstance(item.index.fqn, str):
                raise InvalidRequestError(f"the key {item.index.fqn!r} is not a string")
        data = self._plan.planner_data
        if data is not None and not _is_mappings(data):
            raise InvalidRequestError(
                f"planner {self._name}: planner_data of type {type(data).__name__} can't be saved; "
                "only flatten mappings (key to path) can: keep the rest in the state dict, or save "
                "with dcp.save and another storage writer"
            )

    def _planned_state(self, default: Mapping[str, Any]) -> Mapping[str, Any]:
        """The planner's flattened state dict, if it keeps one as DCP's planner does; else ``default``."""
        state = getattr(self._planner, "state_dict", None)
        return state if isinstance(state, Mapping) else default

    def _refuse_values(self, values: Mapping[str, Any], cause: BaseException | None = None) -> None:
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and (problem := _problem(value)):
                raise InvalidRequestError(f"{key!r} can't be saved: {problem}") from cause

    def _refuse_properties(self) -> None:
        for item in self.items:
            properties = item.tensor_data.properties if item.tensor_data else None
            if properties is None:
                continue
            if properties.layout is not torch.strided:
                problem = _layout_problem(properties.layout)
            elif properties.dtype in archives.DTYPES or torch_compat.has_size(properties.dtype):
                continue
            else:
                problem = f"DCP can't store dtype {properties.dtype}; view it as uint8"
            raise InvalidRequestError(f"{item.index.fqn!r} can't be saved: {problem}")

    def _message(self, values: Mapping[str, Any]) -> plan_pb2.LocalPlan:
        planner = self._planner
        flattens = bool(getattr(planner, "flatten_state_dict", self._plan.planner_data is not None))
        message = plan_pb2.LocalPlan(
            items=plan_codec.encode_items(self.items),
            options=plan_pb2.PlannerOptions(
                planner=self._name,
                flatten_state_dict=flattens,
                flatten_sharded_tensors=bool(getattr(planner, "flatten_sharded_tensors", False)),
                dedup_save_to_lowest_rank=bool(
                    getattr(planner, "dedup_save_to_lowest_rank", False)
                ),
                custom_global_plan=_overrides(planner, torch_compat.GLOBAL_PLANNING),
            ),
        )
        if flattens:
            mappings = plan_codec.encode_mappings(self._plan.planner_data or {})
            message.mappings = mappings.SerializeToString(deterministic=True)
        slots = resolves_as_planned(planner)
        planned = [
            part.archive
            if slots
            and _is_plain(values.get(item.index.fqn))
            and (part := archives.planned_part(item)) is not None
            else None
            for item in self.items
        ]
        message.head = encode_column([len(each.head) if each else 0 for each in planned])
        message.body = encode_column([each.body if each else 0 for each in planned])
        message.tail = encode_column([len(each.tail) if each else 0 for each in planned])
        return message


def expand(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state with top-level ``Stateful`` values replaced by their ``state_dict()``, as in ``dcp.save``.

    Raises InvalidRequestError: it is not a mapping; and whatever a ``state_dict()`` raises.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidRequestError(
            f"a state dict is a mapping, not {type(state_dict).__name__}: {state_dict!r:.80}"
        )
    # The test for a protocol is slow, and states have thousands of tensors.
    if _NOT_STATEFUL.issuperset(map(type, state_dict.values())):
        return dict(state_dict)
    return {key: _expanded(key, value) for key, value in state_dict.items()}


def _expanded(key: str, value: Any) -> Any:
    if type(value) in _NOT_STATEFUL or not isinstance(value, Stateful):
        return value
    with located(f"state_dict() of {key!r}"):
        return value.state_dict()


def resolves_as_planned(planner: SavePlanner) -> bool:
    """Whether values reach storage as the plan describes them.

    False for a planner that overrides how they are looked up or transformed: then dtype
    and shape are known only from the resolved value.
    """
    return not _overrides(bare(planner), _RESOLUTION)


def bare(planner: SavePlanner) -> SavePlanner:
    """The planner inside a wrapper for XLA tensors; any other planner itself."""
    return planner.planner if isinstance(planner, planners.SavePlanner) else planner


def _runner(planner: SavePlanner, state: Mapping[str, Any]) -> SavePlanner:
    """The planner itself, or a wrapper of it where there are XLA tensors."""
    if planners.is_save_planner(planner):
        return planners.UpstreamSavePlanner(planner)
    if isinstance(planner, DefaultSavePlanner) and runtime.is_loaded():
        return planners.SavePlanner(planner) if runtime.holds_xla(state) else planner
    return planner


def _overrides(planner: SavePlanner, names: tuple[str, ...]) -> bool:
    if planners.is_save_planner(planner):
        return planners.overrides(planner, names)
    cls = type(planner)
    return any(
        getattr(cls, name, None) is not getattr(DefaultSavePlanner, name, None)
        or name in vars(planner)
        for name in names
    )


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _same(one: WriteItem, other: WriteItem) -> bool:
    # MetadataIndex's own equality ignores the hint.
    return one is other or (one == other and one.index.index == other.index.index)


def _is_mappings(data: Any) -> bool:
    return isinstance(data, Mapping) and all(
        isinstance(key, str)
        and isinstance(path, tuple)
        and all(isinstance(part, str | int) for part in path)
        for key, path in data.items()
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is expected to resolve to plain tensors."""
    if type(value) in _PLAIN_TYPES or value is None:
        return True
    if not isinstance(value, torch.Tensor):
        return False
    return all(
        type(tensor) in _PLAIN_TYPES
        or isinstance(tensor, torch_compat.AsyncCollectiveTensor)
        # It resolves to its shards.
        or hasattr(tensor, "__get_tensor_shard__")
        or type(tensor.detach()) is torch.Tensor
        for tensor in torch_compat.local_tensors(value)
    )


def _problem(value: torch.Tensor) -> str | None:
    """Why DCP can't store a tensor, and what to do about it."""
    if runtime.is_xla(value):
        return None  # Checked by its planner.
    if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements):
        return (
            f"a DTensor with placements {tuple(value.placements)} is not reduced yet; redistribute "
            "it to Shard or Replicate first"
        )
    if misplaced := torch_compat.shard_problem(value):
        return misplaced
    for tensor in torch_compat.local_tensors(value):
        if isinstance(tensor, torch_compat.ShardedTensor):
            if problem := _problem(tensor):
                return problem
        elif tensor.is_nested:
            return "a nested tensor has no one shape; save its values and offsets"
        elif tensor.layout is not torch.strided:
            return _layout_problem(tensor.layout)
        elif tensor.is_meta or isinstance(tensor, torch_compat.FakeTensor):
            return f"a {'meta' if tensor.is_meta else 'fake'} tensor has no data; materialise it"
    return None


def _layout_problem(layout: torch.layout) -> str:
    name = str(layout).removeprefix("torch.")
    return f"DCP stores strided tensors, not layout {name}; convert it with to_dense()"


_MOST_PARTS: Final = 200_000
"""An object of more parts isn't compared: the caller's thread would take long."""
_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)
_BY_REPR: Final = (*_SCALARS, enum.Enum, PurePath, torch.dtype, torch.device, range, slice)


class _NotComparableError(Exception):
    """The value has a part without a rule, or too many parts."""


def value_hashes(
    items: Sequence[WriteItem], values: Mapping[str, Any], *, tensors: bool
) -> dict[str, int]:
    """The hash of each value that other ranks may hold, too, by its key, and offset if it is a part.

    Args:
        items: of the local plan.
        values: by key.
        tensors: whether tensors are read, which takes the time of a copy from their device. Objects always are.
    """
    found = {}
    for item in items:
        value = values.get(item.index.fqn)
        if item.type is WriteItemType.BYTE_IO:
            digest = _hash(value)
        elif tensors and isinstance(value, torch.Tensor):
            digest = _hash_tensor(value)
        else:
            continue
        if digest is not None:
            offset = tuple(item.index.offset or ()) if item.type is WriteItemType.SHARD else ()
            found[item.index.fqn + (f" at {offset}" if offset else "")] = digest
    return found


def _hash(value: Any) -> int | None:
    try:
        return int.from_bytes(_Hasher().digest(value), "little")
    except (_NotComparableError, RecursionError):
        return None


def _hash_tensor(value: torch.Tensor) -> int | None:
    parts = torch_compat.local_tensors(value)
    if len(parts) != 1 or type(parts[0].detach()) is not torch.Tensor:
        return None
    try:
        return _hash(parts[0].detach().cpu())
    except (RuntimeError, NotImplementedError):  # another layout, or a device without copies
        return None


class _Hasher:
    """Digests of nested values; one for each value."""

    def __init__(self) -> None:
        self._parts = 0

    def digest(self, value: Any) -> bytes:
        """Raises _NotComparableError."""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _NotComparableError
        kind = type(value)
        parts: list[bytes]
        if isinstance(value, _BY_REPR):
            parts = [repr(value).encode(errors="backslashreplace")]
        elif isinstance(value, Mapping):
            # In any order: that of keys often depends on the rank.
            parts = sorted(self.digest(k) + self.digest(v) for k, v in value.items())
        elif isinstance(value, set | frozenset):
            parts = sorted(map(self.digest, value))
        elif isinstance(value, list | tuple):
            parts = [self.digest(each) for each in value]
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            parts = _tensor_parts(value)
        elif isinstance(value, np.ndarray | np.generic):
            parts = _array_parts(np.asarray(value))
        else:
            raise _NotComparableError
        head = f"{kind.__module__}.{kind.__qualname__} {len(parts)}".encode()
        return hashlib.blake2b(b"\0".join((head, *parts)), digest_size=8).digest()


def _tensor_parts(tensor: torch.Tensor) -> list[bytes]:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise _NotComparableError
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = dense.view(torch.uint8).numpy() if len(dense) else np.zeros(0, np.uint8)
    return [repr((tensor.dtype, tuple(tensor.shape))).encode(), _checksum(raw)]


def _array_parts(array: "np.ndarray[Any, Any]") -> list[bytes]:
    if array.dtype.hasobject:
        raise _NotComparableError
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else array[:0]
    return [repr((array.dtype.str, array.shape)).encode(), _checksum(raw)]


def _checksum(raw: "np.ndarray[Any, Any]") -> bytes:
    return struct.pack("<I", crc32c.crc32c(raw.data) if raw.size else 0)
