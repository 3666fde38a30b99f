"""The plan manifest: an attempt's global plan as an object beside the checkpoint.

In: a checkpoint's store and a manifest, or an attempt. Out: the stored manifest, this coordinator's or one
that another coordinator stored first. The coordinator extends the class here by what it derives from the
plan. Async.

The common part of all attempts by one plan is serialised once, as the body of their manifests. The plan id
is its hash, and so the same for all of them.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final, TypeVar

import crc32c
from google.protobuf.message import DecodeError

from pannier.common.fault_points import point
from pannier.storage import ConflictError, DeniedError, NotFoundError, StorageError, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.records import MOST_MANIFEST

_Manifest = TypeVar("_Manifest", bound="ManifestRecord")

# Wire format of the two fields of the seal, fixed64 body_size = 10 and fixed32 crc32c = 11.
_SIZE: Final = "<BQ"
_SIZE_TAG: Final = 10 << 3 | 1
_CHECKSUM: Final = "<BI"
_CHECKSUM_TAG: Final = 11 << 3 | 5
_SEAL: Final = struct.calcsize(_SIZE) + struct.calcsize(_CHECKSUM)


class ManifestRecord:
    """A plan manifest and its id. Immutable.

    Args:
        header: the attempt's own part, without a separate body.
        body: the part that all attempts by the plan share; None: the manifest is one message.
    """

    def __init__(
        self, header: records_pb2.PlanManifest, data: bytes, plan_id: str, body: bytes | None
    ) -> None:
        self.header = header
        """Members, files, identity; the items are in ``message``."""
        self.data = data
        self.plan_id = plan_id
        """SHA-256, hex."""
        self.body = body

    @classmethod
    def parse(cls: type[_Manifest], data: bytes) -> _Manifest:
        """From storage. Raises IntegrityError when it is malformed."""
        try:
            header, body = _split(data)
        except DecodeError as error:
            raise IntegrityError(
                f"a plan manifest of {len(data)} bytes is malformed: {error}"
            ) from error
        if body is None:
            return cls(header, data, hashlib.sha256(data).hexdigest(), None)
        members = [(member.rank, member.digest) for member in header.members]
        prefix = object_names.data_prefix(header.attempt)
        names = [name.removeprefix(prefix) for name in header.metadata.files]
        return cls(header, data, plan_id_of(members, names, body), body)

    @cached_property
    def message(self) -> records_pb2.PlanManifest:
        """The whole manifest. Raises IntegrityError."""
        if self.body is None:
            return self.header
        try:
            return records_pb2.PlanManifest.FromString(self.data)
        except DecodeError as error:
            raise IntegrityError(
                f"the plan manifest of attempt {self.header.attempt} is malformed: {error}"
            ) from error

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, ascending."""
        return [member.rank for member in self.header.members]


def plan_id_of(members: Iterable[tuple[int, str]], names: Sequence[str], body: bytes) -> str:
    """Id of a plan, hex.

    Args:
        members: ranks and digests of their local plans.
        names: of the data files, without the attempt.
    """
    words = [f"{rank} {digest}" for rank, digest in members]
    lines = [f"{len(words)} {len(names)}", *words, *names, ""]
    plan = hashlib.sha256("\n".join(lines).encode())
    plan.update(body)
    return plan.hexdigest()


def join(header: records_pb2.PlanManifest, body: bytes) -> bytes:
    """Content of the object of a manifest with a body."""
    start = header.SerializeToString(deterministic=True)
    size = struct.pack(_SIZE, _SIZE_TAG, len(body))
    checksum = crc32c.crc32c(size, crc32c.crc32c(body, crc32c.crc32c(start)))
    return b"".join((start, body, size, struct.pack(_CHECKSUM, _CHECKSUM_TAG, checksum)))


def _split(data: bytes) -> tuple[records_pb2.PlanManifest, bytes | None]:
    """Header and body; without a valid seal, the whole message and None. Raises DecodeError."""
    end = len(data) - _SEAL
    if end >= 0:
        tag, size = struct.unpack_from(_SIZE, data, end)
        seal, checksum = struct.unpack_from(_CHECKSUM, data, end + struct.calcsize(_SIZE))
        sealed = (tag, seal) == (_SIZE_TAG, _CHECKSUM_TAG) and size <= end
        if sealed and crc32c.crc32c(memoryview(data)[: -struct.calcsize(_CHECKSUM)]) == checksum:
            start = end - size
            return records_pb2.PlanManifest.FromString(data[:start]), data[start:end]
    message = records_pb2.PlanManifest.FromString(data)
    if message.body_size or message.crc32c:
        raise DecodeError("its checksum is wrong")
    return message, None


async def publish(store: Store, manifest: _Manifest) -> _Manifest:
    """Stores the manifest unless the attempt has one; returns the stored one.

    Raises:
        DeniedError, NotFoundError: nothing was written, and there is no manifest.
        StorageError: it is unknown whether there is a manifest.
        IntegrityError: the stored manifest is damaged, or another save's.
    """
    key = object_names.manifest(manifest.header.attempt)
    point("coordinator.manifest.before")
    try:
        await store.create(key, manifest.data)
    except ConflictError:
        try:
            return await _read(store, manifest.header.attempt, type(manifest), manifest.header.save)
        except (DeniedError, NotFoundError) as error:
            raise StorageError(
                f"another coordinator has stored a manifest that can't be read: {error}"
            ) from error
    point("coordinator.manifest.after")
    return manifest


async def read_manifest(
    store: Store, attempt: str, kind: type[_Manifest], save: save_pb2.SaveId | None = None
) -> _Manifest | None:
    """The manifest of an attempt; None when it has none.

    Args:
        save: the expected save, when the caller knows its job, too.

    Raises StorageError, and IntegrityError when it is damaged, or another save's.
    """
    own = save if save is not None else object_names.Attempt.parse(attempt).save
    try:
        return await _read(store, attempt, kind, own)
    except NotFoundError:
        return None


async def _read(
    store: Store, attempt: str, kind: type[_Manifest], save: save_pb2.SaveId
) -> _Manifest:
    key = object_names.manifest(attempt)
    found = kind.parse(await store.read_whole(key, MOST_MANIFEST))
    if found.header.attempt != attempt:
        raise IntegrityError(f"{store.url}/{key} is of attempt {found.header.attempt!r}")
    object_names.check_record(f"{store.url}/{key}", attempt, found.header.save, save)
    return found


async def exists(store: Store, attempt: str) -> bool:
    """Whether the attempt has a manifest. Raises StorageError."""
    return await store.stat(object_names.manifest(attempt)) is not None
