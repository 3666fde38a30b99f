"""Where each value of a known plan goes; the copy alone, without items, planner or checks.

In: the final plan of a structure that was planned and staged before (see
:mod:`pannier.client.planning.state_fingerprint`). Out: for each later save of that structure the same as
:func:`pannier.client.staging.stager.stage`. Heads, tails and gaps are written once to each region and
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
from pannier.client.staging.arena import Arena, Region
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import LARGE, Transfers, freed_error
from pannier.client.staging.stager import Staged, StagedFile, unsaved
from pannier.client.user_errors import add_note
from pannier.client.xla import runtime
from pannier.client.xla.copy_plan import Fetches, Part, Place
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


class Route:
    """See the module. Made by :func:`route`; thread-safe."""

    def __init__(
        self,
        fqns: list[str],
        files: list[_File],
        objects: list[int],
        positions: list[int],
        fetches: Fetches,
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
                for file, region, pick in zip(self._files, arena.files, self._small, strict=True):
                    if not file.size:
                        views.append(())
                        continue
                    imprint = _imprint(file, region)
                    self._copy(file, region, imprint, pick(values), values, transfers)
                    engraved.append((region, imprint))
                    views.append(imprint.views)
                self._fetches.run(values, views, arena.files, transfers)
            varying = self._spill(values, arena, names)
            transfers.run()
        finally:
            # Also on failure: the arena is lent again, and no device may still write to it.
            transfers.wait()
        for region, imprint in engraved:
            header_cache.leave(region, imprint)
        files = [
            StagedFile(name, region.size, region.address, region)
            for name, region in zip(names, arena.files, strict=True)
            if region.size
        ]
        spill = arena.spilled
        if spill is not None and spill.size:
            files.append(StagedFile(names[-1], spill.size, spill.address, spill))
        rest = transfers.rest()  # Settles how, too.
        how = transfers.how or (runtime.HOW if self._fetches else "")
        return Staged(files, varying, [], arena, rest, how)

    def engrave(self, arena: Arena) -> None:
        """Writes everything but values into an arena, so that later saves find it there."""
        for file, region in zip(self._files, arena.files, strict=True):
            if file.size:
                header_cache.leave(region, _imprint(file, region))

    def _copy(
        self,
        file: _File,
        region: Region,
        imprint: header_cache.Imprint,
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
                    region,
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


def route(
    fqns: list[str],
    values: Sequence[Any],
    items: Sequence[WriteItem],
    final: plan_pb2.FinalPlan,
) -> Route | None:
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
    fetched: list[Place] = []
    ends = [0] * len(files)
    places = final.placement
    for position, number, start, length in zip(
        final.positions, places.file, places.offset, places.length, strict=True
    ):
        item, value = items[position], values[position]
        if item.type is WriteItemType.BYTE_IO:
            if length or isinstance(value, torch.Tensor | Part) or number != len(files) - 1:
                return None
            objects.append(position)
            continue
        if not _is_planned(item, value):
            return None
        tensor = value.tensor if isinstance(value, Part) else value
        shape = value.chunk.sizes if isinstance(value, Part) else value.shape
        archive = archives.archive(tensor.dtype, shape)
        end = start + length
        if archive.length != length or start < ends[number] or end > files[number].size:
            return None
        ends[number] = end
        raw = start + len(archive.head)
        slot = _Slot(position, start, raw, shape, archive, tensor.dtype)
        if isinstance(value, Part):
            if archive.body:
                fetched.append(Place(position, number, len(files[number].slots), raw))
            files[number].slots.append(slot)
        else:
            _place(files[number], slot, on_host=value.is_cpu)
    fetches = Fetches(fetched, values)
    return Route(fqns, files, objects, list(objects), fetches)


def _is_planned(item: WriteItem, value: Any) -> bool:
    """Whether a tensor is what its item says, and can be copied to an archive's place."""
    data = item.tensor_data
    if data is None or data.properties.dtype not in archives.DTYPES:
        return False
    if isinstance(value, Part):
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


def _imprint(file: _File, region: Region) -> header_cache.Imprint:
    """The region's imprint of the file, engraved where it isn't there; to be left when all is done."""
    found = header_cache.take(region)
    if found is None or found.pattern is not file:
        found = _engrave(file, region)
    return found


def _engrave(file: _File, region: Region) -> header_cache.Imprint:
    """Writes all of a file but the elements."""
    written = 0
    memory = region.memory
    for slot in file.slots:
        region.zero(written, slot.start)
        memory[slot.start : slot.raw] = slot.archive.head
        tail = slot.raw + slot.archive.body
        written = slot.start + slot.archive.length
        memory[tail:written] = slot.archive.tail
    region.zero(written, region.size)
    views = _views(file, region)
    return header_cache.Imprint(file, views, [views[i] for i in file.small])


def _views(file: _File, region: Region) -> list[torch.Tensor]:
    """Each slot's elements as a tensor; one without elements stands for nothing."""
    if not region.size:
        return []
    # By address, so that the views don't keep the mapping from being closed; and no inference
    # tensors, which couldn't be written to later.
    memory = (ctypes.c_char * region.size).from_address(region.address)
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
