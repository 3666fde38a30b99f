"""The receipts of an attempt in storage, which outlive the sidecars that wrote them.

In: a checkpoint's store and an attempt. Out: its receipts, and ranks whose files are missing. Async.
"""

import logging
from collections.abc import Collection, Iterable, Mapping

from pannier.storage import NotFoundError, StorageError, Store
from pannier.storage.many import for_each
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.records import MOST_RECORD, parse_receipt

_log = logging.getLogger(__name__)


class LostError(StorageError):
    """What sidecars have written isn't in storage. In a directory it may show a little later (NFS)."""


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
    unlisted: list[tuple[int, str, int | None]] = []
    for receipt in receipts:
        record = (object_names.receipt(attempt, receipt.rank), None)
        for key, size in (record, *((file.name, file.size) for file in receipt.files)):
            if key not in there or size not in (None, there[key]):
                unlisted.append((receipt.rank, key, size))

    async def is_lost(item: tuple[int, str, int | None]) -> bool:
        _, key, size = item
        info = await store.stat(key)
        return info is None or size not in (None, info.size)

    lost = await for_each(is_lost, unlisted)
    ranks = (rank for (rank, _, _), missing in zip(unlisted, lost, strict=True) if missing)
    return list(dict.fromkeys(ranks))


async def check_shared_directory(
    store: Store, attempt: str, hosts: Mapping[int, str], *, here: str
) -> None:
    """Checks that the ranks' hosts have written to the directory that this host, ``here``, sees.

    Args:
        hosts: by rank, of ranks whose receipts were written.

    Raises:
        LostError: the directory lacks the receipt of a host's lowest rank; names the hosts.
        StorageError: it can't be read.
    """
    if not store.host_local:
        return
    lowest: dict[str, int] = {}
    for rank in sorted(hosts):
        lowest.setdefault(hosts[rank], rank)

    async def is_elsewhere(rank: int) -> bool:
        return await store.stat(object_names.receipt(attempt, rank)) is None

    elsewhere = await for_each(is_elsewhere, lowest.values())
    if names := [host for host, missing in zip(lowest, elsewhere, strict=True) if missing]:
        raise LostError(
            f"{store.url} isn't one directory for all hosts: what {', '.join(names[:5])} wrote there isn't "
            f"seen on {here}; save to a bucket or to a file system that all hosts share"
        )


async def find_receipts(
    store: Store, attempt: str, ranks: Collection[int], *, unlisted: bool = False
) -> list[records_pb2.Receipt]:
    """The receipts of these ranks that are in storage. Raises StorageError.

    Args:
        unlisted: requests all by name, without a listing, which may be stale (NFS).
    """
    listed = [] if unlisted else await store.list(object_names.receipts_prefix(attempt))
    there = {info.key: info for info in listed}
    wanted = [rank for rank in ranks if unlisted or object_names.receipt(attempt, rank) in there]

    async def read(rank: int) -> records_pb2.Receipt | None:
        key = object_names.receipt(attempt, rank)
        try:
            data = await store.read_whole(key, MOST_RECORD, there.get(key))
            return parse_receipt(data, attempt, rank, f"{store.url}/{key}")
        except (NotFoundError, IntegrityError) as error:
            if isinstance(error, IntegrityError) or key in there:
                # The rank's sidecar still has it and reports it.
                _log.warning("a receipt can't be read: %s", error)
            return None

    found = await for_each(read, wanted)
    return [receipt for receipt in found if receipt is not None]
