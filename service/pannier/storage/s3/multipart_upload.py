"""One multipart upload: the parts of a file are sent several at a time, possibly while it still grows.

Parts are read in order, each with its own checksum. The object becomes visible when the upload is completed,
with the checksum of the whole, and only if there is no such object.
"""

import asyncio
import base64
from asyncio import FIRST_COMPLETED, Task
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pannier.storage.base import NotFoundError, Progress
from pannier.storage.http_body import Part
from pannier.storage.io_threads import BUFFER
from pannier.storage.retry import clean_up
from pannier.storage.s3.client import PreconditionError
from pannier.storage.source_reader import SourceReader

MEMORY: Final = 4 * BUFFER
"""Bytes of the parts under way at a time, unless the file has more than 10,000 parts of :data:`BUFFER`."""
_AT_A_TIME: Final = MEMORY // BUFFER
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
    """

    def __init__(self, call: Call, what: str, size: int) -> None:
        self._call = call
        self._what = what
        self._size = size
        self._part_size = BUFFER * -(-size // (BUFFER * _MOST_PARTS))
        self._free = [Part(self._part_size) for _ in range(_AT_A_TIME)]
        self._id = ""
        self._held = 0

    async def run(self, reader: SourceReader, progress: Progress) -> None:
        """Uploads all of ``reader``.

        Raises:
            PreconditionError: the object exists, perhaps by this upload, whose answer was lost.
            StorageError: any other final error. The upload is aborted then, and on cancellation.
        """
        created = await self._call(
            "create_multipart_upload", ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
        )
        self._id = created["UploadId"]
        try:
            parts = await self._send_parts(reader, progress)
            await self._complete(parts, await reader.confirm())
        except BaseException:
            await clean_up(
                abort(self._call, self._id), f"the multipart upload of {self._what} may be left"
            )
            raise

    async def _send_parts(self, reader: SourceReader, progress: Progress) -> list[dict[str, Any]]:
        """Returns the parts, in order. When it raises, no part is being sent any more."""
        tasks: list[Task[dict[str, Any]]] = []
        running: set[Task[dict[str, Any]]] = set()
        try:
            for number, start in enumerate(range(0, self._size, self._part_size), 1):
                if not self._free:
                    ended, running = await asyncio.wait(running, return_when=FIRST_COMPLETED)
                    for task in ended:
                        task.result()
                part, end = self._free.pop(), min(start + self._part_size, self._size)
                if end - start < self._part_size:
                    part = Part(end - start)
                await reader.fill(memoryview(part), start)
                sending = self._send(number, part, reader.crc32c(start, end), progress)
                tasks.append(asyncio.create_task(sending))
                running.add(tasks[-1])
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, number: int, part: Part, crc: int, progress: Progress) -> dict[str, Any]:
        checksum = encode_crc(crc)
        answer = await self._call(
            "upload_part",
            size=len(part),
            Body=part,
            PartNumber=number,
            ChecksumAlgorithm="CRC32C",
            ChecksumCRC32C=checksum,
            UploadId=self._id,
        )
        self._held += len(part)
        progress(self._held)
        self._free.append(part)
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": checksum}

    async def _complete(self, parts: list[dict[str, Any]], crc: int) -> None:
        try:
            await self._call(
                "complete_multipart_upload",
                MultipartUpload={"Parts": parts},
                ChecksumType="FULL_OBJECT",
                ChecksumCRC32C=encode_crc(crc),
                IfNoneMatch="*",
                UploadId=self._id,
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
