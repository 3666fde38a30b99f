"""Code that calls ``torch.distributed.checkpoint`` saves and loads with Pannier within ``client.patch_dcp()``."""

import functools
import sys
import types
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from pannier import client
from pannier.client import InvalidRequestError, SaveAbortedError
from pannier.client.integrations import dcp_patch
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

NAMES = ("save", "async_save", "load")
TORCHS = [getattr(dcp, name) for name in NAMES]


@pytest.fixture(scope="module", autouse=True)
def running(tmp_path_factory: pytest.TempPathFactory, server: GcsServer) -> Iterator[None]:
    bucket = {"STORAGE_EMULATOR_HOST": server.url}
    with (
        pytest.MonkeyPatch.context() as patch,
        Daemons(tmp_path_factory.mktemp("daemons"), environment=bucket) as daemons,
    ):
        for name, value in {**daemons.env(), **bucket}.items():
            patch.setenv(name, value)
        yield
        client.close()


@pytest.fixture(autouse=True)
def unpatched(server: GcsServer) -> Iterator[None]:
    yield
    server.clear()
    assert [getattr(dcp, name) for name in NAMES] == TORCHS


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value), "step": int(value)}


def loaded(**source: Any) -> float:
    """By the function that is there now."""
    target = state(0)
    dcp.load(target, **source)
    assert target["step"] == target["w"][63]
    return float(target["w"][0])


def is_ours(path: Path) -> bool:
    """Whether it has what only Pannier writes."""
    return (path / ".pannier").exists()


def test_what_save_has_written_is_committed_when_it_returns(tmp_path: Path) -> None:
    with client.patch_dcp():
        metadata = dcp.save(state(1), checkpoint_id=tmp_path / "a")
        assert is_ours(tmp_path / "a")
        stored = dcp.FileSystemReader(tmp_path / "a").read_metadata()
        assert metadata.storage_data == stored.storage_data
        assert loaded(checkpoint_id=tmp_path / "a") == 1
    assert loaded(checkpoint_id=tmp_path / "a") == 1


def test_files_count_by_their_path(tmp_path: Path, server: GcsServer) -> None:
    path, url = tmp_path / "a", "gs://bucket/files"
    with client.patch_dcp():
        dcp.save(state(1), storage_writer=dcp.FileSystemWriter(path, thread_count=2))
        dcp.save(state(2), storage_writer=FsspecWriter(url, token="anon"), planner=None)
        # An id that is given goes before the writer's own.
        dcp.save(state(3), storage_writer=dcp.FileSystemWriter(path), checkpoint_id=tmp_path / "b")
        for reader, value in (
            (dcp.FileSystemReader(path), 1),
            (FsspecReader(url, token="anon"), 2),
            (client.StorageReader(tmp_path / "b"), 3),
        ):
            assert loaded(storage_reader=reader) == value
    assert is_ours(path)
    assert is_ours(tmp_path / "b")


def test_async_save_has_the_types_that_frameworks_look_for(tmp_path: Path) -> None:
    values = state(1)
    with client.patch_dcp():
        handle = dcp.async_save(
            values,
            storage_writer=dcp.FileSystemWriter(tmp_path / "a"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=BlockingAsyncStager(),
        )
        assert isinstance(handle, Future)
        assert isinstance(handle, AsyncSaveResponse)
        # Staged.
        values["w"].fill_(7)
        handle.result(BOUND_S)
        assert loaded(checkpoint_id=tmp_path / "a") == 1


def test_a_load_waits_for_a_save_to_the_same_place(server: GcsServer) -> None:
    server.fault(kind="delay", seconds=0.5, times=2)
    with client.patch_dcp():
        dcp.async_save(state(5), checkpoint_id="gs://bucket/soon")
        assert loaded(checkpoint_id="gs://bucket/soon") == 5


def test_leaving_the_context_waits_and_raises_what_failed(
    server: GcsServer, tmp_path: Path
) -> None:
    with client.patch_dcp():
        dcp.async_save(state(1), checkpoint_id=tmp_path / "a")
    assert (tmp_path / "a" / ".metadata").exists()

    server.fault(kind="status", status=403, message="no such right", times=-1)
    with pytest.raises(SaveAbortedError, match="no such right"), client.patch_dcp():
        dcp.async_save(state(1), checkpoint_id="gs://bucket/denied")


def test_an_error_within_it_is_the_one_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), client.patch_dcp():
        raise ZeroDivisionError


def test_names_that_were_imported_are_replaced_and_put_back(tmp_path: Path) -> None:
    trainer = types.ModuleType("a_trainer")
    vars(trainer).update(write=dcp.save, other=state_dict_loader.load, unrelated=loaded)
    sys.modules["a_trainer"] = trainer
    try:
        patch = client.patch_dcp()
        patch.start()
        with patch:
            assert state_dict_saver.async_save is dcp.async_save is not TORCHS[1]
        kept = dcp.save
        trainer.write(state(4), checkpoint_id=tmp_path / "a")
        assert trainer.other is dcp.load
        patch.stop()
    finally:
        del sys.modules["a_trainer"]
    assert [trainer.write, trainer.other, trainer.unrelated] == [TORCHS[0], TORCHS[2], loaded]
    assert is_ours(tmp_path / "a")
    # A caller that has kept the function has torch's afterwards.
    kept(state(5), checkpoint_id=tmp_path / "b")
    assert not is_ours(tmp_path / "b")
    assert loaded(checkpoint_id=tmp_path / "b") == 5
    with pytest.raises(RuntimeError, match="more often than it was started"):
        patch.stop()


def test_other_storage_is_torchs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(dcp.FileSystemWriter):
        pass

    with client.patch_dcp():
        for name in ("a", "b"):
            dcp.save(state(1), storage_writer=Own(tmp_path / name))
            assert not is_ours(tmp_path / name)
            assert loaded(checkpoint_id=tmp_path / name) == 1
    messages = [each.message for each in caplog.records if each.name.startswith("pannier")]
    assert [each.rpartition(".")[2] for each in messages if "patch_dcp()" in each] == [
        "Own reads or writes is left to torch"
    ]


def test_a_checkpoint_per_rank_is_loaded_by_torch(tmp_path: Path) -> None:
    path = tmp_path / "a"
    dcp.save(state(3), checkpoint_id=path, use_collectives=False)
    assert not (path / ".metadata").exists()
    with client.patch_dcp():
        assert loaded(checkpoint_id=path) == 3
        for reader in (dcp.FileSystemReader(path), client.StorageReader(path)):
            assert loaded(storage_reader=reader) == 3
        with pytest.raises(client.StorageError, match="it doesn't exist"):
            loaded(checkpoint_id=tmp_path / "b")


def load_what_extensions_wrote() -> None:
    import os
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from pannier import client
    from support.states.extensions import transformed

    dist.init_process_group("gloo")
    path = Path(os.environ["ROOT"])
    writer, reader = transformed(path)
    with client.patch_dcp():
        dcp.save({"w": torch.ones(64)}, storage_writer=writer)
        assert not (path / ".pannier").exists()
        state = {"w": torch.zeros(64)}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["w"], torch.ones(64))
    client.close()
    dist.destroy_process_group()


def test_a_checkpoint_with_extensions_that_torch_saved_is_loaded_by_torch_on_all_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(load_what_extensions_wrote, 2, {"ROOT": str(tmp_path / "a")}, torchrun=False)
    with pytest.raises(InvalidRequestError, match=r"transformed by \['stream.flipped/1'\]"):
        client.load(state(0), checkpoint_id=tmp_path / "a")


def test_storage_is_taken_as_the_second_argument_as_torch_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with client.patch_dcp():
        dcp.save(state(1), dcp.FileSystemWriter(path))
        assert is_ours(path)
        target = state(0)
        dcp.load(target, dcp.FileSystemReader(path))
        assert target["step"] == 1
        dcp.async_save(state(2), dcp.FileSystemWriter(path)).result(BOUND_S)
        assert loaded(checkpoint_id=path) == 2
        with pytest.raises(TypeError, match="storage_writer"):
            dcp.save(state(3), dcp.FileSystemWriter(path), path)


def test_a_writer_has_the_id_of_its_save_afterwards(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "a")
    with client.patch_dcp():
        dcp.save(state(1), storage_writer=writer)
        stored = dcp.FileSystemReader(tmp_path / "a").read_metadata().storage_meta
        assert stored is not None
        assert writer.save_id == stored.save_id


def test_what_goes_on_with_torchs_functions_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        write = staticmethod(dcp.save)

    def read(load: Any = dcp.load) -> None: ...

    begin = functools.partial(dcp.async_save, no_dist=True)
    with client.patch_dcp():
        (message,) = [each.message for each in caplog.records if "patch_dcp()" in each.message]
    assert f"the staticmethod write of a class in {__name__}" in message
    assert f"a default argument of {__name__}.{read.__qualname__}" in message
    assert "a functools.partial of async_save" in message
    del begin


def test_an_adapter_takes_the_states_of_one_directory(tmp_path: Path) -> None:
    class Taker:
        def __init__(self) -> None:
            self.saved: dict[str, Any] = {}

        def save(self, path: Path, state_dict: dict[str, Any]) -> bool:
            self.saved[str(path)] = state_dict
            return len(path.parts) == 2

        def load(self, path: Path, state_dict: dict[str, Any]) -> bool:
            state_dict.update(self.saved.get(str(path), {}))
            return len(path.parts) == 2

    taker, scratch = Taker(), tmp_path / "scratch"
    dcp_patch.take_states(scratch, taker)
    try:
        dcp.save(state(1), storage_writer=dcp.FileSystemWriter(scratch / "a/model"))
        dcp.save(state(2), checkpoint_id=scratch / "b")
        dcp.save(state(3), checkpoint_id=tmp_path / "c")
        assert [*taker.saved] == ["a/model", "b"]
        assert not (scratch / "a").exists()
        assert loaded(storage_reader=dcp.FileSystemReader(scratch / "a/model")) == 1
        # Nor was anything else patched.
        assert not is_ours(scratch / "b")
        assert not is_ours(tmp_path / "c")
        with client.patch_dcp():
            dcp.save(state(4), checkpoint_id=scratch / "a/model")
            dcp.save(state(5), checkpoint_id=tmp_path / "d")
        assert is_ours(tmp_path / "d")
        assert loaded(checkpoint_id=scratch / "a/model") == 4
    finally:
        dcp_patch.leave_states(scratch)
    dcp.save(state(6), checkpoint_id=scratch / "a/model")
    assert (scratch / "a/model/.metadata").exists()
    with client.patch_dcp():
        pass


def test_what_is_there_is_replaced_as_the_writer_says(tmp_path: Path) -> None:
    path = tmp_path / "a"
    dcp.save(state(1), checkpoint_id=path)
    with client.patch_dcp():
        dcp.save(state(2), checkpoint_id=path)
        assert loaded(checkpoint_id=path) == 2
        with pytest.raises(client.CheckpointExistsError):
            dcp.save(state(3), storage_writer=dcp.FileSystemWriter(path, overwrite=False))
        assert loaded(checkpoint_id=path) == 2


def test_what_can_not_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    class OwnStager(BlockingAsyncStager):
        pass

    with client.patch_dcp():
        with pytest.raises(InvalidRequestError, match=r"async_stager=.*OwnStager"):
            dcp.async_save(state(1), checkpoint_id=tmp_path / "a", async_stager=OwnStager())
        with pytest.raises(InvalidRequestError, match="use_collectives=False"):
            dcp.save(state(1), checkpoint_id=tmp_path / "a", use_collectives=False)
        # torch's own errors stay.
        with pytest.raises(RuntimeError):
            dcp.save(state(1))
    assert not (tmp_path / "a" / ".metadata").exists()
