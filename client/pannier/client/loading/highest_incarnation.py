"""The highest incarnation number below a root when this process first read from there.

In: roots that ``latest`` and ``load`` read, on one rank for all. Out: that number, which the
process's saves carry: an incarnation of the same job with a higher one began to save after this
process had begun, and is not to be followed by it. Reading needs no client, so this is the
process's. Thread-safe.
"""

import logging
import os
import posixpath
import threading
from collections.abc import Mapping
from typing import Any

from pannier.client.loading.filesystem import MissingError, absolute, open_dir
from pannier.wire import object_names
from pannier.wire.errors import StorageError

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_seen: dict[str, int] = {}
"""By root: what no world of this process has taken yet."""


def look(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> int | None:
    """The number, from storage the first time; None where it can't be listed.

    Raises InvalidRequestError, ConfigurationError: the root can't be read at all.
    """
    key = _key(root)
    with _lock:
        if key in _seen:
            return _seen[key]
    place = open_dir(root, storage_options)
    try:
        entries = place.child(object_names.incarnations_prefix().rstrip("/")).list()
    except MissingError:
        entries = []
    except StorageError as error:
        # What is to be read comes first; saves go without this check then.
        _log.warning("the incarnations below %s are not known: %s", place.url, error)
        return None
    number = max((object_names.incarnation_number(entry.name) for entry in entries), default=0)
    remember(root, number)
    return number


def recall(root: str | os.PathLike[str]) -> int | None:
    """The number as far as it is known, without a look."""
    with _lock:
        return _seen.get(_key(root))


def remember(root: str | os.PathLike[str], number: int | None) -> None:
    """What another rank has found; the first word counts."""
    if number is not None:
        with _lock:
            _seen.setdefault(_key(root), number)


def take(root: str) -> int | None:
    """The number, for the one world that is to save there; None when nothing was read."""
    with _lock:
        return _seen.pop(_key(root), None)


def root_of(checkpoint_id: str) -> str:
    """The root of a checkpoint that is read; any directory can be."""
    return posixpath.dirname(absolute(checkpoint_id).rstrip("/")) or "/"


def _key(root: str | os.PathLike[str]) -> str:
    return absolute(root).removeprefix("file://")
