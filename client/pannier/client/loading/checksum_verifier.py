"""Compares what is read with what was saved.

In: the decision and the receipts of an attempt, and the bytes of its files. Out: IntegrityError where
they differ. The checksum of a data file covers the whole file: so all of it is read, also the bytes
that the rank doesn't need. An extra file has a checksum of its own. Blocking; for one load of one rank.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import crc32c

from pannier.client.loading.filesystem import MissingError, StorageDir
from pannier.client.loading.range_reader import PIECE_BYTES, KeyIndex, Range, Read, in_parallel
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, StorageError
from pannier.wire.records import MOST_RECORD, fits, parse_decision, parse_receipt

_log = logging.getLogger(__name__)

_OWNER: Final = re.compile(r"_(\d+)_[a-z0-9]+\.distcp")
_ADVICE: Final = "`pannier verify` lists all damaged files"

Wanted = Collection[str] | Callable[[str], bool]
"""Names of extra files, which must exist; or a function that returns whether an existing one is wanted."""


class Receipts:
    """The decision and the receipts of one attempt.

    Args:
        directory: the checkpoint.
        attempt: name of the attempt; empty: there is none, and so no records.
    """

    def __init__(self, directory: StorageDir, attempt: str) -> None:
        self.directory = directory
        self.attempt = attempt
        self._known: dict[int, dict[str, records_pb2.DataFile]] = {}

    def check_metadata(self, content: bytes, *, required: bool) -> None:
        """Raises IntegrityError unless ``.metadata`` is what was committed.

        Args:
            required: raise also when the decision can't be read.
        """
        try:
            decision = self._read_decision()
        except (StorageError, IntegrityError) as error:
            if required:
                raise
            # A copy of a checkpoint without its records, or a reader without access to them.
            _log.debug("%s", error)
            return
        expected = (decision.metadata_size, decision.metadata_crc32c)
        found = (len(content), crc32c.crc32c(content))
        if not fits(decision, *found):
            raise IntegrityError(
                f"{self.directory.url}/{object_names.METADATA} is not what was committed: it has "
                f"{found[0]} bytes with crc32c {found[1]:08x}, committed were {expected[0]} with "
                f"{expected[1]:08x}; {_ADVICE}"
            )

    def _read_decision(self) -> records_pb2.Decision:
        key = object_names.decision(self.attempt)
        try:
            data = self.directory.read(key, MOST_RECORD)
        except MissingError as error:
            raise IntegrityError(f"{error}: {object_names.METADATA} can't be verified") from error
        return parse_decision(data, self.attempt, f"{self.directory.url}/{key}")

    def find(self, name: str) -> records_pb2.DataFile:
        """The receipt of a data file, whose size in storage is checked.

        Raises:
            IntegrityError: there is none, or the size differs.
            StorageError: it can't be read.
        """
        match = _OWNER.fullmatch(name.removeprefix(object_names.data_prefix(self.attempt)[:-1]))
        if match is None:
            raise IntegrityError(
                f"{self.directory.url}/{name} is not a data file of {self.attempt}, to which "
                f"{object_names.METADATA} belongs: it can't be verified"
            )
        file = self._files_of(int(match[1])).get(name)
        if file is None:
            raise IntegrityError(
                f"rank {match[1]}'s receipt doesn't name {name} at {self.directory.url}; {_ADVICE}"
            )
        size = self.directory.size(name)
        if size != file.size:
            raise IntegrityError(
                f"{self.directory.url}/{name} has {size} bytes, saved were {file.size}; {_ADVICE}"
            )
        return file

    def extra_files(self, wanted: Wanted) -> dict[str, bytes]:
        """The wanted extra files by name. Raises StorageError, also for a name that isn't there, and IntegrityError."""
        if not callable(wanted) and not wanted:
            return {}
        if not self.attempt:
            # Another writer's: there are no records, only the files themselves.
            return {} if callable(wanted) else {name: self.directory.read(name) for name in wanted}
        commit = self._read_decision()
        if callable(wanted):
            wanted = [each.name for each in commit.extra_files if wanted(each.name)]
        return {name: read_extra_file(self.directory, commit, name) for name in wanted}

    def recorded(self, names: Iterable[str], *, threads: int) -> dict[str, records_pb2.DataFile]:
        """The receipts of data files, by name; without those that can't be read, which is logged."""
        if not self.attempt:
            return {}
        prefix = object_names.data_prefix(self.attempt)[:-1]
        owners: defaultdict[int, list[str]] = defaultdict(list)
        for name in names:
            if (match := _OWNER.fullmatch(name.removeprefix(prefix))) is not None:
                owners[int(match[1])].append(name)

        def read(rank: int) -> dict[str, records_pb2.DataFile]:
            try:
                return self._files_of(rank)
            except (StorageError, IntegrityError) as error:
                _log.info("%s", error)
                return {}

        found = in_parallel(read, list(owners), threads=threads)
        return {
            name: files[name]
            for files, names in zip(found, owners.values(), strict=True)
            for name in names
            if name in files
        }

    def _files_of(self, rank: int) -> dict[str, records_pb2.DataFile]:
        if rank not in self._known:
            key = object_names.receipt(self.attempt, rank)
            try:
                data = self.directory.read(key, MOST_RECORD)
            except MissingError as error:
                raise IntegrityError(f"{error}: rank {rank}'s files can't be verified") from error
            receipt = parse_receipt(data, self.attempt, rank, f"{self.directory.url}/{key}")
            self._known[rank] = {file.name: file for file in receipt.files}
        return self._known[rank]


class ChecksumVerifier:
    """Takes checksums of files while they are read, and compares each at its end.

    Args:
        directory: the checkpoint.
        receipts: of its attempt.
        files: that the load needs.
        index: the keys that these hold, for errors.
    """

    def __init__(
        self, directory: StorageDir, receipts: Receipts, files: Iterable[str], index: KeyIndex
    ) -> None:
        self._directory = directory
        self._index = index
        self._files = {}
        for name in sorted(set(files)):
            with index.naming(name):
                self._files[name] = receipts.find(name)
        self._at = ("", 0, 0)
        """Name of the current file, bytes of it so far, their checksum."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {name: file.size for name, file in self._files.items()}

    def cover(self, reads: Iterable[Read | None]) -> Iterator[Read | None]:
        """``reads``, sorted by file, and reads of all that lies between, so that files are read whole.

        Raises IntegrityError: they want bytes behind the end of a file.
        """
        name, done = "", 0
        for each in reads:
            if each is None:
                yield None
                continue
            if each.range.file != name:
                yield from self._rest(name, done)
                name, done = each.range.file, 0
            size = self._files[name].size
            if each.range.end > size:
                raise IntegrityError(
                    f"{object_names.METADATA} wants bytes up to {each.range.end} of {name}, which has "
                    f"{size}"
                )
            yield from _between(name, done, each.range.offset)
            yield each
            done = max(done, each.range.end)
        yield from self._rest(name, done)

    def _rest(self, name: str, done: int) -> Iterator[Read]:
        if name:
            yield from _between(name, done, self._files[name].size)

    def update(self, each: Range, content: memoryview) -> None:
        """Adds the bytes of :meth:`cover`'s next read. Raises IntegrityError at a damaged file's end."""
        name, done, checksum = self._at
        if name != each.file:
            name, done, checksum = each.file, 0, 0
        checksum = crc32c.crc32c(content[done - each.offset :], checksum)
        is_end = done < each.end == self._files[name].size
        done = max(done, each.end)
        self._at = (name, done, checksum)
        expected = self._files[name]
        if is_end and checksum != expected.crc32c:
            with self._index.naming(name):
                raise IntegrityError(
                    f"{self._directory.url}/{name} has crc32c {checksum:08x}, saved was "
                    f"{expected.crc32c:08x}: its bytes are damaged or another file's; {_ADVICE}"
                )


def _between(name: str, start: int, end: int) -> Iterator[Read]:
    for offset in range(start, end, PIECE_BYTES):
        yield Read(Range(name, offset, min(PIECE_BYTES, end - offset)), lambda _: None)


def read_extra_file(directory: StorageDir, commit: records_pb2.Decision, name: str) -> bytes:
    """The bytes of an extra file of a COMMIT. Raises StorageError, also where it has none of this name, IntegrityError."""
    file = next((each for each in commit.extra_files if each.name == name), None)
    if file is None:
        names = ", ".join(each.name for each in commit.extra_files) or "none"
        raise StorageError(f"{directory.url} has no extra file {name!r}; it has {names}")
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
