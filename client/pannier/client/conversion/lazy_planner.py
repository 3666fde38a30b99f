"""A planner for torch's storage writers whose tensors lie in a checkpoint.

In: planned tensors, and the reader of their checkpoint. Out: each tensor when the writer resolves it, read
together with those that follow it in its file, and not kept afterwards. So the memory that an export takes is
the writer's. Not thread-safe.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from pannier.client.conversion.export_plan import PlannedTensor
from pannier.client.loading.storage_reader import StorageReader

_BATCH_BYTES: Final = 256 << 20
"""Tensors of so many bytes are read together, so that small ones cost few requests."""


class LazySavePlanner(DefaultSavePlanner):
    """See the module.

    Args:
        planned: in the order in which they are written.
        reader: has resolved the checkpoint's ``.metadata``.
        metadata: what it has read.
        progress: called with the bytes of tensors that were read so far.
    """

    def __init__(
        self,
        planned: Sequence[PlannedTensor],
        reader: StorageReader,
        metadata: Metadata,
        progress: Callable[[int], None],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._unread = {each.name: each for each in planned}
        self._reader = reader
        self._metadata = metadata
        self._progress = progress
        self._held: dict[str, torch.Tensor] = {}
        """Tensors that were read, and not resolved yet."""
        self._read_bytes = 0
        reader.set_up_storage_reader(metadata, True)
        self.set_up_planner(
            {
                each.name: torch.empty(each.shape, dtype=each.dtype, device="meta")
                for each in planned
            },
            is_coordinator=True,
        )

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor of an item, which may be looked up once.

        Raises: as :meth:`pannier.client.loading.storage_reader.StorageReader.read_data`.
        """
        if index.fqn not in self._held:
            batch = self._batch(index.fqn)
            tensors = {
                each.key: torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in batch
            }
            self._fill(tensors)
            for each in batch:
                del self._unread[each.name]
                self._held[each.name] = tensors[each.key]
                self._read_bytes += each.bytes
            self._progress(self._read_bytes)
        return self._held.pop(index.fqn)

    def _batch(self, name: str) -> list[PlannedTensor]:
        first = self._unread[name]
        batch, size = [first], first.bytes
        for each in self._unread.values():
            if each.file != first.file or each is first:
                continue
            size += each.bytes
            if size > _BATCH_BYTES:
                break
            batch.append(each)
        return batch

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
