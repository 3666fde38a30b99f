"""The plan manifest as an object: bytes whose hash is the plan id.

In: a checkpoint's store and a manifest, or an attempt. Out: the manifest that stands there,
ours or another coordinator's that was first. What follows from its plan is the
coordinator's business, whose class extends the one here. Async.
"""

import hashlib
from typing import TypeVar

from google.protobuf.message import DecodeError

from pannier.daemon.crashing import point
from pannier.storage import ConflictError, DeniedError, NotFoundError, StorageError, Store
from pannier.v1 import records_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError

_Manifest = TypeVar("_Manifest", bound="ManifestRecord")


class ManifestRecord:
    """A plan manifest and its id. Immutable."""

    def __init__(self, message: records_pb2.PlanManifest, data: bytes) -> None:
        self.message = message
        self.data = data
        self.plan_id = hashlib.sha256(data).hexdigest()
        """SHA-256, hex, of the bytes in storage."""

    @classmethod
    def parse(cls: type[_Manifest], data: bytes) -> _Manifest:
        """From storage. Raises IntegrityError when it is no manifest."""
        try:
            return cls(records_pb2.PlanManifest.FromString(data), data)
        except DecodeError as error:
            raise IntegrityError(
                f"a plan manifest of {len(data)} bytes is malformed: {error}"
            ) from error

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, ascending."""
        return [member.rank for member in self.message.members]


async def publish(store: Store, manifest: _Manifest) -> _Manifest:
    """Writes the manifest beside the checkpoint; returns the one that stands there.

    That is another coordinator's when it was first.

    Raises:
        DeniedError, NotFoundError: nothing was written, and none stands there.
        StorageError, IntegrityError: whether one stands there isn't known.
    """
    key = identity.manifest(manifest.message.attempt)
    point("coordinator.manifest.before")
    try:
        await store.create(key, manifest.data)
    except ConflictError:
        try:
            return type(manifest).parse(await store.read(key))
        except (DeniedError, NotFoundError) as error:
            raise StorageError(
                f"another coordinator's manifest stands there, but can't be read: {error}"
            ) from error
    point("coordinator.manifest.after")
    return manifest


async def read_manifest(store: Store, attempt: str, kind: type[_Manifest]) -> _Manifest | None:
    """The manifest of an attempt; None when it has none. Raises StorageError, IntegrityError."""
    key = identity.manifest(attempt)
    try:
        found = kind.parse(await store.read(key))
    except NotFoundError:
        return None
    if found.message.attempt != attempt:
        raise IntegrityError(f"{store.url}/{key} is of attempt {found.message.attempt!r}")
    return found


async def exists(store: Store, attempt: str) -> bool:
    """Whether the attempt has a manifest. Raises StorageError."""
    return await store.stat(identity.manifest(attempt)) is not None
