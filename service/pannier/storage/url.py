"""Which locations a daemon may touch, and which names below them. Pure, except for symbolic links.

The sidecar and the coordinator call :func:`check_shared` and :func:`check_allowed` before any access.
"""

import os
import posixpath
import time
from collections.abc import Sequence

from pannier.common import timeouts
from pannier.common.locations import Location, parse
from pannier.storage.io_threads import HungError, threads_of
from pannier.wire.errors import InvalidRequestError, UnavailableError


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

    Local paths are compared with their symbolic links resolved, as far as they exist. That blocks while their
    file system doesn't respond; see :func:`check_allowed_in_time`.
    """
    location = parse(checkpoint_id)
    if allowed and not _is_below(_resolved(location), allowed):
        raise InvalidRequestError(
            f"checkpoint id {checkpoint_id!r} is not below an allowed root "
            f"({', '.join(allowed)}); choose one below, or start the daemon with another --allow"
        )


async def check_allowed_in_time(checkpoint_id: str, allowed: Sequence[str]) -> None:
    """As :func:`check_allowed`, for an event loop: local paths are resolved in a thread.

    Raises UnavailableError when their file system doesn't respond: a later call may succeed.
    """
    location = parse(checkpoint_id)
    if not allowed or location.scheme != "file":
        check_allowed(checkpoint_id, allowed)
        return
    threads = threads_of(os.path.dirname(location.path))
    until = time.monotonic() + timeouts.HUNG_CALL_S
    try:
        await threads.run(check_allowed, checkpoint_id, allowed, until=until)
    except HungError as error:
        raise UnavailableError(str(error)) from error


def is_allowed_file(path: str, allowed: Sequence[str]) -> bool:
    """Whether an open file lies below one of ``allowed``; blocking.

    Args:
        path: absolute and without symbolic links, as the kernel reports it.
        allowed: as in :func:`check_allowed`.
    """
    names = tuple(name for name in path.split("/") if name)
    return not allowed or _is_below(Location("file", "", names), allowed)


def _is_below(location: Location, allowed: Sequence[str]) -> bool:
    """Whether ``location``, without symbolic links, lies strictly below one of ``allowed``."""
    place = (location.scheme, location.bucket)
    roots = [root for root in map(parse, allowed) if (root.scheme, root.bucket) == place]

    def covers(root: Location) -> bool:
        depth = len(root.parts)
        return len(location.parts) > depth and location.parts[:depth] == root.parts

    # First as they are written: the other roots' file systems may not respond.
    return any(map(covers, roots)) or any(covers(_resolved(root)) for root in roots)


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
