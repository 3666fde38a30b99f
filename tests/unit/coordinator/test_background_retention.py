"""Retention that fails is counted, logged and left to the next commit."""

import asyncio
import logging
from pathlib import Path

import pytest

from pannier.coordinator.background.retention import Retention
from pannier.coordinator.stores import Stores
from pannier.maintenance.retention_policy import Policy
from pannier.storage import ObjectInfo, StorageError, Store, open_store
from support.storage.unreliable_store import UnreliableStore


class Refusing(UnreliableStore):
    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        raise StorageError("403")


class RefusingStores(Stores):
    def open_root(self, root: str) -> Store:
        return Refusing(open_store(root))


def test_a_root_that_cannot_be_listed_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> int:
        retention = Retention(RefusingStores(), Policy(newest=1), host="node-0")
        for step in (1, 2):
            retention.committed(f"{tmp_path}/step-{step}", "job", f"i1-inc-g0000000a-s{step}")
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others)
            assert retention.failures == step
        await retention.stop()
        return retention.failures

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == 2
    assert caplog.text.count("is left to the next commit") == 2
