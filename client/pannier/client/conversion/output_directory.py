"""A local directory that appears with all its files, or not at all.

In: its path. Out: a directory beside it to write into, which is renamed to the path at the end. Blocking.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pannier.common.locations import absolute
from pannier.wire.errors import InvalidRequestError, PannierError, StorageError

_PREFIX: Final = "file://"
_unfinished: Final[set[Path]] = set()
"""Directories that this process is writing."""


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to write into; at ``path`` when the block has succeeded, removed when it hasn't.

    Its parents are created. Until then it is named ``.NAME.<random>.partial``; a process that is killed
    leaves it behind.

    Raises:
        InvalidRequestError: ``path`` is there already, and isn't an empty directory.
        StorageError: it can't be written.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        _refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _unfinished.add(partial)
        partial.mkdir()
        try:
            yield partial
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
            _refuse_existing(path)
            # Takes the place of an empty directory, too; fails if it isn't empty any more.
            partial.rename(path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except PannierError:  # a missing checkpoint is an OSError, too
        raise
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error}") from error
    finally:
        _unfinished.discard(partial)


def remove_unfinished() -> None:
    """Removes what this process is writing: for a signal handler that ends it."""
    for partial in _unfinished:
        shutil.rmtree(partial, ignore_errors=True)


def local_path(place: str | os.PathLike[str]) -> Path:
    """The absolute path of a directory. Raises InvalidRequestError: it isn't local."""
    path = absolute(place)
    if "://" in path and not path.startswith(_PREFIX):
        raise InvalidRequestError(
            f"{path} is no local directory: torch's writer of safetensors files writes to file systems "
            "only; export to a local one, and copy it"
        )
    return Path(path.removeprefix(_PREFIX))


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidRequestError(
            f"{path} exists already: give a directory that doesn't exist, or is empty"
        )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
