"""Staged files are plain DCP files, equal bit for bit, whatever the state is made of."""

import ctypes
import io
import resource
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor

from pannier.client.planning.local_plan import resolves_as_planned
from pannier.client.staging import archives
from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.layout import PlannerValues, own_layout, planned_layout
from pannier.client.staging.stager import Staged, stage
from pannier.client.torch_compat import AsyncCollectiveTensor
from pannier.wire.errors import InvalidRequestError, PannierError
from pannier.wire.plan_columns import decode_column
from support.actors.staged import (
    final_plan,
    plan,
    stage_all,
    stage_by,
    write_checkpoint,
    write_files,
)
from support.plan_messages import changed_column

DTYPES = sorted(archives.DTYPES, key=str)
pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf", "ignore:torch.distributed is disabled", "ignore:.*quantize_per_tensor"
)


@pytest.fixture
def pool() -> Iterator[ArenaPool]:
    pool = ArenaPool(2)
    yield pool
    pool.close()


def _dirty(pool: ArenaPool, staged_bytes: int = 1 << 20) -> None:
    """Leaves another save's bytes in the memory that the next arena gets."""
    arena = pool.acquire([staged_bytes])
    ctypes.memset(arena.files[0].address, 0xAA, staged_bytes)
    spill = arena.spill
    spill.reserve(staged_bytes)
    ctypes.memset(spill.address, 0xAA, staged_bytes)
    pool.release(arena)


def _save(state: Any, directory: Path, pool: ArenaPool, planner: Any = None) -> Staged:
    planning = plan(state, planner)
    staged, arena = stage_all(planning, pool)
    write_checkpoint(directory, planning.message, planning.items, staged)
    pool.release(arena)
    return staged


def _load(into: dict[str, Any], directory: Path) -> dict[str, Any]:
    dcp.load(into, storage_reader=FileSystemReader(directory), no_dist=True)
    return into


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with random bytes, every bit pattern of the dtype included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def _bits(tensor: torch.Tensor) -> bytes:
    """The elements, row-major."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _round_trip(tensor: torch.Tensor, directory: Path, pool: ArenaPool) -> torch.Tensor:
    """Saves and loads one tensor; it must have gone to its slot."""
    _dirty(pool)
    staged = _save({"t": tensor}, directory, pool)
    assert not staged.varying
    into = {"t": _random(tensor.dtype, *tensor.shape)}
    return _load(into, directory)["t"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (7,), (3, 5, 4)], ids=str)
def test_every_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, pool: ArenaPool
) -> None:
    tensor = _random(dtype, *shape)
    loaded = _round_trip(tensor, tmp_path, pool)
    assert loaded.dtype == dtype
    assert _bits(loaded) == _bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_transposed_and_strided(
    dtype: torch.dtype, tmp_path: Path, pool: ArenaPool
) -> None:
    tensor = _random(dtype, 6, 5).t()[::2]
    assert not tensor.is_contiguous()
    assert _bits(_round_trip(tensor, tmp_path, pool)) == _bits(tensor)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 4).expand(5, 4),
    "expanded from one": lambda: torch.randn(()).expand(3, 3),
    "a slice": lambda: torch.randn(100)[17:40],
    "strided": lambda: torch.randn(10, 10)[::3, 1::2],
    "unaligned": lambda: torch.randn(9)[1:],
    "a diagonal": lambda: torch.randn(6, 6).diagonal(),
    "conj": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "conj, strided": lambda: torch.randn(4, 6, dtype=torch.complex128).conj().t()[::2],
    "neg": lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
    "real": lambda: torch.randn(5, dtype=torch.complex64).real,
    "inference": lambda: _inference(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3, 2)),
    "of a graph": lambda: torch.randn(3, requires_grad=True) * 2,
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4).t()


@pytest.mark.parametrize("name", VIEWS)
def test_every_kind_of_view_has_its_own_values(name: str, tmp_path: Path, pool: ArenaPool) -> None:
    tensor = VIEWS[name]()
    loaded = _round_trip(tensor, tmp_path, pool)
    assert torch.equal(loaded, tensor.detach())


def test_neg_and_conj_bits_were_there_to_be_resolved() -> None:
    assert VIEWS["neg"]().is_neg()
    assert VIEWS["conj"]().is_conj()


def test_staging_works_in_inference_mode_and_out_of_it_with_one_pool(
    tmp_path: Path, pool: ArenaPool
) -> None:
    tensor = torch.randn(4, 4).t()
    with torch.inference_mode():
        _save({"t": tensor}, tmp_path / "1", pool)
    loaded = _round_trip(tensor, tmp_path / "2", pool)
    assert torch.equal(loaded, tensor)


def test_a_small_view_of_a_big_storage_brings_only_its_own_bytes(
    tmp_path: Path, pool: ArenaPool
) -> None:
    view = torch.randn(1 << 22)[1000:1010]
    staged = _save({"t": view}, tmp_path, pool)
    assert staged.bytes < 4096
    assert torch.equal(_load({"t": torch.zeros(10)}, tmp_path)["t"], view)


def test_parameters_lose_what_is_not_theirs_to_save(tmp_path: Path, pool: ArenaPool) -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 3))
    parameter.tag = object()  # type: ignore[attr-defined]
    parameter.register_hook(lambda grad: grad)
    loaded = _round_trip(parameter, tmp_path, pool)
    assert torch.equal(loaded, parameter.detach())


def test_tied_weights_each_have_a_slot(tmp_path: Path, pool: ArenaPool) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    staged = _save({"embed": weight, "head": weight, "view": weight.t()}, tmp_path, pool)
    assert len({placed.offset for placed in staged.locations}) == 3
    into = _load({key: torch.zeros(4, 4) for key in ("embed", "head", "view")}, tmp_path)
    assert torch.equal(into["embed"], weight.detach())
    assert torch.equal(into["head"], weight.detach())
    assert torch.equal(into["view"], weight.detach().t())


class Note:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]


class Counting:
    def __init__(self, step: int) -> None:
        self.step = step
        self.total = torch.full((3,), float(step))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.total = state["step"], state["total"]


def test_nested_containers_objects_and_statefuls(tmp_path: Path, pool: ArenaPool) -> None:
    def state(fill: float, step: int, text: str) -> dict[str, Any]:
        return {
            "model": {"layers": [{"w": torch.full((2, 3), fill)}, {"w": torch.full((4,), fill)}]},
            "mixed": [torch.tensor(fill), text, {"deep": [step]}],
            "pair": (torch.full((2,), fill), step),
            "note": Note(text),
            "name": text,
            "none": None,
            "bytes": text.encode(),
            "app": Counting(step),
            "rng": torch.get_rng_state(),
        }

    _dirty(pool)
    torch.manual_seed(1)
    saved = state(1.5, 7, "saved")
    _save(saved, tmp_path, pool)
    torch.manual_seed(2)
    loaded = _load(state(0.0, 0, "fresh"), tmp_path)

    assert torch.equal(loaded["model"]["layers"][0]["w"], torch.full((2, 3), 1.5))
    assert torch.equal(loaded["model"]["layers"][1]["w"], torch.full((4,), 1.5))
    assert loaded["mixed"][1:] == ["saved", {"deep": [7]}]
    assert loaded["mixed"][0].item() == 1.5
    assert torch.equal(loaded["pair"][0], torch.full((2,), 1.5))
    assert loaded["pair"][1] == 7
    assert loaded["note"] == Note("saved")
    assert (loaded["name"], loaded["none"], loaded["bytes"]) == ("saved", None, b"saved")
    assert loaded["app"].step == 7
    assert torch.equal(loaded["app"].total, torch.full((3,), 7.0))
    assert torch.equal(loaded["rng"], saved["rng"])


def test_optimizer_state_round_trips(tmp_path: Path, pool: ArenaPool) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (steps + 1))
        for _ in range(steps):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(2)
    _save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path, pool)
    other, fresh = trained(1)
    into = _load({"m": other.state_dict(), "o": fresh.state_dict()}, tmp_path)
    saved = optimizer.state_dict()
    assert into["o"]["param_groups"] == saved["param_groups"]
    for index, entry in saved["state"].items():
        # DCP turns integer keys into strings.
        loaded = {**into["o"]["state"]}
        found = loaded.get(str(index), loaded.get(index))
        for name, value in entry.items():
            assert torch.equal(found[name], value)


# What can't go into a slot


def _names(staged: Staged) -> list[str]:
    return [placed.file.rpartition("_")[2] for placed in staged.locations]


def test_a_quantized_tensor(tmp_path: Path, pool: ArenaPool) -> None:
    def quantized(values: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(values, 0.1, 10, torch.quint8)

    values = quantized(torch.randn(64, 4))
    staged = _save({"q": values, "part": values[:2]}, tmp_path, pool)
    assert _names(staged) == ["objects.distcp"] * 2
    zeros = quantized(torch.zeros(64, 4))
    into = _load({"q": zeros, "part": quantized(torch.zeros(2, 4))}, tmp_path)
    assert torch.equal(into["q"].int_repr(), values.int_repr())
    assert torch.equal(into["part"].int_repr(), values[:2].int_repr())


def test_a_wrapper_subclass(tmp_path: Path, pool: ArenaPool) -> None:
    wrapper = TwoTensor(torch.randn(3), torch.randn(3))
    staged = _save({"w": wrapper, "plain": torch.ones(2)}, tmp_path, pool)
    assert _names(staged) == ["objects.distcp", "0.distcp"]
    into = {"w": TwoTensor(torch.zeros(3), torch.zeros(3)), "plain": torch.zeros(2)}
    with torch.serialization.safe_globals([TwoTensor]):
        _load(into, tmp_path)
    assert torch.equal(into["w"].a, wrapper.a)
    assert torch.equal(into["w"].b, wrapper.b)
    assert torch.equal(into["plain"], torch.ones(2))


class ToHalf(DefaultSavePlanner):
    """Stores float32 as bfloat16."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        if write_item.type is WriteItemType.BYTE_IO or value.dtype is not torch.float32:
            return value
        return value.to(torch.bfloat16)


class Untouched(DefaultSavePlanner):
    """Overrides a transform, so that nothing can be known before it has run."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object)


def test_a_transform_that_changes_the_dtype_is_stored_as_it_is(
    tmp_path: Path, pool: ArenaPool
) -> None:
    _dirty(pool)
    state = {"w": torch.randn(3, 4), "i": torch.arange(5), "text": "t"}
    staged = _save(state, tmp_path, pool, ToHalf())
    assert _names(staged) == ["objects.distcp"] * 3
    into = _load({"w": torch.zeros(3, 4), "i": torch.zeros(5).long(), "text": ""}, tmp_path)
    assert torch.equal(into["w"], state["w"].to(torch.bfloat16).float())
    assert torch.equal(into["i"], torch.arange(5))
    assert into["text"] == "t"
    # A template, not torch.save: the stored tensor is bfloat16.
    placed = staged.locations[0]
    with (tmp_path / placed.file).open("rb") as file:
        file.seek(placed.offset)
        stored = torch.load(io.BytesIO(file.read(placed.length)), weights_only=True)
    assert stored.dtype is torch.bfloat16
    assert placed.length == archives.archive(torch.bfloat16, (3, 4)).length


@pytest.mark.parametrize(
    "changed",
    [
        lambda t: t.to(torch.bfloat16),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        lambda t: TwoTensor(t, t),
    ],
)
def test_a_slot_whose_value_turns_out_otherwise_stays_empty(
    changed: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, pool: ArenaPool
) -> None:
    """The plan knew of no transform: the planner got it after it was planned."""
    _dirty(pool)
    planner = DefaultSavePlanner()
    state = {"a": torch.randn(3, 4), "b": torch.randn(3, 4), "c": torch.randn(3, 4)}
    planning = plan(state, planner)
    final = final_plan(planning.message)

    def transform(item: WriteItem, value: Any) -> Any:
        return changed(value) if item.index.fqn == "b" else value

    planner.transform_object = transform  # type: ignore[method-assign]
    staged = stage_by(planning, final, pool)

    (varying,) = staged.varying
    assert varying.position == 1
    assert varying.file == "0_objects.distcp"
    assert (varying.file, varying.offset, varying.length) == staged.locations[1]
    write_files(tmp_path, staged)
    offset, length = map(decode_column, (final.placement.offset, final.placement.length))
    hole = (tmp_path / staged.files[0].name).read_bytes()[offset[1] :][: length[1]]
    assert not any(hole)
    blob = (tmp_path / varying.file).read_bytes()[varying.offset :][: varying.length]
    with torch.serialization.safe_globals([TwoTensor]):
        stored = torch.load(io.BytesIO(blob), weights_only=True)
    expected = changed(state["b"])
    assert (type(stored), stored.dtype, stored.shape) == (
        type(expected),
        expected.dtype,
        expected.shape,
    )


def test_gaps_hold_nothing_of_an_earlier_save(tmp_path: Path, pool: ArenaPool) -> None:
    _dirty(pool, 4 << 20)
    state = {"a": torch.randn(3), "big": torch.randn(1 << 18), "b": torch.randn(5), "o": "text"}
    planning = plan(state)
    staged, arena = stage_all(planning, pool)
    taken: dict[str, list[tuple[int, int]]] = {}
    for placed in staged.locations:
        taken.setdefault(placed.file, []).append((placed.offset, placed.offset + placed.length))
    for file in staged.files:
        data = bytearray(ctypes.string_at(file.address, file.size))
        for start, stop in taken[file.name]:
            data[start:stop] = bytes(stop - start)
        assert not any(data), f"{file.name} has foreign bytes"
    pool.release(arena)


# What a training loop may rely on


def test_what_happens_after_staging_changes_nothing(tmp_path: Path, pool: ArenaPool) -> None:
    inner = [1, 2]
    state = {
        "w": torch.ones(1000),
        "view": torch.ones(10, 10).t(),
        "q": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8),
        "cast": torch.ones(4),
        "object": {"inner": inner},
    }
    planning = plan(state, ToHalf())
    staged, arena = stage_all(planning, pool)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(9)
    inner.append(3)
    write_checkpoint(tmp_path, planning.message, planning.items, staged)
    into = _load(
        {
            "w": torch.zeros(1000),
            "view": torch.zeros(10, 10),
            "q": torch.quantize_per_tensor(torch.zeros(4), 0.5, 0, torch.quint8),
            "cast": torch.zeros(4),
            "object": {"inner": []},
        },
        tmp_path,
    )
    assert torch.equal(into["w"], torch.ones(1000))
    assert torch.equal(into["view"], torch.ones(10, 10))
    assert torch.equal(into["q"].dequantize(), torch.ones(4))
    assert torch.equal(into["cast"], torch.ones(4))
    assert into["object"] == {"inner": [1, 2]}
    pool.release(arena)


class CountsResolves(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.resolved: list[WriteItem] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.resolved.append(write_item)
        return super().resolve_data(write_item)


def test_each_written_item_is_resolved_exactly_once(pool: ArenaPool) -> None:
    planner = CountsResolves()
    planning = plan(
        {"a": torch.ones(3), "b": torch.ones(4), "c": "x", "d": torch.ones(())}, planner
    )
    staged = stage_by(planning, final_plan(planning.message, [0, 2, 3]), pool)
    assert [id(item) for item in planner.resolved] == [id(planning.items[p]) for p in (0, 2, 3)]
    assert [varying.position for varying in staged.varying] == [0, 2, 3]
    pool.release(staged.arena)


def test_each_item_with_a_slot_is_looked_up_once(
    pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: Counter[str] = Counter()
    original = DefaultSavePlanner.resolve_data

    def counted(self: DefaultSavePlanner, item: WriteItem) -> Any:
        looked_up[item.index.fqn] += 1
        return original(self, item)

    monkeypatch.setattr(DefaultSavePlanner, "resolve_data", counted)
    _, arena = stage_all(plan({"a": torch.ones(3), "t": torch.ones(4, 4).t(), "o": 1}), pool)
    assert looked_up == {"a": 1, "t": 1, "o": 1}
    pool.release(arena)


def test_the_second_save_touches_no_fresh_page(pool: ArenaPool) -> None:
    state = {f"w{i}": torch.randn(1 << 18) for i in range(16)}
    state["o"] = "object"  # type: ignore[assignment]
    for _ in range(2):
        _, arena = stage_all(plan(state), pool)
        pool.release(arena)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _, arena = stage_all(plan(state), pool)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    # 16 MiB are 4096 pages.
    assert faults < 200
    pool.release(arena)


def test_large_copies_let_other_threads_run(pool: ArenaPool) -> None:
    state = {"w": torch.ones(64 << 20)}
    _, arena = stage_all(plan(state), pool)
    pool.release(arena)
    stop = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.monotonic()
        for _ in range(4):
            _, arena = stage_all(plan(state), pool)
            pool.release(arena)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join()
    during = [t for t in ticks if begin <= t <= end]
    # Holding the GIL it would tick between the saves only.
    assert len(during) > 12


def test_no_settings_of_torch_change(pool: ArenaPool) -> None:
    before = (
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.serialization.get_crc32_options(),
        torch.get_default_dtype(),
    )
    _, arena = stage_all(plan({"w": torch.ones(3, requires_grad=True), "o": Note("x")}), pool)
    pool.release(arena)
    after = (
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.serialization.get_crc32_options(),
        torch.get_default_dtype(),
    )
    assert before == after
    assert not torch.cuda.is_initialized()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, of which this is the second."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def _stored(staged: Staged) -> list[torch.Tensor]:
    files = {file.name: ctypes.string_at(file.address, file.size) for file in staged.files}
    return [
        torch.load(io.BytesIO(files[p.file][p.offset : p.offset + p.length]), weights_only=True)
        for p in staged.locations
    ]


def test_a_distributed_tensor_is_staged_as_this_ranks_shard(
    mesh: DeviceMesh, pool: ArenaPool
) -> None:
    uneven = torch.randn(2, 4)
    late = AsyncCollectiveTensor(torch.randn(3))
    state = {
        "uneven": DTensor.from_local(
            uneven, mesh, [ShardOf(0)], shape=torch.Size([5, 4]), stride=(4, 1)
        ),
        "columns": DTensor.from_local(torch.ones(4, 3).t(), mesh, [ShardOf(1)]),
        "nothing": DTensor.from_local(
            torch.ones(0, 4), mesh, [ShardOf(0)], shape=torch.Size([1, 4]), stride=(4, 1)
        ),
        "parameter": torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()])),
        "late": DTensor.from_local(late, mesh, [Replicate()]),
        "late, plain": late,
    }
    staged, arena = stage_all(plan(state), pool)
    assert not staged.varying
    stored = dict(zip(state, _stored(staged), strict=True))
    assert torch.equal(stored["uneven"], uneven)
    assert torch.equal(stored["columns"], torch.ones(3, 4))
    assert stored["nothing"].shape == (0, 4)
    assert torch.equal(stored["parameter"], torch.ones(2))
    assert torch.equal(stored["late"], late.wait())
    assert torch.equal(stored["late, plain"], late.wait())
    pool.release(arena)


def test_shards_within_shards_have_slots_too(mesh: DeviceMesh, pool: ArenaPool) -> None:
    pieces = [torch.randn(2, 3), torch.randn(4, 3)]
    local = LocalShardsWrapper(pieces, [(4, 0), (6, 0)])
    tensor = DTensor.from_local(
        local, mesh, [ShardOf(0)], run_check=False, shape=torch.Size([10, 3]), stride=(3, 1)
    )
    staged, arena = stage_all(plan({"t": tensor}), pool)
    assert not staged.varying
    assert all(torch.equal(a, b) for a, b in zip(_stored(staged), pieces, strict=True))
    assert len(staged.locations) == 2
    pool.release(arena)


# Bad input


def test_an_unpicklable_object_is_named(pool: ArenaPool) -> None:
    planning = plan({"ok": torch.ones(2), "extra": {"lock": threading.Lock()}})
    with pytest.raises(TypeError, match=r"pickle.*\n'extra\.lock' can't be saved"):
        stage_all(planning, pool)


def test_a_planner_that_raises_names_the_key(pool: ArenaPool) -> None:
    class Fails(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            if index.fqn == "b":
                raise RuntimeError("not today")
            return super().lookup_object(index)

    planning = plan({"a": torch.ones(1), "b": torch.ones(1)}, Fails())
    with pytest.raises(RuntimeError, match=r"not today\n'b' can't be saved"):
        stage_all(planning, pool)


@pytest.mark.parametrize(("value", "kind"), [(5, "int"), (io.BytesIO(b"x"), "BytesIO")])
def test_a_planner_that_resolves_to_something_else_is_refused(
    value: Any, kind: str, pool: ArenaPool
) -> None:
    class Wrong(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return value

    with pytest.raises(InvalidRequestError, match=f"'a'.*{kind}.*Tensor"):
        stage_all(plan({"a": torch.ones(1)}, Wrong()), pool)


def test_a_freed_storage_is_refused_instead_of_read(pool: ArenaPool) -> None:
    gone = torch.ones(100)
    view = gone[10:20]
    planning = plan({"gone": view})
    gone.untyped_storage().resize_(0)
    with pytest.raises(InvalidRequestError, match=r"'gone'.*freed"):
        stage_all(planning, pool)


@pytest.mark.parametrize("change", ["overlap", "beyond", "length"])
def test_a_wrong_final_plan_writes_nowhere(change: str, pool: ArenaPool) -> None:
    planning = plan({"a": torch.ones(4), "b": torch.ones(4)})
    final = final_plan(planning.message)
    with (
        changed_column(final.placement, "offset") as offset,
        changed_column(final.placement, "length") as length,
    ):
        if change == "overlap":
            offset[1] = offset[0] + 64
        elif change == "beyond":
            offset[1] += 1 << 30
        else:
            length[0] -= 8
    with pytest.raises(PannierError, match="final plan"):
        planned_layout(planning.items, final)


# What is left to others: several files, empty ranks, plans of torch's


def test_several_files_and_their_sizes(
    tmp_path: Path, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pannier.wire.file_layout.FILE_BYTES", 1 << 20)
    state = {f"w{i}": torch.randn(1 << 17) for i in range(8)}
    staged = _save(state, tmp_path, pool)
    assert len(staged.files) == 4
    assert staged.bytes == sum(file.size for file in staged.files)
    into = _load({key: torch.zeros(1 << 17) for key in state}, tmp_path)
    assert all(torch.equal(into[key], state[key]) for key in state)


def test_a_rank_without_items_has_no_files(pool: ArenaPool) -> None:
    planning = plan({"a": torch.ones(4)})
    staged = stage_by(planning, final_plan(planning.message, []), pool)
    assert (staged.files, staged.varying, staged.bytes) == ([], [], 0)
    pool.release(staged.arena)


@pytest.mark.parametrize("planner", [DefaultSavePlanner(), ToHalf()])
def test_an_external_plan_is_laid_out_here(
    planner: DefaultSavePlanner, tmp_path: Path, pool: ArenaPool
) -> None:
    _dirty(pool)
    state = {"a": torch.arange(5), "o": {"x": Note("n")}, "t": torch.randn(3, 4).t(), "e": 1}
    planning = plan(state, planner)
    layout = own_layout(planning.items, 4, is_planned=resolves_as_planned(planner))
    staged = stage(layout, PlannerValues(planning.items, planner), pool.acquire(layout.sizes))
    names = {placed.file for placed in staged.locations}
    assert names == {file.name for file in staged.files}
    assert all(name.startswith("4_") for name in names)
    assert staged.varying == []
    write_checkpoint(tmp_path, planning.message, planning.items, staged)
    pool.release(staged.arena)
    into = {"a": torch.zeros(5).long(), "o": {"x": None}, "t": torch.zeros(4, 3), "e": 0}
    _load(into, tmp_path)
    assert torch.equal(into["a"], torch.arange(5))
    exact = state["t"] if type(planner) is DefaultSavePlanner else state["t"].bfloat16().float()
    assert torch.equal(into["t"], exact)
    assert (into["o"], into["e"]) == ({"x": Note("n")}, 1)


def test_the_headers_of_an_external_plan_are_written_once(
    pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    for value in (1.0, 2.0):
        planner = DefaultSavePlanner()
        planning = plan({"a": torch.full((3,), value), "o": value}, planner)
        layout = own_layout(planning.items, 0, is_planned=True)
        staged = stage(layout, PlannerValues(planning.items, planner), pool.acquire(layout.sizes))
        saved.append(_stored(staged)[0])
        pool.release(staged.arena)
        monkeypatch.setattr("pannier.client.staging.layout._File._write_headers", None)
    assert torch.equal(torch.stack(saved), torch.tensor([[1.0] * 3, [2.0] * 3]))


def test_a_slot_that_stayed_empty_is_complete_in_the_next_save(
    tmp_path: Path, pool: ArenaPool
) -> None:
    planner = DefaultSavePlanner()
    planning = plan({"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, planner)
    layout = planned_layout(planning.items, final_plan(planning.message))
    for transform in (lambda _, value: value.half(), lambda _, value: value):
        planner.transform_object = transform  # type: ignore[method-assign]
        values = planning.finish(layout.positions)
        staged = stage(layout, values, pool.acquire(layout.sizes))
        stored = _stored(staged)
        pool.release(staged.arena)
        assert [each.dtype for each in stored] == [values.resolve(0).dtype] * 2  # type: ignore[union-attr]
    assert not staged.varying


def test_dcp_and_we_store_the_same_values(tmp_path: Path, pool: ArenaPool) -> None:
    """Where DCP itself is right, plain dcp.save and staging give the same loaded values."""
    state = {"w": torch.randn(5, 3).t(), "n": [torch.tensor(1), "x"], "h": torch.randn(3).half()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    _save(state, tmp_path / "ours", pool)

    def empty() -> dict[str, Any]:
        return {
            "w": torch.zeros(3, 5),
            "n": [torch.tensor(0), ""],
            "h": torch.zeros(3, dtype=torch.half),
        }

    theirs, ours = (_load(empty(), tmp_path / name) for name in ("theirs", "ours"))
    assert torch.equal(theirs["w"], ours["w"])
    assert torch.equal(theirs["h"], ours["h"])
    assert theirs["n"] == ours["n"]
