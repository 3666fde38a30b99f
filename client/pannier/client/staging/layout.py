"""Where a rank's items go in its data files, what those hold besides the tensors' elements, and the values of a save.

In: a rank's items and its final plan, or the items of a plan that torch made; the values of a state whose structure
is known, or a planner. Out: a slot for each item, an arena whose files have the head and the tail of each archive in
place, and the value of each slot: a tensor, or the archive of an object. Heads and tails are written once to each
buffer: they stay there from save to save, as long as nothing else is written to it. Tensors of XLA's devices come from
:class:`pannier.client.xla.shard_tensors.Fetcher`. A layout is made once for each final plan; immutable, thread-safe.
"""

import ctypes
import io
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from pannier.client import torch_compat
from pannier.client.staging import archives
from pannier.client.staging.archives import Archive, Part, planned_part
from pannier.client.staging.arena import Arena, FileBuffer, MemoryMapping
from pannier.client.staging.host_copy import LARGE
from pannier.client.xla import planners, runtime
from pannier.client.xla.shard_tensors import Fetcher, ShardView
from pannier.v1 import plan_pb2
from pannier.wire import file_layout, object_names
from pannier.wire.errors import InvalidRequestError, PannierError
from pannier.wire.plan_columns import decode_column

Value = torch.Tensor | bytes | io.BytesIO
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


class Slot(NamedTuple):
    """Where the archive of an item goes, if its size is planned."""

    file: int
    """Index of the data file."""
    view: int
    """Index of the view of its elements among those of the file."""
    start: int
    """Offset of the archive in the file, bytes."""
    part: Part
    archive: Archive

    @property
    def raw(self) -> int:
        """Offset of the elements in the file, bytes."""
        return self.start + len(self.archive.head)

    @property
    def end(self) -> int:
        """Offset of the byte after the archive."""
        return self.start + self.archive.length


class StageLayout:
    """The files of one rank in a save.

    Args:
        names, sizes, objects, positions: see the attributes.
        parts: of the items, in order; None: its size isn't planned.
        places: file and offset of each item, and the planned length of its archive, bytes.

    Raises PannierError: archives overlap, or don't fit.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        objects: str,
        positions: Sequence[int],
        parts: Sequence[Part | None],
        places: Sequence[tuple[int, int, int]],
    ) -> None:
        self.names = list(names)
        """Of the data files, without the attempt's prefix."""
        self.sizes = list(sizes)
        """Bytes of each data file; 0 for the objects file."""
        self.objects = objects
        """Name of the objects file, likewise."""
        self.positions = positions
        """Of the items in the local plan; empty: the coordinator has no local plan."""
        self.slots: list[Slot | None] = []
        """One per item; None: its archive goes to the objects file."""
        self._files = [_File(size) for size in sizes]
        for part, (file, start, length) in zip(parts, places, strict=True):
            slot = None
            if part is not None:
                archive = part.archive
                self._check(file, start, length, archive)
                slot = Slot(file, len(self._files[file].slots), start, part, archive)
                self._files[file].slots.append(slot)
            self.slots.append(slot)

    def _check(self, file: int, start: int, length: int, archive: Archive) -> None:
        if archive.length != length:
            raise PannierError(
                f"the final plan has {length} bytes for an archive of {archive.length}"
            )
        size, taken = self.sizes[file], self._files[file].end
        if start < taken or start + length > size:
            raise PannierError(
                f"the final plan puts bytes {start} to {start + length} into {self.names[file]}, "
                f"which has {size} bytes of which {taken} are taken"
            )

    def open(self, arena: Arena) -> list[list[torch.Tensor]]:
        """Writes what the files hold besides elements, unless it is there; returns the elements' views, by file.

        Until :meth:`close` nothing is known of what the arena holds.
        """
        return [
            file.take_headers(buffer) if file.size else []
            for file, buffer in zip(self._files, arena.files, strict=True)
        ]

    def close(
        self, arena: Arena, views: Sequence[list[torch.Tensor]], but: Collection[int] = ()
    ) -> None:
        """Every file holds again what :meth:`open` wrote, ``but`` those with these indices."""
        for index, (file, buffer) in enumerate(zip(self._files, arena.files, strict=True)):
            if file.size and index not in but:
                file.put_headers(buffer, views[index])


def planned_layout(items: Sequence[WriteItem], final: plan_pb2.FinalPlan) -> StageLayout:
    """The layout of a final plan.

    Args:
        items: of the local plan that it answers.
        final: the coordinator's answer.

    Raises:
        InvalidRequestError: its files' names aren't those of its attempt.
        PannierError: archives overlap, or don't fit.
    """
    names = object_names.data_suffixes(final.attempt, [file.name for file in final.files])
    placed = final.placement
    places = list(
        zip(*map(decode_column, (placed.file, placed.offset, placed.length)), strict=True)
    )
    positions = decode_column(final.positions)
    parts = [
        planned_part(items[position]) if length else None
        for position, (_, _, length) in zip(positions, places, strict=True)
    ]
    objects = object_names.objects_suffix(int(names[0].partition("_")[0])) if names else ""
    sizes = [file.size for file in final.files]
    return StageLayout(names, sizes, objects, positions, parts, places)


def own_layout(items: Sequence[WriteItem], rank: int, *, is_planned: bool) -> StageLayout:
    """A layout for items that torch has planned, without the coordinator. That of an equal plan is reused.

    Args:
        items: what this rank writes.
        rank: global rank, for the names of the files.
        is_planned: False when dtypes and shapes are known only from the resolved values (see
            :func:`pannier.client.planning.local_plan.resolves_as_planned`).
    """
    return _own_layout(rank, tuple(planned_part(item) if is_planned else None for item in items))


@lru_cache(maxsize=2)
def _own_layout(rank: int, parts: tuple[Part | None, ...]) -> StageLayout:
    known = [part.archive for part in parts if part is not None]
    laid = file_layout.lay_out(
        [len(archive.head) for archive in known],
        [archive.body for archive in known],
        [len(archive.tail) for archive in known],
    )
    slotted = iter(zip(laid.file, laid.offset, laid.length, strict=True))
    places = [next(slotted) if part is not None else (0, 0, 0) for part in parts]
    names = [object_names.data_suffix(rank, index) for index in range(len(laid.sizes))]
    objects = object_names.objects_suffix(rank)
    return StageLayout(names, laid.sizes, objects, (), parts, places)


class _File:
    """A data file of one layout."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Bytes."""
        self.slots: list[Slot] = []
        """In order of their offsets."""

    @property
    def end(self) -> int:
        """Offset of the byte after the last archive."""
        return self.slots[-1].end if self.slots else 0

    def take_headers(self, buffer: FileBuffer) -> list[torch.Tensor]:
        """Views of the elements in a buffer, whose headers are written unless an earlier save left them there."""
        assert buffer.mapping is not None
        with _lock:
            file, views = _cached.pop(buffer.mapping, (None, []))
        return views if file is self else self._write_headers(buffer)

    def put_headers(self, buffer: FileBuffer, views: list[torch.Tensor]) -> None:
        """Caches the headers that the buffer holds."""
        assert buffer.mapping is not None
        with _lock:
            _cached[buffer.mapping] = (self, views)

    def _write_headers(self, buffer: FileBuffer) -> list[torch.Tensor]:
        written = 0
        memory = buffer.memory
        for slot in self.slots:
            buffer.zero(written, slot.start)
            memory[slot.start : slot.raw] = slot.archive.head
            written = slot.end
            memory[written - len(slot.archive.tail) : written] = slot.archive.tail
        buffer.zero(written, buffer.size)
        return self._views(buffer)

    def _views(self, buffer: FileBuffer) -> list[torch.Tensor]:
        """The elements of each archive as a tensor; an empty one where there are none."""
        # By address, so that the views don't keep the mapping from being closed; and no inference
        # tensors, which couldn't be written to later.
        memory = (ctypes.c_char * buffer.size).from_address(buffer.address)
        with torch.inference_mode(False), torch_compat.without_torch_functions():
            empty = torch.empty(0, device="cpu")
            return [
                torch.frombuffer(
                    memory,
                    dtype=slot.part.dtype,
                    count=math.prod(slot.part.shape),
                    offset=slot.raw,
                ).view(slot.part.shape)
                if slot.archive.body
                else empty
                for slot in self.slots
            ]


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


_lock = threading.Lock()
_cached: WeakKeyDictionary[MemoryMapping, tuple[_File, list[torch.Tensor]]] = WeakKeyDictionary()
"""By buffer: the file whose headers an earlier save left there, and the views of its elements, which don't keep
the memory mapped. Taken away before anything is written to the buffer."""
