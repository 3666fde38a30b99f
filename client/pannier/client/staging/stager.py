"""Stages a rank's items: the one copy into host memory that a save costs the training loop.

In: the planner's items with their planned offsets, and an arena. Out: complete data files in host
memory; afterwards the training loop may change anything but the sources of deferred copies. Each
item is resolved once. Only a plain strided tensor of the planned dtype and shape is copied to its
planned offset; everything else is serialised at once, as DCP would store it, to the rank's objects
file. Not thread-safe.
"""

import ctypes
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final, NamedTuple, Protocol, TypeVar, cast

import crc32c
import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pannier.client import torch_compat
from pannier.client.staging import archives
from pannier.client.staging.arena import Arena, FileBuffer
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import TensorCopies
from pannier.client.user_errors import located
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import file_layout, object_names
from pannier.wire.errors import InvalidRequestError, PannierError
from pannier.wire.plan_columns import decode_column

_log = logging.getLogger(__name__)

Resolve = Callable[[WriteItem], torch.Tensor | io.BytesIO]
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
    varying: list[records_pb2.VaryingItem]
    """Items whose archive is not at its planned offset; files are named as in ``files``."""
    locations: list[ArchiveLocation]
    """One per item."""
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


class PlannerRun(Protocol):
    """The planner that made the items (see :class:`pannier.client.planning.local_plan.PlannerRun`)."""

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The value of one of its items; called once for each."""

    def release(self) -> None:
        """Frees what was fetched from devices; called once every item is resolved."""

    @property
    def copy_description(self) -> str:
        """How values are copied from devices that Pannier doesn't copy from itself; empty: there are none."""


def stage(
    planner: PlannerRun,
    items: Sequence[WriteItem],
    final: plan_pb2.FinalPlan,
    arena: Arena,
    devices: DeviceCopies | None = None,
) -> Staged:
    """Copies the items that the final plan assigns to this rank.

    Args:
        planner: resolves the items.
        items: those of ``final.positions``, as the planner's ``finish_plan`` returned them.
        final: where each item goes.
        arena: acquired with the sizes of ``final.files``, in order.
        devices: makes the copies from devices, and may defer some. Default: defers none.

    Raises:
        InvalidRequestError: an item doesn't match its plan; names its key.
        PannierError: there is no memory.
        Exception: whatever resolving, copying or pickling an item raised, with a note of its key.
    """
    names = object_names.data_suffixes(final.attempt, [file.name for file in final.files])
    placement = final.placement
    columns = (placement.file, placement.offset, placement.length)
    planned = list(map(_PlannedLocation, *map(decode_column, columns)))
    try:
        with _Writer(names, _objects_name(names), arena, devices) as writer:
            locations = [
                writer.put(item, planner.resolve, target)
                for item, target in zip(items, planned, strict=True)
            ]
            files = writer.finish()
    finally:
        planner.release()
    varying = [
        records_pb2.VaryingItem(
            position=position, file=location.file, offset=location.offset, length=location.length
        )
        for position, target, location in zip(
            decode_column(final.positions), planned, locations, strict=True
        )
        if location != (names[target.file], target.offset, target.length)
    ]
    copy_description = writer.copy_description or planner.copy_description
    return Staged(files, varying, locations, arena, writer.start_deferred(), copy_description)


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


def stage_external(
    items: Sequence[WriteItem],
    resolve: Resolve,
    rank: int,
    acquire: Callable[[Sequence[int]], Arena],
    *,
    as_planned: bool = True,
) -> Staged:
    """Copies the items of a plan that torch made, in a file layout made here.

    Args:
        items: what this rank writes.
        resolve: returns an item's value; called once for each.
        rank: global rank, for the names of the files.
        acquire: returns an arena with a buffer of each size, which the caller releases, also on
            failure.
        as_planned: False when dtypes and shapes are known only from the resolved values (see
            :func:`pannier.client.planning.local_plan.resolves_as_planned`).

    Raises:
        InvalidRequestError: an item doesn't match its plan; names its key.
        PannierError: there is no memory.
        Exception: whatever resolving, copying or pickling an item raised, with a note of its key.
    """
    planned = [archives.planned_archive(item) if as_planned else None for item in items]
    known = [archive for archive in planned if archive is not None]
    layout = file_layout.lay_out(
        [len(archive.head) for archive in known],
        [archive.body for archive in known],
        [len(archive.tail) for archive in known],
    )
    targets = map(_PlannedLocation, layout.file, layout.offset, layout.length)
    names = [object_names.data_suffix(rank, index) for index in range(len(layout.sizes))]
    arena = acquire(layout.sizes)
    with _Writer(names, object_names.objects_suffix(rank), arena) as writer:
        locations = [
            writer.put(item, resolve, next(targets) if archive is not None else None)
            for item, archive in zip(items, planned, strict=True)
        ]
        return Staged(
            writer.finish(), [], locations, arena, copy_description=writer.copy_description
        )


class _PlannedLocation(NamedTuple):
    """Where the plan puts an item's archive."""

    file: int
    """Index of the data file."""
    offset: int
    length: int
    """Bytes; 0: the plan has no offset for the item."""


class _Writer:
    """Fills an arena, item by item, in the order of their offsets."""

    def __init__(
        self,
        names: Sequence[str],
        objects: str,
        arena: Arena,
        devices: DeviceCopies | None = None,
    ) -> None:
        self._names = names
        self._objects_name = objects
        self._arena = arena
        self._written = [0] * len(names)
        """By buffer: bytes that were written or cleared so far."""
        self._copies = TensorCopies(devices)
        for buffer in arena.files:
            archives.take_headers(buffer)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        # Also on failure: the arena will be used again, and no device may still write to it.
        self._copies.wait()

    def put(
        self, item: WriteItem, resolve: Resolve, target: _PlannedLocation | None
    ) -> ArchiveLocation:
        """Resolves one item and copies it; returns where its archive is."""
        with located(cannot_be_saved(item.index.fqn)):
            value = _checked(item, resolve(item))
            tensor = _detached(value) if isinstance(value, torch.Tensor) else None
            if target is not None and target.length:
                buffer = self._claim(target)
                if tensor is not None and _is_plain(tensor) and _matches(tensor, item):
                    self._fill(buffer, target, tensor, item.index.fqn, value)
                    return ArchiveLocation(self._names[target.file], target.offset, target.length)
                if tensor is not None and _is_plain(tensor):
                    _refuse_other_shape(tensor, item)
                buffer.zero(target.offset, target.offset + target.length)
            return self._spill(value if tensor is None else tensor, item.index.fqn)

    def finish(self) -> list[StagedFile]:
        """Completes the copies; nothing may be put afterwards."""
        for buffer, written in zip(self._arena.files, self._written, strict=True):
            buffer.zero(written, buffer.size)
        self._copies.run()
        self._copies.wait()
        files = [
            StagedFile(name, buffer.size, buffer.address, buffer)
            for name, buffer in zip(self._names, self._arena.files, strict=True)
            if buffer.size
        ]
        spill = self._arena.spilled
        if spill is not None and spill.size:
            files.append(StagedFile(self._objects_name, spill.size, spill.address, spill))
        return files

    @property
    def copy_description(self) -> str:
        """See :attr:`Staged.copy_description`."""
        return self._copies.copy_description

    def start_deferred(self) -> DeferredCopies | None:
        """Starts the deferred copies, if there are any; to be called after everything that can fail."""
        return self._copies.start_deferred()

    def _claim(self, target: _PlannedLocation) -> FileBuffer:
        """The target's buffer, with the gap before the target cleared."""
        buffer, written = self._arena.files[target.file], self._written[target.file]
        end = target.offset + target.length
        if target.offset < written or end > buffer.size:
            raise PannierError(
                f"the final plan puts bytes {target.offset} to {end} into "
                f"{self._names[target.file]}, which has {buffer.size} bytes of which {written} are "
                "taken"
            )
        buffer.zero(written, target.offset)
        self._written[target.file] = end
        return buffer

    def _fill(
        self,
        buffer: FileBuffer,
        target: _PlannedLocation,
        tensor: torch.Tensor,
        name: str,
        value: Any,
    ) -> None:
        archive = archives.archive(tensor.dtype, tensor.shape)
        if archive.length != target.length:
            raise PannierError(
                f"the final plan has {target.length} bytes for an archive of {archive.length}"
            )
        raw = target.offset + len(archive.head)
        tail = raw + archive.body
        buffer.memory[target.offset : raw] = archive.head
        buffer.memory[tail : tail + len(archive.tail)] = archive.tail
        self._copies.copy(tensor, buffer, raw, name=name, value=value)
        self._copies.limit_held()

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
            self._copies.copy(value, spill, raw, name=name)
        else:
            start = spill.size
            torch.save(_compact(value.cpu()), cast("IO[bytes]", spill))
            if type(value) not in _checked_types:
                _checked_types.add(type(value))
                _warn_if_not_loadable(
                    name, value, ctypes.string_at(spill.address + start, spill.size - start)
                )
        return ArchiveLocation(self._objects_name, start, spill.size - start)


def _checked(item: WriteItem, value: Any) -> torch.Tensor | io.BytesIO:
    expected: type = io.BytesIO if item.type is WriteItemType.BYTE_IO else torch.Tensor
    if not isinstance(value, expected):
        raise InvalidRequestError(
            f"{item.index.fqn!r} can't be saved: the planner's resolve_data returned a "
            f"{type(value).__name__} where its plan has a {expected.__name__}"
        )
    return cast("torch.Tensor | io.BytesIO", value)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch_compat.AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and raw bytes describe a detached tensor completely."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _matches(tensor: torch.Tensor, item: WriteItem) -> bool:
    data = item.tensor_data
    return (
        data is not None
        and tensor.dtype == data.properties.dtype
        and tensor.shape == data.chunk.sizes
    )


def _refuse_other_shape(tensor: torch.Tensor, item: WriteItem) -> None:
    """Raises InvalidRequestError for a value whose shape isn't that of the part that was planned."""
    data = item.tensor_data
    if data is None or tensor.shape == data.chunk.sizes:
        return
    raise InvalidRequestError(
        f"{item.index.fqn!r} can't be saved: its part at offset {tuple(data.chunk.offsets)} of "
        f"{tuple(data.size)} has shape {tuple(data.chunk.sizes)} by its plan, but this rank holds "
        f"{tuple(tensor.shape)}: a DTensor made by from_local needs local tensors of the sizes that its "
        "placements give each rank"
    )


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


def cannot_be_saved(fqn: str) -> str:
    """The note on an exception that was raised for this key."""
    return f"{fqn!r} can't be saved"


def _objects_name(names: Sequence[str]) -> str:
    """The name of the objects file that belongs to a rank's planned files."""
    if not names:
        return ""
    return object_names.objects_suffix(int(names[0].partition("_")[0]))
