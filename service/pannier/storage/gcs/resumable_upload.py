"""One resumable upload: a file is sent in chunks, possibly while it still grows.

The last chunk, a small one, is read before it is sent, since its request has the checksum of the whole.
After a failure the upload resumes at the offset that the server reports. The object becomes visible with
its last chunk.
"""

import base64
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pannier.storage.base import NotFoundError, Progress, Retried, Source
from pannier.storage.gcs.http import Answer, GcsConnection
from pannier.storage.http_body import FromSpool, Slices
from pannier.storage.retry import TransientError, UploadLostError, clean_up, restart_lost, retry
from pannier.storage.source_reader import SourceReader

T = TypeVar("T")

UNIT = 256 << 10
"""All chunks but the last have a multiple of this many bytes."""
_LEAST = 8 << 20
"""Bytes of a growing file that are awaited before the next chunk is sent."""
_LOSSES = 3
"""When the server has lost bytes of a session so many times, the session counts as lost."""


def encode_crc(crc: int) -> str:
    """A crc32c as in the JSON API."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class ResumableUpload:
    """Creates one object. Used once.

    Args:
        name: of the object within the bucket.
        source: not empty.
        chunk: most bytes of a request, a multiple of :data:`UNIT`.
        deadline_s: for each chunk.
    """

    def __init__(
        self,
        connection: GcsConnection,
        bucket: str,
        name: str,
        source: Source,
        *,
        chunk: int,
        deadline_s: float,
        retried: Retried,
    ) -> None:
        self._connection = connection
        self._bucket, self._name = bucket, name
        self._size = source.size
        self._chunk = chunk
        self._last = (self._size - 1) // UNIT * UNIT
        """Where the last chunk begins."""
        self._what = f"gs://{bucket}/{name}"
        self._deadline_s = deadline_s
        self._retried = retried
        self._session = ""
        self._behind = 0
        """Times in this session that the server had fewer bytes than it had confirmed."""

    async def run(self, reader: SourceReader, progress: Progress) -> dict[str, Any]:
        """Uploads all of ``reader``.

        Returns:
            the object's resource, whose checksum the caller must compare.

        Raises:
            PreconditionError: the object exists.
            UnclearError: the server's last answer is not the object's resource.
            StorageError: any other final error. The session is deleted then, and on cancellation.
        """
        return await restart_lost(lambda: self._run(reader, progress), retried=self._retried)

    async def _run(self, reader: SourceReader, progress: Progress) -> dict[str, Any]:
        self._behind = 0
        self._session = await self._retry(self._start)
        try:
            held = 0
            while True:
                if held < self._last:
                    reached = await self._send_next(reader, held)
                else:
                    reached = await self._send_last(reader, held)
                if isinstance(reached, dict):
                    return reached
                if reached < held:
                    self._note_loss(held, reached)
                held = reached
                progress(held)
        except BaseException:
            await clean_up(self._cancel(), "an upload session may be left")
            raise

    async def _send_next(self, reader: SourceReader, start: int) -> int | dict[str, Any]:
        most = min(start + self._chunk, self._last)
        arrived = await reader.wait_for(min(start + _LEAST, most))
        end = min(arrived // UNIT * UNIT, most)
        return await self._send(start, end, lambda at: FromSpool(reader, at, end - at), {})

    async def _send_last(self, reader: SourceReader, start: int) -> int | dict[str, Any]:
        buffer = bytearray(self._size - start)
        await reader.fill(memoryview(buffer), start)
        # With this header the server refuses an object of another checksum.
        headers = {"X-Goog-Hash": f"crc32c={encode_crc(await reader.confirm())}"}
        return await self._send(
            start, self._size, lambda at: Slices(memoryview(buffer)[at - start :]), headers
        )

    def _note_loss(self, held: int, reached: int) -> None:
        self._behind += 1
        reason = f"{self._what}: the server had confirmed {held} bytes, and holds {reached}"
        if self._behind >= _LOSSES:
            raise UploadLostError(f"the upload session loses bytes: {reason}")
        self._retried(reason)

    async def _retry(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await retry(
            operation, what=self._what, deadline_s=self._deadline_s, retried=self._retried
        )

    async def _start(self) -> str:
        answer = await self._connection.request(
            "POST",
            self._connection.object_url(self._bucket, area="/upload"),
            what=self._what,
            params={"uploadType": "resumable", "name": self._name, "ifGenerationMatch": "0"},
            headers={
                "Content-Type": "application/json; charset=UTF-8",
                "X-Upload-Content-Type": "application/octet-stream",
                "X-Upload-Content-Length": str(self._size),
            },
            data=Slices(json.dumps({"name": self._name}).encode()),
            expected=(200, 201),
        )
        location = answer.headers.get("Location")
        if not location:
            raise TransientError(f"{self._what}: the server named no upload session")
        return location

    async def _send(
        self,
        start: int,
        end: int,
        body: Callable[[int], FromSpool | Slices],
        headers: dict[str, str],
    ) -> int | dict[str, Any]:
        """Sends the chunk; returns the number of bytes that the server holds then, or the object.

        Args:
            body: makes the body, of the chunk's bytes from an offset in the file on.
        """
        uncertain = False

        async def once() -> int | dict[str, Any]:
            nonlocal uncertain
            at = start
            if uncertain:
                state = self._state(await self._put(Slices(), f"bytes */{self._size}", {}))
                if isinstance(state, dict) or not start <= state < end:
                    return state
                at = state
            uncertain = True
            span = f"bytes {at}-{end - 1}/{self._size}"
            state = self._state(await self._put(body(at), span, headers))
            if state == at:
                raise TransientError(f"{self._what}: the server accepted no bytes of {span}")
            return state

        return await self._retry(once)

    async def _put(
        self, data: FromSpool | Slices, content_range: str, headers: dict[str, str]
    ) -> Answer:
        try:
            return await self._connection.request(
                "PUT",
                self._session,
                what=self._what,
                headers={"Content-Range": content_range, **headers},
                data=data,
                upload=bool(data.size),
                expected=(200, 201, 308),
            )
        except NotFoundError as error:
            raise UploadLostError(f"the server lost the upload session: {error}") from error

    def _state(self, answer: Answer) -> int | dict[str, Any]:
        if answer.status != 308:
            return answer.resource(self._what)
        span = answer.headers.get("Range")
        if span is None:
            return 0
        try:
            held = int(span.rpartition("-")[2]) + 1
        except ValueError as error:
            raise TransientError(f"{self._what}: the server holds {span!r}") from error
        if held >= self._size:
            # The next try's status request may find the object finished.
            raise TransientError(
                f"{self._what}: the server holds {held} of {self._size} bytes, but the object "
                "does not exist yet"
            )
        return held

    async def _cancel(self) -> None:
        """Deletes the session; otherwise the server does after a week."""
        await self._connection.request(
            "DELETE",
            self._session,
            what=self._what,
            headers={"Content-Length": "0"},
            expected=(200, 204, 404, 410, 499),
        )
