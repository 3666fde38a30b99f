"""A random history of one checkpoint id, by the steps that coordinators, sidecars and readers take.

It keeps what must never be lost, which :meth:`History.check` looks for.
"""

import pickle
import random
from contextlib import suppress
from dataclasses import dataclass, field

import crc32c
from google.protobuf import json_format
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from pannier.attempts.commit import SupersededError, carry_out, prepare_commit
from pannier.attempts.decisions import decide, new_decision, read_decision
from pannier.attempts.leases import store_time
from pannier.attempts.manifests import ManifestRecord, publish
from pannier.attempts.metadata_swap import RemovedError
from pannier.storage import ConflictError, NotFoundError, Store
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names

RANKS = 2


@dataclass
class _Try:
    """One attempt, as its processes know it."""

    name: object_names.Attempt
    plan_id: str = ""
    durable: set[int] = field(default_factory=set)
    decision: records_pb2.Decision | None = None

    @property
    def file(self) -> dict[int, str]:
        return {rank: object_names.data_file(self.name.name, rank, 0) for rank in range(RANKS)}


class History:
    """Takes random steps on ``store``."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self._store = store
        self._chance = chance
        self._tries: list[_Try] = []
        self._leases: dict[str, str] = {}
        """Attempt by key: valid leases, taken when the attempt was committed."""

    async def now(self) -> float:
        return await store_time(self._store)

    async def step(self) -> None:
        """One random step of a process."""
        kinds = [self._whole, self._whole, self._begin, self._upload, self._upload, self._end]
        kinds += [self._abort, self._lease, self._lease, self._let_go, self._late]
        await self._chance.choice(kinds)()

    async def _whole(self) -> None:
        """A save without trouble."""
        await self._begin()
        attempt = self._tries[-1]
        for rank in range(RANKS):
            await self._make_durable(attempt, rank)
        await self._commit(attempt)

    async def _begin(self) -> None:
        name = object_names.Attempt(1, len(self._tries) + 1, "g0000000a", "i")
        attempt = _Try(name)
        message = records_pb2.PlanManifest(save=self._save(attempt), attempt=name.name)
        for rank in range(RANKS):
            message.members.add(rank=rank, host="node")
        manifest = ManifestRecord.parse(message.SerializeToString())
        attempt.plan_id = (await publish(self._store, manifest)).plan_id
        self._tries.append(attempt)

    def _save(self, attempt: _Try) -> save_pb2.SaveId:
        save = attempt.name.save
        save.job = "j"
        return save

    def _pick(self) -> _Try | None:
        going = [attempt for attempt in self._tries if attempt.decision is None]
        return self._chance.choice(going) if going else None

    async def _upload(self) -> None:
        """A rank becomes durable in an undecided attempt."""
        attempt = self._pick()
        if attempt is not None:
            await self._make_durable(attempt, self._chance.randrange(RANKS))

    async def _make_durable(self, attempt: _Try, rank: int) -> None:
        name = attempt.name.name
        try:
            await self._store.create(attempt.file[rank], name.encode())
            receipt = records_pb2.Receipt(attempt=name, plan_id=attempt.plan_id, rank=rank)
            receipt.files.add(name=attempt.file[rank], size=len(name), crc32c=0)
            await self._store.create(object_names.receipt(name, rank), receipt.SerializeToString())
        except ConflictError:
            return
        attempt.durable.add(rank)

    async def _end(self) -> None:
        """A coordinator commits what is complete, and what it had decided before."""
        decided = [attempt for attempt in self._tries if attempt.decision is not None]
        if decided and self._chance.random() < 0.2:
            await self._carry_out(self._chance.choice(decided))
            return
        ready = [a for a in self._tries if a.decision is None and len(a.durable) == RANKS]
        if ready:
            await self._commit(self._chance.choice(ready))

    async def _commit(self, attempt: _Try) -> None:
        try:
            proposal = await prepare_commit(
                self._store,
                save=self._save(attempt),
                attempt=attempt.name,
                plan_id=attempt.plan_id,
                metadata=self._metadata(attempt),
                receipts=[],
                host="here",
            )
        except SupersededError:
            await self._give_up(attempt)
            return
        attempt.decision = await decide(self._store, proposal)
        if self._chance.random() < 0.8:
            await self._carry_out(attempt)

    def _metadata(self, attempt: _Try) -> bytes:
        places = {
            MetadataIndex(str(rank)): _StorageInfo(name, 0, 1)
            for rank, name in attempt.file.items()
        }
        state = {str(rank): BytesStorageMetadata() for rank in attempt.file}
        return pickle.dumps(Metadata(state, storage_data=places))

    async def _carry_out(self, attempt: _Try) -> None:
        assert attempt.decision is not None
        # What was superseded and swept before it was installed is removed: nothing is left to do.
        with suppress(RemovedError):
            await carry_out(self._store, attempt.decision)

    async def _abort(self) -> None:
        attempt = self._pick()
        if attempt is not None:
            await self._give_up(attempt)

    async def _give_up(self, attempt: _Try) -> None:
        attempt.decision = await decide(
            self._store,
            new_decision(
                records_pb2.OUTCOME_ABORT,
                save=self._save(attempt),
                attempt=attempt.name,
                host="here",
            ),
        )
        if self._chance.random() < 0.5:
            await self._carry_out(attempt)

    async def _late(self) -> None:
        """A delayed write of a data file whose attempt has ended."""
        ended = [attempt for attempt in self._tries if attempt.decision is not None]
        if ended:
            attempt = self._chance.choice(ended)
            await self._store.create(attempt.file[0], attempt.name.name.encode())

    async def _lease(self) -> None:
        """As a reader does: look, take it, look again."""
        standing = await self._standing()
        if standing is None:
            return
        key = object_names.lease(standing.name, f"{self._chance.randrange(2**32):x}")
        lease = records_pb2.Lease(attempt=standing.name, host="h", pid=1, renew_s=1000)
        await self._store.create(key, json_format.MessageToJson(lease).encode())
        if await self._standing() == standing:
            self._leases[key] = standing.name
        else:
            await self._store.delete(key)

    async def _let_go(self) -> None:
        if self._leases:
            key = self._chance.choice(sorted(self._leases))
            del self._leases[key]
            await self._store.delete(key)

    async def _standing(self) -> object_names.Attempt | None:
        """The attempt of ``.metadata``, by its content rather than by the records."""
        try:
            content = await self._store.read(object_names.METADATA)
        except NotFoundError:
            return None
        sums = {crc32c.crc32c(self._metadata(attempt)): attempt.name for attempt in self._tries}
        return sums[crc32c.crc32c(content)]

    def complete(self) -> list[str]:
        """Undecided attempts that any coordinator may commit."""
        return [
            attempt.name.name
            for attempt in self._tries
            if attempt.decision is None and len(attempt.durable) == RANKS
        ]

    async def aborted_by(self, host: str, attempts: list[str]) -> list[str]:
        """Those of the attempts that this host has aborted."""
        found = {name: await read_decision(self._store, name) for name in attempts}
        return [
            name
            for name, decision in found.items()
            if decision is not None
            and decision.outcome == records_pb2.OUTCOME_ABORT
            and decision.decided_by.startswith(f"{host}/")
        ]

    async def check(self) -> None:
        """Raises AssertionError when an object is missing that a process needs."""
        there = {info.key for info in await self._store.list()}
        standing = await self._standing()
        needed = set(self._leases.values()) | ({standing.name} if standing else set())
        for attempt in self._tries:
            name = attempt.name.name
            # A sweep may have aborted an incomplete attempt.
            decided = attempt.decision or await read_decision(self._store, name)
            committed = decided is not None and decided.outcome == records_pb2.OUTCOME_COMMIT
            # A commit that is to be applied, and what may still be committed.
            pending = committed and (standing is None or attempt.name > standing)
            ready = decided is None and len(attempt.durable) == RANKS
            if name in needed or pending or ready:
                assert set(attempt.file.values()) <= there, f"{name} has lost data files"
                assert all(object_names.receipt(name, rank) in there for rank in range(RANKS))
