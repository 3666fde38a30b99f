"""The files that a ``.metadata`` refers to, read without torch and without running code of the pickle.

In: the bytes of a ``.metadata``. Out: the names of the files that it needs, which no deletion may touch.
No name in the pickle is ever imported: each becomes an inert object that keeps its attributes. CPU-bound;
any thread.
"""

import io
import pickle
import posixpath
from typing import Any

from pannier.wire import object_names
from pannier.wire.errors import IntegrityError


class _Inert:
    """Replaces any class or function of the pickle, and its instances and results."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        self.state: Any = None

    def __call__(self, *_arguments: Any, **_named: Any) -> "_Inert":
        return _Inert()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Items of a mapping of another class than dict."""

    def append(self, _item: Any) -> None:
        """Items of a list of another class than list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> Any:
        """An inert class for any name."""
        return type("_Named", (_Inert,), {})

    def persistent_load(self, _id: Any) -> Any:
        """An inert object."""
        return _Inert()


def referenced_files(content: bytes, where: str) -> frozenset[str]:
    """Names of the files, relative to the checkpoint. CPU-bound; any thread.

    Args:
        where: the object's name, for errors.

    Raises IntegrityError when it isn't a DCP checkpoint's metadata.
    """
    names, _ = _read(content, where)
    return frozenset(posixpath.normpath(name) for name in names)


def saved_by(content: bytes, where: str) -> tuple[str, frozenset[str]]:
    """The attempt that a ``.metadata`` names as its own, and its :func:`referenced_files`.

    The attempt is empty if Pannier didn't write the ``.metadata``.
    """
    names, save_id = _read(content, where)
    return object_names.own_attempt(save_id), frozenset(map(posixpath.normpath, names))


def _read(content: bytes, where: str) -> tuple[set[str], str]:
    """The files' names, and the id of the save; empty when it has none."""
    try:
        state = _Unpickler(io.BytesIO(content)).load().state
        places = state["storage_data"]
        names = {str(place.state["relative_path"]) for place in places.values()}
        # Not every writer sets a storage_meta.
        meta = getattr(state.get("storage_meta"), "state", None) or {}
        return names, str(meta.get("save_id") or "")
    except Exception as error:  # a damaged pickle can raise anything
        raise IntegrityError(
            f"{where} can't be read as a checkpoint's metadata, so that it isn't known which files it "
            f"needs: {type(error).__name__}: {error}"
        ) from error
