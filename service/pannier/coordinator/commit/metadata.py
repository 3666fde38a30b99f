"""The bytes of ``.metadata``.

In: a manifest and the receipts of all its ranks. Out: the pickle that torch's readers take.
:mod:`pannier.attempts` installs it.
"""

import logging
from collections.abc import Iterable, Mapping

from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.commit.metadata_template import MetadataTemplate
from pannier.coordinator.commit.receipt_check import (
    check_external_metadata,
    check_external_receipt,
    check_receipt,
    complete_metadata,
    receipt_places,
)
from pannier.coordinator.planning.dtypes import torch_for
from pannier.coordinator.planning.plan_cache import AgreedPlan
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire.errors import IntegrityError, InvalidRequestError

_log = logging.getLogger(__name__)


def pickle_metadata(message: plan_pb2.GlobalMetadata, *, checkpoint_id: str, attempt: str) -> bytes:
    """Bytes of ``.metadata`` as torch's readers take them, made with torch. CPU-bound; any thread."""
    with torch_for(f"the .metadata of {checkpoint_id}"):
        from torch.distributed.checkpoint.metadata import StorageMeta

        from pannier.coordinator.commit.metadata_pickler import dump_metadata
        from pannier.wire.plan_codec import build_metadata
    storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=attempt)
    return dump_metadata(build_metadata(message, storage_meta=storage_meta))


def build_candidate(
    manifest: Manifest, receipts: Mapping[int, records_pb2.Receipt], *, checkpoint_id: str
) -> bytes:
    """Bytes of ``.metadata`` for checked receipts of all ranks. CPU-bound; any thread."""
    attempt = manifest.header.attempt
    if manifest.body is not None and (template := manifest.plan.derive(_make_template)) is not None:
        return template.render(checkpoint_id, attempt, receipt_places(manifest, receipts))
    return pickle_metadata(
        complete_metadata(manifest, receipts), checkpoint_id=checkpoint_id, attempt=attempt
    )


def _make_template(plan: AgreedPlan) -> MetadataTemplate | None:
    """The template of all saves by this plan; None for a body unlike those that this version writes."""
    try:
        return MetadataTemplate(plan)
    except (IndexError, KeyError, ValueError) as error:
        _log.warning("the plan %s has no template of metadata: %s", plan.plan_id, error)
        return None


def build_checked(manifest: bytes, receipts: Iterable[records_pb2.Receipt]) -> bytes:
    """Bytes of ``.metadata`` from storage alone.

    Raises IntegrityError when a record is malformed, or a receipt doesn't fit.
    """
    try:
        return _build(manifest, receipts)
    except InvalidRequestError as error:
        raise IntegrityError(f"the attempt's records are malformed: {error}") from error


def _build(manifest: bytes, receipts: Iterable[records_pb2.Receipt]) -> bytes:
    plan = Manifest.parse(manifest)
    by_rank = {receipt.rank: receipt for receipt in receipts}
    for receipt in by_rank.values():
        if plan.header.external:
            check_external_receipt(plan.header.attempt, receipt)
        else:
            check_receipt(plan, receipt)
    if plan.header.external:
        check_external_metadata(plan.message.metadata, by_rank)
    if missing := [rank for rank in plan.ranks if rank not in by_rank]:
        raise IntegrityError(f"the receipts of ranks {missing} are missing")
    return build_candidate(plan, by_rank, checkpoint_id=plan.header.checkpoint_id)
