"""Stages a state whose plan is known: the copies alone, without items, planner or checks.

In: the final plan of a state structure (:mod:`pannier.client.planning.state_fingerprint`), and, for
each save of that structure, its values. Out: what :func:`pannier.client.staging.stager.stage` returns.
Archive heads, tails and gaps are written once to each buffer and reused; small tensors are copied in
one call, large ones by address. Owned by the plan cache; thread-safe.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pannier.client import torch_compat
from pannier.client.staging import archives
from pannier.client.staging.arena import Arena, FileBuffer
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.host_copy import LARGE, TensorCopies, check_storage
from pannier.client.staging.stager import Staged, StagedFile, cannot_be_saved
from pannier.client.user_errors import add_note
from pannier.client.xla import runtime
from pannier.client.xla.copy_plan import FetchPlan, ShardTarget
from pannier.client.xla.shard_tensors import ShardView
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire.errors import PannierError
from pannier.wire.plan_columns import decode_column


@dataclass(frozen=True)
class _TensorLayout:
    """A tensor's archive in its file."""

    value: int
    """Index of the tensor among the values."""
    start: int
    """Offset of the archive in the file."""
    raw: int
    """Offset of the elements in the file."""
    shape: torch.Size
    archive: archives.Archive
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _File:
    """A data file."""

    size: int
    """Bytes."""
    tensors: list[_TensorLayout] = field(default_factory=list)
    """In order of their offsets."""
    small: list[int] = field(default_factory=list)
    """Indices of the tensors that are copied in one call."""
    single: list[int] = field(default_factory=list)
    """Indices of the tensors that are copied one by one."""

    def add(self, tensor: _TensorLayout, *, on_host: bool) -> None:
        """Appends a tensor of the host or of a device with streams."""
        index = len(self.tensors)
        self.tensors.append(tensor)
        if tensor.archive.body:
            is_small = on_host and tensor.archive.body < LARGE
            (self.small if is_small else self.single).append(index)


class CopyPlan:
    """See the module. Made by :func:`make_copy_plan`; immutable."""

    def __init__(
        self, fqns: list[str], files: list[_File], objects: list[int], fetches: FetchPlan
    ) -> None:
        self._fqns = fqns
        self._files = files
        self._objects = objects
        """Indices of the values that are serialised: their positions in the local plan."""
        self._fetches = fetches
        self._small = [_picker([file.tensors[i].value for i in file.small]) for file in files]

    def stage(
        self,
        values: list[Any],
        arena: Arena,
        names: Sequence[str],
        devices: DeviceCopies | None = None,
    ) -> Staged:
        """Copies the values, as :func:`pannier.client.staging.stager.stage` does.

        Args:
            values: of a state with the structure that the plan was made for.
            arena: acquired with the sizes of the plan's files.
            names: of the plan's files, without the attempt's prefix.
            devices: as for :func:`pannier.client.staging.stager.stage`.

        Raises:
            InvalidRequestError: a tensor's storage was freed or cut.
            PannierError: there is no memory.
            Exception: whatever copying or pickling raised, with a note of the key.
        """
        copies = TensorCopies(devices)

        def copy_part(part: torch.Tensor, view: torch.Tensor, file: int, offset: int) -> None:
            copies.copy_to_view(part, view, arena.files[file], offset)

        written = []
        views: list[Sequence[torch.Tensor]] = []
        try:
            with torch.no_grad(), torch_compat.without_torch_functions():
                for file, buffer, pick in zip(self._files, arena.files, self._small, strict=True):
                    if not file.size:
                        views.append(())
                        continue
                    headers = _headers_of(file, buffer)
                    self._copy(file, buffer, headers, pick(values), values, copies)
                    written.append((buffer, headers))
                    views.append(headers.views)
                self._fetches.run(values, views, copy_part, copies.limit_held)
            varying = self._spill(values, arena, names)
            copies.run()
        finally:
            # Also on failure: the arena will be used again, and no device may still write to it.
            copies.wait()
        for buffer, headers in written:
            archives.put_headers(buffer, headers)
        files = [
            StagedFile(name, buffer.size, buffer.address, buffer)
            for name, buffer in zip(names, arena.files, strict=True)
            if buffer.size
        ]
        spill = arena.spilled
        if spill is not None and spill.size:
            files.append(StagedFile(names[-1], spill.size, spill.address, spill))
        deferred = copies.start_deferred()  # before the description is read, which this may change
        copy_description = copies.copy_description or (
            runtime.COPY_DESCRIPTION if self._fetches else ""
        )
        return Staged(files, varying, [], arena, deferred, copy_description)

    def write_headers(self, arena: Arena) -> None:
        """Writes the archives' heads and tails into an arena, where later saves find them."""
        for file, buffer in zip(self._files, arena.files, strict=True):
            if file.size:
                archives.put_headers(buffer, _headers_of(file, buffer))

    def _copy(
        self,
        file: _File,
        buffer: FileBuffer,
        headers: archives.CachedHeaders,
        small: tuple[torch.Tensor, ...],
        values: list[Any],
        copies: TensorCopies,
    ) -> None:
        if small:
            self._check_storages(file, small)
            torch_compat.copy_all(headers.small_views, small)
        for index in file.single:
            tensor = file.tensors[index]
            try:
                copies.copy_to_view(
                    values[tensor.value],
                    headers.views[index],
                    buffer,
                    tensor.raw,
                    self._fqns[tensor.value],
                )
            except Exception as error:
                self._add_key(tensor.value, error)
                raise

    def _check_storages(self, file: _File, tensors: Sequence[torch.Tensor]) -> None:
        held = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
        offsets = map(torch.Tensor.storage_offset, tensors)
        dense = map(torch.Tensor.is_contiguous, tensors)
        columns = zip(file.small, tensors, held, offsets, dense, strict=True)
        for index, tensor, size, offset, is_dense in columns:
            layout = file.tensors[index]
            if offset or not is_dense or size < layout.archive.body:
                check_storage(tensor, self._fqns[layout.value])

    def _spill(
        self, values: list[Any], arena: Arena, names: Sequence[str]
    ) -> list[records_pb2.VaryingItem]:
        varying = []
        for position in self._objects:
            try:
                data = archives.serialized(values[position])
            except Exception as error:
                self._add_key(position, error)
                raise
            start = arena.spill.size
            arena.spill.write(data)
            varying.append(
                records_pb2.VaryingItem(
                    position=position, file=names[-1], offset=start, length=len(data)
                )
            )
        return varying

    def _add_key(self, value: int, error: Exception) -> None:
        if not isinstance(error, PannierError):
            add_note(error, cannot_be_saved(self._fqns[value]))


def make_copy_plan(
    fqns: list[str],
    values: Sequence[Any],
    items: Sequence[WriteItem],
    final: plan_pb2.FinalPlan,
) -> CopyPlan | None:
    """The copy plan of a final plan; None where some values need more than a copy.

    Args:
        fqns: key of each value.
        values: of the state that was planned.
        items: of the local plan.
        final: the coordinator's answer to the local plan.
    """
    if [item.index.fqn for item in items] != fqns:
        return None
    files = [_File(file.size) for file in final.files]
    objects = []
    targets: list[ShardTarget] = []
    ends = [0] * len(files)
    planned = final.placement
    columns = (final.positions, planned.file, planned.offset, planned.length)
    for position, number, start, length in zip(*map(decode_column, columns), strict=True):
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
        layout = _TensorLayout(position, start, raw, shape, archive, tensor.dtype)
        if isinstance(value, ShardView):
            if archive.body:
                targets.append(ShardTarget(position, number, len(files[number].tensors), raw))
            files[number].tensors.append(layout)
        else:
            files[number].add(layout, on_host=value.is_cpu)
    return CopyPlan(fqns, files, objects, FetchPlan(targets, values))


def _is_planned(item: WriteItem, value: Any) -> bool:
    """Whether a tensor matches its item, and its elements are all that its archive needs."""
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


def _headers_of(file: _File, buffer: FileBuffer) -> archives.CachedHeaders:
    """Takes the buffer's cached headers; writes them if it has none for this file."""
    found = archives.take_headers(buffer)
    if found is None or found.layout is not file:
        found = _write_headers(file, buffer)
    return found


def _write_headers(file: _File, buffer: FileBuffer) -> archives.CachedHeaders:
    """Writes everything of a file except the tensors' elements."""
    written = 0
    memory = buffer.memory
    for tensor in file.tensors:
        buffer.zero(written, tensor.start)
        memory[tensor.start : tensor.raw] = tensor.archive.head
        tail = tensor.raw + tensor.archive.body
        written = tensor.start + tensor.archive.length
        memory[tail:written] = tensor.archive.tail
    buffer.zero(written, buffer.size)
    views = _views(file, buffer)
    return archives.CachedHeaders(file, views, [views[i] for i in file.small])


def _views(file: _File, buffer: FileBuffer) -> list[torch.Tensor]:
    """The elements of each archive as a tensor; an empty one where there are none."""
    if not buffer.size:
        return []
    # By address, so that the views don't keep the mapping from being closed; and no inference
    # tensors, which couldn't be written to later.
    memory = (ctypes.c_char * buffer.size).from_address(buffer.address)
    with torch.inference_mode(False):
        empty = torch.empty(0, device="cpu")
        return [
            torch.frombuffer(
                memory, dtype=tensor.dtype, count=math.prod(tensor.shape), offset=tensor.raw
            ).view(tensor.shape)
            if tensor.archive.body
            else empty
            for tensor in file.tensors
        ]


def _picker(indices: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """``values -> tuple(values[i] for i in indices)``."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)
