"""``client.export``: safetensors files that hold what the checkpoint holds, or none at all."""

import dataclasses
import json
import pickle
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from pannier import client
from pannier.client import conversion
from pannier.client.conversion import lazy_planner
from pannier.client.conversion.lazy_planner import LazySavePlanner
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    StorageError,
)
from support.states.bits import bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
INDEX = "model.safetensors.index.json"


def weights() -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.randn(50, 8, generator=noise),
        "layers.0.weight": torch.randn(8, 8, generator=noise).bfloat16(),
        "layers.0.scale": torch.randn(5, generator=noise).to(torch.float8_e4m3fn),
        "layers.0.strided": torch.randn(6, 4, generator=noise).t(),
        "norm.count": torch.tensor(7),
        "norm.empty": torch.empty(0, 3),
        "norm.mask": torch.rand(9, generator=noise) > 0.5,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights below ``model.``, and what an optimizer and a loop have beside them."""
    directory = tmp_path / "step-1"
    state = {
        "model": weights(),
        "optimizer": {"state": {"embed.weight": {"exp_avg": torch.ones(50, 8)}}, "lr": 0.1},
        "step": 1,
    }
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, found as a reader of the index finds them."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    for name in set(index.values()):
        files[name] = safetensors.torch.load_file(directory / name)
    assert sum(map(len, files.values())) == len(index)
    return {name: files[file][name] for name, file in index.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert bits(found[name]) == bits(tensor.contiguous()), name


def test_every_weight_under_its_name(checkpoint: Path, tmp_path: Path) -> None:
    result = client.export(checkpoint, tmp_path / "out", format="safetensors", prefix="model.")
    assert_same(read(tmp_path / "out"), weights())
    assert result.tensors == len(weights())
    assert result.directory == str(tmp_path / "out")
    assert result.files == {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()}
    assert "7 tensors in 1 files" in str(result)


def test_torch_reads_it_too(checkpoint: Path, tmp_path: Path) -> None:
    client.export(checkpoint, tmp_path / "out", keys=["optimizer.*"], exclude=["*.lr"])
    target = {"optimizer.state.embed.weight.exp_avg": torch.zeros(50, 8)}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "out"))
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(*target.values(), torch.ones(50, 8))


def test_from_any_storage(checkpoint: Path, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(checkpoint), "/exports/step-1", recursive=True)
    try:
        client.export("memory://exports/step-1", f"file://{tmp_path}/out", prefix="model.")
    finally:
        store.rm("/exports", recursive=True)
    assert_same(read(tmp_path / "out"), weights())


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_floating_point_tensors_are_cast(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype | str
) -> None:
    client.export(checkpoint, tmp_path / "out", prefix="model.", dtype=dtype)
    wanted = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in weights().items()
    }
    assert_same(read(tmp_path / "out"), wanted)


WHOLE = torch.arange(64.0).reshape(8, 8)


class InParts(dcp.DefaultSavePlanner):
    """Saves ``WHOLE`` as ranks with two rows each would."""

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        (item,) = plan.items
        assert item.tensor_data is not None
        items = []
        for row in range(0, 8, 2):
            offset = torch.Size((row, 0))
            chunk = dcp.ChunkStorageMetadata(offset, torch.Size((2, 8)))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(
                dcp.WriteItem(MetadataIndex("w", offset), WriteItemType.SHARD, tensor_data=data)
            )
        return dataclasses.replace(plan, items=items)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return WHOLE[index.offset[0] : index.offset[0] + 2]


def test_a_tensor_of_many_chunks(tmp_path: Path) -> None:
    dcp.save({"w": WHOLE}, checkpoint_id=tmp_path / "step-1", planner=InParts(), no_dist=True)
    client.export(tmp_path / "step-1", tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")["w"], WHOLE)


def test_a_part_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"w": WHOLE}, checkpoint_id=tmp_path / "step-1", planner=InParts(), no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "step-1").read_metadata()
    del metadata.state_dict_metadata["w"].chunks[1]
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(IntegrityError, match=r"'w' can't be exported: .* 48 of its 64 elements"):
        client.export(tmp_path / "step-1", tmp_path / "out")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({}, r"'optimizer.lr', 'step' can't be exported: only tensors"),
        ({"keys": ["model.*", "st?p"]}, r"'step' can't be exported"),
        ({"prefix": "optimizer."}, r"'optimizer.lr' can't be exported"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, chosen: Any, named: str
) -> None:
    """torch's writer would write a corrupt file."""
    with pytest.raises(InvalidRequestError, match=named):
        client.export(checkpoint, tmp_path / "out", **chosen)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({"keys": "model.norm.*"}, ["model.norm.count", "model.norm.empty", "model.norm.mask"]),
        ({"prefix": "model.", "keys": ["embed.weight"]}, ["embed.weight"]),
        ({"prefix": "model.layers.", "exclude": ["*.s*"]}, ["0.weight"]),
        ({"prefix": "model.", "keys": ["norm.*"], "exclude": "norm.[em]*"}, ["norm.count"]),
        ({"exclude": ["step", "*.lr", "model.*"]}, ["optimizer.state.embed.weight.exp_avg"]),
    ],
)
def test_what_is_chosen(checkpoint: Path, tmp_path: Path, chosen: Any, names: list[str]) -> None:
    client.export(checkpoint, tmp_path / "out", **chosen)
    assert list(read(tmp_path / "out")) == names


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"format": "gguf"}, "format='gguf'"),
        ({"prefix": "modle."}, r"no key begins with it; there are 'model.\*' \(7\), 'optimizer"),
        ({"prefix": "model"}, "end it with the dot"),
        ({"prefix": "step"}, "end it with the dot"),
        ({"prefix": "model.", "keys": ["layer.*"]}, r"keys: no name matches 'layer.\*'; there are"),
        ({"prefix": "model.", "exclude": ["lm_head.*"]}, "exclude: no name matches"),
        ({"prefix": "model.", "exclude": ["*"]}, "leave nothing"),
        ({"keys": [3]}, "3 is not a name"),
        ({"dtype": "bf16"}, "dtype='bf16' is no floating-point dtype"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is no floating-point dtype"),
        ({"max_file_bytes": 0}, "max_file_bytes=0 must be positive"),
    ],
)
def test_a_wrong_argument_is_named(
    checkpoint: Path, tmp_path: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        client.export(checkpoint, tmp_path / "out", **arguments)
    assert_nothing_written(tmp_path)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.float8_e8m0fnu])
def test_a_dtype_that_safetensors_does_not_know_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    state = {"a": torch.ones(2), "z": torch.empty(2, dtype=dtype)}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(InvalidRequestError, match=f"'z' can't be exported as {dtype}"):
        client.export(tmp_path / "step-1", tmp_path / "out")
    client.export(tmp_path / "step-1", tmp_path / "out", exclude="z")


def test_tied_weights_are_written_under_both_names_or_one(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9)})
    model["head"].weight = model["embed"].weight
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-1", no_dist=True)
    client.export(tmp_path / "step-1", tmp_path / "both")
    both = read(tmp_path / "both")
    assert torch.equal(both["embed.weight"], both["head.weight"])
    client.export(tmp_path / "step-1", tmp_path / "one", exclude=["head.weight"])
    one = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9)})
    one["head"].weight = one["embed"].weight
    missing = one.load_state_dict(read(tmp_path / "one"), strict=False).missing_keys
    assert missing == ["head.weight"]
    assert torch.equal(one["head"].weight, model["head"].weight)


def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    state = {"model": model.state_dict(), "step": 1}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    choices: list[dict[str, Any]] = [{"max_file_bytes": 4000}, {"exclude": ["lm_head.weight"]}]
    for number, choice in enumerate(choices):
        out = tmp_path / f"out-{number}"
        client.export(tmp_path / "step-1", out, prefix="model.", **choice)
        config.save_pretrained(out)
        again, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert_same(again.state_dict(), model.state_dict())


# Files and memory.


def test_no_file_is_larger_but_for_one_tensor(tmp_path: Path) -> None:
    state = {f"t{i:02}": torch.full((i,), float(i)) for i in (10, 20, 40, 200, 1, 2, 30)}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    client.export(tmp_path / "step-1", tmp_path / "out", max_file_bytes=4 * 60)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        files[file] = files.get(file, 0) + state[name].nbytes
    assert sorted(files) == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert [size for size in files.values() if size > 4 * 60] == [4 * 200]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert_same(read(tmp_path / "out"), {name: state[name] for name in index["weight_map"]})


@pytest.mark.parametrize("batch", [1, 3000, 1 << 30])
def test_only_one_files_tensors_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    state = {f"t{i:02}": torch.randn(250) for i in range(12)}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    alive: dict[str, Any] = {}
    most = []

    def look_up(self: LazySavePlanner, index: Any) -> torch.Tensor:
        tensor = original(self, index)
        alive[index.fqn] = weakref.ref(tensor)
        held = [name for name, reference in alive.items() if reference() is not None]
        most.append(len({*held, *self._held}))
        return tensor

    original = LazySavePlanner.lookup_object
    monkeypatch.setattr(LazySavePlanner, "lookup_object", look_up)
    monkeypatch.setattr(lazy_planner, "_BATCH_BYTES", batch)
    seen = []
    client.export(
        tmp_path / "step-1",
        tmp_path / "out",
        max_file_bytes=3000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert max(most) <= 3
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert seen[-1] == (12_000, 12_000)
    assert seen == sorted(seen)
    assert len(seen) == (12 if batch == 1 else 4)


# The directory.


def assert_nothing_written(root: Path) -> None:
    assert [path.name for path in root.iterdir()] == ["step-1"]


def test_an_empty_directory_is_filled_and_parents_are_made(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "a/b/c"):
        client.export(checkpoint, tmp_path / name, prefix="model.")
        assert (tmp_path / name / INDEX).exists()


@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_what_exists_is_not_touched(checkpoint: Path, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "directory":
        out.mkdir()
        (out / "config.json").write_text("{}")
    elif what == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError, match="out exists already"):
        client.export(checkpoint, out, prefix="model.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step-1"]
    assert what != "directory" or [path.name for path in out.iterdir()] == ["config.json"]


def test_what_appears_meanwhile_is_not_mixed_with(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def appear(done: int, total: int) -> None:
        out.mkdir()
        (out / "other").touch()

    with pytest.raises(InvalidRequestError, match="out exists already"):
        client.export(checkpoint, out, prefix="model.", progress=appear)
    assert [path.name for path in out.iterdir()] == ["other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step-1"]


@pytest.mark.parametrize("place", ["gs://bucket/out", "s3://bucket/out", "memory://out"])
def test_a_place_that_is_not_local_is_refused(checkpoint: Path, place: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{place} is no local directory"):
        client.export(checkpoint, place, prefix="model.")


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(StorageError, match="step-1 is no checkpoint"):
        client.export(tmp_path / "step-1", tmp_path / "out")
    assert_nothing_written(tmp_path)


def test_damage_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(PannierError):
        client.export(checkpoint, tmp_path / "out", prefix="model.")
    assert_nothing_written(tmp_path)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(1 << 20)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with largest_file(1 << 20), pytest.raises(StorageError, match=r"out can't be written: .*File"):
        client.export(tmp_path / "step-1", tmp_path / "out")
    assert_nothing_written(tmp_path)


def test_what_torch_has_written_is_looked_at(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(self: HuggingFaceStorageWriter, plan: Any, planner: Any) -> Any:
        del plan.items[2]
        return original(self, plan, planner)

    original = HuggingFaceStorageWriter.write_data
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", lose)
    text = r"'layers\.0\.scale' was not written as planned: the first is missing"
    with pytest.raises(IntegrityError, match=text):
        client.export(checkpoint, tmp_path / "out", prefix="model.")
    assert_nothing_written(tmp_path)


def test_what_differs_from_the_plan_is_spelled_out() -> None:
    from pannier.client.conversion.safetensors_files import _difference

    found, planned = (torch.float32, torch.Size([2])), (torch.bfloat16, torch.Size([2, 3]))
    assert _difference(found, None) == "was not planned"
    assert _difference(found, planned) == (
        "has dtype torch.float32 and shape (2,), planned was torch.bfloat16 and (2, 3)"
    )


# Where it runs.


def test_a_missing_package_is_named_with_what_installs_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if no other test had used it.
    monkeypatch.delattr(conversion, "safetensors_files", raising=False)
    monkeypatch.delitem(sys.modules, f"{conversion.__name__}.safetensors_files", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigurationError, match=r"safetensors.*pip install safetensors there"):
        client.export(checkpoint, tmp_path / "out", prefix="model.")
    assert_nothing_written(tmp_path)


def test_a_rank_of_a_process_group_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(InvalidRequestError, match=r"rank 0 of a process group.*pannier export"):
            client.export(checkpoint, tmp_path / "out", prefix="model.")
    finally:
        dist.destroy_process_group()
