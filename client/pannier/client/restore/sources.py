"""Where the bytes of a load come from: each from the nearest place that has it.

In: ranges of data files. Out: their bytes, from this host's spool where the file is there; else, of blocks
that ranks share, through sidecars; else from storage; how many came from where. A file that can't be used
in the spool is read elsewhere from then on. Blocking; thread-safe; for one load of one rank.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from pannier.client.interrupts import aside, shielded
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import BUCKET, OWN_SPOOL
from pannier.client.restore.local_file import BlockCache, LocalFile, Part
from pannier.client.restore.restore_plan import LoadName, RankNeeds, RankPlan
from pannier.client.restore.shared_blocks import BlockPlace, BlockReader, SharedBlocks
from pannier.client.restore.stored_reads import StoredReads
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)

LOCAL_REQUEST_BYTES: Final = 1 << 20
"""Most bytes read together from a local file: they are still in the processor's cache when copied."""
REMOTE_REQUEST_BYTES: Final = BLOCK_BYTES
"""Most bytes read together from other storage."""


class RangeSource(Protocol):
    """Reads the files of a checkpoint. Thread-safe."""

    def reads_blocks(self, name: str) -> bool:
        """Whether a file is read in whole blocks, so that parts of one block are read faster together."""

    def read_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Fills the targets with a file's bytes, from each one's offset on. Raises StorageError."""


class Storage(Protocol):
    """The directory of a checkpoint."""

    is_local: bool
    """Whether its files are read without requests to another host."""

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with a file's bytes from ``offset`` on. Raises StorageError. Thread-safe."""

    def read_range(self, name: str, offset: int, size: int) -> bytes | memoryview:
        """Returns ``size`` bytes of a file from ``offset`` on; not for local storage."""


class Sharing(Protocol):
    """How the ranks of a load share what they read: one rank's side; see :mod:`pannier.client.restore.load_sharing`."""

    together: bool
    """Whether several ranks load."""

    @property
    def host(self) -> str:
        """Name of this host; after :meth:`survey`, as its sidecar reports it."""

    @property
    def local_files(self) -> Mapping[str, LocalFile]:
        """The rank's files in this host's spool, after :meth:`survey`."""

    def locate(self, receipts: Any, names: Sequence[str]) -> Mapping[str, LocalFile]:
        """The files of the receipts' attempt that are in this host's spool, for a load of one rank."""

    def survey(
        self, load: LoadName, receipts: Any, metadata: Metadata, items: Sequence[ReadItem]
    ) -> RankNeeds:
        """What the rank needs and has for others."""

    def plan(self, receipts: Any, needs: Sequence[RankNeeds]) -> list[RankPlan | None]:
        """Each rank's plan, in the order of ``needs``; None: it takes nothing through sidecars."""

    def open_blocks(self, plan: RankPlan, progress: LoadProgress) -> BlockReader | None:
        """A reader that gets the rank's blocks through sidecars; None: that isn't possible."""

    def close(self) -> None:
        """Drops :attr:`local_files`."""


class Sources:
    """Reads the data files of one checkpoint.

    Args:
        storage: the checkpoint in storage.
        url: its directory, for messages.
        local: those of its files that are in this host's spool.
        progress: counts what was read.
        reader: takes blocks through sidecars; closed with this.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        local: Mapping[str, LocalFile],
        progress: LoadProgress,
        reader: BlockReader | None = None,
    ) -> None:
        self._storage = storage
        self._url = url
        self._lock = threading.Lock()
        self._local = dict(local)
        self._progress = progress
        self._cache = BlockCache()
        self._stored = StoredReads(storage.read_range, url, progress.add_hedge)
        self._shared = None if reader is None else SharedBlocks(reader, self._stored, url, progress)
        self._origins: dict[tuple[str, int], str] = {}
        """Sources of the shared blocks in the cache, and of earlier ones."""

    def is_near(self, name: str) -> bool:
        """Whether reads of a file are short, without requests to another host."""
        return self._storage.is_local or name in self._local

    def request_bytes(self, name: str) -> int:
        """Most bytes of a file that are to be read together."""
        return LOCAL_REQUEST_BYTES if self.is_near(name) else REMOTE_REQUEST_BYTES

    def fills_targets(self, name: str, start: int, end: int) -> bool:
        """Whether these bytes of a file may be read into a tensor's own memory.

        That requires that no interrupted read writes there for long: local reads are short, and
        :meth:`cancel` ends reads of shared blocks, also those that fall back to storage.
        """
        if self.is_near(name):
            return True
        shared = self._shared
        blocks = range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        return shared is not None and all(shared.find(name, block) for block in blocks)

    def is_shared(self, name: str) -> bool:
        """Whether a file is read in blocks that ranks share."""
        return self._shared is not None and name not in self._local and self._shared.has(name)

    @shielded
    def peek(self, name: str, offset: int, target: memoryview) -> None:
        """As :meth:`read_into`, for a few bytes that the caller compares with what it knows."""
        local = self._local.get(name)
        if local is not None:
            with suppress(IntegrityError, OSError):
                local.peek(offset, target)
                return
        self._storage.read_into(name, offset, target)

    def reads_blocks(self, name: str) -> bool:
        """See :class:`RangeSource`."""
        return name in self._local or self.is_shared(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with a file's bytes from ``offset`` on. Raises as reading from storage does."""
        self.read_parts(name, [(offset, target)])

    @shielded
    def read_parts(self, name: str, parts: Sequence[Part]) -> None:
        """See :class:`RangeSource`; the parts are in order."""
        local = self._local.get(name)
        if local is not None and self._read_local(local, name, parts):
            return
        for offset, target in parts:
            self._read_elsewhere(name, offset, target)

    def _read_elsewhere(self, name: str, offset: int, target: memoryview) -> None:
        if self._shared is None or not self._shared.has(name):
            self._read_stored(name, offset, target)
            return
        end = offset + len(target)
        while offset < end:
            block = offset // BLOCK_BYTES
            count = min(end, (block + 1) * BLOCK_BYTES) - offset
            piece, target = target[:count], target[count:]
            place = self._shared.find(name, block)
            if place is None or offset + count > place.offset + place.size:
                # Storage reports a read behind the file's end.
                self._read_stored(name, offset, piece)
            else:
                source = self._read_shared(self._shared, place, name, block, offset, piece)
                self._progress.add_read(source, name, count)
            offset += count

    def cancel(self) -> None:
        """Ends reads into targets that are under way and may take long."""
        aside(self._stored.close if self._shared is None else self._shared.close)

    def close(self) -> None:
        """Drops the files in the spool, which the sidecar may then reuse, and ends reads of shared blocks."""
        with self._lock:
            self._local.clear()
        self.cancel()

    def _read_stored(self, name: str, offset: int, target: memoryview) -> None:
        with self._progress.requesting(BUCKET):
            read = self._storage.read_into if self._storage.is_local else self._stored.read_into
            read(name, offset, target)
        self._progress.add_read(BUCKET, name, len(target))

    def _read_shared(
        self,
        shared: SharedBlocks,
        place: BlockPlace,
        name: str,
        block: int,
        offset: int,
        target: memoryview,
    ) -> str:
        """Fills ``target`` from a block, all of which is fetched; returns the name of its source."""
        if len(target) == place.size:
            return shared.read(name, block, target)

        def read(memory: memoryview) -> None:
            self._origins[name, block] = shared.read(name, block, memory)

        with self._cache.block(name, block, place.size, read) as content:
            start = offset - place.offset
            target[:] = content[start : start + len(target)]
        return self._origins[name, block]

    def _read_local(self, local: LocalFile, name: str, parts: Sequence[Part]) -> bool:
        try:
            local.read_parts(parts, self._cache)
        except (IntegrityError, OSError) as error:
            if isinstance(error, IntegrityError):
                self._progress.add_rejected()
            with self._lock:
                first = self._local.pop(name, None) is not None
            if first:
                _log.warning(
                    "%s/%s is read from storage, not from this host's spool: %s",
                    *(self._url, name, error),
                )
            return False
        self._progress.add_read(OWN_SPOOL, name, sum(len(target) for _, target in parts))
        return True
