"""Who is reading which attempt: leases that readers take, renew and remove, or let expire.

In: the objects below ``.pannier/leases/`` and the store's time. Out: which of them live. Readers
write them (``pannier.client.loading.read_lease``); services only look, and remove what has expired. Async.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf import json_format

from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2
from pannier.wire import object_names

LIFE: Final = 3
"""A lease lives this many times the pause between its renewals."""
_UNKNOWN_RENEW_S: Final = 60.0
"""For one that can't be read: it may be half written."""
_LONGEST_RENEW_S: Final = 3600.0
"""Nobody may claim files for ever."""


@dataclass(frozen=True)
class Lease:
    """One reader's word that it is at an attempt's files."""

    info: ObjectInfo
    attempt: str
    host: str
    pid: int
    expires: float
    """By the store's clock; Unix time, seconds."""

    @property
    def holder(self) -> str:
        """For people."""
        return f"process {self.pid} on {self.host}" if self.host else "a reader"


async def find_leases(store: Store) -> list[Lease]:
    """All leases of a checkpoint, living or not. Raises StorageError."""
    return await read_leases(store, await store.list(object_names.leases_prefix()))


async def read_leases(store: Store, objects: Iterable[ObjectInfo]) -> list[Lease]:
    """The leases among ``objects``; one that is gone by now is left out."""
    found = []
    for info in objects:
        attempt = object_names.leased_attempt(info.key)
        if not (attempt and info.key.startswith(object_names.leases_prefix())):
            continue
        told = records_pb2.Lease()
        try:
            json_format.Parse(await store.read(info.key), told, ignore_unknown_fields=True)
        except NotFoundError:
            continue
        except (json_format.ParseError, UnicodeDecodeError):
            told.Clear()
        renew_s = told.renew_s if told.renew_s > 0 else _UNKNOWN_RENEW_S
        expires = info.modified + LIFE * min(renew_s, _LONGEST_RENEW_S)
        found.append(Lease(info, attempt, told.host, told.pid, expires))
    return found
