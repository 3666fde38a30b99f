"""The token that authenticates a job to its sidecar, where a node has several jobs: a file in, call metadata out.

A token is a secret of at least MIN_LENGTH characters in a separate file, which may be replaced at any time
(as Kubernetes does with the files of a Secret): it is checked before each call. A sidecar keeps and
compares digests only. No token appears in an error, a log or a repr. Thread-safe.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pannier.wire.errors import ConfigurationError

VARIABLE: Final = "PANNIER_TOKEN_FILE"
MIN_LENGTH: Final = 32
"""Characters: 16 random bytes in hexadecimal."""
MAX_LENGTH: Final = 1024
DIGEST_BYTES: Final = 32
"""Length of the digest that a client sends first on a descriptor socket that requires a token."""

_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "

Metadata = tuple[tuple[str, str], ...]


def digest(token: str) -> bytes:
    """Digest of a token, DIGEST_BYTES long: the only form that is kept and compared."""
    return hashlib.sha256(token.encode()).digest()


def check_token(token: str, where: str) -> str:
    """``token`` itself. Raises ConfigurationError, which names ``where``, if it is malformed."""
    if not MIN_LENGTH <= len(token) <= MAX_LENGTH:
        raise ConfigurationError(
            f"{where} has a token of {len(token)} characters: {MIN_LENGTH} to {MAX_LENGTH} are required, like those "
            "of `openssl rand -hex 32`"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(
            f"{where} has a token with characters other than letters, digits and signs: use one line "
            "like that of `openssl rand -hex 32`"
        )
    return token


def read_private(path: Path, *, what: str, most: int) -> bytes:
    """Content of a file that only its owner can write.

    Its read permissions are not checked: the files of a Secret belong to root and a group.

    Raises ConfigurationError naming ``what`` it is.
    """
    try:
        # Follows links, by which Kubernetes replaces a Secret's files. Doesn't wait for a pipe's writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(f"{what} can't be read: {error.strerror or error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(f"{what} is not a file")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{what} has mode {stat.S_IMODE(found.st_mode):04o}: others can write it; "
                "chmod go-w it"
            )
        if found.st_size > most:
            raise ConfigurationError(f"{what} has {found.st_size} bytes, at most {most} are read")
        return os.read(fd, most)
    except OSError as error:
        raise ConfigurationError(f"{what} can't be read: {error.strerror or error}") from error
    finally:
        os.close(fd)


def token_metadata(token: str) -> Metadata:
    """Metadata of a call that carries a token."""
    return ((_KEY, _SCHEME + token),)


class TokenFile:
    """A client's token, read again whenever the file was replaced.

    Args:
        path: of a file with the token alone.
        setting: name of the setting that has the path, for errors.
    """

    def __init__(self, path: Path, *, setting: str = VARIABLE) -> None:
        self._path = path
        self._name = f"{setting}={path}"
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._token = ""

    def __repr__(self) -> str:
        return f"TokenFile({self._path})"

    def metadata(self) -> Metadata:
        """Metadata for a call. Raises ConfigurationError: no token, or others can write its file."""
        return token_metadata(self._read())

    def digest(self) -> bytes:
        """Digest for the descriptor socket. Raises as :meth:`metadata`."""
        return digest(self._read())

    def _read(self) -> str:
        with self._lock:
            stamp = file_stamp(self._path)
            if stamp is None or stamp != self._stamp:
                # Taken before the read, so that a replacement meanwhile is noticed.
                self._stamp = None
                content = read_private(self._path, what=self._name, most=MAX_LENGTH + 2)
                self._token = check_token(
                    content.decode(errors="replace").rstrip("\r\n"), self._name
                )
                self._stamp = stamp
            return self._token


def find_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token in a call's metadata; None without one."""
    for key, value in metadata:
        if key == _KEY and isinstance(value, str) and value.startswith(_SCHEME):
            return value.removeprefix(_SCHEME)
    return None


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """A value that changes when the file is written or replaced; None: it can't be read."""
    try:
        found = path.stat()
    except OSError:
        return None  # Reading it raises the reason.
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
