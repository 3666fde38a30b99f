"""Checkpoints in Google Cloud Storage.

Small objects go in one multipart request with their crc32c, data files through a
resumable upload (:mod:`pannier.storage.gcs_upload`). Compare-and-swap is
``ifGenerationMatch``. A failed precondition is settled by reading back, since it
also is what a retry meets when the first try's answer was lost.
"""

import base64
import json
import re
import uuid
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar

import crc32c

from pannier.storage import probing
from pannier.storage.base import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    Progress,
    Retried,
    Source,
    Store,
)
from pannier.storage.bodies import Slices
from pannier.storage.feed import Feed
from pannier.storage.gcs_http import (
    ChecksumRefusedError,
    GcsConnection,
    PreconditionError,
    lease,
)
from pannier.storage.gcs_upload import ResumableUpload, encode_crc
from pannier.storage.limits import end_of
from pannier.storage.location import Location, check_key
from pannier.storage.retrying import TransientError, retry, silent
from pannier.storage.threads import BUFFER, buffers

T = TypeVar("T")

_FIELDS = "name,size,generation,crc32c,updated"
_FRACTION = re.compile(r"\.(\d+)")


class GcsStore(Store):
    """A directory of a bucket."""

    upload_memory = BUFFER

    def __init__(
        self, location: Location, options: Mapping[str, Any], *, deadline_s: float
    ) -> None:
        self._bucket = location.bucket
        self._prefix = location.prefix
        self.url = f"gs://{location.bucket}/{location.prefix}".rstrip("/")
        self._deadline_s = deadline_s
        self._lease = lease(options)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _what(self, key: str) -> str:
        return f"gs://{self._bucket}/{self._prefix}{key}"

    async def _connection(self) -> GcsConnection:
        return await self._lease.get(end_of(self._deadline_s))

    async def _retry(
        self,
        operation: Callable[[], Coroutine[Any, Any, T]],
        key: str,
        retried: Retried = silent,
    ) -> T:
        return await retry(
            operation, what=self._what(key), deadline_s=self._deadline_s, retried=retried
        )

    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`. The deadline counts anew with each chunk."""
        try:
            return await self._upload(key, source, progress, retried)
        except IntegrityError as error:
            retried(str(error))
            return await self._upload(key, source, progress, retried)

    async def _upload(
        self, key: str, source: Source, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        connection = await self._connection()
        troubled = False

        def note(reason: str) -> None:
            nonlocal troubled
            troubled = True
            retried(reason)

        feed = Feed(source)
        try:
            if source.size <= BUFFER:
                buffer = buffers.take()
                view = memoryview(buffer)[: source.size]
                await feed.fill(view, 0)
                crc = await feed.confirm()
                resource = await self._insert(connection, key, view, crc, "0", note)
                if not troubled:
                    # Else a connection that is going down may still send from it.
                    buffers.give(buffer)
            else:
                upload = ResumableUpload(
                    connection,
                    self._bucket,
                    self._name(key),
                    source,
                    deadline_s=self._deadline_s,
                    retried=note,
                )
                resource = await upload.run(feed, progress)
                crc = await source.crc32c()
            info = self._info(resource)
        except PreconditionError:
            crc = await source.crc32c()
            there = await self.stat(key)
            if there is None or (there.size, there.crc32c) != (source.size, crc):
                raise ConflictError(
                    f"{self._what(key)} exists with other content: "
                    "data-file names are never used twice",
                    there,
                ) from None
            info = there
        except ChecksumRefusedError as error:
            sent = await source.crc32c()
            raise IntegrityError(f"{error} The sender's is {sent:08x}.") from error
        finally:
            feed.close()
        if info.crc32c is None:
            info = await self.stat(key) or info
        if (info.size, info.crc32c) != (source.size, crc):
            await self.delete(key, generation=info.generation)
            raise IntegrityError(
                f"{self._what(key)} arrived with {info.size} bytes and crc32c "
                f"{_hex(info.crc32c)}; sent were {source.size} bytes with {_hex(crc)}"
            )
        progress(source.size)
        return info

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        """See :meth:`Store.create`."""
        return await self.replace(key, data, expected=None)

    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        """See :meth:`Store.replace`."""
        connection = await self._connection()
        crc = crc32c.crc32c(data)
        try:
            resource = await self._insert(connection, key, data, crc, expected or "0", silent)
        except PreconditionError:
            return await self._settle(key, data, expected)
        except ChecksumRefusedError as error:
            raise IntegrityError(str(error)) from error
        info = self._info(resource)
        if info.crc32c not in (None, crc) or info.size != len(data):
            await self.delete(key, generation=info.generation)
            raise IntegrityError(
                f"{self._what(key)} arrived with {info.size} bytes and crc32c "
                f"{_hex(info.crc32c)}; sent were {len(data)} bytes with {_hex(crc)}"
            )
        return info

    async def _settle(self, key: str, data: bytes, expected: str | None) -> ObjectInfo:
        current = await self.stat(key)
        if current is not None and current.size == len(data):
            try:
                if await self._media(key, {"generation": current.generation}, {}) == data:
                    return current
            except NotFoundError:
                current = await self.stat(key)  # Replaced in between: not ours any more.
        stands = f"generation {current.generation}" if current else "nothing"
        raise ConflictError(
            f"{self._what(key)}: {stands} stands there, not {expected or 'nothing'}", current
        )

    async def _insert(
        self,
        connection: GcsConnection,
        key: str,
        data: bytes | memoryview,
        crc: int,
        generation: str,
        retried: Retried,
    ) -> dict[str, Any]:
        boundary = uuid.uuid4().hex
        resource = json.dumps({"name": self._name(key), "crc32c": encode_crc(crc)})
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{resource}"
            f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        body = (head.encode(), data, f"\r\n--{boundary}--\r\n".encode())

        async def once() -> dict[str, Any]:
            answer = await connection.request(
                "POST",
                connection.object_url(self._bucket, area="/upload"),
                what=self._what(key),
                params={"uploadType": "multipart", "ifGenerationMatch": generation},
                headers={"Content-Type": f"multipart/related; boundary={boundary}"},
                data=Slices(*body),
            )
            return answer.json()

        return await self._retry(once, key, retried)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`. Whole objects are checked against the answer's crc32c."""
        if length == 0:
            return b""
        headers = {}
        if offset or length is not None:
            end = "" if length is None else str(offset + length - 1)
            headers["Range"] = f"bytes={offset}-{end}"
        return await self._media(key, {}, headers)

    async def _media(
        self, key: str, params: Mapping[str, str], headers: Mapping[str, str]
    ) -> bytes:
        connection = await self._connection()

        async def once() -> bytes:
            answer = await connection.request(
                "GET",
                connection.object_url(self._bucket, self._name(key)),
                what=self._what(key),
                params={"alt": "media", **params},
                headers=headers,
                expected=(200, 206, 416),
            )
            if answer.status == 416:
                return b""
            if answer.status == 200:
                _check_hash(answer.headers.get("X-Goog-Hash", ""), answer.body, self._what(key))
            return answer.body

        return await self._retry(once, key)

    async def stat(self, key: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`. Raises NotFoundError when it is the bucket that is missing."""
        connection = await self._connection()

        async def once() -> dict[str, Any]:
            answer = await connection.request(
                "GET",
                connection.object_url(self._bucket, self._name(key)),
                what=self._what(key),
                params={"fields": _FIELDS},
            )
            return answer.json()

        try:
            return self._info(await self._retry(once, key))
        except NotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            return None

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        connection = await self._connection()
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:

            async def once(token: str | None = token) -> dict[str, Any]:
                answer = await connection.request(
                    "GET",
                    connection.object_url(self._bucket),
                    what=self._what(prefix),
                    params={
                        "prefix": self._prefix + prefix,
                        "fields": f"items({_FIELDS}),nextPageToken",
                        "pageToken": token,
                    },
                )
                return answer.json()

            page = await self._retry(once, prefix)
            found += [self._info(item) for item in page.get("items", ())]
            token = page.get("nextPageToken")
            if not token:
                return sorted(found, key=lambda info: info.key)

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """See :meth:`Store.delete`."""
        connection = await self._connection()

        async def once() -> None:
            await connection.request(
                "DELETE",
                connection.object_url(self._bucket, self._name(key)),
                what=self._what(key),
                params={"ifGenerationMatch": generation},
                expected=(200, 204, 404, 412) if generation else (200, 204, 404),
            )

        await self._retry(once, key)

    async def probe(self) -> None:
        """See :meth:`Store.probe`."""
        await probing.probe(self)

    async def close(self) -> None:
        """See :meth:`Store.close`."""
        await self._lease.release()

    def _info(self, resource: Mapping[str, Any]) -> ObjectInfo:
        crc = resource.get("crc32c")
        return ObjectInfo(
            key=str(resource["name"]).removeprefix(self._prefix),
            size=int(resource.get("size", 0)),
            generation=str(resource["generation"]),
            crc32c=int.from_bytes(base64.b64decode(crc), "big") if crc else None,
            modified=_unix_time(str(resource.get("updated", ""))),
        )


def _check_hash(header: str, body: bytes, what: str) -> None:
    for item in header.split(","):
        name, _, value = item.strip().partition("=")
        if name == "crc32c" and value != encode_crc(crc32c.crc32c(body)):
            raise TransientError(f"{what} was read with another crc32c than {value}")


def _unix_time(text: str) -> float:
    """Seconds, of an RFC 3339 time with any number of decimals; 0 when there is none."""
    if not text:
        return 0.0
    text = _FRACTION.sub(lambda match: f".{match[1][:6]:0<6}", text).replace("Z", "+00:00")
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _hex(crc: int | None) -> str:
    return "unknown" if crc is None else f"{crc:08x}"
