"""The checkpoints below a root, all or those that a pattern matches.

In: listings. Out: checkpoints with their states. The attempt of a checkpoint's ``.metadata`` is found by
comparing its size and checksum with the COMMIT decisions beside it, without unpickling. Checkpoints are
ordered by their attempts, not by times, which come from several clocks. Async.
"""

import dataclasses
import enum
import math
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import crc32c

from pannier.attempts.decisions import find_committed, read_decisions
from pannier.attempts.manifests import ManifestRecord
from pannier.common.locations import CHILDREN, Pattern, has_wildcard, segment_matches
from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.storage.many import for_each
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.records import MOST_METADATA

_NEWEST: Final = 2**64 - 1


class CheckpointState(enum.Enum):
    """State of a checkpoint's directory."""

    COMMITTED = "committed"
    REMOVING = "removing"
    """Its removal has begun: readers are refused, and the next run of retention or of ``pannier rm`` completes it."""
    FOREIGN = "foreign"
    """Its ``.metadata`` matches no decision: not written by Pannier."""
    ABORTED = "aborted"
    """Every attempt ended without a checkpoint."""
    UNDECIDED = "undecided"
    """A save is in progress, or its processes are dead."""


@dataclass(frozen=True)
class Checkpoint:
    """One directory below a root."""

    name: str
    """Relative to the root."""
    state: CheckpointState
    attempt: str | None
    """The committed attempt, or else the newest one; None: foreign."""
    size: int
    """Bytes of the data files of ``attempt``; for a foreign checkpoint, of the files that have no attempt."""
    time: float
    """Time of its decision, or else of its last write; Unix time, seconds. For display only."""
    job: str = ""
    """Of a committed one, or one that is being removed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As its trainers reported; of such a one."""
    ordinal: int = 0
    """See :attr:`pannier.wire.object_names.Attempt.ordinal`."""
    began: float | None = None
    """When the attempt's incarnation wrote its first manifest below the root, by the store's clock; Unix
    time, seconds. None: the checkpoint is foreign, or incarnations are ordered by their numbers."""

    @property
    def order(self) -> tuple[bool, tuple[float | str, ...], float, str]:
        """Sorts oldest first: foreign ones by time, then the others by attempt.

        Copies of a checkpoint have one attempt; they are sorted by time.
        """
        if self.attempt is None:
            return False, (self.time,), self.time, self.name
        return True, object_names.order_key(self.parsed, self.began), self.time, self.name

    @property
    def parsed(self) -> object_names.Attempt:
        """The attempt, which must not be None, with its ordinal."""
        assert self.attempt is not None
        attempt = object_names.Attempt.parse(self.attempt)
        return dataclasses.replace(attempt, ordinal=self.ordinal)


@dataclass
class _Directory:
    metadata: ObjectInfo | None = None
    data: list[ObjectInfo] = field(default_factory=list)
    records: dict[str, list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))
    """By attempt."""

    def all_records(self) -> list[ObjectInfo]:
        return [info for records in self.records.values() for info in records]


async def list_checkpoints(store: Store, pattern: Pattern | None = None) -> list[Checkpoint]:
    """The checkpoints below the root ``store``, oldest first.

    Args:
        pattern: which ones; None: all at any depth, ordered as if they lay in one directory.

    Raises StorageError.
    """
    # All objects, or nearly all, are in directories directly below the root: listing everything at once takes
    # fewer requests than listing each directory.
    whole = pattern is None or pattern == CHILDREN
    objects = await (store.list() if pattern is None or whole else _list_matching(store, pattern))
    directories = _directories(objects)
    if pattern is not None:
        directories = {name: each for name, each in directories.items() if pattern.matches(name)}
    classified = await for_each(lambda item: _classify(store, *item), directories.items())
    found = [each for each in classified if each is not None]
    if pattern is not None and not pattern.one_parent:
        began = _began(directories)
        found = [
            dataclasses.replace(each, began=began[each.parsed.incarnation])
            if each.attempt is not None
            else each
            for each in found
        ]
    return sorted(found, key=lambda checkpoint: checkpoint.order)


async def _list_matching(store: Store, pattern: Pattern) -> list[ObjectInfo]:
    """All objects in the directories that the pattern matches.

    Lists level by level the directories that the pattern's beginning matches, and no others.
    """
    prefixes = [""]
    for segment in pattern.segments:
        if has_wildcard(segment):
            listed = await for_each(store.list_directories, prefixes)
        else:
            listed = [[segment]] * len(prefixes)
        prefixes = [
            f"{prefix}{name}/"
            for prefix, names in zip(prefixes, listed, strict=True)
            for name in names
            if segment_matches(segment, name)
        ]
    return [info for listed in await for_each(store.list, prefixes) for info in listed]


def _began(directories: Mapping[str, _Directory]) -> dict[str, float]:
    """When each incarnation's first attempt was planned, by the store's clock.

    For an incarnation without any manifest left, so without an intact checkpoint: when its first record was
    written.
    """
    planned: dict[str, float] = {}
    written: dict[str, float] = {}
    for name, directory in directories.items():
        for attempt, records in directory.records.items():
            incarnation = object_names.Attempt.parse(attempt).incarnation
            manifest = posixpath.join(name, object_names.manifest(attempt))
            for info in records:
                found = planned if info.key == manifest else written
                found[incarnation] = min(info.modified, found.get(incarnation, math.inf))
    return {**written, **planned}


def _directories(objects: Iterable[ObjectInfo]) -> dict[str, _Directory]:
    found: dict[str, _Directory] = defaultdict(_Directory)
    for item in objects:
        directory, separator, rest = f"/{item.key}".rpartition(f"/{object_names.attempts_prefix()}")
        if separator:
            attempt = rest.partition("/")[0]
            if object_names.is_attempt(attempt):
                found[directory[1:]].records[attempt].append(item)
            continue
        parent, name = posixpath.split(item.key)
        if name == object_names.METADATA:
            found[parent].metadata = item
        elif name.endswith(".distcp"):
            found[parent].data.append(item)
    return {
        name: directory
        for name, directory in found.items()
        if directory.metadata is not None or directory.records
    }


async def _classify(store: Store, name: str, directory: _Directory) -> Checkpoint | None:
    """The checkpoint in a directory; None: it was removed since the listing."""
    if directory.metadata is not None:
        try:
            return await _classify_with_metadata(store, name, directory, directory.metadata)
        except NotFoundError:
            # The removal of a checkpoint begins with its .metadata.
            directory = await _without_metadata(store, name, directory)
    for attempt, records in list(directory.records.items()):
        keys = [posixpath.relpath(info.key, name or ".") for info in records]
        if object_names.is_remains(attempt, keys):
            del directory.records[attempt]
    if not directory.records:
        return None
    decisions = (await read_decisions(store, directory.all_records())).known
    newest = max(directory.records, key=object_names.Attempt.parse)
    aborted = all(
        attempt in decisions and decisions[attempt].outcome == records_pb2.OUTCOME_ABORT
        for attempt in directory.records
    )
    return Checkpoint(
        name,
        CheckpointState.ABORTED if aborted else CheckpointState.UNDECIDED,
        newest,
        sum(item.size for item in directory.data if f"__{newest}_" in item.key),
        max(item.modified for item in directory.records[newest]),
        ordinal=await _read_ordinal(store, name, newest, decisions),
    )


async def _read_ordinal(
    store: Store, name: str, attempt: str, decisions: Mapping[str, records_pb2.Decision]
) -> int:
    """The ordinal of an attempt that isn't committed; of one that has none yet, the highest."""
    if attempt in decisions:
        return decisions[attempt].ordinal
    try:
        data = await store.read(posixpath.join(name, object_names.manifest(attempt)))
        return ManifestRecord.parse(data).header.ordinal
    except (NotFoundError, IntegrityError):
        return _NEWEST


async def _without_metadata(store: Store, name: str, directory: _Directory) -> _Directory:
    """What is left of a directory whose ``.metadata`` was removed since the listing."""
    prefix = posixpath.join(name, object_names.attempts_prefix())
    left = {info.key for info in await store.list(prefix)}
    found = _Directory(data=directory.data)
    for attempt, records in directory.records.items():
        if still := [info for info in records if info.key in left]:
            found.records[attempt] = still
    return found


async def _classify_with_metadata(
    store: Store, name: str, directory: _Directory, metadata: ObjectInfo
) -> Checkpoint:
    """Raises NotFoundError when ``.metadata`` was removed since the listing."""
    checksum, records = metadata.crc32c, directory.all_records()
    try:
        if checksum is None and records:
            checksum = crc32c.crc32c(await store.read_whole(metadata.key, MOST_METADATA, metadata))
        committed = await find_committed(store, records, metadata.size, checksum or 0)
    except IntegrityError:
        # Its attempt is unknown; `pannier verify` reports the damage.
        committed = None
    if committed is None:
        own = [
            item.size
            for item in directory.data
            if not any(f"__{attempt}_" in item.key for attempt in directory.records)
        ]
        return Checkpoint(name, CheckpointState.FOREIGN, None, sum(own), metadata.modified)
    prefix = posixpath.join(name, f"__{committed.attempt}_")
    mark = posixpath.join(name, object_names.removal_mark(committed.attempt))
    is_marked = any(info.key == mark for info in records)
    return Checkpoint(
        name,
        CheckpointState.REMOVING if is_marked else CheckpointState.COMMITTED,
        committed.attempt,
        sum(item.size for item in directory.data if item.key.startswith(prefix)),
        committed.decided_at or metadata.modified,
        committed.save.job,
        dict(committed.metrics),
        committed.ordinal,
    )
