"""Spool files that are given back while a process still holds them, by callers that are cancelled."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pannier.sidecar.spool import mapped_files
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.spool import Spool
from pannier.v1 import save_pb2
from support.processes.stretch import BOUND_S, until


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool")
    yield made
    made.close()


class Looks:
    """Whether a process holds a file, as the test says; a look waits for the test."""

    def __init__(self) -> None:
        self.held = True
        self.begun, self.go_on = threading.Event(), threading.Event()

    def is_held(self, file: object) -> bool:
        self.begun.set()
        assert self.go_on.wait(BOUND_S)
        return self.held


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks()
    monkeypatch.setattr(mapped_files, "_is_held", made.is_held)
    return made


def test_no_file_is_lost_when_the_caller_is_cancelled(spool: Spool, looks: Looks) -> None:
    async def main() -> None:
        mapped = MappedFiles(spool)
        files = [await mapped.take("job", 1000) for _ in range(3)]
        size = sum(file.capacity for file in files)

        async def cancel(task: "asyncio.Task[None]") -> None:
            await until(looks.begun.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            looks.go_on.set()

        await cancel(asyncio.create_task(mapped.give_back(files[0])))
        await until(lambda: mapped.leased_bytes()[1] == files[0].capacity)
        for file in files[1:]:
            await mapped.give_back(file)
        assert mapped.leased_bytes()[1] == size
        # While they are looked at again, the first of them only.
        looks.begun.clear()
        looks.go_on.clear()
        await cancel(asyncio.create_task(mapped.tick()))
        await until(lambda: mapped.leased_bytes()[1] == size)
        assert spool.taken_by("job") == size
        looks.held = False
        await mapped.tick()
        assert mapped.leased_bytes()[1] == spool.taken_by("job") == 0

    asyncio.run(main())


def test_a_kept_file_that_is_dropped_while_its_lease_ends_is_free_once(
    spool: Spool, looks: Looks
) -> None:
    """Twice, it would hold two data files at the same time."""
    looks.held = False
    rank: Any = SimpleNamespace(
        save=SimpleNamespace(id=save_pb2.SaveId(job="job", incarnation="inc")), rank=0, label="rank"
    )

    async def main() -> None:
        mapped, connection = MappedFiles(spool), object()
        lease = await mapped.reserve(("job", "inc", 0), "client", [1000, 1000])
        mapped_files.close_all(await mapped.open_descriptors(lease.token, connection))
        kept = await mapped.claim(rank, lease.files[1].spool_file, 1000)
        mapped.keep(kept)
        ending = asyncio.create_task(mapped.disconnect(connection))
        await until(looks.begun.is_set)
        dropping = asyncio.create_task(mapped.drop(kept))
        await asyncio.sleep(0)
        looks.go_on.set()
        await asyncio.gather(ending, dropping)
        assert spool.taken_by("job") == 0
        files = [await mapped.take("job", 1000) for _ in range(3)]
        assert len(set(files)) == 3

    asyncio.run(main())
