"""Which checkpoints a root holds, and which is the newest.

In: a root and a pattern. Out: the directories below the root that the pattern
matches and that have a ``.metadata``: an attempt in progress, or an aborted one, is no checkpoint. They are
ordered by the attempts that committed them: the names of attempts have the incarnation's number, and their
decisions the ordinal within it. Not by time, since commits come in any order and hosts have different clocks. Checkpoints that Pannier didn't write have
no attempt: they come first, by time. Blocking.
"""

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import crc32c

from pannier.client import console
from pannier.client.interrupts import aside
from pannier.client.loading.filesystem import MissingError, Stat, StorageDir, open_dir
from pannier.client.user_errors import at_call
from pannier.common.locations import CHILDREN, Pattern, has_wildcard, segment_matches
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError
from pannier.wire.records import MOST_METADATA, MOST_RECORD, fits, parse_decision

_log = logging.getLogger(__name__)

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_PARALLEL: Final = 16
_NUMBER: Final = re.compile(r"(\d+)")
_RECORDS: Final = object_names.attempts_prefix().rstrip("/")

IncarnationStarts: TypeAlias = Mapping[str, float] | None
"""When each incarnation wrote its first manifest; None: its number orders it.
See :func:`incarnation_start_times`."""


class PerRankError(MissingError):
    """The directory has a checkpoint per rank, which ``client.load`` doesn't read."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a root."""

    checkpoint_id: str
    """What ``load`` takes."""
    committed_at: float
    """When ``.metadata`` was written, by the store's clock; Unix time, seconds. Doesn't order them."""
    attempt: str | None = None
    """The attempt that committed it; orders checkpoints. None: Pannier didn't write it."""
    step: int | None = None
    """The last number in its name, in the part that the pattern's wildcards match. None: it has none."""
    ordinal: int = 0
    """Orders it among the checkpoints of the attempt's incarnation. 0: an earlier version wrote it, and the
    save's number orders it."""


@at_call
def list_checkpoints(
    root: str | os.PathLike[str],
    *,
    pattern: str = CHILDREN.text,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointInfo]:
    """See :func:`pannier.client.list`."""
    wanted = Pattern(pattern)
    with logged_list(root):
        below = open_dir(root, storage_options)
        places = directories(below, wanted)
        attempts = attempts_of(places)
        begun = incarnation_start_times(places, attempts, wanted)
        found = _each(lambda each: _read_info(*each), list(zip(places, attempts, strict=True)))
    return [
        dataclasses.replace(each, step=_step(below, each, wanted))
        for each in sorted(
            (each for each in found if each is not None), key=lambda each: _order(each, begun)
        )
    ]


def logged_list(root: str | os.PathLike[str]) -> AbstractContextManager[object]:
    """Logs a long wait for storage in this block."""
    return console.logged(f"the list of checkpoints below {root}", lambda: f"storage at {root}")


def newest(root: StorageDir, pattern: Pattern = CHILDREN) -> CheckpointInfo | None:
    """The newest checkpoint of a root.

    Lists each directory, and reads more only where the newest attempts of each group are. Raises as
    :func:`list_checkpoints`.
    """
    places = directories(root, pattern)
    attempts = attempts_of(places)
    begun = incarnation_start_times(places, attempts, pattern)
    read = functools.cache(lambda index: _read_info(places[index], attempts[index]))
    best: CheckpointInfo | None = None
    for chains in by_group(
        [(each, i) for i, found in enumerate(attempts) for each in found], begun
    ):
        for chain in chains:
            for attempt, index in chain:
                info = read(index)
                if info is not None and info.attempt:
                    best = max(
                        (each for each in (best, info) if each),
                        key=lambda each: _order(each, begun),
                    )
                    if info.attempt == attempt.name:
                        break  # The group's earlier ones are older.
        if best is not None:
            return best
    others = _each(read, list(range(len(places))))
    return max(
        (each for each in others if each), key=lambda each: _order(each, begun), default=None
    )


def by_group(
    attempts: Sequence[tuple[object_names.Attempt, _In]], begun: IncarnationStarts
) -> list[list[list[tuple[object_names.Attempt, _In]]]]:
    """Attempts by incarnation and group, each newest first: of one group, names alone show the order."""
    incarnations: dict[Any, dict[str, list[tuple[object_names.Attempt, _In]]]] = {}
    for each in attempts:
        attempt, _ = each
        groups = incarnations.setdefault(order_key(attempt, begun)[:2], {})
        groups.setdefault(attempt.group, []).append(each)
    return [
        [
            sorted(chain, key=lambda each: order_key(each[0], begun), reverse=True)
            for chain in groups.values()
        ]
        for _, groups in sorted(incarnations.items(), key=lambda each: each[0], reverse=True)
    ]


def order_key(attempt: object_names.Attempt, begun: IncarnationStarts) -> tuple[Any, ...]:
    """As :func:`~pannier.wire.object_names.order_key`. An incarnation without a manifest is the newest."""
    began = None if begun is None else begun.get(attempt.incarnation, math.inf)
    return object_names.order_key(attempt, began)


def incarnation_start_times(
    places: Sequence[StorageDir],
    attempts: Sequence[Sequence[object_names.Attempt]],
    pattern: Pattern,
) -> IncarnationStarts:
    """When each incarnation began; None if all checkpoints of the pattern are in one directory.

    Makes one request or a few per incarnation. Raises StorageError.

    Args:
        attempts: at each of ``places``.
    """
    if pattern.one_parent:
        return None
    by_incarnation: dict[str, list[tuple[int, StorageDir, str]]] = {}
    for directory, found in zip(places, attempts, strict=True):
        for each in found:
            own = by_incarnation.setdefault(each.incarnation, [])
            own.append((each.number, directory, each.name))
    if len(by_incarnation) < 2:
        return dict.fromkeys(by_incarnation, 0.0)
    return dict(zip(by_incarnation, _each(_began, list(by_incarnation.values())), strict=True))


def _began(attempts: Sequence[tuple[int, StorageDir, str]]) -> float:
    """When the first of an incarnation's attempts was planned, by the store's clock.

    Without any manifest there is no intact checkpoint: then it is the time of the first decision.
    """
    first_come = sorted(attempts, key=lambda each: each[0])
    for record in (object_names.manifest, object_names.decision):
        for _, directory, name in first_come:
            try:
                return directory.stat(record(name)).modified
            except MissingError:
                continue
    return math.inf


def _order(
    info: CheckpointInfo, begun: IncarnationStarts
) -> tuple[bool, tuple[Any, ...], float, list[tuple[int, str]]]:
    """Sort key, oldest first. Copies of a checkpoint, which have the same attempt, are ordered by time."""
    by_attempt: tuple[Any, ...] = (
        (info.committed_at,)
        if info.attempt is None
        else order_key(
            dataclasses.replace(object_names.Attempt.parse(info.attempt), ordinal=info.ordinal),
            begun,
        )
    )
    return info.attempt is not None, by_attempt, info.committed_at, _natural(info.checkpoint_id)


def _step(root: StorageDir, info: CheckpointInfo, pattern: Pattern) -> int | None:
    name = pattern.name_below(root.url, info.checkpoint_id)
    return None if name is None else pattern.step(name)


def attempts_at(directory: StorageDir) -> list[object_names.Attempt]:
    """The attempts that have records in a checkpoint directory. Raises StorageError.

    Newest first, for those of one group.
    """
    found = []
    try:
        entries = directory.child(_RECORDS).list()
    except MissingError:
        return []
    for entry in entries:
        try:
            found.append(object_names.Attempt.parse(entry.name))
        except InvalidRequestError:
            continue  # leases, and objects of later versions
    return sorted(found, reverse=True)


def attempts_of(directories: Sequence[StorageDir]) -> list[list[object_names.Attempt]]:
    """The attempts at each checkpoint directory, newest first. Raises StorageError."""
    return _each(attempts_at, directories)


def committed_attempt(directory: StorageDir) -> object_names.Attempt | None:
    """The attempt that the ``.metadata`` of a directory is of. Raises StorageError, IntegrityError."""
    try:
        found = find_commit(directory)
    except MissingError:
        return None
    return None if found is None else object_names.Attempt.of(found)


def find_commit(directory: StorageDir) -> records_pb2.Decision | None:
    """The COMMIT of the checkpoint in a directory; None: Pannier didn't write it.

    Raises MissingError when there is no checkpoint, StorageError, IntegrityError.
    """
    found = directory.stat(object_names.METADATA)
    return _find_committed(directory, attempts_at(directory), found)


def directories(root: StorageDir, pattern: Pattern = CHILDREN) -> list[StorageDir]:
    """The directories below a root that may be checkpoints. Raises StorageError.

    Lists the root, and of each level below only the directories that the pattern's beginning matches.
    """
    first, *others = pattern.segments
    found = _matching(root, first)
    if found is None:
        root.check_bucket()
        return []
    if not found and root.is_file():
        raise InvalidRequestError(
            f"{root.url} is a file: give the directory that holds the checkpoints"
        )
    for segment in others:
        if has_wildcard(segment):
            listed = _each(functools.partial(_matching, segment=segment), found)
            found = [each for below in listed for each in below or ()]
        else:
            found = [each.child(segment) for each in found]
    return found


def _matching(directory: StorageDir, segment: str) -> list[StorageDir] | None:
    """The directories in this one that a segment of a pattern matches; None: it doesn't exist."""
    try:
        entries = directory.list()
    except MissingError:
        return None
    names = [each.name for each in entries if each.is_directory]
    return [directory.child(name) for name in names if segment_matches(segment, name)]


def _each(function: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    """``function`` of each item, several at the same time."""

    def run() -> list[_Out]:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="pannier-list") as pool:
            return list(pool.map(function, items))

    return aside(run)


def _read_info(
    directory: StorageDir, attempts: Sequence[object_names.Attempt]
) -> CheckpointInfo | None:
    """The checkpoint in a directory, if there is one; None also once its removal has begun.

    Args:
        attempts: from :func:`attempts_at`.
    """
    try:
        found = directory.stat(object_names.METADATA)
        committed = _find_committed(directory, attempts, found)
        if committed is None and attempts:
            # A new attempt may have replaced it since they were listed.
            committed = _find_committed(directory, attempts_at(directory), found)
    except MissingError:
        return None
    if committed is None:
        return CheckpointInfo(directory.url, found.modified)
    name = committed.attempt
    if directory.find(object_names.removal_mark(name)) is not None:
        return None
    return CheckpointInfo(directory.url, found.modified, name, ordinal=committed.ordinal)


def _find_committed(
    directory: StorageDir, attempts: Sequence[object_names.Attempt], metadata: Stat
) -> records_pb2.Decision | None:
    """The COMMIT of the newest attempt whose decision matches the ``.metadata``."""
    checksum = metadata.crc32c
    damage: IntegrityError | None = None
    for attempt in attempts:
        key = object_names.decision(attempt.name)
        try:
            decision = parse_decision(
                directory.read(key, MOST_RECORD), attempt.name, f"{directory.url}/{key}"
            )
        except MissingError:
            continue  # undecided
        except IntegrityError as error:
            damage = damage or error
            continue
        if fits(decision, metadata.size, checksum) and checksum is None and len(attempts) > 1:
            # The .metadata of several attempts often have the same size.
            checksum = crc32c.crc32c(directory.read(object_names.METADATA, MOST_METADATA))
        if fits(decision, metadata.size, checksum):
            return decision
    if damage is not None:
        raise damage
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders step-9 before step-10."""
    pieces = _NUMBER.split(name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
