"""Directories in storage as the trainer reads them, through fsspec.

In: a path or a URL. Out: ranges of objects, listings, times; only leases are written. Every failure is
a StorageError that names the object; :class:`MissingError` when it doesn't exist. Blocking;
thread-safe.
"""

import base64
import errno
import os
import posixpath
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import fsspec

from pannier.client.interrupts import shielded
from pannier.client.loading.cloud_file_system import open_file_system
from pannier.client.restore.local_file import read_at
from pannier.common import timeouts
from pannier.common.locations import absolute
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    InvalidRequestError,
    StorageError,
)
from pannier.wire.records import MOST_RECORD

_LAYOUT_LOOKUP: Final = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
_PACKAGES: Final = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs"}
_LOCAL: Final = ("file", "local")
_MOST_REMOVALS: Final = 100
"""Times in a row that another process may remove the empty directory of a file to be created."""
_STAMP: Final = ("size", "generation", "ETag", "ino", "mtime", "created")
"""Fields of the file systems' ``info`` that change when an object is replaced."""
_MODIFIED: Final = ("mtime", "LastModified")
"""Fields of the file systems' ``info`` with the time of the last write; others have ``modified``."""


class MissingError(StorageError, FileNotFoundError):
    """There is no such checkpoint, or no such file in it; also a FileNotFoundError."""


@dataclass(frozen=True)
class DirEntry:
    """An object or a directory in a directory."""

    name: str
    """Relative to the directory."""
    is_directory: bool


@dataclass(frozen=True)
class Stat:
    """Metadata of one object."""

    size: int
    crc32c: int | None
    """None: the store keeps none."""
    modified: float
    """When it was last written, by the store's clock; Unix time, seconds."""


class StorageDir:
    """One directory in storage. Made by :func:`open_dir`."""

    def __init__(self, url: str, fs: Any, path: str) -> None:
        self.url = url
        """As the user gave it, absolute, without a trailing slash."""
        self._fs = fs
        self._path = path
        self.is_local = "file" in _protocols(fs)
        """Whether its objects are files of this machine."""

    def child(self, name: str) -> "StorageDir":
        """A directory in this directory."""
        return StorageDir(posixpath.join(self.url, name), self._fs, self._at(name))

    @property
    def parent(self) -> "StorageDir":
        """The directory that contains this one."""
        return StorageDir(posixpath.dirname(self.url), self._fs, posixpath.dirname(self._path))

    @property
    def name(self) -> str:
        """Its name in :attr:`parent`."""
        return posixpath.basename(self._path)

    @shielded
    def read(self, name: str, most: int | None = None) -> bytes:
        """All of an object.

        Args:
            most: bytes. Raises IntegrityError when it has more, of which no more are read; None: any number.
        """
        with self._naming(name):
            if self.is_local:
                content = _read_all_local(self._at(name), most)
            elif most is None:
                content = self._fs.cat_file(self._at(name))
            else:
                content = self._fs.cat_file(self._at(name), start=0, end=most + 1)
        if most is not None and len(content) > most:
            raise IntegrityError(
                f"{self.url}/{name} has more than {most} bytes, of which no more are read of such an object"
            )
        return content

    @shielded
    def find(self, name: str) -> bytes | None:
        """All of a record; None when it doesn't exist, empty when it is too long for one."""
        try:
            return self.read(name, MOST_RECORD)
        except MissingError:
            return None
        except IntegrityError:
            return b""

    @shielded
    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills ``target`` with the object's bytes from ``offset`` on.

        Raises StorageError also when the object ends before.
        """
        if not self.is_local:
            target[:] = self.read_range(name, offset, len(target))
            return
        with self._naming(name):
            count = _read_local(self._at(name), offset, target)
        self._check_range(name, offset, count, len(target))

    @shielded
    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of an object. Raises StorageError also when the object ends before."""
        with self._naming(name):
            data: bytes = self._fs.cat_file(self._at(name), start=offset, end=offset + size)
        self._check_range(name, offset, len(data), size)
        return data

    def _check_range(self, name: str, offset: int, found: int, size: int) -> None:
        if found != size:
            raise StorageError(
                f"{self.url}/{name} ends after {offset + found} bytes, but the checkpoint's "
                f"metadata wants those up to {offset + size}: the file was cut or replaced"
            )

    @shielded
    def list(self) -> list[DirEntry]:
        """The entries of the directory, sorted by name; not those of its subdirectories."""
        with self._naming(""):
            found = self._fs.ls(self._path, detail=True)
        own = self._path.strip("/")
        entries = {}
        for info in found:
            path = str(info["name"]).strip("/")
            # Some stores list the directory itself, as an empty object.
            if path != own:
                name = posixpath.basename(path)
                entries[name] = DirEntry(name, info["type"] == "directory")
        return sorted(entries.values(), key=lambda entry: entry.name)

    @shielded
    def is_file(self) -> bool:
        """Whether there is an object where the directory should be."""
        try:
            with self._naming(""):
                info = self._fs.info(self._path)
        except StorageError:
            return False
        # Some stores list a directory as an empty object.
        return info["type"] == "file" and (self.is_local or bool(info["size"]))

    @shielded
    def check_bucket(self) -> None:
        """Raises StorageError when the bucket doesn't exist, not only the directory."""
        if self.is_local:
            return
        try:
            with self._naming(""):
                # Finds nothing, without an error, if the bucket exists.
                self._fs.find(self._path)
        except MissingError as error:
            raise StorageError(f"{self.url}: its bucket doesn't exist; check the name") from error

    @shielded
    def stat(self, name: str) -> Stat:
        """Size, checksum and time of an object."""
        with self._naming(name):
            path = self._at(name)
            info = self._fs.info(path)
            time = next((info[key] for key in _MODIFIED if info.get(key) is not None), None)
            modified = _seconds(self._fs.modified(path) if time is None else time)
            checksum = info.get("crc32c")
            crc = int.from_bytes(base64.b64decode(checksum), "big") if checksum else None
            return Stat(int(info["size"]), crc, modified)

    @shielded
    def size(self, name: str) -> int:
        """Bytes of an object."""
        with self._naming(name):
            return int(self._fs.info(self._at(name))["size"])

    @shielded
    def stamp(self, name: str) -> str:
        """A text that differs if the object was replaced between two calls."""
        with self._naming(name):
            info = self._fs.info(self._at(name))
        return repr([info.get(each) for each in _STAMP])

    @shielded
    def write(self, name: str, content: bytes) -> None:
        """Creates or replaces a small object; a local file is not replaced atomically."""
        with self._naming(name, "written"):
            path = self._at(name)
            for attempts_left in range(_MOST_REMOVALS if self.is_local else 0, -1, -1):
                try:
                    if self.is_local:
                        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                    self._fs.pipe_file(path, content)
                    break
                except FileNotFoundError:
                    # Another process removed the directory with the last file in it.
                    if not attempts_left:
                        raise

    @shielded
    def remove(self, name: str) -> None:
        """Removes an object, and its directory if that is empty; no error when it doesn't exist."""
        path = self._at(name)
        try:
            with self._naming(name, "removed"):
                self._fs.rm_file(path)
        except MissingError:
            return
        if self.is_local:
            with suppress(OSError):
                os.rmdir(posixpath.dirname(path))

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)

    @contextmanager
    def _naming(self, name: str, done: str = "read") -> Iterator[None]:
        what = posixpath.join(self.url, name) if name else self.url
        try:
            yield
        except (StorageError, IntegrityError):
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingError(f"{what} doesn't exist") from error
        except PermissionError as error:
            raise StorageError(
                f"{what} can't be {done}: {error}; check the permissions of this process"
            ) from error
        except Exception as error:  # each file system of fsspec raises its own errors
            raise StorageError(
                f"{what} can't be {done}: {type(error).__name__}: {error}; check the address and "
                "the credentials in the trainer's environment or storage_options"
            ) from error


@shielded
def open_dir(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> StorageDir:
    """The directory at a path or URL. Touches no storage yet.

    Args:
        path: local, or a URL of any scheme fsspec knows (``file``, ``gs``, ``s3``, ``memory``).
        storage_options: of the fsspec file system: credentials, ``endpoint_url``.
            Default: from the environment.

    Raises:
        InvalidRequestError: it is not a path or URL, or its scheme is unknown.
        ConfigurationError: the scheme's package isn't installed, or its options are wrong.
    """
    url, scheme = readable(path)
    options = dict(storage_options or {})
    try:
        gcs = scheme in ("gs", "gcs")
        kind = _gcs_class(options) if gcs else fsspec.get_filesystem_class(scheme)
        if scheme not in _LOCAL:
            # The listings cache never expires.
            options.setdefault("use_listings_cache", False)
        return StorageDir(
            url, open_file_system(kind, options, scheme), str(kind._strip_protocol(url))
        )
    except ImportError as error:
        if scheme not in _PACKAGES:
            # fsspec's text names the package.
            raise ConfigurationError(f"{url} can't be read in {sys.prefix}: {error}") from error
        package = _PACKAGES[scheme]
        raise ConfigurationError(
            f"{url} needs {package}, which can't be imported in {sys.prefix} ({error}): pip install "
            f"{package} there, where the trainers run, and where the daemons run"
        ) from error
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise ConfigurationError(
            f"{url} can't be set up: {error}; check storage_options"
        ) from error


def readable(path: str | os.PathLike[str]) -> tuple[str, str]:
    """``path`` as :func:`~pannier.common.locations.absolute` returns it, and its scheme (``file`` for paths).

    Raises InvalidRequestError: fsspec doesn't know the scheme.
    """
    url = absolute(path)
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme not in fsspec.available_protocols():
        raise InvalidRequestError(
            f"{scheme}:// is an unknown scheme; use a path, file://, gs://, s3:// or memory://"
        )
    return url, scheme


def refuse_path(argument: str, value: Any) -> None:
    """Raises InvalidRequestError for a path in place of a storage writer or reader."""
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        raise InvalidRequestError(f"{argument}={path!r} is a path: give checkpoint_id={path!r}")


def as_torch(url: str) -> str | Path:
    """The ``path`` attribute of torch's writers and readers: a ``Path``, or a URL as text."""
    return url if "://" in url else Path(url)


def _gcs_class(options: dict[str, Any]) -> Any:
    """gcsfs' class. Adds to ``options`` what it needs."""
    # Set before the import: otherwise gcsfs asks for a bucket's layout over gRPC at its first use.
    os.environ.setdefault(_LAYOUT_LOOKUP, "false")
    import aiohttp
    import gcsfs

    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST", "")
    if endpoint not in ("", "default") and not endpoint.startswith("https://"):
        # No credentials over plain HTTP.
        options.setdefault("token", "anon")
    options.setdefault(
        "requests_timeout",
        aiohttp.ClientTimeout(
            sock_connect=timeouts.STORAGE_CONNECT_S, sock_read=timeouts.STORAGE_IDLE_S
        ),
    )
    if os.environ[_LAYOUT_LOOKUP].lower() in ("true", "1"):
        return gcsfs.GCSFileSystem
    # The base class, also if the trainer has already imported gcsfs.
    return gcsfs.core.GCSFileSystem


def _seconds(time: float | datetime) -> float:
    """Unix time."""
    if not isinstance(time, datetime):
        return float(time)
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _open_local(path: str) -> int:
    """A descriptor of a regular file; follows links. Raises StorageError for other files."""
    # O_NONBLOCK: opening a pipe would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise StorageError(f"{path} is not a regular file ({stat.filemode(mode)}): remove it")
    return fd


def _read_all_local(path: str, most: int | None) -> bytes:
    with open(_open_local(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise IntegrityError(
                f"{path} has {size} bytes, at most {most} are read of such an object"
            )
        return file.read() if most is None else file.read(size + 1)


def _read_local(path: str, offset: int, target: memoryview) -> int:
    fd = _open_local(path)
    try:
        return read_at(fd, offset, target)
    finally:
        os.close(fd)
