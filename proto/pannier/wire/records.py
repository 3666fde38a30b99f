"""What is in a checkpoint's directory: parsers that clients and services share.

In: the bytes of a record, or names and first bytes of files in a format that Pannier doesn't read. Out:
messages, and texts that name the reader of such a format. Knows no stores. Pure; any thread.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError

_SUFFIXES: Final = (".safetensors", ".safetensors.index.json")
_READER: Final = "torch.distributed.checkpoint.HuggingFaceStorageReader"
SAFETENSORS_HEAD: Final = 9
"""Bytes by which :func:`is_safetensors` recognises a file."""
MOST_METADATA: Final = 2 << 30
"""Bytes of a ``.metadata``, and of the other records below, that are read: well above those of any real one."""
MOST_MANIFEST: Final = 1 << 30
MOST_RECORD: Final = 64 << 20
"""Of a decision or receipt."""
MOST_NOTE: Final = 1 << 20
"""Of an incarnation's record, a lease, a removal mark, the record of retention."""
_LARGEST_HEADER: Final = 100_000_000
"""Bytes; safetensors refuses larger ones."""


def parse_decision(
    data: bytes, attempt: str, where: str, save: save_pb2.SaveId | None = None
) -> records_pb2.Decision:
    """The decision of an attempt.

    Args:
        attempt: the attempt that the object belongs to, by its name in storage.
        where: the object's name, for errors.
        save: the attempt's save, if the caller also knows its job.

    Raises IntegrityError when it is damaged, or another attempt's or save's.
    """
    try:
        decision = json_format.Parse(data, records_pb2.Decision(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    # Carrying it out removes or installs the attempt that it names.
    if decision.attempt != attempt:
        raise IntegrityError(f"{where} is damaged: it names {decision.attempt!r}")
    own = save if save is not None else object_names.Attempt.parse(attempt).save
    object_names.check_record(where, attempt, decision.save, own)
    if decision.outcome not in (records_pb2.OUTCOME_COMMIT, records_pb2.OUTCOME_ABORT):
        raise IntegrityError(f"{where} is damaged: it is neither COMMIT nor ABORT")
    return decision


def parse_manifest(data: bytes, attempt: str, where: str) -> records_pb2.PlanManifest:
    """The manifest of an attempt.

    Args:
        where: the object's name, for errors.

    Raises IntegrityError when it is damaged, or another attempt's.
    """
    try:
        manifest = records_pb2.PlanManifest.FromString(data)
    except DecodeError as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    if manifest.attempt != attempt:
        raise IntegrityError(f"{where} is of attempt {manifest.attempt!r}")
    return manifest


def parse_receipt(data: bytes, attempt: str, rank: int, where: str) -> records_pb2.Receipt:
    """The receipt of a rank in an attempt.

    Args:
        where: the object's name, for errors.

    Raises IntegrityError when it is damaged, or another rank's or attempt's.
    """
    try:
        receipt = records_pb2.Receipt.FromString(data)
    except DecodeError as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    if (receipt.attempt, receipt.rank) != (attempt, rank):
        raise IntegrityError(f"{where} is rank {receipt.rank}'s of {receipt.attempt}")
    return receipt


def fits(decision: records_pb2.Decision, size: int, checksum: int | None) -> bool:
    """Whether a ``.metadata`` of this size and crc32c (None: not known) is what was decided."""
    return (
        decision.outcome == records_pb2.OUTCOME_COMMIT
        and decision.metadata_size == size
        and checksum in (None, decision.metadata_crc32c)
    )


def match(
    decisions: Mapping[str, records_pb2.Decision], size: int, checksum: int
) -> records_pb2.Decision | None:
    """The newest COMMIT whose ``.metadata`` has this size and checksum."""
    fitting = [decision for decision in decisions.values() if fits(decision, size, checksum)]
    return max(fitting, key=object_names.Attempt.of, default=None)


def describe_safetensors(names: Iterable[str]) -> str | None:
    """Text on a directory without ``.metadata``; None when it has no safetensors files."""
    found = min((name for name in names if name.endswith(_SUFFIXES)), default=None)
    if found is None:
        return None
    return (
        f"it is in Hugging Face's safetensors format ({found}), which Pannier doesn't read: load "
        f"it with dcp.load(storage_reader={_READER}(...))"
    )


def is_safetensors(head: bytes) -> bool:
    """Whether ``head`` begins a file in safetensors format: a length, then JSON of that length."""
    return (
        head[8:SAFETENSORS_HEAD] == b"{" and int.from_bytes(head[:8], "little") <= _LARGEST_HEADER
    )


def describe_safetensors_file(name: str) -> str:
    """Text on a data file in safetensors format that ``.metadata`` refers to."""
    return (
        f"{name} is in safetensors format (serialization_format=SAFETENSORS), which Pannier "
        f"doesn't read: {_READER} does, if the data files are renamed to end in .safetensors"
    )


def parse_blocks(file: records_pb2.DataFile) -> tuple[int, ...]:
    """The checksums of a data file's blocks; empty: there are none, or they don't fit its size."""
    column = file.block_crc32c
    count = -(-file.size // file.block_bytes) if file.block_bytes else 0
    return struct.unpack(f"<{count}I", column) if len(column) == 4 * count else ()
