"""How an attempt is brought to its end: what the coordinator and ``pannier recover`` share.

In: the exact bytes that ``.metadata`` is to get, or why it can't. Out: the decision that stands,
and storage as it says. Knows nothing of ranks' processes; whoever runs it, and however often, the
outcome is the same. Async; StorageError says that a step's outcome may be unknown: run it again.
"""

import asyncio
from collections.abc import Iterable

from pannier.attempts.decisions import new_decision
from pannier.attempts.delete_attempt import remove_attempt
from pannier.attempts.metadata_refs import referenced_files
from pannier.attempts.metadata_swap import check_free, find_newer, install, publish_candidate
from pannier.storage import Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError


class SupersededError(PannierError):
    """An older attempt never replaces a newer one, and an older incarnation begins no save."""

    kind = save_pb2.FAILURE_KIND_DISAGREEMENT


async def prepare_commit(
    store: Store,
    *,
    save: save_pb2.SaveId,
    attempt: object_names.Attempt,
    plan_id: str,
    metadata: bytes,
    receipts: Iterable[records_pb2.Receipt] = (),
    host: str,
    overwrite: "save_pb2.Overwrite" = save_pb2.OVERWRITE_UNSPECIFIED,
) -> records_pb2.Decision:
    """Publishes the candidate; returns the COMMIT to be put to storage.

    Raises:
        SupersededError: ``.metadata`` is a newer attempt's.
        OccupiedError: it is one that ``overwrite`` doesn't let the save replace.
        IntegrityError: another's candidate stands there, and needs other files.
        HeldError: ``.metadata`` can't be replaced, so that a COMMIT could not be carried out.
    """
    standing = await publish_candidate(store, attempt.name, metadata)
    if standing != metadata:
        # Other versions of Python or torch write other bytes for the same.
        await asyncio.to_thread(_check_same, store, attempt, standing, metadata)
    newer = await find_newer(store, attempt)
    if newer is not None:
        raise SupersededError(f"a newer save, {newer.name}, was committed to {store.url} meanwhile")
    await check_free(store, save=save, attempt=attempt.name, overwrite=overwrite)
    return new_decision(
        records_pb2.OUTCOME_COMMIT,
        save=save,
        attempt=attempt,
        host=host,
        plan_id=plan_id,
        metadata=standing,
        metrics=_metrics(receipts),
        overwrite=overwrite,
    )


def _metrics(receipts: Iterable[records_pb2.Receipt]) -> dict[str, float]:
    """What the ranks have measured; of the lowest rank that tells of it."""
    found: dict[str, float] = {}
    for receipt in sorted(receipts, key=lambda receipt: -receipt.rank):
        found.update(receipt.metrics)
    return found


def _check_same(
    store: Store, attempt: object_names.Attempt, standing: bytes, metadata: bytes
) -> None:
    where = f"{store.url}/{object_names.metadata_candidate(attempt.name)}"
    if referenced_files(standing, where) != referenced_files(metadata, "the metadata made here"):
        raise IntegrityError(
            f"{where} doesn't need the files that the manifest and the receipts tell of: it is "
            "damaged"
        )


async def carry_out(store: Store, decision: records_pb2.Decision) -> None:
    """Makes storage as a standing decision says: installs ``.metadata``, or removes the attempt.

    Raises IntegrityError, RemovedError, OccupiedError as :func:`install`.
    """
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        await install(store, decision)
    else:
        await remove_attempt(store, decision.attempt)
