"""Reads ``.metadata`` without trusting it: an unpickler that allows DCP's own classes only.

In: the bytes of a ``.metadata``, written by any torch and Python. Out: this torch's ``Metadata``. A
pickle can call any function by name; here it can only use the names that DCP writes. Thread-safe.
"""

import dataclasses
import io
import pathlib
import pickle
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from pannier.client import torch_compat
from pannier.wire.errors import InvalidRequestError

_DCP: Final = "torch.distributed.checkpoint.metadata"
_OLD: Final = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED: Final = frozenset(
    {
        (_DCP, "BytesStorageMetadata"),
        (_DCP, "ChunkStorageMetadata"),
        (_DCP, "Metadata"),
        (_DCP, "MetadataIndex"),
        (_DCP, "StorageMeta"),
        (_DCP, "TensorStorageMetadata"),
        (_DCP, "_MEM_FORMAT_ENCODING"),
        # Where torch before 2.3 had them.
        (_OLD, "MEM_FORMAT_ENCODING"),
        (_OLD, "TensorProperties"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
)
_GETATTR: Final = (("builtins", "getattr"), ("__builtin__", "getattr"))
"""How Python 3.11 up to 3.11.3 pickles a member of an Enum: ``getattr(cls, name)``. The second is
its name in pickles of protocol 2."""
# StorageMeta.checkpoint_id; it is never opened.
_PATHS: Final = {
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_MEMBERS: Final = {cls: dict(cls.__members__) for cls in torch_compat.MEMORY_FORMATS}
_PATH_MODULES: Final = ("pathlib", "pathlib._local")


def unpickle_metadata(content: bytes, where: str) -> Metadata:
    """torch's ``Metadata`` from the bytes of a ``.metadata``.

    Args:
        content: the whole object.
        where: its name, for errors.

    Raises:
        InvalidRequestError: it is not a DCP checkpoint's, or it uses a name that DCP doesn't write.
    """
    try:
        metadata = _Unpickler(content, where).load()
    except InvalidRequestError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise InvalidRequestError(
            f"{where} is damaged or not a DCP checkpoint's: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise InvalidRequestError(
            f"{where} holds a {type(metadata).__name__}, not a DCP checkpoint's Metadata"
        )
    return metadata


class _AnyProperties(TensorProperties):
    """Takes the pickled state of another torch's ``TensorProperties`` and becomes this torch's.

    torch 2.15 appends ``strides``, which nothing reads, and older versions refuse.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[: len(dataclasses.fields(TensorProperties))])


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """The object for a name in the pickle. Raises InvalidRequestError for others than DCP's."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == (_DCP, "TensorProperties"):
            return _AnyProperties
        if (module, name) in _GETATTR:
            # A bound method: a pickle could change the defaults of a plain function.
            return self._enum_member
        if module in _PATH_MODULES and name in _PATHS:
            return _PATHS[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise self._refusal(f"{module}.{name}")

    def _enum_member(self, owner: Any, name: Any) -> Any:
        """``getattr`` of a member of DCP's own enums, and of nothing else."""
        members = next((m for cls, m in _MEMBERS.items() if cls is owner), {})
        if type(name) is not str or name not in members:
            raise self._refusal(f"getattr({owner!r:.80}, {name!r:.80})")
        return members[name]

    def _refusal(self, what: str) -> InvalidRequestError:
        if what.startswith("torch.distributed.checkpoint."):
            return InvalidRequestError(
                f"{self._where} refers to {what}, which is not part of a DCP checkpoint's metadata as torch "
                f"{torch.__version__} and Pannier know it: if a newer torch wrote it, load it there, or with "
                "a newer Pannier. If you trust its author, torch.distributed.checkpoint's FileSystemReader "
                "or FsspecReader may read it"
            )
        return InvalidRequestError(
            f"{self._where} refers to {what}, which is not part of a DCP checkpoint's "
            "metadata; unpickling it could run foreign code. If you trust its author, read it with "
            "torch.distributed.checkpoint's FileSystemReader or FsspecReader"
        )
