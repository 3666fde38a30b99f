"""Extra files of one attempt of a checkpoint: of a COMMIT in, their bytes out, compared with their checksums. Blocking."""

from collections.abc import Callable, Collection

import crc32c

from pannier.client.loading.filesystem import StorageDir
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError, StorageError
from pannier.wire.records import parse_decision

Wanted = Collection[str] | Callable[[str], bool]
"""Names that must be there, or which names are wanted of those that are there."""


def check_wanted(wanted: Wanted) -> None:
    """Raises InvalidRequestError for one name in place of several."""
    if isinstance(wanted, str):
        raise InvalidRequestError(
            f"extra_files={wanted!r}: give a collection of names, as [{wanted!r}]"
        )


def read_of_attempt(directory: StorageDir, attempt: str, wanted: Wanted) -> dict[str, bytes]:
    """The wanted files by name. Raises StorageError, also for a name that isn't there, and IntegrityError.

    Args:
        attempt: empty: Pannier didn't write the checkpoint, and what is there has no record.
    """
    if not callable(wanted) and not wanted:
        return {}
    if not attempt:
        names = [] if callable(wanted) else wanted
        return {name: directory.read(name) for name in names}
    key = object_names.decision(attempt)
    commit = parse_decision(directory.read(key), attempt, f"{directory.url}/{key}")
    if callable(wanted):
        return {
            each.name: read(directory, each) for each in commit.extra_files if wanted(each.name)
        }
    return {name: read(directory, find(directory, commit, name)) for name in wanted}


def find(directory: StorageDir, commit: records_pb2.Decision, name: str) -> records_pb2.ExtraFile:
    """Where it lies. Raises StorageError: the checkpoint has none of this name."""
    for file in commit.extra_files:
        if file.name == name:
            return file
    names = ", ".join(each.name for each in commit.extra_files) or "none"
    raise StorageError(f"{directory.url} has no extra file {name!r}; it has {names}")


def read(directory: StorageDir, file: records_pb2.ExtraFile) -> bytes:
    """Its bytes. Raises StorageError, IntegrityError."""
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
