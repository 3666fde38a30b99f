"""Carries a retention policy out at one root: ``pannier retain``, and the coordinator after each commit.

In: how to open stores, the policy, a job. Out: what was removed, what stays and why. A checkpoint that is
being read (a lease lives) or written (an attempt isn't decided) stays until the next time. What was
decided is recorded beside the checkpoints, for ``pannier ls``. Async; whoever dies on the way has removed
some: the next run goes on, and ``pannier gc`` ends the removal that was begun.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pannier.records.clock import store_time
from pannier.records.listing import Checkpoint, list_checkpoints
from pannier.records.retention import Policy, Verdict, judge
from pannier.records.unmaking import condemn, remove_checkpoint, remove_directory
from pannier.storage import ConflictError, NotFoundError, Store
from pannier.wire import identity
from pannier.wire.errors import PannierError

_log = logging.getLogger(__name__)

_RECORDED: Final = 100
"""Removals that the record remembers."""

Opener = Callable[[str], Store]


@dataclass(frozen=True)
class Outcome:
    """What became of one checkpoint."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]
    """Why it stays; empty: it was removed, or would be."""
    removed: int = 0
    """Bytes."""
    spared: bool = False
    """No rule keeps it, but it can't go now."""

    @property
    def why(self) -> str:
        """Its reasons, for people."""
        return ", ".join(self.reasons)


async def retain(
    open_store: Opener,
    root: str,
    policy: Policy,
    *,
    job: str,
    host: str,
    dry_run: bool = False,
) -> list[Outcome]:
    """Removes what the policy doesn't keep of a job's checkpoints directly below ``root``.

    Args:
        open_store: of a checkpoint id or root; each store is closed here.
        host: signs removals.
        dry_run: only tells.

    Raises:
        StorageError: the root can't be read. What fails at one checkpoint is a reason why that stays.
    """
    store = open_store(root)
    try:
        verdicts = judge(policy, await list_checkpoints(store), job=job)
        now = await store_time(store) if any(not each.reasons for each in verdicts) else 0.0
        outcomes = []
        for verdict in verdicts:
            if verdict.reasons:
                outcomes.append(Outcome(verdict.checkpoint, verdict.reasons))
            else:
                url = f"{root.rstrip('/')}/{verdict.checkpoint.name}"
                outcomes.append(await _remove(open_store, url, verdict, now, host, dry_run))
        if not dry_run and policy.limits:
            await _record(store, job, outcomes)
    finally:
        await store.close()
    return outcomes


async def _remove(
    open_store: Opener, url: str, verdict: Verdict, now: float, host: str, dry_run: bool
) -> Outcome:
    checkpoint = verdict.checkpoint
    store = open_store(url)
    try:
        condemned = await condemn(store)
        standing = condemned.seen.standing
        if standing is None or standing.name != checkpoint.attempt:
            return _spared(checkpoint, "it was overwritten a moment ago")
        if condemned.undecided:
            return _spared(checkpoint, "a save to it is under way")
        if readers := condemned.readers(now):
            holders = ", ".join(sorted({lease.holder for lease in readers}))
            return _spared(checkpoint, f"it is being read by {holders}")
        if dry_run:
            return Outcome(checkpoint, (), condemned.size)
        gone = await remove_checkpoint(store, condemned, host=host)
    except PannierError as error:
        return _spared(checkpoint, f"it could not be removed: {error}")
    finally:
        await store.close()
    remove_directory(url)
    return Outcome(checkpoint, (), sum(info.size for info in gone.objects))


def _spared(checkpoint: Checkpoint, why: str) -> Outcome:
    return Outcome(checkpoint, (why,), spared=True)


async def _record(store: Store, job: str, outcomes: list[Outcome]) -> None:
    """Leaves what was decided for whoever lists the root; the last one's word stands."""
    key = identity.retention_record()
    info = await store.stat(key)
    known = await read_record(store) if info is not None else {}
    at = time.time()
    removed = [
        {"name": each.checkpoint.name, "job": job, "bytes": each.removed, "time": at}
        for each in outcomes
        if not each.reasons
    ]
    jobs = known.get("kept", {})
    jobs[job] = {each.checkpoint.name: each.reasons for each in outcomes if each.reasons}
    record = {"kept": jobs, "removed": [*known.get("removed", []), *removed][-_RECORDED:]}
    data = json.dumps(record, indent=1).encode()
    try:
        await store.replace(key, data, expected=info.generation if info is not None else None)
    except ConflictError:
        _log.info("%s/%s was written by another coordinator meanwhile", store.url, key)


async def read_record(store: Store) -> dict[str, Any]:
    """What was decided last at a root: "kept" (by job and name: reasons) and "removed"; else empty."""
    try:
        found = json.loads(await store.read(identity.retention_record()))
    except (NotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
