"""What a restore of the newest checkpoint below a root would use: a check of ``pannier doctor``.

In: a root, and which data files are held where. Out: a check with the number of files by place. Reads
listings and decisions, no data. On an event loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pannier.attempts.listing import Checkpoint, CheckpointState, list_checkpoints
from pannier.common.deadline import within
from pannier.common.units import size_text
from pannier.daemon.doctor_checks import Check, ok, warning
from pannier.storage import Store, open_store
from pannier.wire import object_names
from pannier.wire.errors import PannierError

NAME: Final = "restore"


@dataclass(frozen=True)
class Holder:
    """A host whose spool has data files of a checkpoint."""

    host: str
    """``this host`` for a sidecar's own host."""
    files: int
    size: int
    """Bytes."""
    problem: str = ""
    """Why other hosts can't read there, human-readable; empty: they can."""
    replicas: bool = False
    """Whether some of these files may be replicas of another host's."""


Holders = Callable[[str], Sequence[Holder]]
"""Who holds files of an attempt."""


async def check_restore(
    root: str,
    storage_options: Mapping[str, Any],
    timeout_s: float,
    holders: Holders,
    *,
    allow: Sequence[str] = (),
) -> Check:
    """The check; storage that can't be read is a warning."""
    try:
        store = open_store(root, storage_options=storage_options, deadline_s=timeout_s, allow=allow)
        try:
            return await within(timeout_s, _check(store, root, holders))
        finally:
            await store.close()
    except asyncio.TimeoutError:
        problem = f"storage did not list {root} within {timeout_s:.0f} s"
    except PannierError as error:
        problem = str(error)
    return warning(NAME, f"the newest checkpoint isn't known: {problem}", "")


async def _check(store: Store, root: str, holders: Holders) -> Check:
    newest = _newest(await list_checkpoints(store))
    if newest is None:
        return ok(NAME, f"there is no checkpoint below {root} yet")
    name = newest.name.rpartition("/")[2] or root
    if newest.attempt is None:
        return ok(
            NAME, f"{name}, the newest checkpoint, wasn't written by Pannier: read from storage"
        )
    prefix = f"{newest.name}/" if newest.name else ""
    listed = await store.list(prefix + object_names.data_prefix(newest.attempt))
    found = f"{name}, the newest checkpoint, {len(listed)} files, {size_text(newest.size)}: "
    return ok(NAME, found + _places(len(listed), holders(newest.attempt)))


def _newest(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The newest directly below the root, as ``client.latest`` finds it, else anywhere below."""
    readable = (CheckpointState.COMMITTED, CheckpointState.FOREIGN)
    found = [each for each in checkpoints if each.state in readable]
    near = [each for each in found if "/" not in each.name]
    return next(reversed(near or found), None)


def _places(files: int, holders: Sequence[Holder]) -> str:
    """``6 in the spool of node-1, 12 in storage alone``.

    Holders report how many files they have, not which: with replicas the rest lies between two numbers.
    """
    held = [
        f"{each.files} ({size_text(each.size)}) in the spool of {each.host}"
        + (f", {each.problem}" if each.problem else "")
        for each in holders
        if each.files
    ]
    if not held:
        return "all in storage alone"
    counts = [each.files for each in holders]
    least, most = max(0, files - sum(counts)), max(0, files - max(counts))
    rest = f"{least} in storage alone"
    if least < most and any(each.replicas for each in holders):
        rest = f"{least} to {most} in storage alone, as several hosts may have the same replicas"
    return "; ".join([*held, rest])
