"""Locations of checkpoints: what a user writes, and the parts of the URL or path that it means.

In: text, as an argument of the client or of the command line, or from a message. Out: an absolute
path or a URL, the same in every process, and its parts; which directories below a root a pattern
matches. Nothing in storage is touched. Pure, but for the working directory and the home directories; any
thread.
"""

import fnmatch
import os
import re
from dataclasses import dataclass
from typing import Final

from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_TYPO: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(:/|:|//)(?!/)")
"""A URL with a typo: ``gs:/b``, ``gs:b``, ``gs//b``."""
_OTHER_SCHEMES: Final = ("abfs", "abfss", "az", "hdfs", "http", "https", "s3a")
"""Schemes that a user may mean besides those of :func:`parse`; fsspec reads some of them."""
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
SUPPORTED: Final = "an absolute path, file://, gs:// (gcs://), s3:// or memory://"
_SCHEMES: Final = {
    "": "file",
    "file": "file",
    "gs": "gs",
    "gcs": "gs",
    "s3": "s3",
    "memory": "memory",
}
_WITH_BUCKET: Final = ("gs", "gcs", "s3", "s3a")
_RECORDS: Final = object_names.attempts_prefix().rstrip("/")
_NUMBER: Final = re.compile(r"\d+")
_WILDCARDS: Final = re.compile(r"[*?\[]")


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


def absolute(place: str | os.PathLike[str]) -> str:
    """A place as a user writes it, as an absolute path or a URL without a trailing slash.

    ``~`` is expanded, and the scheme of a URL may be in capitals. Idempotent: the function returns its own
    result unchanged.

    Raises InvalidRequestError when it is empty, not text, names no bucket, or looks like a URL with a
    typo, which would be a directory below the working one.
    """
    text = os.fspath(place)
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{place!r} is neither a path nor a URL like gs://bucket/run")
    url = _URL.fullmatch(text)
    if url is not None:
        scheme, rest = url[1].lower(), url[2]
        if scheme in _WITH_BUCKET and not rest.strip("/"):
            raise InvalidRequestError(f"{text!r} names no bucket")
        if scheme in _WITH_BUCKET and rest.startswith("/"):
            raise InvalidRequestError(
                f"{text!r} names no bucket: use {scheme}://{rest.lstrip('/')} if that is meant"
            )
        return f"{scheme}://{rest.rstrip('/') or '/'}"
    typo = _TYPO.match(text)
    if typo is not None and (typo[2] == ":/" or typo[1].lower() in (*_SCHEMES, *_OTHER_SCHEMES)):
        scheme, rest = typo[1].lower(), text[typo.end() :]
        root = "/" if scheme == "file" else ""
        raise InvalidRequestError(
            f"{text!r} is no URL: use {scheme}://{root}{rest}, or ./{text} for a directory below "
            "the working one"
        )
    home = os.path.expanduser(text)
    if home.startswith("~"):
        raise InvalidRequestError(
            f"{text!r}: there is no home directory of that user; use an absolute path, or ./{text} "
            "for a directory below the working one"
        )
    return os.path.abspath(home)


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


@dataclass(frozen=True)
class Pattern:
    """Which directories below a root are checkpoints: ``checkpoint-*/dcp``.

    Raises InvalidRequestError unless ``text`` is relative and has no empty, ``.`` or ``..`` segment and
    no ``**``.
    """

    text: str
    """Names of directories, joined by ``/``. In each, ``*``, ``?`` and ``[...]`` match as in a shell, but also
    a leading dot; none matches Pannier's directory of records."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise InvalidRequestError(
                f"pattern {self.text!r} {problem}; give names of directories below the root, like '*' "
                "or 'checkpoint-*/dcp'"
            )

    @property
    def segments(self) -> tuple[str, ...]:
        """One per level below the root."""
        return tuple(self.text.split("/"))

    @property
    def one_parent(self) -> bool:
        """Whether all that it matches lies in one directory, whose records order the attempts."""
        return not any(map(has_wildcard, self.segments[:-1]))

    def matches(self, name: str) -> bool:
        """Whether it matches ``name``, which is relative to the root."""
        names = name.split("/")
        return len(names) == len(self.segments) and all(map(segment_matches, self.segments, names))

    def name_below(self, root: str, checkpoint_id: str) -> str | None:
        """The checkpoint's name relative to ``root``; None: the pattern doesn't match it there."""
        begin = root.rstrip("/") + "/"
        name = checkpoint_id.removeprefix(begin)
        return name if checkpoint_id.startswith(begin) and self.matches(name) else None

    def root_of(self, checkpoint_id: str) -> str | None:
        """The root below which the pattern matches the id; None: the pattern matches no suffix of it.

        Raises InvalidRequestError when ``checkpoint_id`` is not a checkpoint id.
        """
        root, name = object_names.split_checkpoint_id(checkpoint_id)
        for _ in self.segments[1:]:
            try:
                root, parent = object_names.split_checkpoint_id(root)
            except InvalidRequestError:
                return None  # nothing is above it
            name = f"{parent}/{name}"
        return root if self.matches(name) else None

    def step(self, name: str) -> int | None:
        """The last number in the last segment that has one; segments without a wildcard don't count.

        5 for ``checkpoint-5/dcp2`` and the pattern ``checkpoint-*/dcp2``.
        """
        numbers = self.numbers(name)
        return numbers[-1] if numbers else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """All numbers in the segments that have a wildcard, or in all segments if none has one; ``name`` must match."""
        pairs = list(zip(self.segments, name.split("/"), strict=True))
        varying = [each for segment, each in pairs if has_wildcard(segment)]
        found = [_NUMBER.findall(each) for each in varying or [each for _, each in pairs]]
        return tuple(int(number) for numbers in found for number in numbers)

    def _problem(self) -> str:
        """Why it can't be used; empty: it can."""
        if not isinstance(self.text, str) or not self.text:
            return "is no text"
        if "://" in self.text or self.text.startswith(("/", "~")):
            return "is not relative to the root"
        if any(ord(character) < 32 or ord(character) == 127 for character in self.text):
            return "contains a control character"
        segments = self.text.split("/")
        if ".." in segments:
            return "contains '..'"
        if "" in segments or "." in segments:
            return "has an empty or '.' segment"
        if "**" in self.text:
            return "contains '**': the number of levels must be known"
        if _RECORDS in segments:
            return f"names Pannier's directory of records, {_RECORDS}"
        return ""


CHILDREN: Final = Pattern("*")
"""The directories directly below a root."""


def has_wildcard(segment: str) -> bool:
    """Whether a segment of a pattern may match several names."""
    return _WILDCARDS.search(segment) is not None


def segment_matches(segment: str, name: str) -> bool:
    """Whether a segment of a pattern matches the name of a directory."""
    return name != _RECORDS and fnmatch.fnmatchcase(name, segment)
