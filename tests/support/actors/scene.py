"""A registry and its save tasks on a store that fails on request, without a server."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_task import SaveTasks
from pannier.coordinator.saves.states import State
from pannier.coordinator.stores import Stores
from pannier.daemon.status_registry import StatusRegistry
from pannier.storage import DeniedError, ObjectInfo, StorageError, Store, open_store
from pannier.v1 import sidecar_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import context, local_plan, rank_plans, receipt_of, tensor
from support.processes.stretch import BOUND_S
from support.storage.unreliable_store import UnreliableStore

_places = itertools.count()


class Failing(UnreliableStore):
    """A store that fails reads or writes of some keys while the test has it so."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.refused: set[str] = set()
        self.denied = False
        """Denies all writes."""
        self.tries = 0
        self.unreadable = False
        """Refuses all reads."""
        self.asked: list[str] = []
        """Keys whose reading was refused."""

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.unreadable:
            self.asked.append(key)
            raise StorageError(f"{key}: 503")
        return await super().read(key, offset, length)

    async def _write(self, key: str, write: Callable[[], Awaitable[ObjectInfo]]) -> ObjectInfo:
        if self.denied:
            self.tries += 1
            raise DeniedError(f"{key}: 403")
        if key in self.refused:
            self.tries += 1
            raise StorageError(f"{key}: 503")
        return await super()._write(key, write)


class OneStore(Stores):
    """Opens the test's store for every checkpoint id."""

    def __init__(self, store: Failing) -> None:
        super().__init__()
        self.store = store
        self.unreachable = False
        """No root answers."""

    async def contact(self, context: sidecar_pb2.SaveContext) -> None:
        self._reach(context)
        await super().contact(context)

    async def find_attempt(self, context: sidecar_pb2.SaveContext) -> object_names.Attempt | None:
        self._reach(context)
        return await super().find_attempt(context)

    def _reach(self, context: sidecar_pb2.SaveContext) -> None:
        if self.unreachable:
            self.store.asked.append("root")
            raise StorageError(f"{context.checkpoint_id}: 503")

    def open(self, checkpoint_id: str) -> Store:
        return self.store


class Scene:
    """A registry and its save tasks on one store, without a server."""

    def __init__(
        self, threads: ThreadPoolExecutor, checkpoint_id: str = "", host: str = "here"
    ) -> None:
        self.checkpoint_id = checkpoint_id or f"memory://conduct-{next(_places)}/step"
        self.plain = open_store(self.checkpoint_id)
        self.store = Failing(self.plain)
        self.stores = OneStore(self.store)
        self.tasks = SaveTasks(self.stores, Planners(), host=host, threads=threads)
        self.status_registry = StatusRegistry()
        self.registry = Registry(self.status_registry, begin=self.tasks.begin, suspect_after_s=5)
        self.plans = rank_plans(local_plan([tensor("w", 4)]), local_plan([tensor("b", 4)]))

    def context(self, rank: int = 0, number: int = 1) -> sidecar_pb2.SaveContext:
        return context(rank, self.checkpoint_id, number=number)

    async def planned(self, plans: list[RankPlan] | None = None) -> Save:
        for plan in plans or self.plans:
            save = self.registry.enter(self.context(plan.rank))
            save.plans.add(plan)
        save.notify()
        await self.reach(save, lambda: save.state is not State.PLANNING)
        return save

    async def make_durable(self, save: Save) -> None:
        assert save.manifest is not None
        for rank in save.ranks:
            receipt = receipt_of(save.manifest.final_plan(rank), rank)
            await self.plain.create(
                object_names.receipt(receipt.attempt, rank), receipt.SerializeToString()
            )
            save.add_receipt(receipt)
        save.progress()

    async def reach(self, save: Save, ready: Callable[[], bool]) -> None:
        await asyncio.wait_for(save.wait_until(ready), BOUND_S)


def attempt_of(save: Save) -> str:
    assert save.attempt is not None
    return save.attempt.name
