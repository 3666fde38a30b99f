"""The highest incarnation number below a root when this process first read from there.

In: the roots that ``latest`` and ``load`` read, on one rank for all. Out: that number, which the
saves of this process carry: an incarnation of the same job with a higher number began to save after
this process had started, so that this process must not save after it. Global to the process, since
reading needs no client. Thread-safe.
"""

import logging
import os
import posixpath
import threading
from collections.abc import Mapping
from typing import Any

from pannier.client.loading.filesystem import MissingError, open_dir
from pannier.common.locations import absolute
from pannier.wire import object_names
from pannier.wire.errors import StorageError

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_seen: dict[str, int] = {}
"""By root; without those that :func:`pop` has returned."""


def read(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> int | None:
    """The number, read from storage by the first call; None: it can't be listed.

    Raises InvalidRequestError, ConfigurationError: the root can't be read at all.
    """
    key = _key(root)
    with _lock:
        if key in _seen:
            return _seen[key]
    directory = open_dir(root, storage_options)
    try:
        entries = directory.child(object_names.incarnations_prefix().rstrip("/")).list()
    except MissingError:
        entries = []
    except StorageError as error:
        # A load must not fail for this; saves are not checked then.
        _log.warning("the incarnations below %s can't be listed: %s", directory.url, error)
        return None
    number = max((object_names.incarnation_number(entry.name) for entry in entries), default=0)
    remember(root, number)
    return number


def known(root: str | os.PathLike[str]) -> int | None:
    """The number if it is known; doesn't read storage."""
    with _lock:
        return _seen.get(_key(root))


def remember(root: str | os.PathLike[str], number: int | None) -> None:
    """Records the number that another rank has read; keeps the first one recorded."""
    if number is not None:
        with _lock:
            _seen.setdefault(_key(root), number)


def pop(root: str) -> int | None:
    """Returns and forgets the number, for the incarnation that is to save there; None: there is none."""
    with _lock:
        return _seen.pop(_key(root), None)


def root_of(checkpoint_id: str) -> str:
    """The directory above a checkpoint that is read."""
    scheme, separator, path = absolute(checkpoint_id).rpartition("://")
    # Above a bucket there is nothing.
    return f"{scheme}{separator}{posixpath.dirname(path) or path}"


def _key(root: str | os.PathLike[str]) -> str:
    return absolute(root).removeprefix("file://")
