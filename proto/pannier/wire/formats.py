"""Formats of checkpoints that Pannier doesn't read, recognised so that errors name their reader.

In: names and first bytes of files. Out: text for an error. Pure; any thread.
"""

from collections.abc import Iterable
from typing import Final

_SUFFIXES: Final = (".safetensors", ".safetensors.index.json")
_READER: Final = "torch.distributed.checkpoint.HuggingFaceStorageReader"
SAFETENSORS_HEAD: Final = 9
"""Bytes by which :func:`is_safetensors` recognises a file."""
_LARGEST_HEADER: Final = 100_000_000
"""Bytes; safetensors refuses larger ones."""


def describe_safetensors(names: Iterable[str]) -> str | None:
    """What a directory without ``.metadata`` is; None when it has no safetensors files."""
    found = min((name for name in names if name.endswith(_SUFFIXES)), default=None)
    if found is None:
        return None
    return (
        f"it is in Hugging Face's safetensors format ({found}), which Pannier doesn't read: load "
        f"it with dcp.load(storage_reader={_READER}(...))"
    )


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins so is in safetensors format: a length, then JSON of that length."""
    return (
        head[8:SAFETENSORS_HEAD] == b"{" and int.from_bytes(head[:8], "little") <= _LARGEST_HEADER
    )


def describe_safetensors_file(name: str) -> str:
    """What is wrong with a data file in safetensors format that ``.metadata`` refers to."""
    return (
        f"{name} is in safetensors format (serialization_format=SAFETENSORS), which Pannier "
        f"doesn't read: {_READER} does, if the data files are renamed to end in .safetensors"
    )
