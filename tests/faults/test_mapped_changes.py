"""Trainers that change what they have handed over: at most their own save fails, and nothing else is harmed."""

import ctypes
import mmap
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from pannier.client import SaveAbortedError, load
from pannier.v1 import save_pb2
from support.actors.lease_holder import mapped_files
from support.actors.mapped_clients import MIB, check, saving, state
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.processes.watching import all_in, await_save
from support.storage.bucket import hold_up
from support.storage.gcs_server import GcsServer

INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the transport of the other tests."""
    monkeypatch.delenv("PANNIER_TRANSPORT", raising=False)


@pytest.fixture
def storage(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """Without faults; this process reads from it, too."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    yield server
    server.clear()


@pytest.fixture
def slow(storage: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    """One upload at a time, and none is begun before its file is complete."""
    flags = ("--memory", "8MiB")
    with Daemons(tmp_path, environment=storage.env, sidecar_arguments=flags) as running:
        yield running


def scribble(path: Path, address: int, length: int) -> None:
    """Writes into a mapping that was made read-only."""
    middle = address + length // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    with path.open("rb") as file:
        before = os.pread(file.fileno(), 8, middle - address)
        assert not _libc.mprotect(address, length, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(middle, before[0] ^ 0xFF, 8)
        assert os.pread(file.fileno(), 8, middle - address) != before


@pytest.mark.parametrize("place", ["gs", "local"])
@pytest.mark.parametrize("how", ["written", "cut"])
def test_what_a_trainer_changes_after_the_hand_over_harms_its_own_save_alone(
    slow: Daemons, storage: GcsServer, tmp_path: Path, place: str, how: str
) -> None:
    root = {"gs": f"gs://bucket/{how}", "local": str(tmp_path / "root")}[place]
    spool = slow.spool / "0"
    with saving(slow) as other, saving(slow) as client:
        client.save(state(0), checkpoint_id=f"{root}/0")
        ours = mapped_files(spool).keys()
        hold_up(storage)
        begun = uploads_begun(storage)
        # It takes the only place, so that the next upload waits.
        first = other.async_save(state(1), checkpoint_id=f"gs://bucket/{place}-{how}/first")
        wait_until(lambda: uploads_begun(storage) > begun)
        theirs = mapped_files(spool).keys() - ours
        assert theirs
        second = client.async_save(state(2), checkpoint_id=f"{root}/2", timeout=60)
        await_save(slow.sidecar_address, f"{root}/2", INGESTED)
        changed = large(mapped_files(spool), theirs)
        for path, (address, length) in changed.items():
            if how == "written":
                scribble(path, address, length)
            else:
                os.truncate(path, mmap.PAGESIZE)
        storage.clear()
        if how == "written":
            # The checksums are those of what was uploaded.
            second.result(BOUND_S)
            load_verified(f"{root}/2")
        else:
            with pytest.raises(SaveAbortedError, match=r"rank 0 .*ends at byte 4096"):
                second.result(BOUND_S)
        first.result(BOUND_S)
        check(f"gs://bucket/{place}-{how}/first", 1)
        check(f"{root}/0", 0)
        if how == "cut":
            # What it has mapped is no more its own to write to.
            client.close()
        third = saving(slow) if how == "cut" else client
        with third:
            for step in (3, 4, 5):
                third.save(state(step), checkpoint_id=f"{root}/{step}")
                check(f"{root}/{step}", step)
    assert slow.sidecar.stop() == 0


def load_verified(checkpoint_id: str) -> None:
    """Whatever it holds is what the receipts say."""
    loaded = state(0)
    load(loaded, checkpoint_id=checkpoint_id, no_dist=True, verify=True)


def uploads_begun(storage: GcsServer) -> int:
    return sum("uploadType=resumable" in request[1] for request in storage.requests())


def large(
    files: dict[Path, tuple[int, int]], others: Collection[Path]
) -> dict[Path, tuple[int, int]]:
    """Those with the tensor that aren't others'."""
    found = {p: area for p, area in files.items() if p not in others and area[1] >= 8 * MIB}
    assert found
    return found
