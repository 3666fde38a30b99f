"""Plain DCP's own readers, set up so that they see what is in storage now."""

from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader


def fsspec_reader(url: str) -> FsspecReader:
    """torch's reader of URLs. gcsfs would remember listings, and what is not there, for good."""
    return FsspecReader(url, use_listings_cache=False, skip_instance_cache=True)


def plain_load(state: dict[str, Any], directory: str, **arguments: Any) -> None:
    """``dcp.load`` with the reader that torch has for such a directory."""
    reader = fsspec_reader(directory) if "://" in directory else FileSystemReader(directory)
    dcp.load(state, storage_reader=reader, **arguments)
