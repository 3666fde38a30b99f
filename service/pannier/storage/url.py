"""Locations of checkpoints: a URL or path in, its scheme and parts out. Pure, except for symbolic links.

The sidecar and the coordinator call :func:`check_shared` and :func:`check_allowed` before any access.
"""

import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pannier.wire.errors import InvalidRequestError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
SUPPORTED = "an absolute path, file://, gs:// (gcs://), s3:// or memory://"
_SCHEMES = {
    "": "file",
    "file": "file",
    "gs": "gs",
    "gcs": "gs",
    "s3": "s3",
    "memory": "memory",
}


@dataclass(frozen=True)
class Location:
    """The parts of a directory URL."""

    scheme: str
    """``file``, ``gs``, ``s3`` or ``memory``."""
    bucket: str
    """Empty for ``file`` and ``memory``."""
    parts: tuple[str, ...]
    """Names below the bucket, or below the root of the file system."""

    @property
    def path(self) -> str:
        """``parts`` as an absolute path."""
        return "/" + "/".join(self.parts)

    @property
    def prefix(self) -> str:
        """Prefix of the names of the directory's objects; empty at the bucket's top."""
        return "".join(f"{part}/" for part in self.parts)


def parse(url: str) -> Location:
    """Parses a URL or an absolute path.

    Raises InvalidRequestError for unknown schemes, relative paths, ``..``, empty
    names, control characters and lone surrogates.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or "/" in scheme:
        scheme, separator, rest = "", "", url
    known = _SCHEMES.get(scheme)
    if known is None or (separator and not scheme):
        raise InvalidRequestError(f"{url!r} has an unknown scheme; use {SUPPORTED}")
    if any(ord(character) < 32 or ord(character) == 127 for character in url):
        raise InvalidRequestError(f"{url!r} contains a control character")
    if any(0xD800 <= ord(character) < 0xE000 for character in url):
        raise InvalidRequestError(f"{url!r} can't be written as UTF-8")
    local = known == "file"
    if local and not rest.startswith("/"):
        raise InvalidRequestError(f"{url!r} is not absolute; use {SUPPORTED}")
    names = rest.split("/")
    if ".." in names:
        raise InvalidRequestError(f"{url!r} contains '..'")
    parts = tuple(name for name in names if name not in ("", "."))
    if local or known == "memory":
        return Location(known, "", parts)
    if not names[0]:
        raise InvalidRequestError(f"{url!r} names no bucket")
    if not _BUCKET.fullmatch(names[0]):
        # It becomes part of requests unchanged: no '?', '#', '%' or the like.
        raise InvalidRequestError(f"{url!r}: {names[0]!r} is not the name of a bucket")
    if "" in names[1:-1] or "." in names:
        # Literal names in an object store, but not for a path library.
        raise InvalidRequestError(f"{url!r} has an empty or '.' path segment")
    return Location(known, parts[0], parts[1:])


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
