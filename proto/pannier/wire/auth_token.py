"""The token by which a job is known to a sidecar that serves several: a file in, call metadata out.

A token is a secret of at least MIN_LENGTH characters, in a file of its own, which may be replaced while
it is used (as Kubernetes does with a Secret's): it is looked at before each call. What a sidecar keeps
and compares are digests. Nothing here puts a token into an error, a log or a representation.
Thread-safe.
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
"""What is said first on a socket that passes descriptors, where a token is wanted."""

_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "

Metadata = tuple[tuple[str, str], ...]


def digest(token: str) -> bytes:
    """What stands for a token where it is kept or compared; DIGEST_BYTES long."""
    return hashlib.sha256(token.encode()).digest()


def check_token(token: str, where: str) -> str:
    """``token`` itself. Raises ConfigurationError, which names ``where``, unless it may be one."""
    if not MIN_LENGTH <= len(token) <= MAX_LENGTH:
        raise ConfigurationError(
            f"{where} has a token of {len(token)} characters: {MIN_LENGTH} to {MAX_LENGTH} are wanted, like those "
            "of `openssl rand -hex 32`"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(
            f"{where} has a token with characters other than letters, digits and signs: use one line "
            "like that of `openssl rand -hex 32`"
        )
    return token


def read_private(path: Path, *, what: str, most: int) -> bytes:
    """Content of a file that nobody but its owner could have written.

    Who may read it is left to whoever put it there: a Secret's files are root's, with a group.

    Raises ConfigurationError naming ``what`` it is.
    """
    try:
        # Through links: that is how Kubernetes replaces a secret's files. Never waiting for a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(f"{what} can't be read: {error.strerror or error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(f"{what} is not a file")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{what} has mode {stat.S_IMODE(found.st_mode):04o}: others could write there; "
                "chmod go-w it"
            )
        if found.st_size > most:
            raise ConfigurationError(f"{what} has {found.st_size} bytes, at most {most} are read")
        return os.read(fd, most)
    except OSError as error:
        raise ConfigurationError(f"{what} can't be read: {error.strerror or error}") from error
    finally:
        os.close(fd)


class TokenFile:
    """A client's token, read again whenever the file was replaced.

    Args:
        path: of a file with the token alone.
        setting: what the path was told by, for errors.
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
        """What a call carries. Raises ConfigurationError: there is no token, or others can write it."""
        return ((_KEY, _SCHEME + self._read()),)

    def digest(self) -> bytes:
        """What is said on the socket that passes descriptors. Raises as :meth:`metadata`."""
        return digest(self._read())

    def _read(self) -> str:
        with self._lock:
            stamp = _stamp(self._path)
            if stamp is None or stamp != self._stamp:
                # Taken before: what is replaced meanwhile is looked at again.
                self._stamp = None
                content = read_private(self._path, what=self._name, most=MAX_LENGTH + 2)
                self._token = check_token(
                    content.decode(errors="replace").rstrip("\r\n"), self._name
                )
                self._stamp = stamp
            return self._token


def find_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token in a call's metadata; None: there is none."""
    for key, value in metadata:
        if key == _KEY and isinstance(value, str) and value.startswith(_SCHEME):
            return value.removeprefix(_SCHEME)
    return None


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # reading it says why
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
