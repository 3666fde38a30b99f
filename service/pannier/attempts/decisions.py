"""The one object that ends an attempt: COMMIT or ABORT.

In: a checkpoint's store and a new decision. Out: the stored decision, this process's or another's. A stored
decision never changes, so decisions that were read are cached. Async.
"""

import os
import posixpath
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import crc32c
from google.protobuf import json_format

from pannier.common.fault_points import point
from pannier.storage import ConflictError, NotFoundError, ObjectInfo, Store
from pannier.storage.many import for_each
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, StorageError
from pannier.wire.records import MOST_RECORD, fits, match, parse_decision

_PROCESS: Final = uuid.uuid4().hex[:8]
"""Random, since process ids recur."""
_KNOWN: Final = 4096
"""Most cached decisions."""

_known: dict[tuple[str, ObjectInfo], records_pb2.Decision] = {}
"""Cached decisions by store and listing entry, which includes the generation."""


def new_decision(
    outcome: "records_pb2.Outcome",
    *,
    save: save_pb2.SaveId,
    attempt: object_names.Attempt,
    host: str,
    plan_id: str = "",
    metadata: bytes = b"",
    failures: Sequence[save_pb2.Failure] = (),
    metrics: Mapping[str, float] | None = None,
    overwrite: "save_pb2.Overwrite" = save_pb2.OVERWRITE_UNSPECIFIED,
    extra_files: Sequence[records_pb2.ExtraFile] = (),
) -> records_pb2.Decision:
    """A decision to store; unique, so that :func:`decide` recognizes it after a lost answer."""
    return records_pb2.Decision(
        outcome=outcome,
        save=save,
        attempt=attempt.name,
        incarnation_number=attempt.incarnation_number,
        ordinal=attempt.ordinal,
        plan_id=plan_id,
        metadata_size=len(metadata),
        metadata_crc32c=crc32c.crc32c(metadata) if metadata else 0,
        failures=failures,
        decided_by=f"{decider(host)}{uuid.uuid4().hex}",
        decided_at=time.time(),
        metrics=metrics,
        overwrite=overwrite,
        extra_files=extra_files,
    )


def decider(host: str) -> str:
    """Prefix of ``decided_by`` in this process's decisions."""
    return f"{host}/{os.getpid()}/{_PROCESS}/"


async def decide(store: Store, proposal: records_pb2.Decision) -> records_pb2.Decision:
    """Stores the decision unless the attempt has one; returns the stored one, which is binding.

    Raises:
        StorageError: the outcome may be unknown: run it again with the same proposal.
        IntegrityError: the stored decision is damaged, or another save's.
    """
    text = json_format.MessageToJson(proposal, sort_keys=True)
    point("coordinator.decision.before")
    try:
        await store.create(object_names.decision(proposal.attempt), text.encode())
    except ConflictError:
        standing = await read_decision(store, proposal.attempt, proposal.save)
        if standing is None:
            raise StorageError(
                f"{store.url}: the decision of {proposal.attempt} could neither be "
                "created nor found"
            ) from None
        return standing
    point("coordinator.decision.after")
    return proposal


async def read_decision(
    store: Store, attempt: str, save: save_pb2.SaveId | None = None
) -> records_pb2.Decision | None:
    """The decision of an attempt; None when it has none yet.

    Args:
        save: the expected save, when the caller knows its job, too.

    Raises IntegrityError when it is damaged, or another save's.
    """
    return await _read(store, object_names.decision(attempt), attempt, save)


async def _read(
    store: Store,
    key: str,
    attempt: str,
    save: save_pb2.SaveId | None = None,
    listed: ObjectInfo | None = None,
) -> records_pb2.Decision | None:
    try:
        data = await store.read_whole(key, MOST_RECORD, listed)
    except NotFoundError:
        return None
    return parse_decision(data, attempt, f"{store.url}/{key}", save)


async def _read_once(store: Store, info: ObjectInfo, attempt: str) -> records_pb2.Decision | None:
    """The decision of a listing entry, from the cache if it was read before."""
    decision = _known.get((store.url, info))
    if decision is None:
        decision = await _read(store, info.key, attempt, listed=info)
        if decision is not None:
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[store.url, info] = decision
    return decision


@dataclass
class Decisions:
    """All decisions of some attempts."""

    known: dict[str, records_pb2.Decision] = field(default_factory=dict)
    """By attempt."""
    damaged: dict[str, IntegrityError] = field(default_factory=dict)
    """By key: unreadable ones."""

    def check(self) -> None:
        """Raises IntegrityError when one is damaged."""
        for damage in self.damaged.values():
            raise damage


async def read_decisions(store: Store, objects: Iterable[ObjectInfo]) -> Decisions:
    """The decisions among ``objects``, without those that were removed since the listing."""
    found = Decisions()

    async def read(item: tuple[str, ObjectInfo]) -> None:
        attempt, info = item
        try:
            decision = await _read_once(store, info, attempt)
        except IntegrityError as error:
            found.damaged[info.key] = error
        else:
            if decision is not None:
                found.known[attempt] = decision

    await for_each(read, _find(objects, object_names.decision).items())
    return found


async def find_committed(
    store: Store, objects: Collection[ObjectInfo], size: int, checksum: int
) -> records_pb2.Decision | None:
    """The newest COMMIT whose ``.metadata`` has this size and checksum.

    Args:
        objects: a listing of the records of all attempts.

    The sizes of the candidates of ``.metadata`` narrow the search, so that usually one decision is
    read, however many attempts there are.

    Raises IntegrityError when it may be a damaged decision.
    """
    decided = _find(objects, object_names.decision)
    candidates = _find(objects, object_names.metadata_candidate)
    likely = [
        attempt
        for attempt in decided
        if attempt in candidates
        and candidates[attempt].size == size
        and candidates[attempt].crc32c in (None, checksum)
    ]
    for attempt in sorted(likely, key=object_names.Attempt.parse, reverse=True):
        decision = await _read_once(store, decided[attempt], attempt)
        if decision is not None and fits(decision, size, checksum):
            return decision
    others = await read_decisions(
        store, [info for attempt, info in decided.items() if attempt not in likely]
    )
    others.check()
    return match(others.known, size, checksum)


def _find(objects: Iterable[ObjectInfo], name: Callable[[str], str]) -> dict[str, ObjectInfo]:
    """By attempt, the record with this name, at any depth."""
    found = {}
    for info in objects:
        attempt = posixpath.basename(posixpath.dirname(info.key))
        if object_names.is_attempt(attempt) and f"/{info.key}".endswith(f"/{name(attempt)}"):
            found[attempt] = info
    return found
