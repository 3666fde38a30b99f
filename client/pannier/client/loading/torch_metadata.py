"""Builds torch's ``Metadata`` from the bytes of a ``.metadata``, which any torch, Python or stranger may have written.

In: the bytes. Out: this torch's ``Metadata``, of which each field has the type that DCP gives it. The pickle is
read by :mod:`pannier.wire.metadata_pickle`, which runs nothing of it; torch's objects are made here, one by
one, from what it says. Classes that DCP doesn't write are refused by name. Thread-safe.
"""

import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pannier.client import torch_compat
from pannier.wire.errors import IntegrityError, InvalidRequestError
from pannier.wire.metadata_pickle import Named, Record, read_pickle

_DCP: Final = "torch.distributed.checkpoint.metadata"
# Where torch before 2.3 had them.
_OLD: Final = "torch.distributed._shard.sharded_tensor.metadata"
_SIZE: Final = ("torch", "Size")
_LAYOUT: Final = ("torch.serialization", "_get_layout")
_ORDERED: Final = ("collections", "OrderedDict")
_GETATTR: Final = (("builtins", "getattr"), ("__builtin__", "getattr"))
"""How Python 3.11 up to 3.11.3 pickles a member of an Enum: ``getattr(cls, name)``. The second is
its name in pickles of protocol 2."""
_ENUMS: Final = {
    (_DCP, "_MEM_FORMAT_ENCODING"): torch_compat.MEMORY_FORMATS[0],
    (_OLD, "MEM_FORMAT_ENCODING"): torch_compat.MEMORY_FORMATS[1],
}
_MEMORY_FORMATS: Final = {
    0: torch.contiguous_format,
    1: torch.channels_last,
    2: torch.preserve_format,
}
"""By the value of the enum's member."""
_PATH_MODULES: Final = ("pathlib", "pathlib._local")
# StorageMeta.checkpoint_id; it is never opened.
_PATHS: Final = {
    (module, name): kind
    for module in _PATH_MODULES
    for name, kind in (
        ("PosixPath", pathlib.PurePosixPath),
        ("PurePosixPath", pathlib.PurePosixPath),
        ("WindowsPath", pathlib.PureWindowsPath),
        ("PureWindowsPath", pathlib.PureWindowsPath),
    )
}
_DTYPES: Final = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
_LAYOUTS: Final = {
    str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)
}
_MOST_DIMENSIONS: Final = 256
_DEEPEST: Final = 64
"""Containers within each other in ``planner_data``."""
_EXPANDED: Final = 16
"""So many values per byte of the pickle may be reached in it, those counted each time that are referred to repeatedly."""

_Name = tuple[str, str]
T = TypeVar("T")


def build_metadata(content: bytes, where: str) -> Metadata:
    """torch's ``Metadata`` from the bytes of a ``.metadata``.

    Args:
        content: the whole object.
        where: its name, for errors.

    Raises:
        InvalidRequestError: it is not a DCP checkpoint's, or has a class, or a value of a type, that DCP
            doesn't write there.
    """

    def check(named: Named) -> None:
        name = (named.module, named.name)
        if name not in _ALLOWED and not (named.module == "torch" and named.name in _DTYPES):
            raise _refusal(where, repr(named))

    try:
        root = read_pickle(content, where, check)
    except IntegrityError as error:
        raise InvalidRequestError(
            f"{where} is damaged or not a DCP checkpoint's: {error.__cause__}"
        ) from error
    if type(root) is not Record or _name(root.cls) != (_DCP, "Metadata"):
        kind = root.cls.name if type(root) is Record else type(root).__name__
        raise InvalidRequestError(f"{where} holds a {kind}, not a DCP checkpoint's Metadata")
    return _Builder(where, _EXPANDED * len(content)).metadata(root)


def _name(named: Named) -> _Name:
    return named.module, named.name


def _refusal(where: str, what: str) -> InvalidRequestError:
    if what.startswith("torch.distributed.checkpoint."):
        return InvalidRequestError(
            f"{where} refers to {what}, which is not part of a DCP checkpoint's metadata as torch "
            f"{torch.__version__} and Pannier know it: if a newer torch wrote it, load it there, or with "
            "a newer Pannier. If you trust its author, torch.distributed.checkpoint's FileSystemReader "
            "or FsspecReader may read it"
        )
    return InvalidRequestError(
        f"{where} refers to {what}, which is not part of a DCP checkpoint's "
        "metadata; unpickling it could run foreign code. If you trust its author, read it with "
        "torch.distributed.checkpoint's FileSystemReader or FsspecReader"
    )


class _Builder:
    def __init__(self, where: str, most: int) -> None:
        self._where = where
        self._left = most
        self._sizes: dict[int, torch.Size] = {}
        """By the identity of the record: many tensors have the same."""
        self._values: dict[int, tuple[Any, int]] = {}
        """Containers of ``planner_data`` by identity, and how many values are reached through each."""

    def metadata(self, record: Record) -> Metadata:
        state = self._state(record)
        tensors = self._typed(state, "state_dict_metadata", dict)
        stored = state.get("storage_data")
        meta = state.get("storage_meta")
        return Metadata(
            {self._is(key, str, "a key"): self._entry(each) for key, each in tensors.items()},
            self.value(state.get("planner_data")),
            # Empty and absent differ: only a writer without files of its own has none.
            None if stored is None else self._places(self._is(stored, dict, "storage_data")),
            None if meta is None else self._storage_meta(self._of(meta, "StorageMeta")),
            self._typed(state, "version", str, None),
        )

    def _places(self, stored: Mapping[Any, Any]) -> dict[MetadataIndex, Any]:
        return {self._index(key): self._info(each) for key, each in stored.items()}

    def _entry(self, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        record = self._is(value, Record, "an entry")
        if record.cls.name == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = self._state(self._of(record, "TensorStorageMetadata"))
        return TensorStorageMetadata(
            self._properties(state.get("properties")),
            self._size(state.get("size")),
            [self._chunk(each) for each in self._typed(state, "chunks", list)],
        )

    def _chunk(self, value: Any) -> ChunkStorageMetadata:
        state = self._state(self._of(value, "ChunkStorageMetadata"))
        return ChunkStorageMetadata(
            self._size(state.get("offsets")), self._size(state.get("sizes"))
        )

    def _index(self, value: Any) -> MetadataIndex:
        state = self._state(self._of(value, "MetadataIndex"))
        index = MetadataIndex.__new__(MetadataIndex)
        offset = state.get("offset")
        # It is frozen, and its constructor copies the offset.
        set_field = object.__setattr__
        set_field(index, "fqn", self._typed(state, "fqn", str))
        set_field(index, "index", self._typed(state, "index", int, None))
        if offset is not None:
            set_field(index, "offset", self._size(offset))
        return index

    def _info(self, value: Any) -> Any:
        state = self._state(self._of(value, "_StorageInfo"))
        info = torch_compat.StorageInfo(
            self._typed(state, "relative_path", str),
            self._typed(state, "offset", int),
            self._typed(state, "length", int),
        )
        transforms = state.get("transform_descriptors")
        if transforms is not None:
            info.transform_descriptors = self._texts(transforms)
        return info

    def _storage_meta(self, record: Record) -> StorageMeta:
        state = self._state(record)
        place = state.get("checkpoint_id")
        return StorageMeta(
            place if place is None or type(place) is str else self._path(place),
            self._typed(state, "save_id", str, None),
            self._typed(state, "load_id", str, None),
            self._texts(state.get("modules", [])),
        )

    def _properties(self, value: Any) -> TensorProperties:
        record = self._of(value, "TensorProperties")
        # torch 2.15 appends ``strides``, which nothing reads, and older versions refuse.
        state = self._is(record.state, tuple, "the state of TensorProperties")[:5]
        if len(state) < 5:
            self._refuse(f"TensorProperties of {len(state)} fields")
        return TensorProperties(
            self._dtype(state[0]),
            self._layout(state[1]),
            self._is(state[2], bool, "requires_grad"),
            _MEMORY_FORMATS[self._member(state[3]).value],
            self._is(state[4], bool, "pin_memory"),
        )

    # Values that aren't plain.

    def _size(self, value: Any) -> torch.Size:
        known = self._sizes.get(id(value))
        if known is not None:
            return known
        record = self._of(value, "Size")
        (numbers,) = record.args if len(record.args) == 1 else ((),)
        if type(numbers) is not tuple or not set(map(type, numbers)) <= {int}:
            self._refuse("a torch.Size that isn't one of integers")
        if len(numbers) > _MOST_DIMENSIONS:
            self._refuse(f"a torch.Size of {len(numbers)} dimensions")
        try:
            size = self._sizes[id(value)] = torch.Size(numbers)
        except (OverflowError, RuntimeError) as error:
            self._refuse(f"the size {numbers}", error)
        return size

    def _dtype(self, value: Any) -> torch.dtype:
        if type(value) is not Named or value.module != "torch" or value.name not in _DTYPES:
            self._refuse(f"the dtype {_text(value)}")
        return _DTYPES[value.name]

    def _layout(self, value: Any) -> torch.layout:
        args = self._of(value, "_get_layout").args
        if len(args) != 1 or type(args[0]) is not str or args[0] not in _LAYOUTS:
            self._refuse(f"the layout {_text(args)}")
        return _LAYOUTS[args[0]]

    def _member(self, value: Any) -> Any:
        record = self._is(value, Record, "a memory format")
        name = _name(record.cls)
        if name in _GETATTR:
            owner, member = record.args if len(record.args) == 2 else (None, None)
            enum = _ENUMS.get(_name(owner)) if type(owner) is Named else None
            if enum is None or type(member) is not str or member not in enum.__members__:
                raise _refusal(self._where, f"getattr({_text(owner)}, {_text(member)})")
            return enum.__members__[member]
        enum = _ENUMS.get(name)
        found = [] if enum is None else [each for each in enum if (each.value,) == record.args]
        if len(found) != 1 or type(record.args[0]) is not int:
            self._refuse(f"the memory format {record!r}")
        return found[0]

    def _path(self, value: Any) -> pathlib.PurePath:
        record = self._is(value, Record, "checkpoint_id")
        kind = _PATHS.get(_name(record.cls))
        if kind is None or not set(map(type, record.args)) <= {str}:
            self._refuse(f"the path {record!r}")
        return kind(*record.args)

    def value(self, value: Any, depth: int = 0) -> Any:
        """``planner_data``, or a part of it: plain containers of plain values and of DCP's objects."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            self._refuse("planner_data that is nested too deep, or refers to itself too often")
        kind = type(value)
        if kind is Record or kind in (dict, list, tuple, set, frozenset):
            known = self._values.get(id(value))
            if known is None:
                before = self._left
                build = self._object if kind is Record else self._container
                known = self._values[id(value)] = build(value, depth), before - self._left
            else:
                self._left -= known[1]
            return known[0]
        return self._dtype(value) if kind is Named else value

    def _container(self, value: Any, depth: int) -> Any:
        parts = [self.value(each, depth + 1) for each in value]
        try:
            if type(value) is dict:
                values = [self.value(each, depth + 1) for each in value.values()]
                return dict(zip(parts, values, strict=True))
            return type(value)(parts)
        except TypeError as error:
            self._refuse("a key that has no hash", error)

    def _object(self, record: Record, depth: int) -> Any:
        name = _name(record.cls)
        if name in _BUILDERS:
            return _BUILDERS[name](self, record)
        if name in _PATHS:
            return self._path(record)
        if name == _ORDERED and record.args in ((), ([],)):
            return OrderedDict(self._container(record.items or {}, depth))
        return self._member(record)

    # Types.

    def _state(self, record: Record) -> dict[str, Any]:
        if record.state is None:
            return {}
        return self._is(record.state, dict, f"the state of {record!r}")

    def _of(self, value: Any, name: str) -> Record:
        """The record, which is of DCP's class with this name; the name is enough, since only DCP's are accepted."""
        if type(value) is not Record or value[0].name != name:
            self._refuse(f"{_text(value)} in place of a {name}")
        return value

    def _typed(self, state: Mapping[str, Any], name: str, *kinds: Any) -> Any:
        """A field, whose value has one of these types; None among them: it may be absent."""
        value = state.get(name)
        if type(value) not in kinds and not (value is None and None in kinds):
            self._refuse(f"{name!r} is {_text(value)}")
        return value

    def _is(self, value: Any, kind: type[T], what: str) -> T:
        if type(value) is not kind:
            self._refuse(f"{what} is {_text(value)}")
        return value

    def _texts(self, value: Any) -> list[str]:
        if type(value) not in (list, tuple) or not set(map(type, value)) <= {str}:
            self._refuse(f"{_text(value)} in place of a list of names")
        return list(value)

    def _refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise InvalidRequestError(
            f"{self._where} is damaged or not a DCP checkpoint's: it has {what}"
        ) from cause


_BUILDERS: Final[Mapping[_Name, Callable[[_Builder, Any], Any]]] = {
    _SIZE: _Builder._size,
    _LAYOUT: _Builder._layout,
    (_DCP, "BytesStorageMetadata"): _Builder._entry,
    (_DCP, "TensorStorageMetadata"): _Builder._entry,
    (_DCP, "ChunkStorageMetadata"): _Builder._chunk,
    (_DCP, "Metadata"): _Builder.metadata,
    (_DCP, "MetadataIndex"): _Builder._index,
    (_DCP, "StorageMeta"): _Builder._storage_meta,
    (_DCP, "TensorProperties"): _Builder._properties,
    (_OLD, "TensorProperties"): _Builder._properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Builder._info,
}
_ALLOWED: Final = frozenset({*_BUILDERS, *_ENUMS, *_PATHS, *_GETATTR, _ORDERED})


def _text(value: Any) -> str:
    """A value for an error, in a length that isn't the pickle's."""
    if type(value) is Record or type(value) is Named:
        return repr(value)
    if type(value) in (str, bytes):
        return repr(value[:80])
    return f"a {type(value).__name__}"
