"""What a checkpoint holds, read with torch alone, on one rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties


def without_strides(properties: TensorProperties) -> TensorProperties:
    """The same; torch 2.15 adds strides, which older versions can't read and nothing uses."""
    if hasattr(properties, "strides"):
        properties.strides = None
    return properties


def described(directory: Path) -> dict[str, Any]:
    metadata: Metadata = FileSystemReader(directory).read_metadata()
    entries = {
        key: (
            entry.size,
            without_strides(entry.properties),
            sorted((c.offsets, c.sizes) for c in entry.chunks),
        )
        if hasattr(entry, "chunks")
        else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    return {"entries": entries, "mappings": metadata.planner_data}


def values(directory: Path) -> dict[str, Any]:
    """All of a checkpoint, on one rank."""
    metadata = FileSystemReader(directory).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if hasattr(entry, "chunks")
        else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state
