"""The one object that ends an attempt: COMMIT or ABORT.

In: a checkpoint's store and a proposal. Out: the decision that stands there, ours or
another's. Nobody changes or replaces one. Async.
"""

import os
import posixpath
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import crc32c
from google.protobuf import json_format

from pannier.daemon.crashing import point
from pannier.storage import ConflictError, NotFoundError, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import identity
from pannier.wire.errors import IntegrityError, InvalidRequestError, StorageError

_LIFE: Final = uuid.uuid4().hex[:8]
"""Process ids are used again."""


def propose(
    outcome: "records_pb2.Outcome",
    *,
    save: save_pb2.SaveId,
    attempt: identity.Attempt,
    host: str,
    plan_id: str = "",
    metadata: bytes = b"",
    failures: Sequence[save_pb2.Failure] = (),
    metrics: Mapping[str, float] | None = None,
) -> records_pb2.Decision:
    """A decision to be put to storage; unlike any other, so that ours can be told."""
    return records_pb2.Decision(
        outcome=outcome,
        save=save,
        attempt=attempt.name,
        incarnation_number=attempt.incarnation_number,
        plan_id=plan_id,
        metadata_size=len(metadata),
        metadata_crc32c=crc32c.crc32c(metadata) if metadata else 0,
        failures=failures,
        decided_by=f"{decider(host)}{uuid.uuid4().hex}",
        decided_at=time.time(),
        metrics=metrics,
    )


def decider(host: str) -> str:
    """How ``decided_by`` of this process's decisions begins."""
    return f"{host}/{os.getpid()}/{_LIFE}/"


async def decide(store: Store, proposal: records_pb2.Decision) -> records_pb2.Decision:
    """Returns the decision that stands; whoever lost the race obeys it.

    StorageError says that the outcome may be unknown: run it again with the same proposal.
    """
    text = json_format.MessageToJson(proposal, sort_keys=True)
    point("coordinator.decision.before")
    try:
        await store.create(identity.decision(proposal.attempt), text.encode())
    except ConflictError:
        standing = await read_decision(store, proposal.attempt)
        if standing is None:
            raise StorageError(
                f"{store.url}: the decision of {proposal.attempt} could not be created, but isn't "
                "there"
            ) from None
        return standing
    point("coordinator.decision.after")
    return proposal


async def read_decision(store: Store, attempt: str) -> records_pb2.Decision | None:
    """The decision of an attempt; None when it has none yet. Raises IntegrityError."""
    return await _read(store, identity.decision(attempt))


async def _read(store: Store, key: str) -> records_pb2.Decision | None:
    try:
        data = await store.read(key)
    except NotFoundError:
        return None
    try:
        decision = json_format.Parse(data, records_pb2.Decision(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{store.url}/{key} is damaged: {error}") from error
    # Whoever obeys it removes or installs what it names.
    if not key.endswith(identity.decision(decision.attempt)):
        raise IntegrityError(f"{store.url}/{key} is damaged: it names {decision.attempt!r}")
    if decision.outcome not in (records_pb2.OUTCOME_COMMIT, records_pb2.OUTCOME_ABORT):
        raise IntegrityError(f"{store.url}/{key} is damaged: it says neither COMMIT nor ABORT")
    return decision


@dataclass
class Decisions:
    """All decisions of some attempts."""

    known: dict[str, records_pb2.Decision] = field(default_factory=dict)
    """By attempt."""
    damaged: dict[str, IntegrityError] = field(default_factory=dict)
    """By key: those that can't be read."""


async def read_decisions(store: Store, keys: Iterable[str]) -> Decisions:
    """The decisions among the objects ``keys``; one that is gone by now is left out."""
    found = Decisions()
    for key in keys:
        attempt = posixpath.basename(posixpath.dirname(key))
        if not (is_attempt(attempt) and key.endswith(identity.decision(attempt))):
            continue
        try:
            decision = await _read(store, key)
        except IntegrityError as error:
            found.damaged[key] = error
        else:
            if decision is not None:
                found.known[attempt] = decision
    return found


def is_attempt(name: str) -> bool:
    """Whether a directory's name is an attempt's."""
    try:
        identity.Attempt.parse(name)
    except InvalidRequestError:
        return False
    return True


def match(
    decisions: dict[str, records_pb2.Decision], size: int, checksum: int
) -> records_pb2.Decision | None:
    """The newest COMMIT whose ``.metadata`` has this size and checksum."""
    fitting = [
        attempt
        for attempt, decision in decisions.items()
        if decision.outcome == records_pb2.OUTCOME_COMMIT
        and (decision.metadata_size, decision.metadata_crc32c) == (size, checksum)
    ]
    return decisions[max(fitting, key=identity.Attempt.parse)] if fitting else None
