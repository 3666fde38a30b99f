"""What is staged by a cached plan is, bit for bit, what a new plan and its staging would give."""

import ctypes
import gc
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pannier.client.planning.plan_cache import CachedPlan, PlannerOptions, PlanScope
from pannier.client.staging import archives
from pannier.client.staging.arena import ArenaPool
from pannier.client.staging.layout import StateValues
from pannier.client.staging.stager import Staged, stage
from pannier.v1 import plan_pb2
from pannier.wire.errors import InvalidRequestError
from support.actors.staged import ATTEMPT, final_plan, plan, stage_all, stage_by, write_checkpoint
from support.states import nested
from support.states.bits import bits
from support.states.contents import described, values

DEFAULT = PlannerOptions(flatten_sharded_tensors=True, dedup_save_to_lowest_rank=False)
SCOPE = PlanScope("incarnation", "group", "/root")
NUMBER = 1
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf"
)


@pytest.fixture
def pool() -> Iterator[ArenaPool]:
    pool = ArenaPool(2)
    yield pool
    pool.close()


def learned(state: dict[str, Any], positions: list[int] | None = None) -> CachedPlan:
    """The plan of a state, as it is kept after its first save."""
    planning = plan(state)
    kept = CachedPlan(SCOPE, planning, final_plan(planning.message, positions))
    kept.add_state(DEFAULT, state, planning.items)
    return kept


def match(kept: CachedPlan, state: dict[str, Any]) -> StateValues:
    found = kept.match(DEFAULT, state)
    assert found is not None
    return found


def content(staged: Staged) -> dict[str, bytes]:
    return {file.name: ctypes.string_at(file.address, file.size) for file in staged.files}


def by_cached_plan(kept: CachedPlan, state: dict[str, Any], pool: ArenaPool) -> dict[str, bytes]:
    arena = pool.acquire(kept.layout.sizes)
    try:
        return content(stage(kept.layout, match(kept, state), arena))
    finally:
        pool.release(arena)


def replanned(
    state: dict[str, Any], pool: ArenaPool, positions: list[int] | None = None
) -> dict[str, bytes]:
    planning = plan(state)
    staged = stage_by(planning, final_plan(planning.message, positions), pool)
    try:
        return content(staged)
    finally:
        pool.release(staged.arena)


def dirty(pool: ArenaPool, size: int) -> None:
    """Other bytes in the memory that the next arena gets."""
    arena = pool.acquire([size])
    ctypes.memset(arena.files[0].address, 0xAA, size)
    pool.release(arena)


@settings(max_examples=60)
@given(nested.states, st.integers(0, 1 << 30), st.randoms(use_true_random=False))
def test_any_state_of_the_same_structure(state: dict[str, Any], seed: int, chance: Any) -> None:
    first, second, third = (nested.build(state, seed + i) for i in range(3))
    try:
        count = len(plan(first).items)
    except InvalidRequestError:
        assume(False)
    positions = sorted(chance.sample(range(count), chance.randrange(count + 1)))
    kept = learned(first, positions)
    pool = ArenaPool(1)
    dirty(pool, 1 << 20)
    for again in (first, second, third, first):
        if kept.match(DEFAULT, again) is None:
            # An object became a list of tensors: it is planned again.
            assert plan(again).digest != plan(first).digest
            continue
        assert by_cached_plan(kept, again, pool) == replanned(again, ArenaPool(1), positions)
    pool.close()


@pytest.mark.parametrize("dtype", sorted(archives.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("elements", [0, 33, 600_000])
def test_every_dtype(dtype: torch.dtype, elements: int, pool: ArenaPool) -> None:
    def state() -> dict[str, Any]:
        raw = torch.randint(0, 2, (elements * dtype.itemsize,), dtype=torch.uint8)
        return {"t": raw.view(dtype), "o": 1}

    kept = learned(state())
    for _ in range(2):
        again = state()
        assert by_cached_plan(kept, again, pool) == replanned(again, ArenaPool(1))


@pytest.mark.parametrize("elements", [40, 400_000], ids=["small", "large"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t])[::2],
        lambda t: torch.empty_like(t).copy_(t.conj()).conj(),
        lambda t: t.conj().imag.to(t.dtype),
        lambda t: t[:1].expand(t.shape),
        lambda t: t.detach().clone(),
        lambda t: t * 2,
    ],
)
def test_strides_and_bits_may_change(elements: int, change: Any, pool: ArenaPool) -> None:
    first = {"t": torch.randn(elements, 2, dtype=torch.complex64)}
    kept = learned(first)
    by_cached_plan(kept, first, pool)
    again = {"t": change(torch.randn(elements, 2, dtype=torch.complex64))}
    assert by_cached_plan(kept, again, pool) == replanned(again, ArenaPool(1))


def test_heads_and_tails_are_written_once(pool: ArenaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.randn(100), "b": torch.randn(1 << 20)}
    kept = learned(state)
    by_cached_plan(kept, state, pool)
    state["a"].fill_(3)
    wanted = replanned(state, ArenaPool(1))
    monkeypatch.setattr("pannier.client.staging.layout._File._write_headers", None)
    assert by_cached_plan(kept, state, pool) == wanted


def test_another_save_in_between_drops_the_cached_headers(pool: ArenaPool) -> None:
    state = {"a": torch.randn(100), "o": "x"}
    kept = learned(state)
    wanted = by_cached_plan(kept, state, pool)
    _, arena = stage_all(plan({"b": torch.full((30,), 7.0), "c": torch.ones(60)}), pool)
    pool.release(arena)
    assert by_cached_plan(kept, state, pool) == wanted


def test_another_plan_in_between_drops_the_cached_headers(pool: ArenaPool) -> None:
    state = {"a": torch.randn(100), "o": "x"}
    other = {"b": torch.full((30,), 7.0), "c": torch.ones(60), "o": "y"}
    kept, between = learned(state), learned(other)
    for _ in range(2):
        assert by_cached_plan(kept, state, pool) == replanned(state, ArenaPool(1))
        assert by_cached_plan(between, other, pool) == replanned(other, ArenaPool(1))


@pytest.mark.parametrize("big", [False, True])
def test_a_failure_in_between_drops_the_cached_headers(big: bool, pool: ArenaPool) -> None:
    state = {"a": torch.randn(1 << 20 if big else 100), "o": "x"}
    kept = learned(state)
    wanted = by_cached_plan(kept, state, pool)
    with pytest.raises(Exception, match=r"lambda.*\n'o' can't be saved"):
        by_cached_plan(kept, {**state, "o": lambda: None}, pool)
    dirty(pool, kept.layout.sizes[0])
    assert by_cached_plan(kept, state, pool) == wanted


@pytest.mark.parametrize("elements", [100, 1 << 20])
def test_a_freed_storage_is_refused_by_name(elements: int, pool: ArenaPool) -> None:
    state = {"a": torch.randn(30), "b": torch.randn(2 * elements)[elements:]}
    kept = learned(state)
    state["b"].untyped_storage().resize_(0)
    with pytest.raises(InvalidRequestError, match="'b' can't be saved: its storage"):
        by_cached_plan(kept, state, pool)


def test_tied_and_empty_tensors_and_gradients(pool: ArenaPool) -> None:
    weight = torch.nn.Parameter(torch.randn(50, 3))
    state = {"a": weight, "b": weight, "none": torch.empty(0, 3), "g": weight * 2}
    kept = learned(state)
    assert by_cached_plan(kept, state, pool) == replanned(state, ArenaPool(1))
    with torch.inference_mode():
        assert by_cached_plan(kept, state, ArenaPool(1)) == replanned(state, ArenaPool(1))


def test_memory_first_used_in_inference_mode_serves_outside_it(pool: ArenaPool) -> None:
    state = {"a": torch.randn(50), "b": torch.randn(50, 3).t()}
    kept = learned(state)
    with torch.inference_mode():
        by_cached_plan(kept, state, pool)
    state["a"].fill_(1)
    assert by_cached_plan(kept, state, pool) == replanned(state, ArenaPool(1))


def test_a_default_device_and_recorded_gradients_change_nothing(pool: ArenaPool) -> None:
    state = {"a": torch.randn(50, requires_grad=True), "o": {"lr": 0.1}}
    kept = learned(state)
    torch.set_default_device("meta")
    try:
        staged = by_cached_plan(kept, state, pool)
    finally:
        torch.set_default_device(None)
    assert staged == replanned(state, ArenaPool(1))


@settings(max_examples=15)
@given(nested.states, st.integers(0, 1 << 30))
def test_what_is_staged_loads_as_what_torch_saves(state: dict[str, Any], seed: int) -> None:
    first, again = (nested.build(state, seed + i) for i in range(2))
    try:
        kept = learned(first)
    except InvalidRequestError:
        assume(False)
    found = kept.match(DEFAULT, again)
    assume(found is not None)
    assert found is not None
    pool = ArenaPool(1)
    with tempfile.TemporaryDirectory() as name:
        ours, torchs = Path(name) / "ours", Path(name) / "torch"
        staged = stage(kept.layout, found, pool.acquire(kept.layout.sizes))
        planning = plan(again)
        write_checkpoint(ours, planning.message, planning.items, staged)
        dcp.save(again, checkpoint_id=torchs, no_dist=True)
        assert described(ours) == described(torchs)
        assert [*map(as_text, values(ours).items())] == [*map(as_text, values(torchs).items())]
    pool.close()


def as_text(pair: tuple[str, Any]) -> tuple[str, Any]:
    """Comparable, where a NaN equals itself."""
    key, value = pair
    return (key, bits(value) if isinstance(value, torch.Tensor) else repr(value))


def test_nothing_of_a_state_is_kept(pool: ArenaPool) -> None:
    state = {"a": torch.randn(100), "b": torch.randn(1 << 20), "o": Thing()}
    gone = [weakref.ref(value) for value in state.values()]
    kept = learned(state)
    by_cached_plan(kept, state, pool)
    del state
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


class Thing:
    """An object that can be pickled."""


def test_names_follow_the_number() -> None:
    state = {"a": torch.randn(100), "o": "x"}
    kept = learned(state)
    assert kept.attempt(1) == ATTEMPT
    assert kept.attempt(12) == "i1-a1-g00000000-s12"
    assert kept.layout.names == ["0_0.distcp", "0_objects.distcp"]
    final = plan_pb2.FinalPlan(attempt=kept.attempt(12))
    assert kept.equals(final, 12)
    assert not kept.equals(final, 13)


def test_dtensors(pool: ArenaPool, tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "s"), 1)
    )
    try:
        mesh = init_device_mesh("cpu", (1,))

        def state() -> dict[str, Any]:
            return {
                "d": distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]),
                "p": torch.nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(1)])),
                "t": torch.randn(3),
            }

        kept = learned(state())
        for _ in range(2):
            again = state()
            assert by_cached_plan(kept, again, pool) == replanned(again, ArenaPool(1))
        with torch.no_grad():
            # The local part requires no gradient then: another plan, as dcp.save's would be.
            assert kept.match(DEFAULT, again) is None
        other = {**again, "d": distribute_tensor(torch.randn(8, 4), mesh, [Shard(1)])}
        assert kept.match(DEFAULT, other) is None
    finally:
        dist.destroy_process_group()
