"""Buckets and objects of the GCS server: content on disk, resources in memory."""

import base64
import hashlib
import itertools
import os
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import crc32c

MD5_LIMIT = 32 << 20
"""Larger objects carry no md5Hash (as composite ones don't in GCS): it costs more than the rest."""


HOLDS = {"temporaryHold": "Temporary", "eventBasedHold": "Event-Based"}


class Refused(Exception):
    """An answer in the API's error form."""

    def __init__(self, status: int, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason


def now() -> str:
    text = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class Content:
    """Bytes of an object in the making, with a running checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.crc = 0
        self._file: BinaryIO = path.open("w+b", buffering=0)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)
        self.crc = crc32c.crc32c(data, self.crc)

    def truncate(self, size: int) -> None:
        """Forgets what is beyond; checksums are taken again."""
        if size == self.size:
            return
        self._file.seek(0)
        self.size, self.crc = 0, 0
        while self.size < size and (part := self._file.read(min(1 << 20, size - self.size))):
            self.size += len(part)
            self.crc = crc32c.crc32c(part, self.crc)
        self._file.truncate(size)
        self._file.seek(size)

    @property
    def crc_text(self) -> str:
        return base64.b64encode(self.crc.to_bytes(4, "big")).decode()

    def md5_text(self) -> str | None:
        """Of an object that has one; when it is whole, for only then its size is known."""
        if self.size > MD5_LIMIT:
            return None
        data = os.pread(self._file.fileno(), self.size, 0)
        return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


@dataclass
class StoredObject:
    """A live object: its resource as the API shows it, and where its bytes are."""

    resource: dict[str, Any]
    path: Path

    @property
    def size(self) -> int:
        return int(self.resource["size"])

    @property
    def generation(self) -> str:
        return str(self.resource["generation"])

    @property
    def metageneration(self) -> str:
        return str(self.resource["metageneration"])


@dataclass
class Bucket:
    name: str
    zonal: bool = False
    """A Rapid bucket: its objects are written over gRPC only."""
    created: str = field(default_factory=now)
    objects: dict[str, StoredObject] = field(default_factory=dict)


class Objects:
    """All buckets. Of one event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.buckets: dict[str, Bucket] = {}
        self.ignore_preconditions = False
        self.ignore_delete_preconditions = False
        self.ignore_checksums = False
        self._numbers = itertools.count()
        self._generation = int(time.time() * 1e6)

    def bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            raise Refused(404, "The specified bucket does not exist.", "notFound")
        return self.buckets[name]

    def get(self, bucket: str, name: str, generation: str | None = None) -> StoredObject:
        found = self.bucket(bucket).objects.get(name)
        if found is None or (generation is not None and found.generation != generation):
            raise Refused(404, f"No such object: {bucket}/{name}", "notFound")
        return found

    def content(self) -> Content:
        """A place for new bytes."""
        return Content(self.directory / f"{os.getpid()}-{next(self._numbers)}")

    def check(self, found: StoredObject | None, query: dict[str, str]) -> None:
        """Raises 412 (304 for a negated match) when a precondition in ``query`` doesn't hold."""
        if self.ignore_preconditions:
            return
        generation = found.generation if found else "0"
        metageneration = found.metageneration if found else None
        for name, actual in (("Generation", generation), ("Metageneration", metageneration)):
            wanted = query.get(f"if{name}Match")
            if wanted is not None and wanted != actual:
                raise Refused(
                    412,
                    "At least one of the pre-conditions you specified did not hold.",
                    "conditionNotMet",
                )
            unwanted = query.get(f"if{name}NotMatch")
            if unwanted is not None and unwanted == actual:
                raise Refused(304, "Not Modified", "notModified")

    def commit(
        self, bucket: str, metadata: dict[str, Any], content: Content, query: dict[str, str]
    ) -> StoredObject:
        """Makes ``content`` the object's live generation, if preconditions and checksums hold."""
        if self.bucket(bucket).zonal:
            raise Refused(400, "This bucket does not support this operation over this API.")
        place = self.bucket(bucket).objects
        name = str(metadata["name"])
        old = place.get(name)
        md5 = content.md5_text()
        try:
            self.check(old, query)
            check_holds(bucket, name, old)
            for key, actual, title in (
                ("crc32c", content.crc_text, "CRC32C"),
                ("md5Hash", md5, "MD5 hash"),
            ):
                given = metadata.get(key)
                if given and actual and given != actual and not self.ignore_checksums:
                    raise Refused(
                        400,
                        f'Provided {title} "{given}" doesn\'t match calculated {title} "{actual}".',
                    )
        except Refused:
            content.discard()
            raise
        content.close()
        self._generation = max(self._generation + 1, int(time.time() * 1e6))
        moment = now()
        resource = {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{self._generation}",
            "name": name,
            "bucket": bucket,
            "generation": str(self._generation),
            "metageneration": "1",
            "contentType": metadata.get("contentType", "application/octet-stream"),
            "storageClass": "STANDARD",
            "size": str(content.size),
            "crc32c": content.crc_text,
            "etag": base64.b64encode(str(self._generation).encode()).decode(),
            "timeCreated": moment,
            "updated": moment,
            "timeStorageClassUpdated": moment,
        }
        if md5 and "componentCount" not in metadata:
            resource["md5Hash"] = md5
        for key in ("metadata", "cacheControl", "contentEncoding", "componentCount"):
            if key in metadata:
                resource[key] = metadata[key]
        place[name] = StoredObject(resource, content.path)
        if old is not None:
            old.path.unlink(missing_ok=True)
        return place[name]

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        found = self.bucket(bucket).objects.get(name)
        if found is not None and not self.ignore_delete_preconditions:
            self.check(found, query)
        self.get(bucket, name, query.get("generation"))
        check_holds(bucket, name, found)
        self.bucket(bucket).objects.pop(name).path.unlink(missing_ok=True)

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        """A page: objects, or prefixes up to a delimiter, in the order of their UTF-8 bytes."""
        objects = self.bucket(bucket).objects
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, end = query.get("startOffset", ""), query.get("endOffset", "")
        limit = min(int(query.get("maxResults", 1000)), 1000)
        after = base64.b64decode(query["pageToken"]).decode() if query.get("pageToken") else ""
        items: list[dict[str, Any]] = []
        prefixes: list[str] = []
        last = ""
        for name in sorted(objects, key=str.encode):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            entry = name if cut < 0 else name[: cut + len(delimiter)]
            if (after and entry <= after) or (prefixes and entry == prefixes[-1]):
                continue
            if len(items) + len(prefixes) == limit:
                token = base64.b64encode(last.encode()).decode()
                return _page(items, prefixes, token)
            last = entry
            if cut < 0:
                items.append(objects[name].resource)
            else:
                prefixes.append(entry)
        return _page(items, prefixes, None)


def _page(items: list[dict[str, Any]], prefixes: list[str], token: str | None) -> dict[str, Any]:
    page: dict[str, Any] = {"kind": "storage#objects"}
    if items:
        page["items"] = items
    if prefixes:
        page["prefixes"] = prefixes
    if token:
        page["nextPageToken"] = token
    return page


def check_holds(bucket: str, name: str, found: StoredObject | None) -> None:
    """Raises 403 when a hold keeps the object from being replaced or deleted."""
    for key, title in HOLDS.items():
        if found is not None and found.resource.get(key):
            raise Refused(
                403,
                f"Object '{bucket}/{name}' is under active {title} hold and cannot be deleted, "
                "overwritten or archived until hold is removed.",
                "objectUnderActiveHold",
            )
