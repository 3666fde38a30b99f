"""Which checkpoints a root holds, and which is the newest.

In: a root in storage. Out: the directories directly below it that have a
``.metadata``: an attempt that is under way, or was aborted, is no checkpoint. Their order is that of
the attempts that committed them, (incarnation, save number), whose names are in storage; times are
those of several clocks, and of commits, which come in any order. What Pannier didn't write has no
attempt: it comes before all that has, by time.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import crc32c
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pannier.client import torch_compat, wait_log
from pannier.client.identity import is_alone
from pannier.client.interrupts import aside
from pannier.client.loading import highest_incarnation
from pannier.client.loading.filesystem import MissingError, Stat, StorageDir, absolute, open_dir
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    StorageError,
)
from pannier.wire.failures import failures_text, shorten
from pannier.wire.records import describe_safetensors, fits, parse_decision

_log = logging.getLogger(__name__)

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_PARALLEL: Final = 16
_SHOWN: Final = 5
_NUMBER: Final = re.compile(r"(\d+)")
_PREFIX: Final = "pannier-latest"
_RECORDS: Final = object_names.attempts_prefix().rstrip("/")


def _nothing() -> None:
    """What comes before a look-up by default."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a root."""

    checkpoint_id: str
    """What ``load`` takes."""
    committed_at: float
    """When ``.metadata`` was written, by the store's clock; Unix time, seconds. Not what orders it."""
    attempt: str | None = None
    """The attempt that it is of; a newer one's is newer. None: Pannier didn't write it."""

    @property
    def order(self) -> tuple[bool, Any, float, list[tuple[int, str]]]:
        """Sorts oldest first. Copies of a checkpoint have one attempt: by time."""
        place = (
            self.committed_at if self.attempt is None else object_names.Attempt.parse(self.attempt)
        )
        return self.attempt is not None, place, self.committed_at, _natural(self.checkpoint_id)


def list_checkpoints(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """See :func:`pannier.client.list`."""
    with _logged(root):
        directories = _directories(open_dir(root, storage_options))
        found = _each(lambda directory: _look(directory, attempts_at(directory)), directories)
    return sorted((each for each in found if each is not None), key=lambda each: each.order)


def _logged(root: str | os.PathLike[str]) -> AbstractContextManager[object]:
    return wait_log.logged(f"the list of checkpoints below {root}", lambda: f"storage at {root}")


def newest(root: StorageDir) -> CheckpointInfo | None:
    """The last of a root's checkpoints, looked for where the newest attempts are.

    One listing for each directory, and few requests more. Raises as :func:`list_checkpoints`.
    """
    directories = _directories(root)
    attempts = _each(attempts_at, directories)
    ours = sorted(
        (
            (found, directory)
            for found, directory in zip(attempts, directories, strict=True)
            if found
        ),
        key=lambda each: each[0][0],
        reverse=True,
    )
    best: CheckpointInfo | None = None
    for found, directory in ours:
        if best is not None and found[0] < object_names.Attempt.parse(best.attempt or ""):
            break
        seen = _look(directory, found)
        if seen is not None and seen.attempt and (best is None or seen.order > best.order):
            best = seen
    if best is not None:
        return best
    others = _each(lambda each: _look(*each), list(zip(directories, attempts, strict=True)))
    return max((each for each in others if each), key=lambda each: each.order, default=None)


def latest(
    root: str | os.PathLike[str],
    *,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
    before: Callable[[], None] = _nothing,
) -> str | None:
    """See :func:`pannier.client.latest`.

    Args:
        before: beside what that takes, called first of all; what it raises on the first rank is told to all.
    """

    def look() -> str | None:
        before()
        # First: an incarnation that begins to save after this look has followed.
        highest_incarnation.look(root, storage_options)
        with _logged(root):
            found = newest(open_dir(root, storage_options))
        return found.checkpoint_id if found is not None else None

    if is_alone(no_dist):
        return look()
    return _shared(absolute(root), look, process_group, timeout, before)


def attempts_at(directory: StorageDir) -> list[object_names.Attempt]:
    """Attempts whose records are at a checkpoint id, newest first. Raises StorageError."""
    found = []
    try:
        entries = directory.child(_RECORDS).list()
    except MissingError:
        return []
    for entry in entries:
        try:
            found.append(object_names.Attempt.parse(entry.name))
        except InvalidRequestError:
            continue  # leases, and what a later version may put there
    return sorted(found, reverse=True)


def _directories(root: StorageDir) -> list[StorageDir]:
    try:
        entries = root.list()
    except MissingError:
        root.check_bucket()
        return []
    return [root.child(e.name) for e in entries if e.is_directory and e.name != _RECORDS]


def _each(function: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    """``function`` of all items, several at a time."""

    def run() -> list[_Out]:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="pannier-list") as pool:
            return list(pool.map(function, items))

    return aside(run)


def _look(directory: StorageDir, attempts: Sequence[object_names.Attempt]) -> CheckpointInfo | None:
    """The checkpoint there, if there is one.

    Args:
        attempts: those whose records are there, newest first.
    """
    try:
        found = directory.stat(object_names.METADATA)
        committed = _find_committed(directory, attempts, found)
    except MissingError:
        return None
    name = committed.name if committed is not None else None
    return CheckpointInfo(directory.url, found.modified, name)


def _find_committed(
    directory: StorageDir, attempts: Sequence[object_names.Attempt], metadata: Stat
) -> object_names.Attempt | None:
    """Whose ``.metadata`` it is: the newest attempt that decided to commit what stands there."""
    checksum = metadata.crc32c
    damage: IntegrityError | None = None
    for attempt in attempts:
        key = object_names.decision(attempt.name)
        try:
            decision = parse_decision(directory.read(key), attempt.name, f"{directory.url}/{key}")
        except MissingError:
            continue  # undecided
        except IntegrityError as error:
            damage = damage or error
            continue
        if fits(decision, metadata.size, checksum) and checksum is None and len(attempts) > 1:
            # Those of several attempts are often of one size.
            checksum = crc32c.crc32c(directory.read(object_names.METADATA))
        if fits(decision, metadata.size, checksum):
            return attempt
    if damage is not None:
        raise damage
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders step-9 before step-10."""
    parts = _NUMBER.split(name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _shared(
    root: str,
    look: Callable[[], str | None],
    process_group: Any,
    timeout: float,
    before: Callable[[], None],
) -> str | None:
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidRequestError(
            f"rank {dist.get_rank()} is not in this process group: only its ranks may ask with it"
        )
    store = PrefixStore(_PREFIX, torch_compat.group_store(process_group))
    rank = dist.get_rank(process_group)
    # Counted in the store, which may live longer than this process group.
    key = str(store.add(f"calls/{rank}", 1))
    if rank == 0:
        return _answer(store, key, root, look)
    # This call is counted: whatever is raised, the next is in step.
    before()
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    try:
        with wait_log.logged(
            f"latest below {root}", lambda: f"rank {first} to list what is in storage"
        ):
            store.wait([key], timedelta(seconds=timeout))
        answer = json.loads(store.get(key))
    except RuntimeError as error:  # torch's DistStoreError
        raise DeadlineError(
            f"waiting for ranks [{first}]: after {timeout:g} s rank {first} has not said which is "
            f"the newest checkpoint below {root}; does it call latest() as often as rank "
            f"{dist.get_rank()}? ({error})"
        ) from error
    if answer["root"] != root:
        raise InvalidRequestError(
            f"rank {dist.get_rank()} asks for the newest checkpoint below {root}, the first rank "
            f"of its group for that below {answer['root']}"
        )
    if "error" in answer:
        raise StorageError(answer["error"])
    highest_incarnation.remember(root, answer["incarnation"])
    latest_id: str | None = answer["latest"]
    return latest_id


def _answer(store: Store, key: str, root: str, look: Callable[[], str | None]) -> str | None:
    try:
        found = look()
    except PannierError as error:
        store.set(key, json.dumps({"root": root, "error": str(error)}))
        raise
    answer = {"root": root, "latest": found, "incarnation": highest_incarnation.recall(root)}
    store.set(key, json.dumps(answer))
    return found


def describe_absence(place: StorageDir, name: str = object_names.METADATA) -> str:
    """Why ``place`` is no checkpoint: says which attempts at one are under way or were aborted."""
    begin = f"{place.url} is no checkpoint: "
    try:
        entries = {entry.name for entry in place.list()}
    except MissingError:
        return begin + (_describe_retired(place) or "it doesn't exist")
    except StorageError as error:
        return f"{begin}it has no {name}, and what is there can't be listed: {error}"
    if not entries:
        return begin + (_describe_retired(place) or "the directory is empty or doesn't exist")
    begin += f"it has no {name}"
    if name == object_names.METADATA and f"__0{object_names.METADATA}" in entries:
        return (
            f"{begin}; it was saved with use_collectives=False, as a checkpoint per rank: load it "
            "with dcp.load(storage_reader=StorageReader(...)) and as many ranks"
        )
    if _RECORDS not in entries:
        if safetensors := describe_safetensors(entries):
            return f"{place.url} has no {name}: {safetensors}"
        return (
            f"{begin} and no records of a save by Pannier, only {shorten(sorted(entries), _SHOWN)}"
        )
    try:
        newest_first = attempts_at(place)[:_SHOWN]
        attempts = [_describe_attempt(place, attempt.name) for attempt in newest_first]
    except StorageError as error:
        return f"{begin}, and the records of its attempts can't be read: {error}"
    return f"{begin}; attempts at it: {'; '.join(attempts) or 'none'}"


def check_not_removed(place: StorageDir, attempt: str) -> None:
    """Raises MissingError when the removal of the attempt's checkpoint has begun.

    Retention looks for leases after it has written its mark. A reader must call this after it has
    written its lease, so that one of the two sees the other.
    """
    mark = place.find(object_names.removal_mark(attempt))
    if mark is None:
        return
    raise MissingError(
        f"{place.url} is being removed{_signed(mark)}{_advise(place)}. If that was interrupted, "
        "`pannier rm` ends it"
    )


def _signed(mark: bytes) -> str:
    """Who removes it and why, as the mark says."""
    signed = _parse(mark)
    if "reason" not in signed or "by" not in signed:
        return ""
    return f" by {signed['reason']} on {signed['by']}"


def _describe_retired(place: StorageDir) -> str:
    """As :func:`describe_removal`, and what to load instead."""
    removal = describe_removal(place)
    return f"{removal}{_advise(place)}" if removal else ""


def describe_removal(place: StorageDir) -> str:
    """That retention removed the checkpoint there, and when; empty when its record doesn't say so."""
    key = object_names.retention_record()
    try:
        removed = _parse(place.parent.read(key)).get("removed", [])
    except MissingError:
        return ""
    except StorageError as error:
        _log.warning("whether retention removed %s can't be read: %s", place.url, error)
        return ""
    for each in reversed(removed if isinstance(removed, list) else []):
        if isinstance(each, Mapping) and each.get("name") == place.name:
            at = each.get("time")
            when = time.gmtime(at if isinstance(at, int | float) else 0)
            shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", when)
            return f"retention (job {each.get('job')}) removed it at {shown}"
    return ""


def _parse(content: bytes) -> dict[str, Any]:
    """A JSON object that is there to be shown; empty when it is none."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _advise(place: StorageDir) -> str:
    """What to load instead."""
    root = place.parent
    try:
        found = newest(root)
    except PannierError as error:
        return f"; which checkpoint is the newest below {root.url} can't be read: {error}"
    if found is None or found.checkpoint_id == place.url:
        return f"; there is no other checkpoint below {root.url}"
    return f"; the newest below {root.url} is {found.checkpoint_id}: load that"


def _describe_attempt(place: StorageDir, attempt: str) -> str:
    key = object_names.decision(attempt)
    try:
        decision = parse_decision(place.read(key), attempt, f"{place.url}/{key}")
    except MissingError:
        return f"{attempt} is in progress (or its processes are gone)"
    except IntegrityError:
        return f"{attempt} has a damaged decision"
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        mark = place.find(object_names.removal_mark(attempt))
        if mark is None:
            return f"{attempt} is decided and about to be committed"
        return f"{attempt} was committed, and is being removed{_signed(mark)}"
    causes = failures_text(decision.failures)
    return f"{attempt} was aborted" + (f" ({causes})" if causes else "")
