"""Pickles torch's classes by their names, so that a commit needs no torch, whose import takes seconds.

In: names of dtypes and the like. Out: fragments of a pickle, each of which puts one object on the stack, as
:mod:`~pannier.coordinator.commit.metadata_pickler` writes it. Pure; any thread.
"""

import io
import pickle
import struct
from typing import Any, Final

from pannier.coordinator.planning.dtypes import ITEM_BYTES, torch_for
from pannier.v1 import plan_pb2

PROTOCOL: Final = 4
"""Pickle's protocol: torch's own writer uses it, and torch's readers of all versions support it."""
DCP_VERSION: Final = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch up to 2.15, where it has one."""

_LARGEST_FRAME: Final = 1 << 16
"""Bytes of a pickle from which Python may write a second frame."""

NEWOBJ: Final = b")\x81"
"""Class -> object, made without arguments."""
REDUCE: Final = b"\x85R"
"""Class or function, and argument -> its result."""
DICT: Final = b"}("
"""An empty dict, and the mark before its items."""
STATE: Final = b"ub"
"""Adds the items since the mark to the dict, and makes the dict the object's state."""
_TUPLE: Final = b"t"
_MARK: Final = b"("
_BUILD: Final = b"b"

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_LAYOUTS: Final = frozenset(
    {"strided", "jagged", "_mkldnn"}
    | {f"sparse_{kind}" for kind in ("coo", "csr", "csc", "bsr", "bsc")}
)
_MEMORY_FORMATS: Final = {"contiguous_format": 0, "channels_last": 1, "preserve_format": 2}
"""Values of ``_MEM_FORMAT_ENCODING``."""


def plain(value: Any) -> bytes:
    """Pickles a value of Python's own types."""
    pickled = _dump(value, PROTOCOL)
    if len(pickled) < _LARGEST_FRAME:
        return without_frame(pickled)
    # It has several frames, which can't be within a frame. Protocol 3, whose opcodes are all in 4, has none.
    return _dump(value, 3)[2:-1]


def _dump(value: Any, protocol: int) -> bytes:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=protocol)
    # Without references, which count from the beginning of a pickle.
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()


def without_frame(pickled: bytes) -> bytes:
    """A whole pickle without its header and end: a fragment, if it was made without references."""
    text = pickled[2:-1]
    # A frame's header has 9 bytes; it holds the length of all that follows, the end included.
    framed = text[:1] == b"\x95" and struct.unpack_from("<Q", text, 1)[0] == len(text) - 9 + 1
    return text[9:] if framed else text


def named(module: str, name: str) -> bytes:
    """The attribute of this name of a module."""
    return plain(module) + plain(name) + b"\x93"


SIZE: Final = named("torch", "Size")
STORAGE_INFO: Final = named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
METADATA, METADATA_INDEX, CHUNK, TENSOR, BYTES, _PROPERTIES, _MEMORY_FORMAT, _STORAGE_META = (
    named(_MODULE, name)
    for name in (
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    )
)
OBJECT: Final = BYTES + NEWOBJ
"""A ``BytesStorageMetadata``."""


def properties(message: plan_pb2.TensorProperties) -> bytes:
    """A ``TensorProperties``; needs torch for names that aren't known here.

    Raises InvalidRequestError when torch doesn't know them either.
    """
    known = message.dtype in ITEM_BYTES and message.layout in _LAYOUTS
    if not known or message.memory_format not in _MEMORY_FORMATS:
        with torch_for(f"tensors of {message.dtype}, {message.layout}, {message.memory_format}"):
            from pannier.coordinator.commit.metadata_pickler import dump_metadata
            from pannier.wire.plan_codec import decode_properties
        return without_frame(dump_metadata(decode_properties(message), fast=True))
    return b"".join(
        (
            _PROPERTIES + NEWOBJ + _MARK,
            named("torch", message.dtype),
            named("torch.serialization", "_get_layout") + plain(f"torch.{message.layout}") + REDUCE,
            plain(message.requires_grad),
            _MEMORY_FORMAT + plain(_MEMORY_FORMATS[message.memory_format]) + REDUCE,
            plain(message.pin_memory),
            _TUPLE + _BUILD,
        )
    )


def storage_meta(checkpoint_id: str, attempt: str) -> bytes:
    """A ``StorageMeta``."""
    fields: dict[str, Any] = {"checkpoint_id": checkpoint_id, "save_id": attempt}
    fields |= {"load_id": None, "modules": []}
    items = b"".join(plain(each) for field in fields.items() for each in field)
    return _STORAGE_META + NEWOBJ + DICT + items + STATE
