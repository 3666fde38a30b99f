import copy
import gc
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pannier import client
from pannier.client.loading import load as load_module
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.load import load, recent_seconds
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.ranks.load_error import LoadError
from pannier.common import timeouts
from pannier.wire import errors, object_names
from pannier.wire.errors import (
    IntegrityError,
    InvalidRequestError,
    PannierError,
    StorageError,
)
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
READER = r"torch\.distributed\.checkpoint\.HuggingFaceStorageReader"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-1"
    state = {"w": torch.arange(6.0), "count": 3, "deep": {"b": torch.ones(2), "name": "x"}}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_keys_that_a_planner_adds_are_not_put_into_the_callers_dict(checkpoint: Path) -> None:
    class Adding(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, *arguments: Any, **named: Any) -> None:
            state_dict["w"] = torch.zeros(6)
            super().set_up_planner(state_dict, *arguments, **named)

    for function in (load, dcp.load):
        state: dict[str, Any] = {"count": 0}
        function(state, checkpoint_id=checkpoint, planner=Adding(), no_dist=True)
        assert state == {"count": 3}


def test_fills_tensors_where_they_are(checkpoint: Path) -> None:
    weight, bias = torch.zeros(6), torch.zeros(2)
    state: dict[str, Any] = {"w": weight, "count": 0, "deep": {"b": bias, "name": ""}}
    load(state, checkpoint_id=checkpoint)
    assert state["w"] is weight
    assert state["deep"]["b"] is bias
    assert torch.equal(weight, torch.arange(6.0))
    assert torch.equal(bias, torch.ones(2))
    assert (state["count"], state["deep"]["name"]) == (3, "x")


def test_what_loads_took_is_known_to_advice(checkpoint: Path) -> None:
    load_module._recent_s.clear()
    with pytest.raises(StorageError):
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint.with_name("step-2"))
    assert recent_seconds() == []
    for _ in range(2):
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)
    assert len(recent_seconds()) == 2
    assert all(0 < seconds < BOUND_S for seconds in recent_seconds())


def test_fills_a_view_of_a_larger_tensor(checkpoint: Path) -> None:
    whole = torch.zeros(4, 6)
    load(
        {"w": whole[:, 1:].t()[0:1].expand(1, 4)[0, :0]} | {"w": whole[2]}, checkpoint_id=checkpoint
    )
    assert torch.equal(whole[2], torch.arange(6.0))
    assert not whole[[0, 1, 3]].any()


def test_stateful_objects_load_themselves(checkpoint: Path) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"b": torch.zeros(2), "name": ""}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    counter = Counter()
    load({"deep": counter}, checkpoint_id=str(checkpoint))
    assert counter.loaded["name"] == "x"
    assert torch.equal(counter.loaded["b"], torch.ones(2))


def test_storage_that_does_not_answer_is_named_while_it_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.05)
    original = StorageDir.read_into

    def slow(place: StorageDir, name: str, offset: int, target: memoryview) -> None:
        wait_until(lambda: "for bucket" in caplog.text)
        original(place, name, offset, target)

    monkeypatch.setattr(StorageDir, "read_into", slow)
    with caplog.at_level(logging.WARNING, "pannier"):
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)
    expected = (
        rf"load of {checkpoint} has waited \d+ s: for bucket \(1 of 1 file, [\d.]+ KiB left\)"
    )
    assert re.search(expected, caplog.text)


def test_full_garbage_collections_wait_for_the_end_of_loads(checkpoint: Path) -> None:
    seen = []

    class Watching:
        def state_dict(self) -> dict[str, Any]:
            seen.append(gc.get_threshold())
            load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)
            seen.append(gc.get_threshold())
            return {"b": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ZeroDivisionError

    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError):
        load({"deep": Watching()}, checkpoint_id=checkpoint)
    assert gc.get_threshold() == before
    assert [each[:2] for each in seen] == [before[:2]] * 2
    assert all(each[2] > 1 << 30 for each in seen)


def test_thresholds_that_the_users_code_sets_meanwhile_stay(checkpoint: Path) -> None:
    before = gc.get_threshold()

    class Tuning:
        def state_dict(self) -> dict[str, Any]:
            gc.set_threshold(50_000, 5, 7)
            return {"b": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    try:
        load({"deep": Tuning()}, checkpoint_id=checkpoint)
        assert gc.get_threshold() == (50_000, 5, 7)
    finally:
        gc.set_threshold(*before)


def test_converts_to_the_targets_dtype(checkpoint: Path) -> None:
    state = {"w": torch.zeros(6, dtype=torch.float64)}
    load(state, checkpoint_id=checkpoint)
    assert torch.equal(state["w"], torch.arange(6, dtype=torch.float64))


def test_planners_are_honoured(checkpoint: Path) -> None:
    state = {"w": torch.zeros(6), "new": torch.full((2,), 7.0)}
    load(state, checkpoint_id=checkpoint, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(state["w"], torch.arange(6.0))
    assert torch.equal(state["new"], torch.full((2,), 7.0))


def test_a_reader_brings_its_own_place(checkpoint: Path, tmp_path: Path) -> None:
    state = {"w": torch.zeros(6)}
    load(state, storage_reader=StorageReader(checkpoint, thread_count=1))
    assert torch.equal(state["w"], torch.arange(6.0))
    # Or reads another, as in dcp.load.
    reader = StorageReader(tmp_path / "nothing")
    load(state, checkpoint_id=checkpoint, storage_reader=reader)
    assert reader.checkpoint_id == str(checkpoint)


def test_a_reader_may_be_given_by_position(checkpoint: Path) -> None:
    for call in (load, client.load, client.Client().load):
        state = {"w": torch.zeros(6)}
        call(state, StorageReader(checkpoint))
        assert torch.equal(state["w"], torch.arange(6.0))


@pytest.mark.parametrize("convert", [str, Path])
def test_a_path_by_position_is_refused_with_the_name_it_needs(
    checkpoint: Path, convert: Any
) -> None:
    expected = f"storage_reader='{checkpoint}' is a path: give checkpoint_id='{checkpoint}'"
    for call in (load, client.load, client.Client().load):
        with pytest.raises(InvalidRequestError, match=re.escape(expected)):
            call({"w": torch.zeros(6)}, convert(checkpoint))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_reader_reads_again_each_time(checkpoint: Path) -> None:
    reader = StorageReader(checkpoint)
    load({"w": torch.zeros(6)}, storage_reader=reader)
    dcp.save({"w": torch.full((6,), 5.0)}, checkpoint_id=checkpoint, no_dist=True)
    state = {"w": torch.zeros(6)}
    load(state, storage_reader=reader)
    assert torch.equal(state["w"], torch.full((6,), 5.0))


def test_a_reader_reads_again_when_torch_loads_with_it_next(checkpoint: Path) -> None:
    reader = StorageReader(checkpoint)
    load({"w": torch.zeros(6)}, storage_reader=reader)
    dcp.save({"w": torch.full((6,), 5.0)}, checkpoint_id=checkpoint, no_dist=True)
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["w"], torch.full((6,), 5.0))


def test_refuses_other_readers(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"FileSystemReader.*dcp\.load"):
        load({}, storage_reader=FileSystemReader(checkpoint))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"FileSystemReader.*dcp\.load"):
        load({}, FileSystemReader(checkpoint))  # type: ignore[arg-type]


def test_wants_a_place() -> None:
    with pytest.raises(InvalidRequestError, match="checkpoint_id is missing"):
        load({})


def test_no_checkpoint_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is no checkpoint: it doesn't exist"):
        load({"w": torch.zeros(6)}, checkpoint_id=tmp_path / "nothing")


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00001.safetensors", "model.safetensors.index.json"],
        ["shard-00002-model-00001-of-00001.safetensors"],
        ["any.safetensors", "config.json"],
    ],
)
def test_a_checkpoint_in_safetensors_format_is_named_with_its_reader(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    expected = rf"has no \.metadata: .*safetensors format.*{READER}"
    with pytest.raises(StorageError, match=expected):
        load({"w": torch.zeros(6)}, checkpoint_id=tmp_path)
    with pytest.raises(StorageError, match=expected):
        StorageReader(tmp_path).read_metadata()
    # Where Pannier is at a save, its state matters more.
    (tmp_path / object_names.attempts_prefix() / "i1-inc-g0000000a-s3").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"i1-inc-g0000000a-s3 is in progress"):
        load({"w": torch.zeros(6)}, checkpoint_id=tmp_path)


def test_data_files_in_safetensors_format_are_not_called_damaged(checkpoint: Path) -> None:
    """As FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS) writes them."""
    (file,) = checkpoint.glob("*.distcp")
    text = json.dumps({"w": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    content = len(text).to_bytes(8, "little") + text
    file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    with pytest.raises(InvalidRequestError, match=rf"'w' can't be read: .*{file.name}.*{READER}"):
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)
    # A wrong length, and what is no length at all, are damage.
    for head in ((1 << 40).to_bytes(8, "little") + b"{", bytes(9)):
        file.write_bytes(head.ljust(file.stat().st_size, b"\0"))
        with pytest.raises(IntegrityError, match="can't be read from bytes"):
            load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)


def test_a_missing_key_is_named_by_an_ordinary_exception(checkpoint: Path) -> None:
    with pytest.raises(LoadError, match="missing") as caught:
        load({"missing": torch.zeros(6)}, checkpoint_id=checkpoint)
    assert isinstance(caught.value, Exception)
    assert "missing" in caught.value.failures[0].message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_code_that_catches_torchs_exception_catches_and_reads_a_load_error(
    checkpoint: Path,
) -> None:
    caught: CheckpointException | None = None
    try:
        client.load({"missing": torch.zeros(6)}, checkpoint_id=checkpoint)
    except CheckpointException as error:
        caught = error
    assert isinstance(caught, client.LoadError)
    assert isinstance(caught, errors.LoadError)
    assert str(caught).startswith("rank 0: RuntimeError: Missing key in checkpoint state_dict")
    ((rank, (cause, stack)),) = caught.failures.items()
    assert (rank, type(cause)) == (0, RuntimeError)
    assert caught.__cause__ is cause
    assert stack[-1].filename.endswith("default_planner.py")


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_load_error_is_copied_with_its_failures(checkpoint: Path, copied: Any) -> None:
    class OwnError(RuntimeError):
        """A class that no pickle can name."""

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            raise OwnError("no plan today")

    with pytest.raises(LoadError, match="no plan today") as caught:
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint, planner=Planner())
    error = copied(caught.value)
    assert type(error) is LoadError
    assert str(error) == str(caught.value)
    failure, before = error.failures[0], caught.value.failures[0]
    assert (failure.rank, failure.host) == (before.rank, before.host)
    assert (failure.kind, failure.message) == ("CLIENT", before.message)
    cause, stack = copied(failure)
    assert (str(cause), list(stack)) == (before.message, [])


def test_another_shape_is_named(checkpoint: Path) -> None:
    with pytest.raises(LoadError, match=r"Size mismatch.*for w"):
        load({"w": torch.zeros(7)}, checkpoint_id=checkpoint)


def test_damage_keeps_its_type(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(b"?" * file.stat().st_size)
    with pytest.raises(IntegrityError, match="'w' can't be read"):
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)


def test_a_foreign_pickle_is_refused_at_once(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(PannierError, match=r"os\.system"):
        load({"w": torch.zeros(6)}, checkpoint_id=checkpoint)
