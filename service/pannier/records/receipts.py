"""The receipts of an attempt that are in storage, whoever wrote them and died since.

In: a checkpoint's store and an attempt. Out: the receipts that are there. Async.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from google.protobuf.message import DecodeError

from pannier.storage import NotFoundError, Store
from pannier.v1 import records_pb2
from pannier.wire import identity

_log = logging.getLogger(__name__)

_PARALLEL: Final = 16
"""Receipts read at the same time."""


async def find_receipts(
    store: Store, attempt: str, ranks: Collection[int]
) -> list[records_pb2.Receipt]:
    """The receipts of these ranks that are in storage. Raises StorageError."""
    there = {info.key for info in await store.list(identity.receipts_prefix(attempt))}
    wanted = [rank for rank in ranks if identity.receipt(attempt, rank) in there]
    limit = asyncio.Semaphore(_PARALLEL)

    async def read(rank: int) -> records_pb2.Receipt | None:
        key = identity.receipt(attempt, rank)
        async with limit:
            try:
                receipt = records_pb2.Receipt.FromString(await store.read(key))
            except (NotFoundError, DecodeError) as error:
                # Its sidecar still has it, and tells.
                _log.warning("%s/%s is not readable: %s", store.url, key, error)
                return None
        return receipt if receipt.rank == rank else None

    found = await asyncio.gather(*(read(rank) for rank in wanted))
    return [receipt for receipt in found if receipt is not None]
