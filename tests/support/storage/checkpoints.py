"""Hand-made checkpoints: the records and data files that a committed attempt leaves in a directory."""

import hashlib
import pickle
import random
from pathlib import Path

import crc32c
from google.protobuf import json_format
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def save_of(attempt: str) -> save_pb2.SaveId:
    """The save whose attempt has this name."""
    save = object_names.Attempt.parse(attempt).save
    save.job = "job"
    return save


def write_decision(
    directory: Path,
    attempt: str,
    outcome: records_pb2.Outcome,
    metadata: bytes = b"",
    plan_id: str = "",
    decided_at: float = 1000.0,
) -> None:
    """The object that ends an attempt."""
    decision = records_pb2.Decision(
        outcome=outcome,
        save=save_of(attempt),
        attempt=attempt,
        plan_id=plan_id,
        metadata_size=len(metadata),
        metadata_crc32c=crc32c.crc32c(metadata),
        decided_by="test",
        decided_at=decided_at,
    )
    write(directory / object_names.decision(attempt), json_format.MessageToJson(decision).encode())


def write_attempt(
    directory: Path,
    attempt: str,
    *,
    ranks: int = 2,
    files: int = 2,
    size: int = 10_000,
    commit: bool = True,
    decided_at: float = 1000.0,
    timeout_s: float = 0,
) -> bytes:
    """Writes one attempt of ``ranks`` x ``files`` data files; with ``commit`` decided and visible.

    Returns the content of its ``.metadata``, installed or not.
    """
    noise = random.Random(attempt)
    manifest = records_pb2.PlanManifest(save=save_of(attempt), attempt=attempt, timeout_s=timeout_s)
    for rank in range(ranks):
        manifest.members.add(rank=rank, host=f"node-{rank}")
        names = [object_names.data_file(attempt, rank, index) for index in range(files)]
        manifest.metadata.files.extend(names)
    plan_id = hashlib.sha256(manifest.SerializeToString()).hexdigest()
    places: dict[str, _StorageInfo] = {}
    for rank in range(ranks):
        receipt = records_pb2.Receipt(attempt=attempt, plan_id=plan_id, rank=rank)
        for index in range(files):
            name = object_names.data_file(attempt, rank, index)
            data = noise.randbytes(size + rank + index)
            write(directory / name, data)
            places[f"{rank}.{index}"] = _StorageInfo(name, 0, len(data))
            receipt.files.add(name=name, size=len(data), crc32c=crc32c.crc32c(data))
        write(directory / object_names.receipt(attempt, rank), receipt.SerializeToString())
    write(directory / object_names.manifest(attempt), manifest.SerializeToString())
    metadata = pickle.dumps(
        Metadata(
            {name: BytesStorageMetadata() for name in places},
            storage_data={MetadataIndex(name): place for name, place in places.items()},
            storage_meta=StorageMeta(str(directory), save_id=attempt),
        )
    )
    write(directory / object_names.metadata_candidate(attempt), metadata)
    if commit:
        write_decision(
            directory, attempt, records_pb2.OUTCOME_COMMIT, metadata, plan_id, decided_at
        )
        write(directory / object_names.METADATA, metadata)
    return metadata
