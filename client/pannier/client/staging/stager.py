"""The one copy: a rank's items from wherever they are into host memory.

In: the planner's items with their planned places, and an arena. Out: data files
in host memory, complete and ready to be sent; from then on the training loop
may change anything. Each item is resolved once. A planned place is used only by
a plain strided tensor of the planned dtype and shape; everything else is
serialised at once, as DCP would store it, to the rank's objects file.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple, Protocol, cast

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pannier.client import torch_compat
from pannier.client.staging import archives, header_cache
from pannier.client.staging.arena import Arena, FileBuffer
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import Transfers
from pannier.client.user_errors import located
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import file_layout, object_names
from pannier.wire.errors import InvalidRequestError, PannierError

Resolve = Callable[[WriteItem], torch.Tensor | io.BytesIO]


@dataclass(frozen=True)
class StagedFile:
    """A data file in host memory."""

    name: str
    """Relative to the checkpoint id."""
    size: int
    """Bytes."""
    address: int
    """Of the first byte; valid until the arena is released."""
    keepalive: object
    """Owner of the memory."""


class ArchiveLocation(NamedTuple):
    """Where an item's archive lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Staged:
    """What a rank holds in host memory for one save."""

    files: list[StagedFile]
    """Data files, without empty ones."""
    varying: list[records_pb2.VaryingItem]
    """Items that are not where the plan put them."""
    locations: list[ArchiveLocation]
    """One per item."""
    arena: Arena
    """The memory; whoever acquired it releases it."""
    deferred: DeferredCopies | None = None
    """Copies that are still under way; they must be finished before the arena is released."""
    copy_description: str = ""
    """By which way bytes came from devices, for people; empty when none did."""

    @property
    def bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    def renamed(self, names: Sequence[str]) -> "Staged":
        """The same for another attempt, with these names of all the plan's files."""
        endings = {_ending(name): name for name in names}
        files = [replace(file, name=endings[_ending(file.name)]) for file in self.files]
        varying = []
        for item in self.varying:
            moved = records_pb2.VaryingItem()
            moved.CopyFrom(item)
            moved.file = endings[_ending(item.file)]
            varying.append(moved)
        return replace(self, files=files, varying=varying)


class PlannerRun(Protocol):
    """The planner that made the items (see :class:`pannier.client.planning.local_plan.PlannerRun`)."""

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The value of one of its items; called once for each."""

    def release(self) -> None:
        """Every item is resolved: frees what was fetched from devices for that."""

    @property
    def how(self) -> str:
        """How values come from devices that Pannier doesn't copy from; human-readable."""


def stage(
    planner: PlannerRun,
    items: Sequence[WriteItem],
    final: plan_pb2.FinalPlan,
    arena: Arena,
    devices: DeviceCopies | None = None,
) -> Staged:
    """Copies the items that the final plan gave to this rank.

    Args:
        planner: resolves the items.
        items: those of ``final.positions``, as the planner's ``finish_plan`` returned them.
        final: says where each item goes.
        arena: acquired with the sizes of ``final.files``, in order.
        devices: makes the copies from devices; says what may arrive later. Default: nothing.

    Raises:
        InvalidRequestError: an item isn't what its plan says; names its key.
        PannierError: there is no memory.
        Exception: whatever resolving, copying or pickling an item raised, with a note of its key.
    """
    names = [file.name for file in final.files]
    places = final.placement
    slots = list(map(_Slot, places.file, places.offset, places.length))
    try:
        with _Writer(names, _objects_name(names), arena, devices) as writer:
            placements = [
                writer.put(item, planner.resolve, slot)
                for item, slot in zip(items, slots, strict=True)
            ]
            files = writer.finish()
    finally:
        planner.release()
    varying = [
        records_pb2.VaryingItem(
            position=position, file=placed.file, offset=placed.offset, length=placed.length
        )
        for position, slot, placed in zip(final.positions, slots, placements, strict=True)
        if placed != (names[slot.file], slot.offset, slot.length)
    ]
    copy_description = writer.copy_description or planner.how
    return Staged(files, varying, placements, arena, writer.start_deferred(), copy_description)


def stage_external(
    items: Sequence[WriteItem],
    resolve: Resolve,
    attempt: str,
    rank: int,
    acquire: Callable[[Sequence[int]], Arena],
    *,
    slots: bool = True,
) -> Staged:
    """Copies items of a plan that torch made, in a layout of this rank's own.

    Args:
        items: what this rank writes.
        resolve: gives an item's value; called once for each.
        attempt: name of the attempt, for the names of the files.
        rank: global rank, for the names of the files.
        acquire: gives the arena, with a buffer of each size; it is the caller's also on failure.
        slots: False when only the resolved values tell dtypes and shapes (see
            :func:`pannier.client.planning.local_plan.resolves_as_planned`).

    Raises:
        InvalidRequestError: an item isn't what its plan says; names its key.
        PannierError: there is no memory.
        Exception: whatever resolving, copying or pickling an item raised, with a note of its key.
    """
    planned = [archives.planned_archive(item) if slots else None for item in items]
    known = [archive for archive in planned if archive is not None]
    laid = file_layout.lay_out(
        [len(archive.head) for archive in known],
        [archive.body for archive in known],
        [len(archive.tail) for archive in known],
    )
    places = iter(zip(laid.file, laid.offset, laid.length, strict=True))
    names = [object_names.data_file(attempt, rank, index) for index in range(len(laid.sizes))]
    arena = acquire(laid.sizes)
    with _Writer(names, object_names.objects_file(attempt, rank), arena) as writer:
        placements = [
            writer.put(item, resolve, _Slot(*next(places)) if archive is not None else None)
            for item, archive in zip(items, planned, strict=True)
        ]
        return Staged(
            writer.finish(), [], placements, arena, copy_description=writer.copy_description
        )


class _Slot(NamedTuple):
    """A planned place; ``length`` is 0 when the plan knows none."""

    file: int
    offset: int
    length: int


class _Writer:
    """Fills an arena, item by item, in the order of their places."""

    def __init__(
        self,
        names: Sequence[str],
        objects: str,
        arena: Arena,
        devices: DeviceCopies | None = None,
    ) -> None:
        self._names = names
        self._objects = objects
        self._arena = arena
        self._written = [0] * len(names)
        """Per buffer: everything below it is this save's."""
        self._transfers = Transfers(devices)
        for buffer in arena.files:
            header_cache.take(buffer)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        # Also on failure: the arena is lent again, and no device may still write to it.
        self._transfers.wait()

    def put(self, item: WriteItem, resolve: Resolve, slot: _Slot | None) -> ArchiveLocation:
        """Resolves one item and copies it; says where it went."""
        with located(unsaved(item.index.fqn)):
            value = _checked(item, resolve(item))
            tensor = _detached(value) if isinstance(value, torch.Tensor) else None
            if slot is not None and slot.length:
                buffer = self._claim(slot)
                if tensor is not None and _is_plain(tensor) and _fits(tensor, item):
                    self._fill(buffer, slot, tensor, item.index.fqn, value)
                    return ArchiveLocation(self._names[slot.file], slot.offset, slot.length)
                buffer.zero(slot.offset, slot.offset + slot.length)
            return self._spill(value if tensor is None else tensor, item.index.fqn)

    def finish(self) -> list[StagedFile]:
        """Ends the copies that are under way; nothing may be put afterwards."""
        for buffer, written in zip(self._arena.files, self._written, strict=True):
            buffer.zero(written, buffer.size)
        self._transfers.run()
        self._transfers.wait()
        files = [
            StagedFile(name, buffer.size, buffer.address, buffer)
            for name, buffer in zip(self._names, self._arena.files, strict=True)
            if buffer.size
        ]
        spill = self._arena.spilled
        if spill is not None and spill.size:
            files.append(StagedFile(self._objects, spill.size, spill.address, spill))
        return files

    @property
    def copy_description(self) -> str:
        """See :attr:`Staged.copy_description`."""
        return self._transfers.copy_description

    def start_deferred(self) -> DeferredCopies | None:
        """Begins the copies that may be late, if there are any; after all that can fail."""
        return self._transfers.start_deferred()

    def _claim(self, slot: _Slot) -> FileBuffer:
        """The slot's buffer, with the gap before the slot cleared."""
        buffer, written = self._arena.files[slot.file], self._written[slot.file]
        end = slot.offset + slot.length
        if slot.offset < written or end > buffer.size:
            raise PannierError(
                f"the final plan puts bytes {slot.offset} to {end} into {self._names[slot.file]}, "
                f"which has {buffer.size} bytes of which {written} are taken"
            )
        buffer.zero(written, slot.offset)
        self._written[slot.file] = end
        return buffer

    def _fill(
        self, buffer: FileBuffer, slot: _Slot, tensor: torch.Tensor, name: str, value: Any
    ) -> None:
        archive = archives.archive(tensor.dtype, tensor.shape)
        if archive.length != slot.length:
            raise PannierError(
                f"the final plan has {slot.length} bytes for an archive of {archive.length}"
            )
        raw = slot.offset + len(archive.head)
        tail = raw + archive.body
        buffer.memory[slot.offset : raw] = archive.head
        buffer.memory[tail : tail + len(archive.tail)] = archive.tail
        self._transfers.copy(tensor, buffer, raw, name=name, value=value)
        self._transfers.bound()

    def _spill(self, value: torch.Tensor | io.BytesIO, name: str) -> ArchiveLocation:
        spill = self._arena.spill
        if isinstance(value, io.BytesIO):
            start = spill.size
            spill.write(value.getbuffer())
        elif _is_plain(value) and value.dtype in archives.DTYPES:
            archive = archives.archive(value.dtype, value.shape)
            spill.align(len(archive.head), file_layout.ALIGNMENT)
            start = spill.size
            spill.write(archive.head)
            raw = spill.reserve(archive.body)
            spill.write(archive.tail)
            self._transfers.copy(value, spill, raw, name=name)
        else:
            start = spill.size
            torch.save(_compact(value.cpu()), cast("IO[bytes]", spill))
        return ArchiveLocation(self._objects, start, spill.size - start)


def _checked(item: WriteItem, value: Any) -> torch.Tensor | io.BytesIO:
    wanted: type = io.BytesIO if item.type is WriteItemType.BYTE_IO else torch.Tensor
    if not isinstance(value, wanted):
        raise InvalidRequestError(
            f"{item.index.fqn!r} can't be saved: the planner's resolve_data gave a "
            f"{type(value).__name__} where its plan has a {wanted.__name__}"
        )
    return cast("torch.Tensor | io.BytesIO", value)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch_compat.AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and raw bytes are all there is to a detached tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _fits(tensor: torch.Tensor, item: WriteItem) -> bool:
    data = item.tensor_data
    return (
        data is not None
        and tensor.dtype == data.properties.dtype
        and tensor.shape == data.chunk.sizes
    )


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that brings no more storage along than it shows; as DCP does it."""
    if tensor.untyped_storage().size() != tensor.nbytes:
        return tensor.clone()
    return tensor


def unsaved(fqn: str) -> str:
    """Where an exception was raised, as its note."""
    return f"{fqn!r} can't be saved"


def _ending(name: str) -> str:
    """What a file's name has beside the attempt's and the rank's."""
    return name.rpartition("_")[2]


def _objects_name(names: Sequence[str]) -> str:
    """Name of the objects file beside planned files of one rank."""
    if not names:
        return ""
    stem, _, _ = names[0].rpartition("_")
    return f"{stem}_objects.distcp"
