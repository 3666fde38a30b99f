"""Which readers are reading which attempt, and the store's time, by which their leases expire.

In: the objects below ``.pannier/leases/``. Out: leases and when they expire. Readers write and renew them
(``pannier.client.loading.read_lease``); services only read them, and remove expired ones. Ages are always
taken from one clock, the store's. Async.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf import json_format

from pannier.common import timeouts
from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.records import MOST_NOTE

LIFE: Final = 3
"""A lease is valid for this many times its renewal period."""


@dataclass(frozen=True)
class Lease:
    """A reader's claim on the files of an attempt."""

    info: ObjectInfo
    attempt: str
    host: str
    pid: int
    expires: float
    """By the store's clock; Unix time, seconds."""

    @property
    def holder(self) -> str:
        """Human-readable."""
        return f"process {self.pid} on {self.host}" if self.host else "a reader"


async def find_leases(store: Store) -> list[Lease]:
    """All leases of a checkpoint, expired ones included. Raises StorageError."""
    return await read_leases(store, await store.list(object_names.leases_prefix()))


async def read_leases(store: Store, objects: Iterable[ObjectInfo]) -> list[Lease]:
    """The leases among ``objects``, without those that were removed since the listing."""
    found = []
    for info in objects:
        attempt = object_names.leased_attempt(info.key)
        if not (attempt and info.key.startswith(object_names.leases_prefix())):
            continue
        lease = records_pb2.Lease()
        try:
            json_format.Parse(
                await store.read_whole(info.key, MOST_NOTE, info), lease, ignore_unknown_fields=True
            )
        except NotFoundError:
            continue
        except (json_format.ParseError, UnicodeDecodeError, IntegrityError):
            lease.Clear()
        renew_s = lease.renew_s if lease.renew_s > 0 else timeouts.LEASE_UNKNOWN_RENEW_S
        expires = info.modified + LIFE * min(renew_s, timeouts.LEASE_LONGEST_RENEW_S)
        found.append(Lease(info, attempt, lease.host, lease.pid, expires))
    return found


async def store_time(store: Store) -> float:
    """The store's time (Unix, seconds), from a new object that is removed. Raises StorageError."""
    token = uuid.uuid4().hex
    key = object_names.clock(token)
    try:
        return (await store.create(key, token.encode())).modified
    finally:
        await store.delete(key)
