"""Checks receipts against the manifest: whether each rank has written what was planned.

In: a manifest and receipts. Out: the complete metadata, or an error that names the rank
and what is wrong. Pure; any thread.
"""

from collections.abc import Mapping

from pannier.coordinator.commit.manifest import Manifest
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError
from pannier.wire.plan_columns import column_length, decode_column, encode_column


def check_receipt(manifest: Manifest, receipt: records_pb2.Receipt) -> None:
    """Raises IntegrityError unless the receipt fits the plan.

    It must name the same plan, the planned files in their planned sizes, a place for each item whose
    size varies and, if the rank has any, the file of its extra files, which no plan has.
    """
    _check_identity(receipt, manifest.header.attempt, manifest.plan_id)
    if receipt.part and receipt.part != manifest.plan.part(receipt.rank):
        raise _wrong(
            receipt,
            f"it writes part {receipt.part[:12]}, the plan has {manifest.plan.part(receipt.rank)[:12]}",
        )
    share = manifest.share(receipt.rank)
    prefix = object_names.data_prefix(manifest.header.attempt)
    sizes = _sizes(receipt)
    _check_extra(receipt)
    own = sizes.keys() - {object_names.extra_file(receipt.attempt, receipt.rank)}
    if own != {prefix + name for name in share.files}:
        planned = sorted(prefix + name for name in share.files)
        raise _wrong(receipt, f"it names files {sorted(sizes)}, the plan has {planned}")
    for name, size in share.files.items():
        if size and size != sizes[prefix + name]:
            raise _wrong(
                receipt,
                f"{prefix + name} has {sizes[prefix + name]} bytes, the plan says {size}",
            )
    placed = {item.position: item for item in receipt.varying}
    if len(placed) != len(receipt.varying) or placed.keys() != share.varying.keys():
        raise _wrong(
            receipt,
            f"it places items {sorted(placed)}, those without a planned place are "
            f"{sorted(share.varying)}",
        )
    for position, item in placed.items():
        planned_file = prefix + share.varying[position][1]
        if item.file != planned_file:
            raise _wrong(receipt, f"item {position} is in {item.file}, not {planned_file}")
        if not item.length or item.offset + item.length > sizes[item.file]:
            raise _wrong(
                receipt,
                f"item {position} takes bytes {item.offset} to {item.offset + item.length} of "
                f"{item.file}, which has {sizes[item.file]}",
            )


def check_external_receipt(attempt: str, receipt: records_pb2.Receipt) -> None:
    """Raises IntegrityError unless names and attempt fit: no more of torch's plan can be checked."""
    _check_identity(receipt, attempt, "")
    for name in _sizes(receipt):
        try:
            object_names.check_data_file(name, attempt, receipt.rank)
        except InvalidRequestError as error:
            raise _wrong(receipt, str(error)) from error
    _check_extra(receipt)
    if receipt.varying:
        raise _wrong(receipt, "it places items of a plan that Pannier doesn't know")


def check_external_metadata(
    metadata: plan_pb2.GlobalMetadata, receipts: Mapping[int, records_pb2.Receipt]
) -> None:
    """Raises IntegrityError unless every place of torch's metadata lies in a durable file."""
    sizes: dict[str, int] = {}
    for receipt in receipts.values():
        sizes.update(_sizes(receipt))
    limits = []
    for name in metadata.files:
        if name not in sizes:
            raise IntegrityError(f"the metadata names {name}, which no rank has written")
        limits.append(sizes[name])
    place = metadata.placement
    count = column_length(metadata.items.fqn)
    columns = [decode_column(column) for column in (place.file, place.offset, place.length)]
    if {len(column) for column in columns} != {count}:
        raise IntegrityError(f"the metadata has {count} items and {len(columns[0])} places")
    for file, offset, length in zip(*columns, strict=True):
        if file >= len(limits) or offset + length > limits[file]:
            name = metadata.files[file] if file < len(limits) else f"file {file}"
            raise IntegrityError(
                f"the metadata places bytes {offset} to {offset + length} of {name}"
            )


def complete_metadata(
    manifest: Manifest, receipts: Mapping[int, records_pb2.Receipt]
) -> plan_pb2.GlobalMetadata:
    """The manifest's metadata with the places from the (checked) receipts."""
    out = plan_pb2.GlobalMetadata()
    out.CopyFrom(manifest.message.metadata)
    if manifest.header.external:
        return out
    offsets = decode_column(out.placement.offset)
    lengths = decode_column(out.placement.length)
    for row, (offset, length) in receipt_places(manifest, receipts).items():
        offsets[row], lengths[row] = offset, length
    out.placement.offset, out.placement.length = encode_column(offsets), encode_column(lengths)
    return out


def receipt_places(
    manifest: Manifest, receipts: Mapping[int, records_pb2.Receipt]
) -> dict[int, tuple[int, int]]:
    """Offset and length of the items that have no planned place, by row of the metadata."""
    places = {}
    for rank, receipt in receipts.items():
        varying = manifest.share(rank).varying
        for item in receipt.varying:
            row, _ = varying[item.position]
            if row < 0:
                continue
            places[row] = (item.offset, item.length)
    return places


def _check_identity(receipt: records_pb2.Receipt, attempt: str, plan_id: str) -> None:
    if receipt.attempt != attempt:
        raise _wrong(receipt, f"it is of attempt {receipt.attempt}, not {attempt}")
    if receipt.plan_id != plan_id:
        raise _wrong(receipt, f"it follows plan {receipt.plan_id!r}, the others {plan_id!r}")


def _check_extra(receipt: records_pb2.Receipt) -> None:
    try:
        limits.check_extra_files(receipt)
    except InvalidRequestError as error:
        raise _wrong(receipt, str(error)) from error


def _sizes(receipt: records_pb2.Receipt) -> dict[str, int]:
    sizes = {file.name: file.size for file in receipt.files}
    if len(sizes) != len(receipt.files):
        raise _wrong(receipt, "it names a file twice")
    return sizes


def _wrong(receipt: records_pb2.Receipt, what: str) -> IntegrityError:
    return IntegrityError(
        f"the receipt of rank {receipt.rank} (host {receipt.host}) is not what was planned: {what}"
    )
