"""Stages a rank's items: the one copy into host memory that a save costs the training loop.

In: the layout of a save, the value of each slot, and an arena. Out: complete data files in host memory;
afterwards the training loop may change anything but the sources of deferred copies. Each value is resolved
once. Only a plain strided tensor of the planned dtype and shape is copied to its slot; everything else is
serialised at once, as DCP would store it, to the rank's objects file. The same loop serves the values of a
known state, those that a planner resolves, and those of torch's plans. Not thread-safe.
"""

import ctypes
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final, NamedTuple, TypeVar, cast

import crc32c
import torch

from pannier.client import torch_compat
from pannier.client.staging import archives, device_stream
from pannier.client.staging.archives import Part
from pannier.client.staging.arena import Arena, SpillBuffer
from pannier.client.staging.bounce_buffers import TensorCopy
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import LARGE, HostCopies, check_storage
from pannier.client.staging.layout import PlannerValues, Slot, Small, StageLayout, StateValues
from pannier.client.user_errors import add_note
from pannier.v1 import records_pb2
from pannier.wire import file_layout, object_names
from pannier.wire.errors import InvalidRequestError, PannierError

_log = logging.getLogger(__name__)

_HELD: Final = 256 << 20
"""Gathered sources of more bytes are copied at once: a planner may have allocated them for the save."""
_Placed = TypeVar("_Placed", records_pb2.VaryingItem, records_pb2.ExtraFile)


@dataclass(frozen=True)
class StagedFile:
    """A data file in host memory."""

    name: str
    """Without the attempt's prefix, which it gets when it is sent."""
    size: int
    """Bytes."""
    address: int
    """Address of the first byte; valid until the arena is released."""
    keepalive: object
    """Owner of the memory."""


class ArchiveLocation(NamedTuple):
    """Where the archive of an item is."""

    file: str
    """As :attr:`StagedFile.name`."""
    offset: int
    length: int
    """Bytes."""


@dataclass(frozen=True)
class Staged:
    """What a rank holds in host memory for one save."""

    files: list[StagedFile]
    """Data files, without empty ones."""
    layout: StageLayout
    """Where the archives are, but for those in ``elsewhere``."""
    elsewhere: dict[int, ArchiveLocation]
    """By slot: archives in the objects file."""
    arena: Arena
    """The memory; the caller who acquired it must release it."""
    deferred: DeferredCopies | None = None
    """Copies that are still under way; they must be finished before the arena is released."""
    copy_description: str = ""
    """How bytes were copied from devices, human-readable; empty: none were."""
    extra: Sequence[records_pb2.ExtraFile] = ()
    """Small files beside the state; their data file is named as in ``files``."""

    @property
    def bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    @property
    def varying(self) -> list[records_pb2.VaryingItem]:
        """Items of the local plan whose archive is not at its planned offset; files are named as in ``files``."""
        positions = self.layout.positions
        return [
            records_pb2.VaryingItem(
                position=positions[number],
                file=place.file,
                offset=place.offset,
                length=place.length,
            )
            for number, place in self.elsewhere.items()
            if positions
        ]

    @property
    def locations(self) -> list[ArchiveLocation]:
        """One per item."""
        return [
            self.elsewhere[number]
            if slot is None or number in self.elsewhere
            else ArchiveLocation(self.layout.names[slot.file], slot.start, slot.archive.length)
            for number, slot in enumerate(self.layout.slots)
        ]


def stage(
    layout: StageLayout,
    values: StateValues | PlannerValues,
    arena: Arena,
    devices: DeviceCopies | None = None,
) -> Staged:
    """Copies each value to its slot.

    Args:
        layout: of the save's plan.
        values: by slot.
        arena: acquired with the layout's sizes.
        devices: makes the copies from devices, and may defer some. Default: defers none.

    Raises:
        InvalidRequestError: a value doesn't match its plan, or its storage was freed or cut; names its key.
        PannierError: there is no memory.
        Exception: whatever resolving, copying or pickling a value raised, with a note of its key.
    """
    writer = _Writer(layout, arena, devices)
    try:
        for small in values.small:
            writer.copy_small(small, values)
        for number in values.single:
            writer.put(number, values)
        writer.finish()
    finally:
        # Also on failure: the arena will be used again, and no device may still write to it.
        writer.wait()
        values.release()
    return writer.staged(values.copy_description)


def add_extra_files(staged: Staged, rank: int, contents: Mapping[str, bytes]) -> Staged:
    """``staged`` with one more data file, which holds these contents one after the other.

    Args:
        rank: global rank, for the name of the data file.
        contents: by name, checked.
    """
    name, data = object_names.extra_suffix(rank), bytearray()
    extra = []
    for each, content in contents.items():
        place = (name, len(data)) if content else ("", 0)
        extra.append(
            records_pb2.ExtraFile(
                name=each,
                file=place[0],
                offset=place[1],
                size=len(content),
                crc32c=crc32c.crc32c(content),
            )
        )
        data += content
    files = list(staged.files)
    if data:
        memory = (ctypes.c_char * len(data)).from_buffer(data)
        files.append(StagedFile(name, len(data), ctypes.addressof(memory), memory))
    return replace(staged, files=files, extra=extra)


def in_attempt(items: Iterable[_Placed], prefix: str) -> list[_Placed]:
    """Copies of messages that name staged files, with an attempt's ``prefix`` before the names."""
    found = []
    for item in items:
        named = type(item)()
        named.CopyFrom(item)
        named.file = prefix + item.file if item.file else ""
        found.append(named)
    return found


class _Writer:
    """Fills an arena, value by value. Not thread-safe."""

    def __init__(self, layout: StageLayout, arena: Arena, devices: DeviceCopies | None) -> None:
        self._layout = layout
        self._arena = arena
        self._given = devices
        self._devices: DeviceCopies | None = None
        """None: nothing was copied from a device."""
        self._host = HostCopies()
        self._views = layout.open(arena)
        self._elsewhere: dict[int, ArchiveLocation] = {}
        """By slot: archives that are in the objects file."""
        self._changed: set[int] = set()
        """Files with slots that were left empty."""

    def copy_small(self, small: Small, values: StateValues | PlannerValues) -> None:
        """Copies small tensors of the host."""
        tensors = small.pick(values.values)
        with torch.no_grad(), torch_compat.without_torch_functions():
            held = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
            offsets = map(torch.Tensor.storage_offset, tensors)
            dense = map(torch.Tensor.is_contiguous, tensors)
            columns = zip(small.slots, tensors, small.bodies, held, offsets, dense, strict=True)
            for number, tensor, body, size, offset, is_dense in columns:
                if offset or not is_dense or size < body:
                    check_storage(tensor, values.key(number))
            torch_compat.copy_all(small.pick_views(self._views[small.file]), tensors)

    def put(self, number: int, values: StateValues | PlannerValues) -> None:
        """Resolves the value of a slot and copies it."""
        try:
            value = values.resolve(number)
            tensor = _plain(value)
            slot = self._layout.slots[number]
            if (
                tensor is not None
                and slot is not None
                and slot.part[:2] == (tensor.dtype, tensor.shape)
            ):
                if slot.archive.body:
                    view = self._views[slot.file][slot.view]
                    buffer = self._arena.files[slot.file]
                    copy = TensorCopy(values.key(number), tensor, buffer, slot.raw, view)
                    self._copy(copy, value)
            else:
                self._spill(number, slot, value, tensor, values.key(number))
            if values.makes_tensors and self._host.bytes > _HELD:
                self._host.run()
        except Exception as error:
            if not isinstance(error, PannierError):
                add_note(error, f"{values.key(number)!r} can't be saved")
            raise

    def finish(self) -> None:
        """Makes the gathered copies."""
        if self._devices is not None:
            self._devices.run()
        if self._host.bytes:
            self._host.run()

    def wait(self) -> None:
        """Returns when no device writes any more."""
        if self._devices is not None:
            self._devices.wait()

    def staged(self, copy_description: str) -> Staged:
        """The result. Starts the deferred copies, if there are any: nothing fails any more."""
        layout, arena = self._layout, self._arena
        layout.close(arena, self._views, self._changed)
        files = [
            StagedFile(name, buffer.size, buffer.address, buffer)
            for name, buffer in zip(layout.names, arena.files, strict=True)
            if buffer.size
        ]
        spill, deferred = arena.spilled, None
        if spill is not None and spill.size:
            files.append(StagedFile(layout.objects, spill.size, spill.address, spill))
        if self._devices is not None:
            # Before the description is read, which this may change.
            deferred = self._devices.start_deferred()
            copy_description = self._devices.copy_description or copy_description
        return Staged(files, layout, self._elsewhere, arena, deferred, copy_description)

    def _copy(self, copy: TensorCopy, value: Any) -> None:
        """Makes, gathers or queues a copy. Raises InvalidRequestError: the storage was freed or cut."""
        tensor, target = copy.tensor, copy.target
        kind = tensor.device.type
        if kind in device_stream.ASYNC_DEVICES:
            check_storage(tensor, copy.name)
            self._devices = self._devices or self._given or DeviceCopies()
            self._devices.add(copy, value)
            return
        if kind == "cpu":
            check_storage(tensor, copy.name)
        if kind != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            copy.target_view().copy_(tensor)
            return
        address, size = target.address + copy.offset, tensor.nbytes
        if size < LARGE or isinstance(target, SpillBuffer):
            # Releases the GIL.
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            self._host.add(address, tensor.data_ptr(), size, tensor)

    def _spill(
        self, number: int, slot: Slot | None, value: Any, tensor: torch.Tensor | None, name: str
    ) -> None:
        """Writes a value that doesn't match its slot to the objects file."""
        if slot is not None:
            if tensor is not None:
                _refuse_other_shape(tensor, slot.part, name)
            self._arena.files[slot.file].zero(slot.start, slot.end)
            self._changed.add(slot.file)
        spill = self._arena.spill
        start = spill.size
        if tensor is not None and tensor.dtype in archives.DTYPES:
            archive = archives.archive(tensor.dtype, tensor.shape)
            spill.align(len(archive.head), file_layout.ALIGNMENT)
            start = spill.size
            spill.write(archive.head)
            raw = spill.reserve(archive.body)
            spill.write(archive.tail)
            if archive.body:
                self._copy(TensorCopy(name, tensor, spill, raw), value)
        elif isinstance(value, torch.Tensor):
            _serialize(value, spill, name)
        else:
            spill.write(value.getbuffer() if isinstance(value, io.BytesIO) else value)
        place = ArchiveLocation(self._layout.objects, start, spill.size - start)
        self._elsewhere[number] = place


def _plain(value: Any) -> torch.Tensor | None:
    """The detached tensor, if dtype, shape and raw bytes describe it completely."""
    if not isinstance(value, torch.Tensor):
        return None
    tensor = _detached(value)
    if (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    ):
        return tensor
    return None


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch_compat.AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach()


def _refuse_other_shape(tensor: torch.Tensor, part: Part, name: str) -> None:
    """Raises InvalidRequestError for a value whose shape isn't that of the part that was planned."""
    if tensor.shape == part.shape:
        return
    raise InvalidRequestError(
        f"{name!r} can't be saved: its part at offset {part.offsets} of {part.size} has shape {part.shape} by its "
        f"plan, but this rank holds {tuple(tensor.shape)}: a DTensor made by from_local needs local tensors of the "
        "sizes that its placements give each rank"
    )


def _serialize(value: torch.Tensor, spill: SpillBuffer, name: str) -> None:
    """Writes the archive of a tensor that has no template."""
    start, value = spill.size, _detached(value)
    torch.save(_compact(value.cpu()), cast("IO[bytes]", spill))
    if type(value) not in _checked_types:
        _checked_types.add(type(value))
        archive = ctypes.string_at(spill.address + start, spill.size - start)
        _warn_if_not_loadable(name, value, archive)


def _warn_if_not_loadable(name: str, value: torch.Tensor, archive: bytes) -> None:
    """Warns of a tensor that torch's allow-list keeps from being unpickled, here at least."""
    unknown = archives.unknown_globals(archive)
    if unknown:
        _log.warning(
            "%r is saved as a %s, which client.load and dcp.load unpickle only in a program that has called "
            "torch.serialization.add_safe_globals for %s; a plain tensor needs no such call",
            name,
            type(value).__name__,
            ", ".join(unknown),
        )


_checked_types: Final[set[type]] = set()
"""Types of tensors that were checked against torch's allow-list."""


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without storage beyond its own elements, as DCP stores it."""
    if tensor.untyped_storage().size() != tensor.nbytes:
        return tensor.clone()
    return tensor
