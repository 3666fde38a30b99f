"""Numbers of incarnations: which life of a job under one root is newer.

In: a root's store, a job and an incarnation's id. Out: its number, the same for whoever
asks, from a create-if-absent object per number. Async.
"""

import asyncio
import time
from typing import Final

from google.protobuf import json_format

from pannier.daemon.crashing import point
from pannier.storage import ConflictError, Store
from pannier.v1 import records_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError

_PARALLEL: Final = 16
"""Records read at the same time."""
_DIGITS: Final = 12
"""Of a record's name; whatever has more or fewer isn't ours."""


async def number_of(root: Store, job: str, incarnation: str) -> int:
    """The incarnation's number under this root; the next free one when it has none yet.

    Numbers have no gaps, so two who want one at the same time meet at the same object:
    the loser reads it, and takes the next or finds that it is its own.

    Raises StorageError, IntegrityError.
    """
    prefix = identity.incarnations_prefix()
    keys = [info.key for info in await root.list(prefix)]
    numbers = [int(key.removeprefix(prefix)) for key in keys if _is_number(key, prefix)]
    limit = asyncio.Semaphore(_PARALLEL)

    async def read(number: int) -> records_pb2.IncarnationRecord:
        async with limit:
            return await _read(root, number)

    # The newest first: a coordinator that was started again looks for a recent one.
    for record in await asyncio.gather(*(read(number) for number in reversed(numbers))):
        if (record.job, record.incarnation) == (job, incarnation):
            return record.number
    number = max(numbers, default=0) + 1
    while True:
        record = records_pb2.IncarnationRecord(
            number=number, job=job, incarnation=incarnation, created_at=time.time()
        )
        point("coordinator.incarnation.before")
        try:
            await root.create(_key(number), json_format.MessageToJson(record).encode())
        except ConflictError:
            winner = await _read(root, number)
            if (winner.job, winner.incarnation) == (job, incarnation):
                return number
            number += 1
        else:
            point("coordinator.incarnation.after")
            return number


def _key(number: int) -> str:
    return f"{identity.incarnations_prefix()}{number:0{_DIGITS}d}"


def _is_number(key: str, prefix: str) -> bool:
    name = key.removeprefix(prefix)
    return name.isascii() and name.isdigit() and len(name) == _DIGITS


async def _read(root: Store, number: int) -> records_pb2.IncarnationRecord:
    data = await root.read(_key(number))
    try:
        record = json_format.Parse(
            data, records_pb2.IncarnationRecord(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise IntegrityError(
            f"{root.url}/{_key(number)} is no incarnation record ({error}); it orders the attempts "
            "below this root: restore it, or save below another root"
        ) from error
    record.number = number
    return record
