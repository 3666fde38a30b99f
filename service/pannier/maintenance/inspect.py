"""A snapshot of one checkpoint id: its attempts, their decisions, and the attempt of ``.metadata``.

In: a store. Out: a :class:`View`, and the names of the files that the current ``.metadata`` needs. Async.
"""

import asyncio
import posixpath
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pannier.attempts.decisions import Decisions, read_decisions
from pannier.attempts.listing import CheckpointState, list_checkpoints
from pannier.attempts.metadata_refs import referenced_files
from pannier.attempts.metadata_swap import stat_metadata
from pannier.common.locations import CHILDREN
from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.storage.retry import contend
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import StorageError
from pannier.wire.records import MOST_METADATA, match

_RACES = 10
"""Commits in a row while ``.metadata`` is read."""


@dataclass
class View:
    """The objects of one checkpoint id, as they were listed."""

    attempts: dict[str, list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))
    """Data files and records by attempt, oldest attempt first."""
    others: list[ObjectInfo] = field(default_factory=list)
    """Other objects beside the records: leases, temporary objects."""
    decisions: Decisions = field(default_factory=Decisions)
    metadata: ObjectInfo | None = None
    standing: object_names.Attempt | None = None
    """The attempt of ``.metadata``."""

    @property
    def foreign(self) -> bool:
        """Whether ``.metadata`` belongs to none of Pannier's attempts."""
        return self.metadata is not None and self.standing is None

    def size(self, attempt: str) -> int:
        """Bytes of all objects of an attempt."""
        return sum(info.size for info in self.attempts[attempt])

    def find(self, attempt: str, key: str) -> ObjectInfo | None:
        """One of an attempt's objects."""
        return next((info for info in self.attempts[attempt] if info.key == key), None)

    def superseded(self) -> list[str]:
        """Committed attempts whose ``.metadata`` a newer one's has replaced."""
        standing = self.standing
        if standing is None:
            return []
        return [
            name
            for name in self.attempts
            if name in self.decisions.known
            and self.decisions.known[name].outcome == records_pb2.OUTCOME_COMMIT
            and object_names.Attempt.of(self.decisions.known[name]) < standing
        ]


async def view(store: Store, *, data: bool = True) -> View:
    """Lists one checkpoint id.

    Args:
        data: also lists data files. Without them, the view has records only, and no attempts with
            nothing but a decision.

    Raises:
        StorageError: it can't be read.
        IntegrityError: a damaged record makes the attempt of ``.metadata`` unknown.
    """
    found = View()
    # Before the listing, which then has the decision of the attempt of ``.metadata``: it was stored earlier.
    metadata, checksum = await stat_metadata(store)
    prefixes = [object_names.attempts_prefix()]
    if data:
        prefixes.append(object_names.data_prefix("")[:-1])
    loose: dict[str, list[ObjectInfo]] = defaultdict(list)
    for prefix in prefixes:
        for info in await store.list(prefix):
            attempt = object_names.attempt_of(info.key)
            if attempt:
                loose[attempt].append(info)
            elif info.key.startswith(object_names.attempts_prefix()):
                found.others.append(info)
    for name in sorted(loose, key=object_names.Attempt.parse):
        # Each abort leaves a decision.
        if data or [info.key for info in loose[name]] != [object_names.decision(name)]:
            found.attempts[name] = loose[name]
    if found.attempts:
        found.decisions = await read_decisions(
            store, (info for items in found.attempts.values() for info in items)
        )
        found.metadata = metadata
        if metadata is not None:
            found.decisions.check()
            committed = match(found.decisions.known, metadata.size, checksum)
            if committed is not None:
                found.standing = object_names.Attempt.of(committed)
    return found


async def find_needed(store: Store) -> frozenset[str]:
    """Names of the files that the current ``.metadata`` refers to; none without one.

    Raises:
        StorageError: it can't be read.
        IntegrityError: it isn't a checkpoint's metadata.
    """
    async for _ in contend(_RACES):
        before = await store.stat(object_names.METADATA)
        if before is None:
            return frozenset()
        try:
            content = await store.read_whole(object_names.METADATA, MOST_METADATA)
        except NotFoundError:
            continue
        after = await store.stat(object_names.METADATA)
        if after is not None and after.generation == before.generation:
            return await asyncio.to_thread(
                referenced_files, content, f"{store.url}/{object_names.METADATA}"
            )
    raise StorageError(
        f"{store.url}/{object_names.METADATA} changed {_RACES} times while it was read"
    )


def by_checkpoint(objects: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Objects of Pannier's and ``.metadata``, by directory, "" for the root itself.

    Args:
        objects: a listing of the root.

    Returns only directories with objects of Pannier's, in order; keys are relative to them.
    """
    found: dict[str, list[ObjectInfo]] = defaultdict(list)
    own = set()
    for info in objects:
        directory, separator, rest = f"/{info.key}".rpartition(f"/{object_names.attempts_prefix()}")
        if separator:
            directory, name = directory[1:], object_names.attempts_prefix() + rest
            own.add(directory)
        else:
            directory, name = posixpath.split(info.key)
            if object_names.attempt_of(name):
                own.add(directory)
            elif name != object_names.METADATA:
                continue
        found[directory].append(replace(info, key=name))
    return {directory: found[directory] for directory in sorted(own)}


async def describe_root(store: Store) -> str:
    """What to give instead of a directory that holds checkpoints; empty: it holds none. Raises StorageError."""
    below = [
        each.name
        for each in await list_checkpoints(store, CHILDREN)
        if each.state is CheckpointState.COMMITTED
    ]
    if not below:
        return ""
    return (
        f"it is a root, which `pannier ls` lists: give a checkpoint, like {store.url}/{below[-1]}"
    )
