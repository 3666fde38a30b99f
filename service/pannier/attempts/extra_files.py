"""Extra files of a checkpoint: small files beside the state that become visible with its commit.

In: the receipts of an attempt, or its COMMIT. Out: for each extra file a copy under its own name, which plain
tools read. The bytes lie in data files of the attempt, which receipts and the COMMIT name with a checksum; so
a copy can be made again from storage alone. The order of writes:

1. after COMMIT and before ``.metadata`` is replaced: the copies, so that any checkpoint that exists has all;
2. after ``.metadata`` was replaced: copies that only the replaced checkpoint had are removed.

``.metadata`` determines which checkpoint's copies are to exist: :mod:`pannier.attempts.metadata_swap` reads
it again after each change here. A copy is only removed if it has exactly the content of its attempt: a file
that another writer has put in its place stays. Async; idempotent.
"""

from collections.abc import Collection, Iterable
from typing import Final

import crc32c

from pannier.common.fault_points import point
from pannier.storage import ConflictError, HeldError, NotFoundError, ObjectInfo, StorageError, Store
from pannier.storage.many import for_each
from pannier.storage.retry import contend
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, PannierError

_PARALLEL: Final = 8
"""Extra files in memory at the same time."""
_MOST: Final = 4096
"""Extra files of one checkpoint: all are in its decision."""
_RACES: Final = 100


class ExtraFilesError(PannierError):
    """Extra files that can't be in one checkpoint, or not in this directory."""

    kind = save_pb2.FAILURE_KIND_DISAGREEMENT


def collect(receipts: Iterable[records_pb2.Receipt]) -> list[records_pb2.ExtraFile]:
    """The extra files of all ranks, by name; of equal ones, the lowest rank's.

    Raises ExtraFilesError when two ranks give different contents for one name, or there are too many.
    """
    found: dict[str, tuple[records_pb2.ExtraFile, records_pb2.Receipt]] = {}
    for receipt in sorted(receipts, key=lambda receipt: receipt.rank):
        for each in receipt.extra_files:
            first, source = found.setdefault(each.name, (each, receipt))
            if (first.size, first.crc32c) != (each.size, each.crc32c):
                raise ExtraFilesError(
                    f"ranks {source.rank} (host {source.host}) and {receipt.rank} (host {receipt.host}) "
                    f"give different contents for the extra file {each.name!r}: give it on one rank only"
                )
    if clash := object_names.find_clash(found):
        raise ExtraFilesError(
            f"the extra files {clash[0]!r} and {clash[1]!r} can't be both: one is the other's directory"
        )
    if len(found) > _MOST:
        raise ExtraFilesError(
            f"the ranks give {len(found)} extra files together, at most {_MOST} are allowed"
        )
    return [each for _, (each, _) in sorted(found.items())]


async def check_writable(store: Store, files: Iterable[records_pb2.ExtraFile]) -> set[str]:
    """Before COMMIT: raises HeldError or ExtraFilesError when a copy could not be written after it.

    Returns the names under which there is a file already.
    """

    async def check(file: records_pb2.ExtraFile) -> bool:
        where = f"{store.url}/{file.name}"
        info = await store.stat(file.name)
        if info is not None and info.hold:
            raise HeldError(
                f"{where} is under a hold ({info.hold}) and can't be replaced by an extra file of that "
                "name: release it, or save to another checkpoint id"
            )
        if info is not None and await _is_directory(store, info):
            raise ExtraFilesError(f"{where} is a directory: give the extra file another name")
        for parent in _parents(file.name):
            if await _is_file(store, parent):
                raise ExtraFilesError(
                    f"{store.url}/{parent} is a file, where the directory of the extra file {file.name!r} "
                    "is to be: give it another name"
                )
        return info is not None

    files = list(files)
    there = await for_each(check, files, parallel=_PARALLEL)
    return {file.name for file, is_there in zip(files, there, strict=True) if is_there}


async def write_copies(
    store: Store, commit: records_pb2.Decision, *, but: Collection[str] = ()
) -> None:
    """Writes the copies of a COMMIT, also over equal ones, so that no concurrent removal removes them.

    After an error no other copy is begun; it is raised when no write is under way any more.

    Args:
        but: names that stay as they are.

    Raises IntegrityError when the bytes aren't what was decided.
    """
    failed = False

    async def write(file: records_pb2.ExtraFile) -> None:
        nonlocal failed
        if failed:
            return
        try:
            await _write_copy(store, file)
        except BaseException:
            failed = True
            raise

    # The caller may remove the copies after an error: no write may take effect after it was raised.
    files = [file for file in commit.extra_files if file.name not in but]
    await for_each(write, files, parallel=_PARALLEL, try_all=True)


async def _write_copy(store: Store, file: records_pb2.ExtraFile) -> None:
    data = await read(store, file)
    async for _ in contend(_RACES):
        info = await store.stat(file.name)
        point("coordinator.extra_file.before")
        try:
            await store.replace(
                file.name, data, expected=info.generation if info is not None else None
            )
        except ConflictError:
            continue
        point("coordinator.extra_file.after")
        return
    raise StorageError(f"{store.url}/{file.name} changed {_RACES} times while it was written")


async def missing_copies(store: Store, commit: records_pb2.Decision) -> set[str]:
    """Names of a COMMIT's copies that are missing or have another content."""
    found = await for_each(
        lambda file: find_copy(store, file), commit.extra_files, parallel=_PARALLEL
    )
    return {file.name for file, copy in zip(commit.extra_files, found, strict=True) if not copy}


async def find_foreign(
    store: Store, names: Collection[str], commits: Iterable[records_pb2.Decision]
) -> set[str]:
    """Those of the names under which there is something else than a copy of one of the COMMITs."""
    files = [file for each in commits for file in each.extra_files if file.name in names]
    copies = await for_each(lambda file: find_copy(store, file), files, parallel=_PARALLEL)
    others = sorted({*names} - {info.key for info in copies if info is not None})
    found = await for_each(store.stat, others, parallel=_PARALLEL)
    return {info.key for info in found if info is not None}


async def remove_copies(
    store: Store, commit: records_pb2.Decision, kept: Collection[str] = ()
) -> list[ObjectInfo]:
    """Removes the copies of a COMMIT whose names aren't ``kept``; returns them."""
    found = await find_copies(store, commit, kept)
    for info in found:
        point("sweep.deletion.before")
        await store.delete(info.key, generation=info.generation)
        point("sweep.deletion.after")
    return found


async def find_copies(
    store: Store, commit: records_pb2.Decision, kept: Collection[str] = ()
) -> list[ObjectInfo]:
    """The copies of a COMMIT whose names aren't ``kept``."""
    files = [file for file in commit.extra_files if file.name not in kept]
    found = await for_each(lambda file: find_copy(store, file), files, parallel=_PARALLEL)
    return [info for info in found if info is not None]


async def find_copy(store: Store, file: records_pb2.ExtraFile) -> ObjectInfo | None:
    """The copy of an extra file; None: there is none, or it has another content."""
    info = await store.stat(file.name)
    if info is None or info.size != file.size:
        return None
    checksum = info.crc32c
    if checksum is None:
        try:
            checksum = crc32c.crc32c(await store.read(file.name))
        except NotFoundError:
            return None
    return info if checksum == file.crc32c else None


async def _is_file(store: Store, name: str) -> bool:
    try:
        await store.read(name, 0, 1)
    except NotFoundError:
        return False
    return True


async def _is_directory(store: Store, info: ObjectInfo) -> bool:
    """Whether ``info`` is a directory, which only some stores have; False if it was removed or replaced."""
    if await _is_file(store, info.key):
        return False
    again = await store.stat(info.key)
    return again is not None and again.generation == info.generation


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


async def read(store: Store, file: records_pb2.ExtraFile) -> bytes:
    """The bytes of an extra file, from its attempt's data file. Raises IntegrityError."""
    data = await store.read(file.file, file.offset, file.size) if file.size else b""
    if (len(data), crc32c.crc32c(data)) != (file.size, file.crc32c):
        raise IntegrityError(
            f"{store.url}/{file.file} is damaged: the extra file {file.name!r} has {len(data)} bytes there "
            f"with crc32c {crc32c.crc32c(data):08x}, decided were {file.size} with {file.crc32c:08x}"
        )
    return data
