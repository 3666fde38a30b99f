"""Checkpoints in Google Cloud Storage.

Small objects are sent in one multipart request with their crc32c, data files by a resumable upload
(:mod:`pannier.storage.gcs.resumable_upload`). Compare-and-swap is ``ifGenerationMatch``. After a failed
precondition the object is read back, since a retry fails in the same way if the first try's answer was lost.
"""

import base64
import functools
import json
import re
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

import crc32c

from pannier.common.locations import Location
from pannier.storage.base import (
    ConflictError,
    DeniedError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    Progress,
    Retried,
    Source,
    StorageError,
    Store,
    end_of,
)
from pannier.storage.gcs.http import (
    ChecksumRefusedError,
    GcsConnection,
    PreconditionError,
    UnclearError,
    shared_connection,
)
from pannier.storage.gcs.resumable_upload import UNIT, ResumableUpload, encode_crc
from pannier.storage.http_body import Slices
from pannier.storage.io_threads import BUFFER, buffers
from pannier.storage.retry import (
    TransientError,
    UnsettledError,
    retry,
    settle,
    settle_upload,
    uncounted,
    unless_written,
)
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import UploadThreads
from pannier.storage.url import check_key

T = TypeVar("T")

_HOLDS = ("temporaryHold", "eventBasedHold")
_FIELDS = ",".join(("name,size,generation,crc32c,updated", *_HOLDS))
_FRACTION = re.compile(r"\.(\d+)")


class GcsStore(Store):
    """A directory of a bucket."""

    upload_memory = BUFFER

    def __init__(
        self,
        location: Location,
        options: Mapping[str, Any],
        threads: UploadThreads,
        *,
        deadline_s: float,
    ) -> None:
        self._bucket = location.bucket
        self._prefix = location.prefix
        self.url = f"gs://{location.bucket}/{location.prefix}".rstrip("/")
        self._deadline_s = deadline_s
        self._threads = threads
        self._shared = shared_connection(options, threads)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _what(self, key: str) -> str:
        return f"gs://{self._bucket}/{self._prefix}{key}"

    async def _connection(self) -> GcsConnection:
        return await self._shared.get(end_of(self._deadline_s))

    async def _retry(
        self,
        operation: Callable[[], Coroutine[Any, Any, T]],
        key: str,
        retried: Retried = uncounted,
        *,
        writes: bool = False,
    ) -> T:
        return await retry(
            operation,
            what=self._what(key),
            deadline_s=self._deadline_s,
            retried=retried,
            writes=writes,
        )

    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`. The deadline restarts with each chunk."""
        once = functools.partial(self._upload, key, source, progress, retried)
        return await settle_upload(once, retried=retried)

    async def _upload(
        self, key: str, source: Source, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        connection = await self._connection()
        troubled = False

        def note(reason: str) -> None:
            nonlocal troubled
            troubled = True
            retried(reason)

        reader = SourceReader(source, self._threads)
        try:
            if source.size <= BUFFER:
                buffer = buffers.take()
                view = memoryview(buffer)[: source.size]
                await reader.fill(view, 0)
                crc = await reader.confirm()
                resource = await self._insert(connection, key, view, crc, "0", note, upload=True)
                if not troubled:
                    # Otherwise a closing connection may still send from it.
                    buffers.give(buffer)
            else:
                upload = ResumableUpload(
                    connection,
                    self._bucket,
                    self._name(key),
                    source,
                    chunk=self._threads.request_bytes(connection.chunk_bytes, UNIT),
                    deadline_s=self._deadline_s,
                    retried=note,
                )
                resource = await upload.run(reader, progress)
                crc = await reader.finish()
            info = self._info(resource)
        except (PreconditionError, UnclearError) as error:
            crc = await reader.finish()
            there = await self.stat(key)
            if there is None:
                raise UnsettledError(f"{error}; the object does not exist") from error
            if (there.size, there.crc32c) != (source.size, crc):
                raise ConflictError(
                    f"{self._what(key)} exists with other content: "
                    "data-file names are never used twice",
                    there,
                ) from None
            info = there
        except ChecksumRefusedError as error:
            sent = await reader.finish()
            raise IntegrityError(f"{error} The sender's is {sent:08x}.") from error
        finally:
            reader.close()
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
        return await settle(lambda: self._replace(key, data, expected))

    async def _replace(self, key: str, data: bytes, expected: str | None) -> ObjectInfo:
        connection = await self._connection()
        crc = crc32c.crc32c(data)
        try:
            resource = await self._insert(connection, key, data, crc, expected or "0", uncounted)
        except (PreconditionError, UnclearError) as error:
            with unless_written():
                return await self._read_back(key, data, expected, error)
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

    async def _read_back(
        self, key: str, data: bytes, expected: str | None, problem: StorageError
    ) -> ObjectInfo:
        """The object, if its content is ``data``. Raises ConflictError, UnsettledError."""
        current = await self.stat(key)
        if current is not None and current.size == len(data):
            try:
                if await self._media(key, {"generation": current.generation}, {}) == data:
                    return current
            except NotFoundError:
                current = await self.stat(key)  # Replaced by another writer meanwhile.
        found = f"generation {current.generation}" if current else "nothing"
        if (current.generation if current else None) == expected:
            raise UnsettledError(f"{problem}; found {found}, as expected") from problem
        raise ConflictError(
            f"{self._what(key)}: found {found}, expected {expected or 'nothing'}", current
        )

    async def _insert(
        self,
        connection: GcsConnection,
        key: str,
        data: bytes | memoryview,
        crc: int,
        generation: str,
        retried: Retried,
        *,
        upload: bool = False,
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
                upload=upload,
            )
            return answer.resource(self._what(key))

        return await self._retry(once, key, retried, writes=True)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`. Whole objects are compared with the answer's crc32c."""
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
        """See :meth:`Store.stat`. Raises NotFoundError when the bucket doesn't exist."""
        connection = await self._connection()

        async def once() -> dict[str, Any]:
            answer = await connection.request(
                "GET",
                connection.object_url(self._bucket, self._name(key)),
                what=self._what(key),
                params={"fields": _FIELDS},
            )
            try:
                return answer.resource(self._what(key))
            except UnclearError as error:
                raise TransientError(str(error)) from error

        try:
            return self._info(await self._retry(once, key))
        except NotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            return None

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`."""
        pages = await self._pages(prefix, fields=f"items({_FIELDS})")
        found = [self._info(item) for page in pages for item in page.get("items", ())]
        return sorted(found, key=lambda info: info.key)

    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`Store.list_directories`."""
        pages = await self._pages(prefix, fields="prefixes", delimiter="/")
        start = len(self._prefix + prefix)
        return sorted(name[start:-1] for page in pages for name in page.get("prefixes", ()))

    async def _pages(
        self, prefix: str, *, fields: str, delimiter: str | None = None
    ) -> Sequence[dict[str, Any]]:
        """All pages of a listing."""
        connection = await self._connection()
        pages: list[dict[str, Any]] = []
        token: str | None = None
        while True:

            async def once(token: str | None = token) -> dict[str, Any]:
                answer = await connection.request(
                    "GET",
                    connection.object_url(self._bucket),
                    what=self._what(prefix),
                    params={
                        "prefix": self._prefix + prefix,
                        "delimiter": delimiter,
                        "fields": f"kind,{fields},nextPageToken",
                        "pageToken": token,
                    },
                )
                page = answer.json()
                if page.get("kind") != "storage#objects":
                    raise TransientError(f"{self._what(prefix)}: {page!r:.100} is no listing")
                return page

            pages.append(await self._retry(once, prefix))
            token = pages[-1].get("nextPageToken")
            if not token:
                return pages

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
        """See :meth:`Store.probe`. A zonal (Rapid) bucket is refused by name."""
        await self._check_layout()
        await super().probe()

    async def _check_layout(self) -> None:
        connection = await self._connection()

        async def once() -> dict[str, Any]:
            answer = await connection.request(
                "GET",
                connection.bucket_url(self._bucket, "storageLayout"),
                what=f"gs://{self._bucket}",
                params={"fields": "locationType"},
                expected=(200, 400, 405, 501),
            )
            return answer.json() if answer.status == 200 else {}

        try:
            layout = await self._retry(once, "")
        except (DeniedError, NotFoundError):
            # Not every server has it, and not every account may read it: the probe's writes decide.
            return
        if layout.get("locationType") == "zone":
            raise StorageError(
                f"gs://{self._bucket} is a zonal (Rapid) bucket, which takes appends over gRPC only: "
                "Pannier can't write there; use a regional, dual-region or multi-region bucket"
            )

    async def close(self) -> None:
        """See :meth:`Store.close`."""
        await self._shared.release()

    def _info(self, resource: Mapping[str, Any]) -> ObjectInfo:
        crc = resource.get("crc32c")
        return ObjectInfo(
            key=str(resource["name"]).removeprefix(self._prefix),
            size=int(resource.get("size", 0)),
            generation=str(resource["generation"]),
            crc32c=int.from_bytes(base64.b64decode(crc), "big") if crc else None,
            modified=_unix_time(str(resource.get("updated", ""))),
            hold=", ".join(name for name in _HOLDS if resource.get(name)),
        )


def _check_hash(header: str, body: bytes, what: str) -> None:
    for item in header.split(","):
        name, _, value = item.strip().partition("=")
        if name == "crc32c" and value != encode_crc(crc32c.crc32c(body)):
            raise TransientError(f"{what} was read with another crc32c than {value}")


def _unix_time(text: str) -> float:
    """Unix time of an RFC 3339 time with any number of decimals; 0 for an empty one."""
    if not text:
        return 0.0
    text = _FRACTION.sub(lambda match: f".{match[1][:6]:0<6}", text).replace("Z", "+00:00")
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _hex(crc: int | None) -> str:
    return "unknown" if crc is None else f"{crc:08x}"
