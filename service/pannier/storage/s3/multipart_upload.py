"""One multipart upload: the parts of a file are sent several at a time, possibly while it still grows.

Each of a few senders has a buffer of its own: it reads the next part into it, sends it, and only then reads
another. Parts are read in order, each with its own checksum. The object becomes visible when the upload is
completed, with the checksum of the whole, and only if there is no such object.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from pannier.storage.base import NotFoundError, Progress, Retried, Unfinished
from pannier.storage.http_body import Part
from pannier.storage.io_threads import BUFFER
from pannier.storage.many import for_each
from pannier.storage.retry import clean_up, restart_lost
from pannier.storage.s3.client import PreconditionError
from pannier.storage.source_reader import SourceReader

MEMORY: Final = 4 * BUFFER
"""Bytes of the parts under way at a time, unless the file has more than 10,000 parts of :data:`BUFFER`."""
_SENDERS: Final = MEMORY // BUFFER
_MOST_PARTS: Final = 10_000

Call = Callable[..., Awaitable[dict[str, Any]]]
"""Calls an operation of S3 by name, with its arguments, until it succeeds; of one key."""


def encode_crc(crc: int) -> str:
    """A crc32c as in S3's API."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class MultipartUpload:
    """Creates one object. Used once.

    Args:
        call: for the object's key.
        what: names it in errors.
        size: of the file, bytes.
        list_all: lists the key's unfinished uploads.
        retried: called before the upload is begun again.
    """

    def __init__(
        self,
        call: Call,
        what: str,
        size: int,
        list_all: Callable[[], Awaitable[Sequence[Unfinished]]],
        retried: Retried,
    ) -> None:
        self._call = call
        self._what = what
        self._size = size
        self._list_all = list_all
        self._retried = retried
        self._part_size = BUFFER * -(-size // (BUFFER * _MOST_PARTS))

    async def run(self, reader: SourceReader, progress: Progress) -> None:
        """Uploads all of ``reader``.

        No upload of the key is left then, neither one whose CreateMultipartUpload answer was lost nor a
        killed process's: data-file names are unique to an attempt and rank.

        Raises:
            PreconditionError: the object exists, perhaps by this upload, whose answer was lost.
            StorageError: any other final error.
        """
        await restart_lost(lambda: self._run(reader, progress), retried=self._retried)

    async def _run(self, reader: SourceReader, progress: Progress) -> None:
        upload, completed = "", False
        try:
            created = await self._call(
                "create_multipart_upload", ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
            )
            upload = created["UploadId"]
            parts = await self._send_parts(upload, reader, progress)
            await self._complete(upload, parts, await reader.confirm())
            completed = True
        finally:
            await clean_up(
                self._abort_all(upload, completed),
                f"multipart uploads of {self._what} may be left",
            )

    async def _abort_all(self, upload: str, completed: bool) -> None:
        """Aborts the key's uploads, except a completed one, which some servers list for a moment."""
        if upload and not completed:
            await abort(self._call, upload)
        for item in await self._list_all():
            if item.token != upload:
                await abort(self._call, item.token)

    async def _send_parts(
        self, upload: str, reader: SourceReader, progress: Progress
    ) -> list[dict[str, Any]]:
        """Returns the parts, in order. When it raises, no part is being sent any more."""
        starts = range(0, self._size, self._part_size)
        numbers = iter(range(1, len(starts) + 1))
        sent: dict[int, dict[str, Any]] = {}
        reading = asyncio.Lock()
        held = 0

        async def send(_sender: int) -> None:
            nonlocal held
            part = Part(min(self._part_size, self._size))
            while True:
                async with reading:
                    number = next(numbers, 0)
                    if not number:
                        return
                    start = starts[number - 1]
                    end = min(start + self._part_size, self._size)
                    if end - start < len(part):
                        part = Part(end - start)
                    await reader.fill(memoryview(part), start)
                    checksum = encode_crc(reader.crc32c(start, end))
                answer = await self._call(
                    "upload_part",
                    size=len(part),
                    Body=part,
                    PartNumber=number,
                    ChecksumAlgorithm="CRC32C",
                    ChecksumCRC32C=checksum,
                    UploadId=upload,
                )
                sent[number] = {
                    "PartNumber": number,
                    "ETag": answer["ETag"],
                    "ChecksumCRC32C": checksum,
                }
                held += len(part)
                progress(held)

        await for_each(send, range(min(_SENDERS, len(starts))))
        return [sent[number] for number in sorted(sent)]

    async def _complete(self, upload: str, parts: list[dict[str, Any]], crc: int) -> None:
        try:
            await self._call(
                "complete_multipart_upload",
                MultipartUpload={"Parts": parts},
                ChecksumType="FULL_OBJECT",
                ChecksumCRC32C=encode_crc(crc),
                IfNoneMatch="*",
                UploadId=upload,
            )
        except NotFoundError as error:
            # A retry fails in this way, too, if the first try's answer was lost: the caller checks.
            raise PreconditionError(str(error)) from error


async def abort(call: Call, upload: str) -> None:
    """Ends an upload whose object isn't complete."""
    try:
        await call("abort_multipart_upload", UploadId=upload)
    except NotFoundError:
        return  # Completed, or aborted already.
