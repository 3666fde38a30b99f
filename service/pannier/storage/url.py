"""Which locations a daemon may touch, and which names below them. Pure, except for symbolic links.

The sidecar and the coordinator call :func:`check_shared` and :func:`check_allowed` before any access.
"""

import os
import posixpath
from collections.abc import Sequence

from pannier.common.locations import Location, parse
from pannier.wire.errors import InvalidRequestError


def check_shared(checkpoint_id: str) -> None:
    """Raises InvalidRequestError for a location that other processes can't see."""
    if parse(checkpoint_id).scheme == "memory":
        raise InvalidRequestError(
            f"{checkpoint_id!r}: memory:// works within one process only and is for unit tests; "
            "each daemon has separate memory, so save to a path, gs:// or s3://"
        )


def check_allowed(checkpoint_id: str, allowed: Sequence[str]) -> None:
    """Raises InvalidRequestError unless ``checkpoint_id`` lies strictly below one of ``allowed``.

    Args:
        checkpoint_id: URL or absolute path.
        allowed: roots in the same form; empty: everywhere.

    Local paths are compared with their symbolic links resolved, as far as they exist.
    """
    location = _resolved(parse(checkpoint_id))
    for root in allowed:
        allowed_root = _resolved(parse(root))
        if (allowed_root.scheme, allowed_root.bucket) == (location.scheme, location.bucket):
            depth = len(allowed_root.parts)
            if len(location.parts) > depth and location.parts[:depth] == allowed_root.parts:
                return
    if allowed:
        raise InvalidRequestError(
            f"checkpoint id {checkpoint_id!r} is not below an allowed root "
            f"({', '.join(allowed)}); choose one below, or start the daemon with another --allow"
        )


def _resolved(location: Location) -> Location:
    if location.scheme != "file":
        return location
    real = os.path.realpath(location.path)
    return Location("file", "", tuple(part for part in real.split("/") if part))


def check_key(key: str) -> str:
    """``key`` itself. Raises InvalidRequestError unless it is a name below the directory."""
    if not key or posixpath.normpath(key) != key or key.startswith(("/", "..")) or "\0" in key:
        raise InvalidRequestError(f"{key!r} is not a name below a checkpoint")
    return key
