"""Blocks of a checkpoint's files that come through sidecars, or, where that fails, from storage.

In: blocks that the restore plan shares. Out: their bytes, checked, and where they came from. A block
that fails is read from storage; one whose sidecar stalls is read from storage, too, and the first
answer counts. After that, blocks are read from storage directly until the sidecar answers again. No read
outlasts the load, even if storage or a sidecar never answers. Blocking; thread-safe; for one load of one
rank.
"""

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, Protocol

import crc32c

from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import BUCKET
from pannier.client.restore.stored_reads import Check, StoredReads
from pannier.common import timeouts
from pannier.wire.errors import IntegrityError, PannierError, StorageError

_log = logging.getLogger(__name__)


class FetchedBlock(Protocol):
    """A block that has arrived, in memory of a sidecar or of a connection."""

    def copy(self, memory: memoryview) -> str:
        """Copies it to ``memory`` and releases it; returns the name of its source. Raises PannierError."""

    def release(self) -> None:
        """Releases it."""


class BlockReader(Protocol):
    """Where shared blocks come from. Thread-safe."""

    def has(self, name: str) -> bool:
        """Whether blocks of this file are shared."""

    def find(self, name: str, block: int) -> "BlockPlace | None":
        """A block of a file; None: it isn't shared."""

    def first_source(self, name: str, block: int) -> str:
        """The source that is asked first for a block: the name of a host, or the bucket."""

    def request(self, name: str, block: int) -> "Future[FetchedBlock]":
        """The block, later; or a PannierError."""

    def message_count(self) -> int:
        """Number of messages that have arrived so far, empty ones that only show a live sender included."""

    def close(self) -> None:
        """Ends all requests."""


class BlockPlace(Protocol):
    """A shared block in its file."""

    @property
    def offset(self) -> int:
        """Of its first byte."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def crc32c(self) -> int | None:
        """From the receipt; None: there is none."""


class SharedBlocks:
    """See the module.

    Args:
        reader: takes blocks through sidecars.
        storage: reads the same bytes from storage; closed with this.
        url: the checkpoint's directory, for messages.
        progress: counts second requests and wrong blocks.
    """

    def __init__(
        self, reader: BlockReader, storage: StoredReads, url: str, progress: LoadProgress
    ) -> None:
        self._reader = reader
        self._storage = storage
        self._url = url
        self._progress = progress
        self._stalled_at: int | None = None
        """Number of messages that had arrived when the sidecar stalled; None: it has not stalled."""
        self._logged: set[str] = set()
        self._end: Future[None] = Future()
        """Done when the load has ended."""

    def has(self, name: str) -> bool:
        """Whether blocks of this file are shared."""
        return self._reader.has(name)

    def find(self, name: str, block: int) -> BlockPlace | None:
        """A block of a file; None: it isn't shared."""
        return self._reader.find(name, block)

    def read(self, name: str, block: int, memory: memoryview) -> str:
        """Fills ``memory`` with a shared block; returns the name of its source.

        Raises:
            StorageError: it can't be read, not from storage either.
            IntegrityError: its bytes in storage are not those that were saved.
        """
        if self._stalled_at == self._reader.message_count():
            return self._read_stored(name, block, memory)
        self._stalled_at = None
        with self._progress.requesting(self._reader.first_source(name, block)):
            request = self._reader.request(name, block)
            arrived = self._arrives(request)
        if not arrived:
            with self._progress.requesting(BUCKET):
                return self._hedge(name, block, memory, request)
        try:
            return request.result().copy(memory)
        except PannierError as error:
            self._note(error)
            return self._read_stored(name, block, memory)

    def close(self) -> None:
        """Ends all requests: reads that are under way fail."""
        try:
            self._end.set_result(None)
        except InvalidStateError:
            return
        # First: the reader may have to wait for its sidecar.
        self._storage.close()
        self._reader.close()

    def _arrives(self, request: "Future[FetchedBlock]") -> bool:
        """Whether the request ends, with a block or an error, before its sidecar stalls."""
        # Polls are counted, not seconds: this process may have been stopped meanwhile.
        polls = quiet = 0
        seen = self._reader.message_count()
        while not wait([request], timeouts.FETCH_POLL_S).done:
            if self._end.done():
                return False
            polls, quiet = polls + 1, quiet + 1
            if seen != self._reader.message_count():
                seen, quiet = self._reader.message_count(), 0
            if quiet * timeouts.FETCH_POLL_S >= timeouts.FETCH_STALL_S:
                return False
            if polls * timeouts.FETCH_POLL_S >= timeouts.FETCH_SLOW_S:
                return False
        return True

    def _hedge(
        self, name: str, block: int, memory: memoryview, request: "Future[FetchedBlock]"
    ) -> str:
        seen = self._reader.message_count()
        offset, check = self._stored(name, block)
        stored = self._storage.start(name, offset, len(memory), check)
        if not self._end.done():
            self._progress.add_hedge()
            self._log_once("blocks come slowly through sidecars: they are read from storage, too")
        both: list[Future[Any]] = [request, stored]
        wait(both, return_when=FIRST_COMPLETED)
        deadline = time.monotonic() + timeouts.FETCH_LAST_S
        if not _succeeded(request):
            if stored.done() and not _succeeded(stored):
                either: list[Future[Any]] = [request, self._end]
                wait(either, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            else:
                wait([stored])
        if _succeeded(request):
            try:
                return request.result().copy(memory)
            except PannierError as error:
                self._note(error)
        else:
            if not request.done() and seen == self._reader.message_count():
                self._stalled_at = seen
            # Runs at once if the block has arrived since the check above.
            request.add_done_callback(_release)
        memory[:] = stored.result()
        return BUCKET

    def _read_stored(self, name: str, block: int, memory: memoryview) -> str:
        offset, check = self._stored(name, block)
        with self._progress.requesting(BUCKET):
            self._storage.read_into(name, offset, memory, check)
        return BUCKET

    def _stored(self, name: str, block: int) -> tuple[int, Check]:
        """Where a block lies in its file, and what checks its bytes."""
        place = self._reader.find(name, block)
        if place is None:
            raise StorageError(f"block {block} of {self._url}/{name} isn't shared")
        offset, expected = place.offset, place.crc32c

        def check(content: bytes | memoryview) -> None:
            crc = crc32c.crc32c(content)
            if expected is not None and crc != expected:
                raise IntegrityError(
                    f"bytes {offset} to {offset + len(content)} of {self._url}/{name} have crc32c "
                    f"{crc:08x}, saved was {expected:08x}: its bytes are damaged or another file's; "
                    "`pannier verify` lists all damaged files"
                )

        return offset, check

    def _note(self, error: PannierError) -> None:
        if self._end.done():
            return
        if isinstance(error, IntegrityError):
            self._progress.add_rejected()
        else:
            self._progress.add_retry()
        self._log_once(f"blocks that don't come through sidecars are read from storage: {error}")

    def _log_once(self, text: str) -> None:
        # One line for each kind: with a stopped or dead sidecar there is one error for each block.
        kind = text.partition(":")[0]
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s: %s", self._url, text)


def _succeeded(future: "Future[FetchedBlock] | Future[bytes | memoryview]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _release(request: "Future[FetchedBlock]") -> None:
    if _succeeded(request):
        request.result().release()
