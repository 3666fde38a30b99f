"""Which checkpoints a root holds, and which is the newest.

In: a root in storage. Out: the directories directly below it that have a
``.metadata``: an attempt that is under way, or was aborted, is no checkpoint.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pannier.client import compat
from pannier.client.identity import is_alone
from pannier.client.places import Entry, MissingError, Place, absolute, open_place
from pannier.wire import identity
from pannier.wire.errors import DeadlineError, InvalidRequestError, PannierError, StorageError

_PARALLEL: Final = 16
_NUMBER: Final = re.compile(r"(\d+)")
_PREFIX: Final = "pannier-latest"


def _nothing() -> None:
    """What comes before a look-up by default."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a root."""

    checkpoint_id: str
    """What ``load`` takes."""
    committed_at: float
    """When ``.metadata`` was written, by the store's clock; Unix time, seconds."""


def list_checkpoints(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """See :func:`pannier.client.list`."""
    place = open_place(root, storage_options)
    try:
        entries = place.list()
    except MissingError:
        return []
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="pannier-list") as pool:
        found = pool.map(lambda entry: _look(place, entry), entries)
        checkpoints = [checkpoint for checkpoint in found if checkpoint is not None]
    return sorted(checkpoints, key=lambda c: (c.committed_at, _natural(c.checkpoint_id)))


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
        checkpoints = list_checkpoints(root, storage_options=storage_options)
        return checkpoints[-1].checkpoint_id if checkpoints else None

    if is_alone(no_dist):
        return look()
    return _shared(absolute(root), look, process_group, timeout, before)


def _look(place: Place, entry: Entry) -> CheckpointInfo | None:
    if not entry.is_directory or f"{entry.name}/" == identity.attempts_prefix():
        return None
    directory = place.child(entry.name)
    try:
        return CheckpointInfo(directory.url, directory.modified(identity.METADATA))
    except MissingError:
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
    store = PrefixStore(_PREFIX, compat.group_store(process_group))
    rank = dist.get_rank(process_group)
    # Counted in the store, which may live longer than this process group.
    key = str(store.add(f"calls/{rank}", 1))
    if rank == 0:
        return _answer(store, key, root, look)
    # This call is counted: whatever is raised, the next is in step.
    before()
    try:
        store.wait([key], timedelta(seconds=timeout))
        answer = json.loads(store.get(key))
    except RuntimeError as error:  # torch's DistStoreError
        first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
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
    latest_id: str | None = answer["latest"]
    return latest_id


def _answer(store: Store, key: str, root: str, look: Callable[[], str | None]) -> str | None:
    try:
        found = look()
    except PannierError as error:
        store.set(key, json.dumps({"root": root, "error": str(error)}))
        raise
    store.set(key, json.dumps({"root": root, "latest": found}))
    return found
