"""What storage knows of a save that nobody here was told: another coordinator, or life of one.

In: a :class:`Save` and its store. Out: the save with the manifest and the receipts that are in
storage, or the decision that has ended it. Writes nothing. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Final

from pannier.attempts.decisions import read_decision
from pannier.attempts.manifests import read_manifest
from pannier.attempts.receipts import find_receipts
from pannier.coordinator.commit.manifest import Manifest
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.saves.participants import DisagreementError, Proposal
from pannier.coordinator.saves.save import Save
from pannier.storage import StorageError, Store
from pannier.storage.base import unlimited
from pannier.v1 import records_pb2
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)

LOOK_S: Final = 3.0
"""After so long, storage is asked for ranks that nobody here speaks for; then ever more rarely."""
LONGEST_LOOK_S: Final = 30.0
"""Even when all ranks are spoken for: another coordinator may have decided."""
_ASK_S: Final = 0.1
"""How long the answer counts whether all ranks are spoken for: it is asked after each change."""
_ANSWER_S: Final = 10.0
"""For storage to tell who is durable."""


class Looks:
    """When storage is asked next. Event loop only."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._last = time.monotonic()
        self._pause = LOOK_S
        self._asked = 0.0
        self._spoken_for = False

    def due(self) -> float:
        """On the monotonic clock."""
        now = time.monotonic()
        if now >= self._asked + _ASK_S:
            self._asked = now
            self._spoken_for = all(
                part.receipt is not None or part.spoken_for for part in self._save.parts.values()
            )
        return self._last + (LONGEST_LOOK_S if self._spoken_for else self._pause)

    async def look(self, store: Store) -> records_pb2.Decision | None:
        """Takes in receipts that no sidecar has lived to report; the decision, if there is one."""
        save = self._save
        save.unseen = False
        assert save.attempt is not None
        missing = [rank for rank, part in save.parts.items() if part.receipt is None]
        try:
            # The last look comes when the save's own time is up.
            with unlimited():
                asked = asyncio.gather(
                    read_decision(store, save.attempt.name, save.context.save),
                    find_receipts(store, save.attempt.name, missing),
                )
            decision, found = await asyncio.wait_for(asked, _ANSWER_S)
        except (StorageError, IntegrityError, asyncio.TimeoutError) as error:
            _log.warning("%s: storage doesn't tell who is durable: %s", save.label, error)
            return None
        finally:
            self._last = time.monotonic()
            self._pause = min(2 * self._pause, LONGEST_LOOK_S)
        if found:
            ranks = [receipt.rank for receipt in found]
            _log.info("%s: receipts of ranks %s are in storage", save.label, ranks)
        take_receipts(save, found)
        save.progress()
        return decision


async def take_up(save: Save, store: Store) -> records_pb2.Decision | None:
    """Goes on from what another life of the coordinator left; the decision, if it has ended.

    Raises StorageError, IntegrityError, DisagreementError.
    """
    assert save.attempt is not None
    save.touched = True
    name = save.attempt.name
    decision = await read_decision(store, name, save.context.save)
    if decision is not None:
        return decision
    found = await read_manifest(store, name, Manifest, save.context.save)
    if found is None:
        # Without a manifest nobody was answered a plan: torch makes this one.
        save.external = True
        receipts = await find_receipts(store, name, save.context.ranks)
    else:
        save.external = found.header.external
        await asyncio.to_thread(lambda: found.plan)
        adopt(save, found)
        receipts = await find_receipts(store, name, found.ranks)
        if save.external:
            save.metadata = found.message.metadata
    what = "receipts" if found is None else "its manifest and receipts"
    save.note = (
        f"taken up again from {what} in storage: {len(receipts)} of {len(save.parts)} ranks were "
        "durable by then"
    )
    _log.info("%s is %s", save.label, save.note)
    take_receipts(save, receipts)
    save.recovered()
    return None


def adopt(save: Save, standing: Manifest) -> None:
    """Takes the manifest that stands in storage.

    Raises DisagreementError unless it is of the plans that we know, and of the one that ranks go by.
    """
    for plan in save.gathering.plans:
        check_member(standing, plan)
    for proposal in save.gathering.unread:
        check_member(standing, proposal)
    go_by(save, standing)


def go_by(save: Save, standing: Manifest) -> None:
    """The save's manifest is in storage, and fits what its ranks have said."""
    save.plan_id = "" if standing.header.external else standing.plan_id
    save.manifest = standing
    # Digests are in the manifest; of a large job the plans are large.
    save.gathering.forget_plans()


def check_member(standing: Manifest, said: RankPlan | Proposal) -> None:
    """Raises DisagreementError unless the manifest was made of what the rank said."""
    digest = standing.plan.digests.get(said.rank, "none")
    attempt = standing.header.attempt
    if digest != said.digest:
        raise DisagreementError(
            f"rank {said.rank} (host {said.host}) planned digest {said.digest[:12]}, but attempt "
            f"{attempt} was planned before with {digest[:12]}",
            (said.rank, said.host),
        )
    if isinstance(said, Proposal) and (said.plan_id, said.attempt) != (standing.plan_id, attempt):
        raise DisagreementError(
            f"rank {said.rank} (host {said.host}) goes by plan {said.plan_id[:12]} as attempt "
            f"{said.attempt}, but attempt {attempt} was planned before as {standing.plan_id[:12]}",
            (said.rank, said.host),
        )


def take_receipts(save: Save, receipts: Iterable[records_pb2.Receipt]) -> None:
    """What is found counts as if its sidecar had told it."""
    for receipt in receipts:
        part = save.parts.get(receipt.rank)
        if part is not None and part.receipt is None:
            part.host = part.host or receipt.host
            save.take_receipt(receipt)
        save.suspects.pop(receipt.rank, None)
