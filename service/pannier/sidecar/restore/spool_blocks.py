"""Blocks of local copies in this host's spool, read for peers, and for ranks that can't open the files.

In: an attempt and a data file. Out: bytes, in pieces; not checked: only readers with the checksum of the
committed receipt get them. A
trainer may stage something else there meanwhile: the file's stamp is compared before and after. The
descriptor's lock keeps the file from another owner. On the event loop, with reads in threads.
"""

import os
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from pannier.sidecar.restore.block_cache import block_threads
from pannier.sidecar.restore.block_fetcher import SourceRequest
from pannier.sidecar.restore.local_copies import LocalCopies, LocalFile
from pannier.sidecar.spool.mapped_files import close_all, open_for_reading
from pannier.storage import NotFoundError
from pannier.wire.errors import IntegrityError, PannierError, StorageError

PIECE_BYTES: Final = 1 << 20
"""What is read, and sent, at a time."""


class SpoolBlock:
    """One block in the spool; see :class:`pannier.sidecar.restore.block_fetcher.BlockSource`."""

    kind = "spool"
    shows_life = False

    def __init__(
        self, copies: LocalCopies, host: str, attempt: str, name: str, offset: int, size: int
    ) -> None:
        self.host = host
        self._copies = copies
        self._attempt = attempt
        self._name = name
        self._offset = offset
        self._size = size

    async def read(self, request: SourceRequest) -> Sequence[bytes]:
        """Raises NotFoundError, IntegrityError, StorageError."""
        return [piece async for piece in self.pieces()]

    def succeeded(self) -> None:
        """Nothing: the spool is asked as long as it has the file."""

    def failed(self, error: PannierError | None) -> None:
        """Nothing: the local copy's own checks report what is wrong with it."""

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The block's bytes. Raises NotFoundError, IntegrityError, StorageError."""
        file = self._copies.find(self._attempt, self._name)
        if file is None or self._offset + self._size > file.size:
            raise NotFoundError(f"{self._name} isn't in the spool of {self.host}")
        try:
            (descriptor,) = await block_threads.run(
                open_for_reading, [file.spool_file], undo=close_all
            )
        except OSError as error:
            raise StorageError(f"{self._name} in the spool of {self.host}: {error}") from error
        try:
            # From here on the lock keeps the file from another owner, unless it got one just before.
            await self._check(file)
            end = self._offset + self._size
            for start in range(self._offset, end, PIECE_BYTES):
                count = min(PIECE_BYTES, end - start)
                piece = await block_threads.run(os.pread, descriptor, count, start)
                if len(piece) < count:
                    raise IntegrityError(f"{self._name} ends early in the spool of {self.host}")
                if start + count >= end:
                    await self._check(file)
                yield piece
        except OSError as error:
            raise StorageError(f"{self._name} in the spool of {self.host}: {error}") from error
        finally:
            os.close(descriptor)

    async def _check(self, file: LocalFile) -> None:
        lost = await self._copies.lost([file])
        if lost:
            raise NotFoundError(
                f"{self._name} isn't in the spool of {self.host} any more: {lost[file]}"
            )
