"""A reader's lease is there while it reads, and gone afterwards, whatever happened."""

import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from google.protobuf import json_format
from torch.distributed.checkpoint.metadata import Metadata

from pannier.client.loading import filesystem, read_lease
from pannier.client.loading.load import load
from pannier.client.loading.read_lease import Lease, take
from pannier.client.loading.storage_reader import StorageReader
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError, StorageError
from support.actors.hosts import await_true as eventually
from support.storage.checkpoints import write_attempt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIRST, SECOND = "i1-inc-g0000000a-s1", "i1-inc-g0000000a-s2"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "step-1"
    write_attempt(directory, FIRST)
    return directory


def held(place: Path) -> list[str]:
    """Attempts of the leases that are there."""
    return [object_names.leased_attempt(f".pannier/leases/{p.name}") for p in leased(place)]


def leased(place: Path) -> list[Path]:
    directory = place / ".pannier" / "leases"
    try:
        return [directory / name for name in os.listdir(directory)]
    except FileNotFoundError:
        return []  # Removed with the last lease.


def threads_of_loads() -> set[threading.Thread]:
    """All but those of the engine, which every call uses again."""
    shared = ("pannier", "pannier-work")
    return {thread for thread in threading.enumerate() if thread.name not in shared}


def test_it_says_who_reads_what(place: Path) -> None:
    lease = Lease(filesystem.open_dir(place), FIRST, renew_s=30, idle_s=None)
    (path,) = leased(place)
    message = json_format.Parse(path.read_bytes(), records_pb2.Lease())
    assert (message.attempt, message.pid, message.renew_s) == (FIRST, os.getpid(), 30)
    assert message.holder.startswith(path.name.rpartition("-")[2])
    lease.release()
    assert not (place / ".pannier" / "leases").exists()
    lease.release()


def test_it_is_renewed(place: Path) -> None:
    lease = Lease(filesystem.open_dir(place), FIRST, renew_s=0.05, idle_s=None)
    (path,) = leased(place)
    first = path.read_bytes(), path.stat().st_mtime_ns
    eventually(lambda: path.stat().st_mtime_ns != first[1], "it is written again")
    # Where a generation is a hash of the content, as on S3, it is another one.
    assert path.read_bytes() != first[0]
    lease.release()


def test_a_reader_that_does_nothing_for_long_loses_it(place: Path) -> None:
    lease = Lease(filesystem.open_dir(place), FIRST, renew_s=0.05, idle_s=0.1)
    eventually(lambda: not leased(place), "it is given up")
    lease.release()


def test_a_reader_that_is_forgotten_loses_it(place: Path) -> None:
    reader = StorageReader(place)
    reader.resolve()
    assert held(place) == [FIRST]
    del reader
    gc.collect()
    eventually(lambda: not leased(place), "it is removed")


def test_a_place_that_cannot_be_written_gets_none_and_says_so_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: filesystem.StorageDir, name: str, content: bytes) -> None:
        raise StorageError(f"{name}: 403")

    monkeypatch.setattr(filesystem.StorageDir, "write", refuse)
    with caplog.at_level(logging.DEBUG, "pannier.client.loading.read_lease"):
        for _ in range(2):
            reader = StorageReader(place)
            assert reader.resolve() == (place / ".metadata").read_bytes()
            reader.release()
    (record,) = [r for r in caplog.records if "without a lease" in r.message]
    assert (record.levelno, "403" in record.message) == (logging.DEBUG, True)


def test_what_pannier_did_not_write_gets_none(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    before = sorted((tmp_path / "plain").iterdir())
    load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "plain")
    assert sorted((tmp_path / "plain").iterdir()) == before


def test_a_checkpoint_that_is_replaced_before_the_lease_is_there_is_read_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of the first looks for leases only once the second is there."""

    def overwrite(*arguments: Any, **named: Any) -> Lease | None:
        if not (place / object_names.decision(SECOND)).exists():
            write_attempt(place, SECOND)
        return take(*arguments, **named)

    monkeypatch.setattr(read_lease, "take", overwrite)
    reader = StorageReader(place)
    content = reader.resolve()
    assert SECOND.encode() in content
    assert held(place) == [SECOND]
    reader.release()


def saved(directory: Path) -> Path:
    """What torch wrote, with a ``.metadata`` that names an attempt."""
    dcp.save({"w": torch.arange(5.0)}, checkpoint_id=directory, no_dist=True)
    metadata: Metadata = dcp.FileSystemReader(directory).read_metadata()
    assert metadata.storage_meta is not None
    metadata.storage_meta.save_id = FIRST
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return directory


def by_client(place: Path, state: dict[str, Any], planner: Any) -> None:
    load(state, checkpoint_id=place, planner=planner)


def by_torch(place: Path, state: dict[str, Any], planner: Any) -> None:
    dcp.load(state, storage_reader=StorageReader(place), planner=planner, no_dist=True)


@pytest.mark.parametrize("read", [by_client, by_torch])
@pytest.mark.parametrize("fails", [False, True])
def test_it_lasts_as_long_as_the_load_also_when_that_fails(
    tmp_path: Path, read: Callable[[Path, dict[str, Any], Any], None], fails: bool
) -> None:
    place = saved(tmp_path / "step-1")
    seen = []

    class Looking(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            seen.extend(held(place))
            if fails:
                raise PannierError("no")
            return super().resolve_tensor(read_item)

    state = {"w": torch.zeros(5)}
    before = threads_of_loads()
    if fails:
        with pytest.raises((PannierError, dcp.api.CheckpointException)):
            read(place, state, Looking())
    else:
        read(place, state, Looking())
        assert torch.equal(state["w"], torch.arange(5.0))
    assert seen == [FIRST]
    assert leased(place) == []
    eventually(lambda: threads_of_loads() <= before, "no thread is left")


def test_a_lease_is_written_though_another_reader_removes_the_empty_directory_meanwhile(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = filesystem.open_dir(place)
    real, removed = directory._fs.makedirs, []

    def makedirs(path: str, exist_ok: bool = False) -> None:
        real(path, exist_ok=exist_ok)
        if not removed:
            Path(path).rmdir()
            removed.append(path)

    monkeypatch.setattr(directory._fs, "makedirs", makedirs)
    lease = Lease(directory, FIRST, renew_s=30, idle_s=None)
    assert removed
    assert len(leased(place)) == 1
    lease.release()
