"""The end of an attempt, as the coordinator and ``pannier recover`` share it.

In: the exact bytes of the new ``.metadata``, or a decision. Out: a COMMIT to decide; storage as a decision
requires. Needs none of the ranks' processes; idempotent, also when several processes run it. Async; after a
StorageError the outcome of a step may be unknown: run it again.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from pannier.attempts import extra_files
from pannier.attempts.decisions import new_decision, read_decisions
from pannier.attempts.delete_attempt import remove_attempt
from pannier.attempts.metadata_refs import referenced_files
from pannier.attempts.metadata_swap import (
    check_free,
    find_newer,
    install,
    publish_candidate,
)
from pannier.storage import Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError
from pannier.wire.failures import shorten

_log = logging.getLogger(__name__)

_SHOWN: Final = 4


class SupersededError(PannierError):
    """A newer attempt is committed, or a newer incarnation has begun to save."""

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
    """Publishes the candidate of ``.metadata``; returns the COMMIT to decide.

    Raises:
        ExtraFilesError: the extra files in the receipts can't be in this checkpoint.
        SupersededError: ``.metadata`` belongs to a newer attempt.
        OccupiedError: ``overwrite`` doesn't allow replacing the existing ``.metadata``.
        IntegrityError: another process published a candidate that refers to other files.
        HeldError: ``.metadata``, or a name of an extra file, is under a hold, so that a COMMIT could not
            be carried out.
    """
    receipts = list(receipts)
    extra = extra_files.collect(receipts)
    standing = await publish_candidate(store, attempt.name, metadata)
    if standing != metadata:
        # Other versions of Python or torch pickle the same metadata to other bytes.
        await asyncio.to_thread(_check_same, store, attempt, standing, metadata)
    await check_commit(store, save=save, attempt=attempt, overwrite=overwrite, extra=extra)
    return new_decision(
        records_pb2.OUTCOME_COMMIT,
        save=save,
        attempt=attempt,
        host=host,
        plan_id=plan_id,
        metadata=standing,
        metrics=_metrics(receipts),
        overwrite=overwrite,
        extra_files=extra,
    )


async def check_commit(
    store: Store,
    *,
    save: save_pb2.SaveId,
    attempt: object_names.Attempt,
    overwrite: "save_pb2.Overwrite",
    extra: Iterable[records_pb2.ExtraFile],
) -> None:
    """Raises the error that forbids the COMMIT of an attempt, as :func:`prepare_commit`; writes nothing."""
    newer = await find_newer(store, attempt)
    if newer is not None:
        raise SupersededError(f"a newer save, {newer.name}, was committed to {store.url} meanwhile")
    await check_free(store, save=save, attempt=attempt.name, overwrite=overwrite)
    if there := await extra_files.check_writable(store, extra):
        records = await store.list(object_names.attempts_prefix())
        known = (await read_decisions(store, records)).known.values()
        if foreign := await extra_files.find_foreign(store, there, known):
            _log.warning(
                "%s: no save has written %s as it is there now: the extra file of that name replaces it",
                store.url,
                shorten(sorted(foreign), _SHOWN),
            )


def _metrics(receipts: Iterable[records_pb2.Receipt]) -> dict[str, float]:
    """The ranks' metrics; of a metric that several ranks report, the lowest rank's."""
    found: dict[str, float] = {}
    for receipt in sorted(receipts, key=lambda receipt: -receipt.rank):
        found.update(receipt.metrics)
    return found


def _check_same(
    store: Store, attempt: object_names.Attempt, standing: bytes, metadata: bytes
) -> None:
    where = f"{store.url}/{object_names.metadata_candidate(attempt.name)}"
    if referenced_files(standing, where) != referenced_files(metadata, "the metadata built here"):
        raise IntegrityError(
            f"{where} doesn't refer to the files of the manifest and the receipts: it is damaged"
        )


async def carry_out(store: Store, decision: records_pb2.Decision) -> None:
    """Carries out a stored decision: installs ``.metadata`` and the copies of extra files, or removes the
    attempt's objects.

    Raises IntegrityError, RemovedError, OccupiedError as :func:`install`.
    """
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        await install(store, decision)
    else:
        await remove_attempt(store, decision.attempt)
