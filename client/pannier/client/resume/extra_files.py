"""Extra files of a checkpoint, of the attempt that ``.metadata`` is of.

In: a checkpoint id and a name. Out: the file's bytes, compared with their checksum. They lie in a data file of the
attempt; so they fit the state that is loaded, also while a save to the same id is being committed. The copy at
``<checkpoint_id>/<name>`` is for tools that know nothing of Pannier. Blocking; any thread.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import crc32c

from pannier.client.loading import catalog
from pannier.client.loading.filesystem import MissingError, StorageDir, open_dir
from pannier.client.messages.call_errors import at_call
from pannier.client.save_factory import raise_unretrieved
from pannier.v1 import records_pb2
from pannier.wire.errors import IntegrityError, StorageError

_Answer = TypeVar("_Answer")

_TRIES: Final = 3
"""Replacements of the checkpoint in a row, while it is read."""


@at_call
def read_extra_file(
    checkpoint_id: str | os.PathLike[str],
    name: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> bytes:
    """A file that ``async_save(extra_files=...)`` added to a checkpoint; each rank reads by itself.

    It is the one that belongs to the state that :func:`load` reads, compared with its checksum, also while the
    checkpoint is being replaced. Of a checkpoint that Pannier didn't write, what is at
    ``<checkpoint_id>/<name>``.

    Args:
        checkpoint_id: directory: a path or a URL.
        name: as it was given.
        storage_options: of the fsspec file system. Default: from the environment.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved.
        StorageError: there is no such checkpoint, or it has no such file.
        IntegrityError: the bytes aren't those that were committed.
    """
    raise_unretrieved()
    directory = open_dir(checkpoint_id, storage_options)

    def read(commit: records_pb2.Decision | None) -> bytes:
        if commit is None:
            # Another writer's: there are no records, only the file itself.
            return directory.read(name)
        file = next((each for each in commit.extra_files if each.name == name), None)
        if file is None:
            names = ", ".join(each.name for each in commit.extra_files) or "none"
            raise StorageError(f"{directory.url} has no extra file {name!r}; it has {names}")
        return _read(directory, file)

    return _of_one_attempt(directory, read)


@at_call
def read_extra_files(
    checkpoint_id: str | os.PathLike[str], wanted: Callable[[str], bool]
) -> dict[str, bytes]:
    """All of a checkpoint's extra files whose names are wanted, by name; of one attempt.

    None of a checkpoint that Pannier didn't write. Raises as :func:`read_extra_file`.
    """
    raise_unretrieved()
    directory = open_dir(checkpoint_id)

    def read(commit: records_pb2.Decision | None) -> dict[str, bytes]:
        files = [] if commit is None else commit.extra_files
        return {file.name: _read(directory, file) for file in files if wanted(file.name)}

    return _of_one_attempt(directory, read)


def _of_one_attempt(
    directory: StorageDir, read: Callable[[records_pb2.Decision | None], _Answer]
) -> _Answer:
    """What ``read`` returns for the COMMIT that ``.metadata`` is of; again when its files are replaced meanwhile."""
    tries = itertools.count(1)
    while True:
        try:
            commit = catalog.find_commit(directory)
        except MissingError:
            raise StorageError(catalog.describe_absence(directory)) from None
        try:
            return read(commit)
        except MissingError:
            if next(tries) == _TRIES:
                raise


def _read(directory: StorageDir, file: records_pb2.ExtraFile) -> bytes:
    data = bytearray(file.size)
    if data:
        directory.read_into(file.file, file.offset, memoryview(data))
    found = crc32c.crc32c(data)
    if found != file.crc32c:
        raise IntegrityError(
            f"the extra file {file.name!r} in {directory.url}/{file.file} is damaged: its crc32c is {found:08x}, "
            f"{file.crc32c:08x} was committed"
        )
    return bytes(data)
