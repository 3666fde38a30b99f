"""A listing of checkpoints is made while others are removed."""

import asyncio
import shutil
from pathlib import Path

import pytest

from pannier.attempts.listing import CheckpointState, list_checkpoints
from pannier.common.locations import Pattern
from pannier.storage import Store, open_store
from support.storage.checkpoints import write_attempt
from support.storage.unreliable_store import UnreliableStore

FIRST, SECOND = "i1-inc-g0000000a-s1", "i1-inc-g0000000a-s2"


class Removing(UnreliableStore):
    """Another process removes step-1, or has just begun to, right before its ``.metadata`` is read."""

    def __init__(self, inner: Store, root: Path, *, whole: bool) -> None:
        super().__init__(inner)
        self._root, self._whole = root, whole

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if key == "step-1/.metadata":
            (self._root / key).unlink()
            if self._whole:
                shutil.rmtree(self._root / "step-1")
        return await super().read(key, offset, length)


@pytest.mark.parametrize("pattern", [None, Pattern("*")])
@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpoint_that_vanishes_meanwhile_does_not_end_the_listing(
    tmp_path: Path, whole: bool, pattern: Pattern | None
) -> None:
    write_attempt(tmp_path / "step-1", FIRST)
    write_attempt(tmp_path / "step-2", SECOND)

    async def main() -> dict[str, CheckpointState]:
        store = Removing(open_store(str(tmp_path)), tmp_path, whole=whole)
        found = await list_checkpoints(store, pattern)
        await store.close()
        return {each.name: each.state for each in found}

    left = {} if whole else {"step-1": CheckpointState.UNDECIDED}
    assert asyncio.run(main()) == {**left, "step-2": CheckpointState.COMMITTED}
