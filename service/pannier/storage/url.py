"""Which locations a daemon may touch, and which names below them. Pure, except for symbolic links.

The sidecar and the coordinator call :func:`check_shared` and :func:`check_allowed` before any access.
"""

import os
import posixpath
import time
from collections.abc import Sequence

from pannier.common import timeouts
from pannier.common.locations import Location, parse
from pannier.storage.base import DeniedError
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


async def check_allowed_in_time(
    checkpoint_id: str, allowed: Sequence[str], *, for_save: bool = False
) -> None:
    """As :func:`check_allowed`, for an event loop: local paths are resolved in a thread.

    Args:
        for_save: also :func:`check_no_link`.

    Raises UnavailableError when their file system doesn't respond: a later call may succeed.
    """
    location = parse(checkpoint_id)
    if location.scheme != "file":
        check_allowed(checkpoint_id, allowed)
        return
    threads = threads_of(os.path.dirname(location.path))
    until = time.monotonic() + timeouts.HUNG_CALL_S
    try:
        if allowed:
            await threads.run(check_allowed, checkpoint_id, allowed, until=until)
        if for_save:
            await threads.run(check_no_link, checkpoint_id, until=until)
    except HungError as error:
        raise UnavailableError(str(error)) from error


def check_no_link(place: str) -> None:
    """Raises InvalidRequestError for a local directory that is reached by a symbolic link of its own; blocking.

    What is written or removed there would be another checkpoint's, and the link would stay.
    """
    location = parse(place)
    if location.scheme == "file" and os.path.islink(location.path):
        raise InvalidRequestError(
            f"{place} is a symbolic link: use the name of the directory itself, "
            f"{os.path.realpath(location.path)}"
        )


def resolve(path: str, allowed: Sequence[str]) -> str:
    """An absolute path without symbolic links, as far as it exists; blocking.

    Raises DeniedError unless it lies below one of ``allowed``, or is one; empty: anywhere.
    """
    found = _resolved(Location("file", "", tuple(name for name in path.split("/") if name)))
    # A name below it, as a root's own directory holds the records of its checkpoints.
    below = Location("file", "", (*found.parts, "*"))
    if allowed and not _is_below(below, allowed):
        raise DeniedError(
            f"{path} leads to {found.path}, which is not below an allowed root ({', '.join(allowed)})"
        )
    return found.path


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
