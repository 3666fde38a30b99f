"""The file from which a restarted sidecar recovers: ``<spool>/journal``.

In: records. Out: the same records after a restart, up to the first damage. The file begins with MAGIC,
the format and their crc32c; then come records, each a mark, the length, the crc32c of length and
message, and a :class:`~pannier.v1.journal_pb2.JournalRecord`; then zeros, which reserve space, since a
full spool must not prevent records. Records are only appended; a file that has grown is replaced
as a whole. Blocking; thread-safe where it says so.
"""

import os
import stat
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import crc32c
from google.protobuf.message import DecodeError

from pannier.common import fault_points
from pannier.v1 import journal_pb2
from pannier.wire.chunk_codec import MAX_MESSAGE_BYTES
from pannier.wire.errors import ConfigurationError, PannierError

NAME: Final = "journal"
MAGIC: Final = b"\x89Pannier"
FORMAT: Final = 4
"""Raised when an older sidecar can't read what a newer one writes; older formats are read."""
MAX_RECORD: Final = MAX_MESSAGE_BYTES
"""Bytes of a record's message: what a client hands over in one message fits."""

_HEADER: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<4sII")
_MARK: Final = b"\xf7PJ\x1a"
_NEW: Final = f"{NAME}.new"
FILES: Final = (NAME, _NEW)
"""All that a journal may leave in its directory."""
_RESERVE: Final = 2 << 20
"""Bytes reserved for more records."""
# Never blocks on a pipe or follows a link.
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NewerFormatError(ConfigurationError):
    """A newer sidecar wrote the journal."""


@dataclass
class Contents:
    """What was read of a journal."""

    records: list[journal_pb2.JournalRecord] = field(default_factory=list)
    """Those before any damage."""
    damaged_at: int | None = None
    """Offset of a broken record that others follow; None: at most the last one was torn."""
    beyond: list[journal_pb2.JournalRecord] = field(default_factory=list)
    """Records behind the damage, which may lack others before them."""
    torn: int = 0
    """Bytes of an incomplete last record, to be overwritten."""
    end: int = 0
    """Where the next record goes when nothing is damaged."""


def encode(records: Iterable[journal_pb2.JournalRecord]) -> bytes:
    """The records as they lie in the file. Raises PannierError for one that a restart would not read."""
    parts = []
    for record in records:
        message = record.SerializeToString()
        length = len(message)
        if length > MAX_RECORD:
            raise PannierError(
                f"the record {record.WhichOneof('change')!r} has {length} bytes, and the journal takes at most "
                f"{MAX_RECORD}: save fewer items per rank"
            )
        parts.append(_RECORD.pack(_MARK, length, _checksum(length, message)))
        parts.append(message)
    return b"".join(parts)


def header(version: int = FORMAT) -> bytes:
    """The first bytes of a file of that format."""
    begin = _HEADER.pack(MAGIC, version, 0)[:-4]
    return begin + struct.pack("<I", crc32c.crc32c(begin))


def decode(data: bytes, path: Path) -> Contents:
    """Reads a whole file; reports damage and reads on behind it.

    Raises NewerFormatError: a newer sidecar wrote it; ConfigurationError: it is no journal at all.
    """
    contents = Contents()
    if len(data) < _HEADER.size and header().startswith(data):
        # No crash leaves this, since the file is renamed as a whole; but it can't have held anything.
        contents.torn = len(data)
        return contents
    contents.end = _HEADER.size
    begins_well = _check_format(data, path)
    at = _HEADER.size if begins_well else 0
    while at < len(data):
        found = _record_at(data, at)
        if found is None:
            break
        record, at = found
        contents.records.append(record)
    contents.end = at
    rest = data[at:].rstrip(b"\0")
    if rest or not begins_well:
        contents.beyond = _salvage(data, at)
        if contents.beyond:
            contents.damaged_at = at
        elif not begins_well:
            raise ConfigurationError(
                f"{path} is not a Pannier journal (it begins with {data[:8]!r}): name another "
                "--spool, or remove the file if nothing in this directory is wanted"
            )
        else:
            contents.torn = len(rest)
    return contents


def check_format(directory: Path) -> None:
    """Raises NewerFormatError when a newer sidecar wrote the journal in that spool."""
    try:
        fd = os.open(directory / NAME, os.O_RDONLY | _SAFE)
    except OSError:
        return
    with os.fdopen(fd, "rb") as file, suppress(OSError):
        _check_format(file.read(_HEADER.size), directory / NAME)


def _check_format(data: bytes, path: Path) -> bool:
    """Whether a file begins as a journal does. Raises NewerFormatError."""
    magic, version, crc = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))
    begins_well: bool = magic == MAGIC and crc == crc32c.crc32c(data[: _HEADER.size - 4])
    if begins_well and version > FORMAT:
        raise NewerFormatError(
            f"{path} has format {version}, this sidecar reads up to {FORMAT}: a newer version of "
            "Pannier holds checkpoints there. Start that version, which uploads them, or name "
            "another --spool; nothing was touched"
        )
    return begins_well


class Journal:
    """The file of one spool; open for more records after :meth:`rewrite` or :meth:`reopen`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._fd = -1
        self._lock = threading.Lock()
        """Around every change of the file and of ``_fd``."""
        self._sync_lock = threading.Lock()
        """Held while the file is synced or exchanged; taken before ``_lock``."""
        self._size = 0
        self._synced = 0
        self._first_size = 0
        self._renamed = False
        """The file was exchanged, and its directory isn't synced yet."""
        self.sync_failed = False
        """Records may be missing on disk although they can be read: only :meth:`rewrite` helps."""

    def read(self) -> Contents:
        """Reads what an earlier process left. Raises ConfigurationError, and changes nothing."""
        try:
            fd = os.open(self.path, os.O_RDONLY | _SAFE)
        except FileNotFoundError:
            return Contents()
        except OSError as error:
            raise ConfigurationError(f"the journal {self.path} can't be read: {error}") from error
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                raise ConfigurationError(
                    f"the journal {self.path} is not a file of user {os.geteuid()} but of user "
                    f"{found.st_uid}: name another --spool"
                )
            return decode(file.read(), self.path)

    def rewrite(self, records: Iterable[journal_pb2.JournalRecord]) -> None:
        """Replaces the file with one of just these records.

        No record may be added meanwhile. Raises PannierError, and then the present file stays.
        """
        new = self.path.with_name(_NEW)
        with self._sync_lock, self._lock:
            if self._fd >= 0:
                self._check_there()
            try:
                new.unlink(missing_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE
                fd = os.open(new, flags, 0o600)
                try:
                    os.fchmod(fd, 0o600)
                    size = _write(fd, header() + encode(records), 0)
                    with suppress(OSError):  # a full disk, which may have room for what there is
                        os.posix_fallocate(fd, 0, size + max(_RESERVE, size))
                    os.fsync(fd)
                    fault_points.point("sidecar.compaction.before")
                    new.rename(self.path)
                except BaseException:
                    os.close(fd)
                    new.unlink(missing_ok=True)
                    raise
                # From here on the new file is in use: what fails now is no reason to go back to the old one.
                self._use(fd, size)
                self._renamed = True
                with suppress(OSError):  # :meth:`sync` tries again, and raises
                    self._sync_rename()
                fault_points.point("sidecar.compaction.after")
            except OSError as error:
                raise PannierError(
                    f"the journal {self.path} can't be rewritten: {error}"
                ) from error

    def reopen(self, contents: Contents) -> None:
        """Appends to the file as it is, when there is no room for another.

        Args:
            contents: as it was read, without damage.

        Raises PannierError.
        """
        with self._sync_lock, self._lock:
            try:
                fd = os.open(self.path, os.O_RDWR | _SAFE)
                try:
                    _write(fd, bytes(contents.torn), contents.end)
                    os.fsync(fd)
                except BaseException:
                    os.close(fd)
                    raise
            except OSError as error:
                raise PannierError(f"the journal {self.path} can't be written: {error}") from error
            self._use(fd, contents.end)

    @property
    def space(self) -> int:
        """Bytes that it takes on its file system."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def growth(self) -> int:
        """Bytes added since it was rewritten."""
        return self._size - self._first_size

    @property
    def compact(self) -> int:
        """Bytes it had when it was rewritten."""
        return self._first_size

    def append(self, *records: journal_pb2.JournalRecord) -> None:
        """Adds records, all or none. They outlive this process; the machine, after :meth:`sync`.

        Thread-safe. Raises PannierError: nothing was added.
        """
        data = encode(records)
        with self._lock:
            try:
                self._size = _write(self._fd, data, self._size)
            except OSError as error:
                raise PannierError(
                    f"the journal {self.path} can't be written: {error}; a restarted sidecar "
                    "needs it"
                ) from error

    def sync(self) -> None:
        """Returns when all that was added before is on disk. Thread-safe.

        Raises PannierError, also later, until the file was rewritten: the kernel reports an error once, and the
        next sync would succeed without the pages that were lost.
        """
        wanted = self._size
        with self._sync_lock:
            self._check_there()
            if self._synced >= wanted and not self._renamed:
                return
            if self.sync_failed:
                raise PannierError(
                    f"the journal {self.path}: an earlier fsync failed, and the sidecar has not written the "
                    "records to another file yet: does the disk have errors?"
                )
            with self._lock:
                reached = self._size
            try:
                self._sync_file()
                self._sync_rename()
            except OSError as error:
                raise PannierError(f"the journal {self.path}: fsync failed: {error}") from error
            self._synced = reached

    def _sync_file(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError:
            self.sync_failed = True
            raise

    def _sync_rename(self) -> None:
        """Without it, the file that was replaced might be back after a loss of power."""
        if self._renamed:
            _sync_directory(self.path.parent)
            self._renamed = False

    def _check_there(self) -> None:
        if os.fstat(self._fd).st_nlink == 0:
            raise PannierError(
                f"the journal {self.path} was removed under the running sidecar: restart the sidecar; saves "
                "that are not committed must be made again"
            )

    def _use(self, fd: int, size: int) -> None:
        previous, self._fd = self._fd, fd
        self._size = self._synced = self._first_size = size
        self.sync_failed = False
        if previous >= 0:
            with suppress(OSError):  # of a file that isn't needed any more
                os.close(previous)

    def close(self, *, remove: bool) -> None:
        """Ends its use; ``remove``: nothing in it is needed any more."""
        with self._sync_lock, self._lock:
            if self._fd < 0:
                return
            if remove and os.fstat(self._fd).st_nlink:
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _write(fd: int, data: bytes, at: int) -> int:
    """Writes ``data`` after all records, which end at ``at``; returns the new end. All or nothing."""
    view, end = memoryview(data), at
    try:
        while end - at < len(view):
            end += os.pwrite(fd, view[end - at :], end)
    except OSError:
        # Half a record would hide all that follow it.
        os.ftruncate(fd, at)
        raise
    return end


def _checksum(length: int, message: bytes) -> int:
    return crc32c.crc32c(message, crc32c.crc32c(length.to_bytes(4, "little")))


def _record_at(data: bytes, at: int) -> tuple[journal_pb2.JournalRecord, int] | None:
    """The record that begins there and where it ends; None when there is no whole one."""
    if at + _RECORD.size > len(data):
        return None
    mark, length, crc = _RECORD.unpack_from(data, at)
    start, end = at + _RECORD.size, at + _RECORD.size + length
    if mark != _MARK or not 0 < length <= MAX_RECORD or end > len(data):
        return None
    message = data[start:end]
    if _checksum(length, message) != crc:
        return None
    record = journal_pb2.JournalRecord()
    try:
        record.ParseFromString(message)
    except DecodeError:
        return None
    return record, end


def _salvage(data: bytes, at: int) -> list[journal_pb2.JournalRecord]:
    """All whole records after ``at``, where none begins."""
    records = []
    at += 1
    while (at := data.find(_MARK, at)) >= 0:
        found = _record_at(data, at)
        if found is None:
            at += 1
        else:
            record, at = found
            records.append(record)
    return records


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


__all__ = [
    "FORMAT",
    "Contents",
    "Journal",
    "NewerFormatError",
    "check_format",
    "decode",
    "encode",
    "header",
]
