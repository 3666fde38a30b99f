"""Checkpoints in Amazon S3, or a server that honours its conditional writes.

Compare-and-swap is ``If-None-Match: *`` and ``If-Match``; a generation is the ETag. Uploads are confirmed by
the store's crc32c of the whole object, or read back where the store keeps none.
"""

import base64
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import crc32c

from pannier.common.locations import Location
from pannier.storage.base import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    ObjectInfo,
    Progress,
    Retried,
    Source,
    StorageError,
    Store,
    Unfinished,
    end_of,
)
from pannier.storage.http_body import Part
from pannier.storage.io_threads import BUFFER
from pannier.storage.retry import (
    TransientError,
    UnsettledError,
    retry,
    settle,
    settle_upload,
    uncounted,
    unless_written,
)
from pannier.storage.s3.client import (
    BeyondEndError,
    ChecksumRefusedError,
    PreconditionError,
    S3Connection,
    check_fields,
    shared_connection,
)
from pannier.storage.s3.multipart_upload import MEMORY, MultipartUpload, abort, encode_crc
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import UploadThreads
from pannier.storage.url import check_key


class _Listing(NamedTuple):
    """An operation that lists."""

    operation: str
    items: str
    """Field of the answer that has them."""
    fields: Sequence[str]
    """Fields that every item has."""
    markers: Mapping[str, str]
    """Parameters of the request for the next page, by the answer's fields."""


_TOKEN: Final = {"ContinuationToken": "NextContinuationToken"}
_OBJECTS: Final = _Listing(
    "list_objects_v2", "Contents", ("Key", "Size", "ETag", "LastModified"), _TOKEN
)
_DIRECTORIES: Final = _Listing("list_objects_v2", "CommonPrefixes", ("Prefix",), _TOKEN)
_UPLOADS: Final = _Listing(
    "list_multipart_uploads",
    "Uploads",
    ("Key", "Initiated", "UploadId"),
    {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
)


class S3Store(Store):
    """A directory of a bucket."""

    upload_memory = MEMORY
    lists_by_key = True

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
        self.url = f"s3://{location.bucket}/{location.prefix}".rstrip("/")
        self._deadline_s = deadline_s
        self._threads = threads
        self._shared = shared_connection(options, threads)

    def _what(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}"

    async def _connection(self) -> S3Connection:
        return await self._shared.get(end_of(self._deadline_s))

    async def _call(
        self,
        key: str,
        operation: str,
        *,
        retried: Retried = uncounted,
        size: int = 0,
        writes: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        connection = await self._connection()
        return await retry(
            lambda: connection.call(
                operation,
                what=self._what(key),
                size=size,
                Bucket=self._bucket,
                Key=self._prefix + check_key(key),
                **more,
            ),
            what=self._what(key),
            deadline_s=self._deadline_s,
            retried=retried,
            writes=writes,
        )

    async def upload(
        self, key: str, source: Source, *, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        """See :meth:`Store.upload`. The deadline restarts with each part."""
        once = functools.partial(self._upload, key, source, progress, retried)
        return await settle_upload(once, retried=retried)

    async def _upload(
        self, key: str, source: Source, progress: Progress, retried: Retried
    ) -> ObjectInfo:
        reader = SourceReader(source, self._threads)
        ours, answered = True, f"{self._what(key)} was uploaded"
        try:
            try:
                if source.size <= BUFFER:
                    data = Part(source.size)
                    await reader.fill(memoryview(data), 0)
                    crc = await reader.confirm()
                    await self._put(key, data, crc, {"IfNoneMatch": "*"}, retried)
                else:
                    upload = MultipartUpload(
                        functools.partial(self._call, key, retried=retried),
                        self._what(key),
                        source.size,
                        functools.partial(self.list_unfinished_of, key),
                        retried,
                    )
                    await upload.run(reader, progress)
            except PreconditionError as error:
                ours, answered = False, str(error)
            crc = await reader.finish()
        except ChecksumRefusedError as error:
            raise IntegrityError(str(error)) from error
        finally:
            reader.close()
        info = await self.stat(key)
        if info is None:
            raise UnsettledError(f"{answered}; the object does not exist")
        arrived = await self._crc_of(info)
        if (info.size, arrived) != (source.size, crc):
            if not ours:
                raise ConflictError(
                    f"{self._what(key)} exists with other content: "
                    "data-file names are never used twice",
                    info,
                )
            await self.delete(key, generation=info.generation)
            raise IntegrityError(
                f"{self._what(key)} arrived with {info.size} bytes and crc32c {arrived:08x}; "
                f"sent were {source.size} bytes with {crc:08x}"
            )
        progress(source.size)
        return ObjectInfo(key, info.size, info.generation, arrived, info.modified)

    async def _crc_of(self, info: ObjectInfo) -> int:
        if info.crc32c is not None:
            return info.crc32c
        crc = 0
        for offset in range(0, info.size, BUFFER):
            crc = crc32c.crc32c(await self.read(info.key, offset, BUFFER), crc)
        return crc

    async def _put(
        self,
        key: str,
        data: "bytes | bytearray",
        crc: int,
        condition: Mapping[str, Any],
        retried: Retried = uncounted,
    ) -> dict[str, Any]:
        return await self._call(
            key,
            "put_object",
            retried=retried,
            size=len(data),
            writes=True,
            Body=data,
            ChecksumAlgorithm="CRC32C",
            ChecksumCRC32C=encode_crc(crc),
            **condition,
        )

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        """See :meth:`Store.create`."""
        return await self.replace(key, data, expected=None)

    async def replace(self, key: str, data: bytes, *, expected: str | None) -> ObjectInfo:
        """See :meth:`Store.replace`."""
        return await settle(lambda: self._replace(key, data, expected))

    async def _replace(self, key: str, data: bytes, expected: str | None) -> ObjectInfo:
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": f'"{expected}"'}
        try:
            answer = await self._put(key, data, crc32c.crc32c(data), condition)
        except (PreconditionError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and expected is None:
                raise
            with unless_written():
                return await self._read_back(key, data, expected, error)
        except ChecksumRefusedError as error:
            raise IntegrityError(str(error)) from error
        etag = answer["ETag"].strip('"')
        with unless_written():
            info = await self.stat(key)
        if info is not None and info.generation == etag:
            return info
        # Another writer has replaced the object since.
        return ObjectInfo(key, len(data), etag, crc32c.crc32c(data), 0.0)

    async def _read_back(
        self, key: str, data: bytes, expected: str | None, problem: StorageError
    ) -> ObjectInfo:
        """The object, if its content is ``data``. Raises ConflictError, UnsettledError."""
        current = await self.stat(key)
        if current is not None and current.size == len(data):
            try:
                if await self.read(key) == data:
                    return current
            except NotFoundError:
                current = None
        found = f"generation {current.generation}" if current else "nothing"
        if (current.generation if current else None) == expected:
            raise UnsettledError(f"{problem}; found {found}, as expected") from problem
        raise ConflictError(
            f"{self._what(key)}: found {found}, expected {expected or 'nothing'}", current
        )

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See :meth:`Store.read`. Whole objects are compared with the store's crc32c."""
        if length == 0:
            return b""
        if offset or length is not None:
            end = "" if length is None else str(offset + length - 1)
            try:
                answer = await self._call(
                    key, "get_object", size=length or 0, Range=f"bytes={offset}-{end}"
                )
            except BeyondEndError:
                return b""
            return bytes(answer["Body"])
        return await self._read_whole(key)

    async def _read_whole(self, key: str) -> bytes:
        connection = await self._connection()

        async def once() -> bytes:
            answer = await connection.call(
                "get_object",
                what=self._what(key),
                Bucket=self._bucket,
                Key=self._prefix + check_key(key),
                ChecksumMode="ENABLED",
            )
            body = bytes(answer["Body"])
            expected = _decode(answer)
            if expected not in (None, crc32c.crc32c(body)):
                raise TransientError(f"{self._what(key)} was read with another crc32c")
            return body

        return await retry(once, what=self._what(key), deadline_s=self._deadline_s)

    async def stat(self, key: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`."""
        try:
            answer = await self._call(key, "head_object", ChecksumMode="ENABLED")
        except NotFoundError:
            return None
        return ObjectInfo(
            key=key,
            size=int(answer["ContentLength"]),
            generation=answer["ETag"].strip('"'),
            crc32c=_decode(answer),
            modified=answer["LastModified"].timestamp(),
        )

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See :meth:`Store.list`; without checksums, which S3 doesn't list."""
        found = [
            ObjectInfo(
                key=item["Key"].removeprefix(self._prefix),
                size=int(item["Size"]),
                generation=item["ETag"].strip('"'),
                crc32c=None,
                modified=item["LastModified"].timestamp(),
            )
            for item in await self._listed(_OBJECTS, prefix)
        ]
        return sorted(found, key=lambda info: info.key)

    async def list_directories(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`Store.list_directories`."""
        start = len(self._prefix + prefix)
        found = await self._listed(_DIRECTORIES, prefix, Delimiter="/")
        return sorted(item["Prefix"][start:-1] for item in found)

    async def _listed(
        self, listing: "_Listing", prefix: str, **options: str
    ) -> Sequence[dict[str, Any]]:
        """All items of a listing, each with the fields that are needed."""
        connection = await self._connection()
        items: list[dict[str, Any]] = []
        more: dict[str, Any] = dict(options)
        what = self._what(prefix)

        async def once() -> dict[str, Any]:
            page = await connection.call(
                listing.operation,
                what=what,
                Bucket=self._bucket,
                Prefix=self._prefix + prefix,
                **more,
            )
            for item in page.get(listing.items, ()):
                check_fields(item, listing.fields, f"{what}: an entry of {listing.operation}")
            if page["IsTruncated"]:
                check_fields(page, listing.markers.values(), f"{what}: {listing.operation}")
            return page

        while True:
            page = await retry(once, what=what, deadline_s=self._deadline_s)
            items += page.get(listing.items, ())
            if not page["IsTruncated"]:
                return items
            more = {**options, **{key: page[name] for key, name in listing.markers.items()}}

    async def delete(self, key: str, *, generation: str | None = None) -> None:
        """See :meth:`Store.delete`."""
        condition: dict[str, Any] = {}
        if generation is not None:
            condition["IfMatch"] = f'"{generation}"'
        try:
            await self._call(key, "delete_object", **condition)
        except (NotFoundError, PreconditionError):
            return

    async def list_unfinished(self) -> Sequence[Unfinished]:
        """See :meth:`Store.list_unfinished`: multipart uploads, which S3 never removes."""
        return await self._unfinished("")

    async def list_unfinished_of(self, key: str) -> Sequence[Unfinished]:
        """See :meth:`Store.list_unfinished_of`."""
        return [item for item in await self._unfinished(check_key(key)) if item.key == key]

    async def _unfinished(self, prefix: str) -> Sequence[Unfinished]:
        return [
            Unfinished(
                key=item["Key"].removeprefix(self._prefix),
                size=0,
                modified=item["Initiated"].timestamp(),
                token=item["UploadId"],
            )
            for item in await self._listed(_UPLOADS, prefix)
        ]

    async def discard(self, item: Unfinished) -> None:
        """See :meth:`Store.discard`."""
        await abort(functools.partial(self._call, item.key), item.token)

    async def close(self) -> None:
        """See :meth:`Store.close`."""
        await self._shared.release()


def _decode(answer: Mapping[str, Any]) -> int | None:
    """crc32c of the whole object; None without one, or with that of its parts only."""
    text = answer.get("ChecksumCRC32C")
    if not text or "-" in text or answer.get("ChecksumType") == "COMPOSITE":
        return None
    return int.from_bytes(base64.b64decode(text), "big")
