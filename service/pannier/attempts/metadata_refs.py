"""The files that a ``.metadata`` refers to, read without torch and without running code of the pickle.

In: the bytes of a ``.metadata``. Out: the names of the files that it needs, which no deletion may touch.
CPU-bound, in proportion to the bytes; any thread.
"""

import posixpath

from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.metadata_pickle import Record, read_pickle


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
        state = _fields(read_pickle(content, where))
        places = state["storage_data"]
        if type(places) is not dict:
            raise TypeError("storage_data is no dict")
        names: set[str] = set()
        for place in places.values():
            name = _fields(place)["relative_path"]
            if type(name) is not str:
                raise TypeError(f"the name of a file is a {type(name).__name__}")
            names.add(name)
        # Not every writer sets a storage_meta.
        meta = state.get("storage_meta")
        save_id = None if meta is None else _fields(meta).get("save_id")
    except (IntegrityError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{where} can't be read as a checkpoint's metadata, so that it isn't known which files it "
            f"needs: {type(error).__name__}: {error}"
        ) from error
    return names, save_id if type(save_id) is str else ""


def _fields(value: object) -> dict[object, object]:
    """The fields of an instance. Raises TypeError."""
    if type(value) is not Record or type(value.state) is not dict:
        raise TypeError(f"a {type(value).__name__} in place of an object with fields")
    return value.state
