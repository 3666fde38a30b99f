"""Where each value of a known plan goes; the copy alone, without items, planner or checks.

In: the final plan of a structure that was planned and staged before (see
:mod:`pannier.client.planning.state_fingerprint`). Out: for each later save of that structure the same as
:func:`pannier.client.staging.stager.stage`. Heads, tails and gaps are written once to each buffer and
stay there; small tensors are copied in one call, large ones by address.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import Any, Final

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pannier.client import torch_compat
from pannier.client.staging import archives, header_cache
from pannier.client.staging.archives import serialized
from pannier.client.staging.arena import Arena, FileBuffer
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import LARGE, Transfers, freed_error
from pannier.client.staging.stager import Staged, StagedFile, unsaved
from pannier.client.user_errors import add_note
from pannier.client.xla import runtime
from pannier.client.xla.copy_plan import FetchPlan, ShardTarget, ShardView
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire.errors import PannierError

_SUSPECT: Final = 1 << 40
"""A tensor whose storage was freed has its offset for an address. Few others lie so low."""


@dataclass(frozen=True)
class _Slot:
    """A tensor's place in its file."""

    value: int
    """Index of the tensor."""
    start: int
    """Where its archive begins."""
    raw: int
    """Where its elements begin."""
    shape: torch.Size
    archive: archives.Archive
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _File:
    """A data file of slots, in order."""

    size: int
    slots: list[_Slot] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    """Numbers of the slots whose tensors are copied together."""
    single: list[int] = field(default_factory=list)
    """Numbers of those that are copied one by one."""


class CopyPlan:
    """See the module. Made by :func:`make_copy_plan`; thread-safe."""

    def __init__(
        self,
        fqns: list[str],
        files: list[_File],
        objects: list[int],
        positions: list[int],
        fetches: FetchPlan,
    ) -> None:
        self._fqns = fqns
        self._fetches = fetches
        self._files = files
        self._objects = objects
        self._positions = positions
        self._small = [_picker([file.slots[i].value for i in file.small]) for file in files]

    def stage(
        self,
        values: list[Any],
        arena: Arena,
        names: Sequence[str],
        devices: DeviceCopies | None = None,
    ) -> Staged:
        """Copies the values, as :func:`pannier.client.staging.stager.stage` does.

        Args:
            values: from the structure that the route was made for.
            arena: acquired with the sizes of the plan's files.
            names: of the plan's files in this save.
            devices: as for :func:`pannier.client.staging.stager.stage`.

        Raises:
            InvalidRequestError: a tensor has no storage.
            PannierError: there is no memory.
            Exception: whatever copying or pickling raised, with a note of the key.
        """
        transfers = Transfers(devices)
        engraved = []
        views: list[Sequence[torch.Tensor]] = []
        try:
            with torch.no_grad(), torch_compat.without_torch_functions():
                for file, buffer, pick in zip(self._files, arena.files, self._small, strict=True):
                    if not file.size:
                        views.append(())
                        continue
                    imprint = _imprint(file, buffer)
                    self._copy(file, buffer, imprint, pick(values), values, transfers)
                    engraved.append((buffer, imprint))
                    views.append(imprint.views)
                self._fetches.run(values, views, arena.files, transfers)
            varying = self._spill(values, arena, names)
            transfers.run()
        finally:
            # Also on failure: the arena is lent again, and no device may still write to it.
            transfers.wait()
        for buffer, imprint in engraved:
            header_cache.leave(buffer, imprint)
        files = [
            StagedFile(name, buffer.size, buffer.address, buffer)
            for name, buffer in zip(names, arena.files, strict=True)
            if buffer.size
        ]
        spill = arena.spilled
        if spill is not None and spill.size:
            files.append(StagedFile(names[-1], spill.size, spill.address, spill))
        deferred = transfers.start_deferred()  # Settles the description, too.
        copy_description = transfers.copy_description or (
            runtime.COPY_DESCRIPTION if self._fetches else ""
        )
        return Staged(files, varying, [], arena, deferred, copy_description)

    def write_headers(self, arena: Arena) -> None:
        """Writes everything but values into an arena, so that later saves find it there."""
        for file, buffer in zip(self._files, arena.files, strict=True):
            if file.size:
                header_cache.leave(buffer, _imprint(file, buffer))

    def _copy(
        self,
        file: _File,
        buffer: FileBuffer,
        imprint: header_cache.CachedHeaders,
        small: tuple[torch.Tensor, ...],
        values: list[Any],
        transfers: Transfers,
    ) -> None:
        if small:
            self._check_storages(file, small)
            torch_compat.copy_all(imprint.together, small)
        for number in file.single:
            slot = file.slots[number]
            try:
                transfers.copy_to_view(
                    values[slot.value],
                    imprint.views[number],
                    buffer,
                    slot.raw,
                    self._fqns[slot.value],
                )
            except Exception as error:
                self._locate(slot.value, error)
                raise

    def _check_storages(self, file: _File, tensors: Sequence[torch.Tensor]) -> None:
        if min(map(torch.Tensor.data_ptr, tensors)) >= _SUSPECT:
            return
        freed = [not tensor.untyped_storage().nbytes() for tensor in tensors]
        for number in compress(file.small, freed):
            raise freed_error(self._fqns[file.slots[number].value])

    def _spill(
        self, values: list[Any], arena: Arena, names: Sequence[str]
    ) -> list[records_pb2.VaryingItem]:
        varying = []
        for index, position in zip(self._objects, self._positions, strict=True):
            try:
                data = serialized(values[index])
            except Exception as error:
                self._locate(index, error)
                raise
            start = arena.spill.size
            arena.spill.write(data)
            varying.append(
                records_pb2.VaryingItem(
                    position=position, file=names[-1], offset=start, length=len(data)
                )
            )
        return varying

    def _locate(self, index: int, error: Exception) -> None:
        if not isinstance(error, PannierError):
            add_note(error, unsaved(self._fqns[index]))


def make_copy_plan(
    fqns: list[str],
    values: Sequence[Any],
    items: Sequence[WriteItem],
    final: plan_pb2.FinalPlan,
) -> CopyPlan | None:
    """The route of a plan; None where values need more than a copy.

    Args:
        fqns: key of each value.
        values: of the state that was planned.
        items: of the local plan.
        final: the answer to it.
    """
    if [item.index.fqn for item in items] != fqns:
        return None
    files = [_File(file.size) for file in final.files]
    objects = []
    fetched: list[ShardTarget] = []
    ends = [0] * len(files)
    places = final.placement
    for position, number, start, length in zip(
        final.positions, places.file, places.offset, places.length, strict=True
    ):
        item, value = items[position], values[position]
        if item.type is WriteItemType.BYTE_IO:
            if length or isinstance(value, torch.Tensor | ShardView) or number != len(files) - 1:
                return None
            objects.append(position)
            continue
        if not _is_planned(item, value):
            return None
        tensor = value.tensor if isinstance(value, ShardView) else value
        shape = value.chunk.sizes if isinstance(value, ShardView) else value.shape
        archive = archives.archive(tensor.dtype, shape)
        end = start + length
        if archive.length != length or start < ends[number] or end > files[number].size:
            return None
        ends[number] = end
        raw = start + len(archive.head)
        slot = _Slot(position, start, raw, shape, archive, tensor.dtype)
        if isinstance(value, ShardView):
            if archive.body:
                fetched.append(ShardTarget(position, number, len(files[number].slots), raw))
            files[number].slots.append(slot)
        else:
            _place(files[number], slot, on_host=value.is_cpu)
    fetches = FetchPlan(fetched, values)
    return CopyPlan(fqns, files, objects, list(objects), fetches)


def _is_planned(item: WriteItem, value: Any) -> bool:
    """Whether a tensor is what its item says, and can be copied to an archive's place."""
    data = item.tensor_data
    if data is None or data.properties.dtype not in archives.DTYPES:
        return False
    if isinstance(value, ShardView):
        _, offsets, sizes = value.chunk
        planned = (data.properties.dtype, data.chunk.offsets, data.chunk.sizes)
        return (value.tensor.dtype, offsets, sizes) == planned
    return isinstance(value, torch.Tensor) and (
        (value.dtype, value.shape) == (data.properties.dtype, data.chunk.sizes)
    )


def _place(file: _File, slot: _Slot, *, on_host: bool) -> None:
    number = len(file.slots)
    file.slots.append(slot)
    if slot.archive.body:
        together = on_host and slot.archive.body < LARGE
        (file.small if together else file.single).append(number)


def _imprint(file: _File, buffer: FileBuffer) -> header_cache.CachedHeaders:
    """The buffer's imprint of the file, engraved where it isn't there; to be left when all is done."""
    found = header_cache.take(buffer)
    if found is None or found.pattern is not file:
        found = _write_headers(file, buffer)
    return found


def _write_headers(file: _File, buffer: FileBuffer) -> header_cache.CachedHeaders:
    """Writes all of a file but the elements."""
    written = 0
    memory = buffer.memory
    for slot in file.slots:
        buffer.zero(written, slot.start)
        memory[slot.start : slot.raw] = slot.archive.head
        tail = slot.raw + slot.archive.body
        written = slot.start + slot.archive.length
        memory[tail:written] = slot.archive.tail
    buffer.zero(written, buffer.size)
    views = _views(file, buffer)
    return header_cache.CachedHeaders(file, views, [views[i] for i in file.small])


def _views(file: _File, buffer: FileBuffer) -> list[torch.Tensor]:
    """Each slot's elements as a tensor; one without elements stands for nothing."""
    if not buffer.size:
        return []
    # By address, so that the views don't keep the mapping from being closed; and no inference
    # tensors, which couldn't be written to later.
    memory = (ctypes.c_char * buffer.size).from_address(buffer.address)
    with torch.inference_mode(False):
        nothing = torch.empty(0, device="cpu")
        return [
            torch.frombuffer(
                memory, dtype=slot.dtype, count=math.prod(slot.shape), offset=slot.raw
            ).view(slot.shape)
            if slot.archive.body
            else nothing
            for slot in file.slots
        ]


def _picker(indices: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """``values -> tuple(values[i] for i in indices)``."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)
