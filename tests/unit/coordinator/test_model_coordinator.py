"""A coordinator's saves against what is in storage: any order of plans, receipts, failures, restarts.

The ranks and their sidecars are played; the coordinator, its socket and its store are real. Whatever
happens: one decision per save, which never changes; COMMIT only with the receipts of all ranks under
one plan; no data file goes before ABORT; and every save ends.
"""

import asyncio
import shutil
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pannier.v1 import plan_pb2, records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError
from support.actors.ranks_by_hand import (
    Sidecar,
    context,
    coordinator,
    local_plan,
    receipt_of,
    report,
    tensor,
    write_receipts,
)
from support.processes.daemons import memory_directory, short_directory
from support.processes.stretch import stretched

COMMIT, ABORT = records_pb2.OUTCOME_COMMIT, records_pb2.OUTCOME_ABORT
PLANNED, INGESTED, DURABLE = (
    save_pb2.RANK_PHASE_PLANNED,
    save_pb2.RANK_PHASE_INGESTED,
    save_pb2.RANK_PHASE_DURABLE,
)
ENDED = (save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED)
RANKS = st.sampled_from([0, 1])


class Coordinator(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sockets, self.memory = short_directory(), memory_directory()
        self.place = self.memory / "root" / "step"
        self.loop = asyncio.new_event_loop()
        self.decisions: dict[str, Any] = {}
        """First seen, by attempt."""
        self.written: dict[str, set[str]] = {}
        """Data files by attempt."""
        self.number = 0
        self._begin()
        self._run(self._start())

    def _begin(self) -> None:
        self.number += 1
        self.asked: dict[int, asyncio.Task[plan_pb2.FinalPlan]] = {}
        self.plans: dict[int, plan_pb2.FinalPlan] = {}
        self.stored: set[int] = set()
        """Ranks whose receipts are in storage."""
        self.reported: dict[int, Any] = {}
        """What the ranks' sidecar reports again when it attaches."""
        self.failed = False

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, stretched(30))

        return self.loop.run_until_complete(bounded())

    async def _start(self) -> None:
        self.stack = AsyncExitStack()
        self.client = await self.stack.enter_async_context(coordinator(self.sockets))
        self.sidecar: Sidecar = await self.client.attach(reports=list(self.reported.values()))

    async def _end(self) -> None:
        for task in self.asked.values():
            task.cancel()
        await asyncio.gather(*self.asked.values(), return_exceptions=True)
        self.asked.clear()
        await self.stack.aclose()

    def _context(self, rank: int) -> Any:
        return context(rank, str(self.place), number=self.number)

    @property
    def attempt(self) -> str:
        return next(iter(self.plans.values())).attempt if self.plans else ""

    # Rules.

    @precondition(lambda self: not self.plans)
    @rule(rank=RANKS)
    def ask_alone(self, rank: int) -> None:
        if rank not in self.asked:
            self._run(self._ask(rank))

    async def _ask(self, rank: int) -> None:
        plan = local_plan([tensor(f"w{rank}", 4)])
        asking = self.client.plan(self._context(rank), plan, timeout_s=stretched(20))
        self.asked[rank] = asyncio.ensure_future(asking)

    @precondition(lambda self: not self.plans)
    @rule()
    def agree(self) -> None:
        async def both() -> None:
            for rank in {0, 1} - set(self.asked):
                await self._ask(rank)
            for rank in (0, 1):
                self.plans[rank] = await self.asked.pop(rank)
            for rank in (0, 1):
                await self._send(report(self._context(rank), self.attempt, PLANNED), rank)

        self._run(both())
        self._look()

    @precondition(lambda self: self.plans)
    @rule(rank=RANKS)
    def ingest(self, rank: int) -> None:
        if rank in self.stored:
            return
        self._run(self._send(report(self._context(rank), self.attempt, INGESTED), rank))
        self._look()

    @precondition(lambda self: self.plans)
    @rule(rank=RANKS, reported=st.booleans())
    def store(self, rank: int, reported: bool) -> None:
        """All of the rank is in storage; its sidecar may die before it reports that."""
        plan = self.plans.get(rank)
        if plan is None or self.failed:
            return
        receipt = receipt_of(plan, rank)
        for file in receipt.files:
            (self.place / file.name).write_bytes(bytes(file.size))
            self.written.setdefault(plan.attempt, set()).add(file.name)
        made = report(self._context(rank), plan.attempt, DURABLE, receipt=receipt)
        self.stored.add(rank)
        self._run(self._send(made, rank) if reported else write_receipts([made]))
        self._look()

    async def _send(self, made: Any, rank: int) -> None:
        self.reported[rank] = made
        await self.sidecar.send(made)

    @precondition(lambda self: self.plans)
    @rule(rank=RANKS)
    def fail(self, rank: int) -> None:
        if rank in self.stored:
            return
        self.failed = True

        async def fail() -> None:
            try:
                await self.client.fail(self._context(rank))
            except PannierError:
                # The save is over already.
                return

        self._run(fail())
        self._look()

    @rule(kept=st.booleans())
    def restart(self, kept: bool) -> None:
        """The coordinator's next process, with or without what the sidecar remembers of the save."""
        self._run(self._end())
        if not kept:
            self.reported.clear()
        self._run(self._start())
        self._look()

    @precondition(lambda self: self.attempt)
    @rule(well=st.booleans())
    def finish(self, well: bool) -> None:
        """Nothing more is lost: the save ends, and as it must."""
        for rank in (0, 1) if well and not self.failed else ():
            if rank not in self.stored:
                self.store(rank, True)
        for rank in {0, 1} - self.stored:
            self._run(self._send(report(self._context(rank), self.attempt, PLANNED), rank))
        complete = len(self.stored) == 2
        if not complete:
            self.fail(0 if 0 not in self.stored else 1)
        for rank in self.stored:
            plan = self.plans[rank]
            made = report(
                self._context(rank), plan.attempt, DURABLE, receipt=receipt_of(plan, rank)
            )
            self._run(self._send(made, rank))
        status = self._run(
            self.sidecar.await_state(self._context(0).save, *ENDED, timeout=stretched(20))
        )
        self._look()
        decided = self.decisions[self.attempt]
        assert (status.state == save_pb2.SAVE_STATE_COMMITTED) == (decided == COMMIT)
        if not self.failed:
            assert complete
            assert decided == COMMIT
        self._run(self._end())
        self._begin()
        self._run(self._start())

    # What must hold.

    def _decision(self, attempt: str) -> Any:
        path = self.place / object_names.decision(attempt)
        if not path.exists():
            return None
        return json_format.Parse(path.read_bytes(), records_pb2.Decision()).outcome

    def _look(self) -> None:
        self._run(asyncio.sleep(0.01))
        assert len({plan.plan_id for plan in self.plans.values()}) <= 1
        for records in self.place.glob(".pannier/i*"):
            self._check(records)
        if (self.place / ".metadata").exists():
            assert COMMIT in self.decisions.values()

    def _check(self, records: Path) -> None:
        attempt = records.name
        # Files first: they may go as soon as ABORT stands.
        left = {path.name for path in self.place.glob("*.distcp")}
        receipts = []
        for path in (records / "receipts").glob("[0-9]"):
            with suppress(FileNotFoundError):  # a deletion that is still under way
                receipts.append(records_pb2.Receipt.FromString(path.read_bytes()))
        decision = self._decision(attempt)
        if decision is not None:
            assert self.decisions.setdefault(attempt, decision) == decision
        if decision != ABORT:
            assert self.written.get(attempt, set()) <= left, f"{attempt} lost files"
        if decision == COMMIT:
            assert sorted(receipt.rank for receipt in receipts) == [0, 1]
            assert len({receipt.plan_id for receipt in receipts}) == 1

    @staticmethod
    async def _let_go() -> None:
        """As asyncio.run does."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def teardown(self) -> None:
        self._run(self._end())
        self.loop.run_until_complete(self._let_go())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        shutil.rmtree(self.sockets)
        shutil.rmtree(self.memory)


TestCoordinator = Coordinator.TestCase
TestCoordinator.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
)
