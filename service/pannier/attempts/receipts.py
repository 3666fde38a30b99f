"""The receipts of an attempt in storage, which outlive the sidecars that wrote them.

In: a checkpoint's store and an attempt. Out: its receipts, and ranks whose files are missing. Async.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Final

from pannier.storage import NotFoundError, Store
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.records import parse_receipt

_log = logging.getLogger(__name__)

_PARALLEL: Final = 16
"""Receipts read at the same time."""


async def find_lost(
    store: Store, attempt: str, receipts: Iterable[records_pb2.Receipt]
) -> list[int]:
    """Ranks whose receipt, or one of its files, is no longer in storage. Raises StorageError.

    Objects that the listing lacks are requested by name: a listing may be stale (NFS).
    """
    there = {
        info.key: info.size
        for prefix in (object_names.receipts_prefix(attempt), object_names.data_prefix(attempt))
        for info in await store.list(prefix)
    }
    limit = asyncio.Semaphore(_PARALLEL)

    async def is_whole(key: str, size: int | None = None) -> bool:
        found = there.get(key)
        if found is None or size not in (None, found):
            async with limit:
                info = await store.stat(key)
            found = info.size if info is not None else None
        return found is not None and size in (None, found)

    async def is_lost(receipt: records_pb2.Receipt) -> bool:
        whole = await asyncio.gather(
            is_whole(object_names.receipt(attempt, receipt.rank)),
            *(is_whole(file.name, file.size) for file in receipt.files),
        )
        return not all(whole)

    counted = list(receipts)
    lost = await asyncio.gather(*(is_lost(receipt) for receipt in counted))
    return [receipt.rank for receipt, missing in zip(counted, lost, strict=True) if missing]


async def find_receipts(
    store: Store, attempt: str, ranks: Collection[int], *, unlisted: bool = False
) -> list[records_pb2.Receipt]:
    """The receipts of these ranks that are in storage. Raises StorageError.

    Args:
        unlisted: requests all by name, without a listing, which may be stale (NFS).
    """
    listed = [] if unlisted else await store.list(object_names.receipts_prefix(attempt))
    there = {info.key for info in listed}
    wanted = [rank for rank in ranks if unlisted or object_names.receipt(attempt, rank) in there]
    limit = asyncio.Semaphore(_PARALLEL)

    async def read(rank: int) -> records_pb2.Receipt | None:
        key = object_names.receipt(attempt, rank)
        async with limit:
            try:
                data = await store.read(key)
                return parse_receipt(data, attempt, rank, f"{store.url}/{key}")
            except (NotFoundError, IntegrityError) as error:
                if isinstance(error, IntegrityError) or key in there:
                    # The rank's sidecar still has it and reports it.
                    _log.warning("a receipt can't be read: %s", error)
                return None

    found = await asyncio.gather(*(read(rank) for rank in wanted))
    return [receipt for receipt in found if receipt is not None]
