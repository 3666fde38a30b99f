"""The values of one save, by the slots of its layout: what the stager copies.

In: the values of a state whose structure is known, or a planner. Out: the value of each slot: a tensor, or the
archive of an object. Tensors of XLA's devices come from :class:`pannier.client.xla.shard_tensors.Fetcher`.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from pannier.client.staging import archives
from pannier.client.staging.host_copy import LARGE
from pannier.client.staging.layout import Slot, StageLayout
from pannier.client.xla import planners, runtime
from pannier.client.xla.shard_tensors import Fetcher, ShardView
from pannier.wire.errors import InvalidRequestError

Value = torch.Tensor | bytes | io.BytesIO
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


class Small(NamedTuple):
    """Small tensors of the host for one file, which one call copies."""

    file: int
    """Index of the file."""
    slots: list[int]
    bodies: list[int]
    """Bytes of the elements of each."""
    pick: Picker
    """Of the state's values, these."""
    pick_views: Picker
    """Of the views of the file, these."""


@dataclass(frozen=True)
class StateSlots:
    """How the values of one state structure fill the slots of its layout. Immutable."""

    keys: Sequence[str]
    """Of the values."""
    positions: Sequence[int]
    """By slot: the index of its value."""
    small: list[Small]
    single: list[int]
    """The other slots with elements, and those of objects."""
    has_xla: bool


def state_slots(
    layout: StageLayout, keys: Sequence[str], values: Sequence[Any]
) -> StateSlots | None:
    """How states with the structure of one that was planned fill a layout; None if a value needs more than a copy.

    Args:
        layout: of the state's plan.
        keys: of the values.
        values: of the state (:mod:`pannier.client.planning.state_fingerprint`).
    """
    positions, found = layout.positions, [values[position] for position in layout.positions]
    if not all(map(_fits, layout.slots, found)):
        return None
    small: dict[int, list[int]] = {}
    single = []
    for number, (slot, value) in enumerate(zip(layout.slots, found, strict=True)):
        if slot is None:
            single.append(number)
        elif slot.archive.body:
            is_small = (
                slot.archive.body < LARGE and isinstance(value, torch.Tensor) and value.is_cpu
            )
            (small.setdefault(slot.file, []) if is_small else single).append(number)
    has_xla = any(isinstance(value, ShardView) for value in found)
    groups = [_small(layout, file, numbers) for file, numbers in small.items()]
    return StateSlots(keys, positions, groups, single, has_xla)


def _fits(slot: Slot | None, value: Any) -> bool:
    """Whether a value matches its slot, and its elements are all that its archive needs."""
    if slot is None:
        return not isinstance(value, torch.Tensor | ShardView)
    if isinstance(value, ShardView):
        return slot.part[:3] == (value.tensor.dtype, value.chunk.sizes, value.chunk.offsets)
    return isinstance(value, torch.Tensor) and slot.part[:2] == (value.dtype, value.shape)


def _small(layout: StageLayout, file: int, numbers: list[int]) -> Small:
    slots = [slot for number in numbers if (slot := layout.slots[number])]
    return Small(
        file,
        numbers,
        [slot.archive.body for slot in slots],
        _picker([layout.positions[number] for number in numbers]),
        _picker([slot.view for slot in slots]),
    )


class StateValues:
    """The values of a state whose structure is known: no planner is asked. Not thread-safe.

    Args:
        slots: of its structure.
        values: of the state.
    """

    def __init__(self, slots: StateSlots, values: Sequence[Any]) -> None:
        self.values = values
        """In the order of the local plan's items."""
        self.small: Sequence[Small] = slots.small
        self.single: Sequence[int] = slots.single
        self.makes_tensors = slots.has_xla
        self.copy_description = runtime.COPY_DESCRIPTION if slots.has_xla else ""
        self._slots = slots
        self._fetcher = Fetcher() if slots.has_xla else None
        if self._fetcher is not None:
            found = (values[slots.positions[number]] for number in slots.single)
            self._fetcher.expect(value for value in found if isinstance(value, ShardView))

    def key(self, slot: int) -> str:
        """The key of a slot's value, for errors."""
        return self._slots.keys[self._slots.positions[slot]]

    def resolve(self, slot: int) -> Value:
        """A slot's value. Raises what pickling or torch_xla raises."""
        value = self.values[self._slots.positions[slot]]
        if isinstance(value, torch.Tensor):
            return value
        if self._fetcher is not None and isinstance(value, ShardView):
            return self._fetcher.take(value)
        return archives.serialized(value)

    def release(self) -> None:
        """Frees what was fetched from devices."""
        self._fetcher = None


class PlannerValues:
    """Values that a planner resolves, one at a time and each once. Not thread-safe.

    Args:
        items: of the slots.
        planner: that made them.
        copy_description: how values are copied from devices that Pannier doesn't copy from itself; empty: there
            are none.
    """

    small: Sequence[Small] = ()
    """Slots that are copied together."""
    makes_tensors = True
    """Whether tensors may be made by resolving them: the stager keeps few of them alive."""
    values: Sequence[Any] = ()

    def __init__(
        self, items: Sequence[WriteItem], planner: SavePlanner, copy_description: str = ""
    ) -> None:
        self.copy_description = copy_description
        self.items = items
        """By slot."""
        self._planner = planner
        self.single: Sequence[int] = range(len(items))
        """Slots that are resolved and copied one by one, in this order."""

    def key(self, slot: int) -> str:
        """The key of a slot's value, for errors."""
        return self.items[slot].index.fqn

    def resolve(self, slot: int) -> Value:
        """A slot's value. Raises InvalidRequestError: it is of another type than planned; and what the planner raises."""
        item = self.items[slot]
        value = self._planner.resolve_data(item)
        expected = io.BytesIO if item.type is WriteItemType.BYTE_IO else torch.Tensor
        if not isinstance(value, expected):
            raise InvalidRequestError(
                f"{item.index.fqn!r} can't be saved: the planner's resolve_data returned a "
                f"{type(value).__name__} where its plan has a {expected.__name__}"
            )
        return value

    def release(self) -> None:
        """Frees what was fetched from devices."""
        planners.release(self._planner)


def _picker(indices: Sequence[int]) -> Picker:
    """``values -> tuple(values[i] for i in indices)``, of at least one index."""
    if len(indices) > 1:
        return itemgetter(*indices)
    (index,) = indices
    return lambda values: (values[index],)
