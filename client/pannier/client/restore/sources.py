"""Where the bytes of a load come from: each file from the nearest place that has it.

In: ranges of data files. Out: their bytes, from this host's spool where the file is there, else from
storage; how many came from where. A file that can't be used in the spool is read from storage from then
on. Blocking; thread-safe; for one load of one rank.
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol

from pannier.client.interrupts import shielded
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import BUCKET, OWN_SPOOL
from pannier.client.restore.local_file import BlockCache, LocalFile
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)

LOCAL_REQUEST_BYTES: Final = 1 << 20
"""What is read together from a local file: it is still in the processor's cache when it is copied."""
REMOTE_REQUEST_BYTES: Final = BLOCK_BYTES
"""The same from other storage."""


class RangeSource(Protocol):
    """Reads the files of a checkpoint. Thread-safe."""

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with a file's bytes from ``offset`` on. Raises StorageError."""


class Storage(RangeSource, Protocol):
    """The directory of a checkpoint."""

    is_local: bool
    """Whether its files are read without requests to another host."""


class Sources:
    """Reads the data files of one checkpoint.

    Args:
        storage: the checkpoint in storage.
        url: its directory, for messages.
        local: those of its files that are in this host's spool.
        progress: counts what was read.
    """

    def __init__(
        self, storage: Storage, url: str, local: Mapping[str, LocalFile], progress: LoadProgress
    ) -> None:
        self._storage = storage
        self._url = url
        self._lock = threading.Lock()
        self._local = dict(local)
        self._progress = progress
        self._cache = BlockCache()

    def is_near(self, name: str) -> bool:
        """Whether reads of a file are short: not by requests to another host."""
        return self._storage.is_local or name in self._local

    def request_bytes(self, name: str) -> int:
        """How much of a file is to be read together."""
        return LOCAL_REQUEST_BYTES if self.is_near(name) else REMOTE_REQUEST_BYTES

    @shielded
    def peek(self, name: str, offset: int, target: memoryview) -> None:
        """As :meth:`read_into`, for a few bytes that the caller compares with what it knows."""
        local = self._local.get(name)
        if local is not None:
            with suppress(IntegrityError, OSError):
                local.peek(offset, target)
                return
        self._storage.read_into(name, offset, target)

    @shielded
    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with a file's bytes from ``offset`` on. Raises as reading from storage does."""
        local = self._local.get(name)
        if local is not None and self._read_local(local, name, offset, target):
            return
        self._storage.read_into(name, offset, target)
        self._progress.add_read(BUCKET, name, len(target))

    def close(self) -> None:
        """Lets go of the files in the spool, which the sidecar may use again then."""
        with self._lock:
            self._local.clear()

    def _read_local(self, local: LocalFile, name: str, offset: int, target: memoryview) -> bool:
        try:
            local.read_into(offset, target, self._cache)
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
        self._progress.add_read(OWN_SPOOL, name, len(target))
        return True
