"""Copies from devices: complete and in order, whatever is queued when and whichever thread waits.

The device is a fake one (``support.states.host_streams``), whose copies happen when a thread waits for them.
"""

import ctypes
import gc
import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.multiprocessing.reductions import StorageWeakRef

from pannier.client import torch_compat
from pannier.client.staging import device_copy
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.staging.bounce_buffers import TensorCopy
from pannier.client.staging.device_copy import DeviceCopies
from pannier.client.staging.stager import Staged
from pannier.wire.errors import InvalidRequestError
from support.actors.staged import final_plan, plan, stage_by, write_checkpoint
from support.states.host_streams import CurrentDevice, FakeStream, fake_backend, host_as_device

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf"
)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with host_as_device(monkeypatch):
        yield


@pytest.fixture
def pool() -> Iterator[ArenaPool]:
    pool = ArenaPool(2)
    yield pool
    pool.close()


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


def staged_by(
    copies: DeviceCopies, state: dict[str, Any], pool: ArenaPool, planner: Any = None
) -> tuple[Staged, Arena]:
    planning = plan(state, planner)
    staged = stage_by(planning, final_plan(planning.message), pool, copies)
    return staged, staged.arena


def stored(staged: Staged) -> list[torch.Tensor]:
    files = {file.name: ctypes.string_at(file.address, file.size) for file in staged.files}
    return [
        torch.load(io.BytesIO(files[p.file][p.offset : p.offset + p.length]), weights_only=False)
        for p in staged.locations
    ]


def mixture() -> dict[str, torch.Tensor]:
    """Large and small, of many dtypes, contiguous and not."""
    state = {
        "large": torch.randn(700_000),
        "transposed": torch.randn(900, 500).t(),
        "tall": torch.randn(3, 2, 400_000).transpose(0, 1),
        "strided": torch.randn(400_000)[::2],
        "scalar": torch.tensor(3.5),
        "empty": torch.ones(0, 3),
        "conj": torch.randn(20_000, dtype=torch.complex64).conj(),
        "conj, small": torch.randn(3, dtype=torch.complex64).conj(),
        "bits": torch.tensor([True, False, True]),
        "fp8": torch.randn(33).to(torch.float8_e4m3fn),
        "uint16": torch.arange(7).to(torch.uint16),
    }
    for i in range(300):
        state[f"small.{i}"] = torch.full((7, i % 5 + 1), float(i))
        state[f"half.{i}"] = torch.full((i % 3 + 1,), float(i)).bfloat16()
    return state


def assert_same(staged: Staged, state: dict[str, torch.Tensor]) -> None:
    for key, found in zip(state, stored(staged), strict=True):
        value = state[key]
        assert (found.dtype, found.shape) == (value.dtype, value.shape), key
        assert torch.equal(found.view(-1).view(torch.uint8), _bytes(value)), key


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().contiguous().view(-1).view(torch.uint8)


def everything(_: torch.Tensor) -> bool:
    return True


def nothing(_: torch.Tensor) -> bool:
    return False


@pytest.mark.parametrize("refusal", ["", "it is on a disk"])
def test_all_has_arrived_when_a_blocking_save_returns(
    refusal: str, stream: FakeStream, pool: ArenaPool
) -> None:
    state = mixture()
    copies = DeviceCopies(backend=fake_backend(stream, refusal=refusal))
    staged, arena = staged_by(copies, state, pool)
    assert staged.deferred is None
    assert stream.done == stream.queued
    assert copies.copy_description == (f"bounced: {refusal}" if refusal else "pinned")
    assert_same(staged, state)
    pool.release(arena)


def test_every_copy_is_queued_behind_the_training_stream(
    stream: FakeStream, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "_BATCH", 1 * MIB)
    state = {f"w{i}": torch.full((300_000,), float(i)) for i in range(6)}
    staged, arena = staged_by(DeviceCopies(backend=fake_backend(stream)), state, pool)
    # A planner's tensors are made one after the other: each batch waits again.
    assert stream.followed_at == [0, 1, 2, 3, 4, 5]
    assert_same(staged, state)
    pool.release(arena)


def test_many_small_tensors_are_one_copy_for_each_dtype(
    stream: FakeStream, pool: ArenaPool
) -> None:
    state: dict[str, Any] = {f"w{i}": torch.full((8,), float(i)) for i in range(1000)}
    state |= {f"i{i}": torch.full((2,), i) for i in range(1000)}
    staged, arena = staged_by(DeviceCopies(backend=fake_backend(stream)), state, pool)
    assert stream.copied == [32 * 1000, 16 * 1000]
    assert_same(staged, state)
    pool.release(arena)


def test_tensors_that_a_planner_makes_are_not_all_kept_alive(
    stream: FakeStream, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "_BATCH", 1 * MIB)
    monkeypatch.setattr(device_copy, "_HELD", 3 * MIB)
    made: list[StorageWeakRef] = []
    alive = []

    class Makes(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            value = super().resolve_data(write_item)
            fresh = value.clone()
            made.append(StorageWeakRef(fresh.untyped_storage()))
            alive.append(sum(not ref.expired() for ref in made))
            return fresh

    state = {f"w{i}": torch.full((300_000,), float(i)) for i in range(20)}
    copies = DeviceCopies(backend=fake_backend(stream))
    _, arena = staged_by(copies, state, pool, Makes())
    assert 2 < max(alive) <= 5
    pool.release(arena)


def test_a_failed_save_leaves_no_copy_under_way(
    stream: FakeStream, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "_BATCH", 1 * MIB)
    state = {"w": torch.randn(600_000), "v": torch.randn(4, 5), "lock": threading.Lock()}
    with pytest.raises(TypeError, match="'lock'"):
        staged_by(DeviceCopies(everything, fake_backend(stream)), state, pool)
    with pytest.raises(TypeError, match="'lock'"):
        staged_by(DeviceCopies(backend=fake_backend(stream)), state, pool)
    assert stream.queued > 0
    assert stream.done == stream.queued


def test_a_growing_file_gets_what_was_queued_before_it_moved(
    stream: FakeStream, pool: ArenaPool, tmp_path: Path
) -> None:
    class Looks(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return super().lookup_object(index)

    state: dict[str, Any] = {"a": torch.randn(5), "b": torch.randn(400_000), "o": "x"}
    state |= {"big": "y" * (4 * MIB), "c": torch.randn(3, 2).t()}
    copies = DeviceCopies(everything, fake_backend(stream))
    planning = plan(state, Looks())
    staged = stage_by(planning, final_plan(planning.message), pool, copies)
    # Nothing there may be late: its place isn't known before.
    assert staged.deferred is None
    write_checkpoint(tmp_path, planning.message, planning.items, staged)
    pool.release(staged.arena)
    into = {"a": torch.zeros(5), "b": torch.zeros(400_000), "c": torch.zeros(2, 3)}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(into[key], state[key]) for key in into)


# Overlapped


@pytest.mark.parametrize("refusal", ["", "it is on a disk"])
def test_an_overlapped_save_is_what_the_state_was_at_the_call(
    refusal: str, stream: FakeStream, pool: ArenaPool
) -> None:
    state = mixture()
    before = {key: value.clone() for key, value in state.items()}
    copies = DeviceCopies(everything, fake_backend(stream, refusal=refusal, buffers=2))
    staged, arena = staged_by(copies, state, pool)
    assert staged.deferred is not None
    assert stream.done == 0
    assert stream.followed_at == [0]
    finishing = threading.Thread(target=staged.deferred.finish)
    finishing.start()
    staged.deferred.make_stream_wait()
    for value in state.values():
        value.zero_()
    finishing.join()
    assert_same(staged, before)
    pool.release(arena)


def test_what_may_change_at_once_is_copied_on_the_device_before_the_call_returns(
    stream: FakeStream, pool: ArenaPool
) -> None:
    state = {"weight": torch.randn(30_000), "average": torch.randn(30_000), "count": torch.ones(1)}
    before = {key: value.clone() for key, value in state.items()}
    weight = state["weight"].data_ptr()
    copies = DeviceCopies(lambda tensor: tensor.data_ptr() == weight, fake_backend(stream))
    staged, arena = staged_by(copies, state, pool)
    assert stream.done == 0
    state["average"].zero_()
    state["count"].zero_()
    assert staged.deferred is not None
    staged.deferred.finish()
    assert_same(staged, before)
    pool.release(arena)


def test_what_has_to_be_pinned_can_be_pinned_ahead(stream: FakeStream, pool: ArenaPool) -> None:
    pinned = []

    def pin(mapping: Any, kind: str) -> str:
        pinned.append((mapping, kind))
        return ""

    found = replace(fake_backend(stream, buffers=3), pin=pin)
    arena = pool.acquire([MIB, 0, 2 * MIB])
    device_copy.prepare_arena(arena, {"step": 5, "empty": []}, found)
    assert not pinned
    device_copy.prepare_arena(arena, {"a": [{"w": torch.ones(3)}], "step": 5}, found)
    assert pinned == [(arena.files[0].mapping, "cpu"), (arena.files[2].mapping, "cpu")]
    assert len(found.pool._free) == 3
    pool.release(arena)


@pytest.mark.parametrize("first", [0, 1])
def test_one_file_that_cannot_be_pinned_is_reported_and_the_others_are_pinned(
    first: int, stream: FakeStream, pool: ArenaPool
) -> None:
    arena = pool.acquire([4 * MIB, 4 * MIB])
    pinned = arena.files[0].mapping

    def pin(mapping: Any, kind: str) -> str:
        return "" if mapping is pinned else "it is on a disk"

    copies = DeviceCopies(everything, replace(fake_backend(stream), pin=pin))
    sources = [torch.randn(MIB), torch.randn(MIB)]
    for number in (first, 1 - first):
        copies.add(TensorCopy("", sources[number], arena.files[number], 0), sources[number])
    copies.run()
    copies.wait()
    deferred = copies.start_deferred()
    assert deferred is not None
    assert copies.copy_description == deferred.copy_description == "bounced: it is on a disk"
    assert stream.copied.count(4 * MIB) == 1
    deferred.finish()
    for region, source in zip(arena.files, sources, strict=True):
        assert ctypes.string_at(region.address, 4 * MIB) == source.numpy().tobytes()
    pool.release(arena)


def test_too_much_that_may_change_at_once_is_waited_for(
    stream: FakeStream, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "SNAPSHOT_BYTES", 100_000)
    state = {"small": torch.randn(1000), "average": torch.randn(300_000)}
    before = {key: value.clone() for key, value in state.items()}
    staged, arena = staged_by(DeviceCopies(nothing, fake_backend(stream)), state, pool)
    state["average"].zero_()
    state["small"].zero_()
    assert staged.deferred is not None
    staged.deferred.finish()
    assert_same(staged, before)
    pool.release(arena)


def test_a_device_without_room_for_them_is_waited_for(
    stream: FakeStream, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(stream, "snapshot", full)
    state = mixture()
    before = {key: value.clone() for key, value in state.items()}
    staged, arena = staged_by(DeviceCopies(nothing, fake_backend(stream)), state, pool)
    assert staged.deferred is None
    for value in state.values():
        value.zero_()
    assert_same(staged, before)
    pool.release(arena)


def test_sources_are_held_until_they_are_copied_and_no_longer(
    stream: FakeStream, pool: ArenaPool
) -> None:
    staged, arena = staged_by(
        DeviceCopies(everything, fake_backend(stream)),
        state := {"w": torch.full((300_000,), 5.0)},
        pool,
    )
    source = StorageWeakRef(state["w"].untyped_storage())
    state.clear()
    gc.collect()  # torch 2.9 leaves a cycle behind when it flattens
    assert not source.expired()
    assert staged.deferred is not None
    staged.deferred.finish()
    assert source.expired()
    assert torch.equal(stored(staged)[0], torch.full((300_000,), 5.0))
    pool.release(arena)


def test_a_change_that_waited_for_nothing_fails_the_save_by_name(
    stream: FakeStream, pool: ArenaPool
) -> None:
    state = {"a": torch.randn(300_000), "layer.weight": torch.randn(300_000)}
    staged, arena = staged_by(DeviceCopies(everything, fake_backend(stream)), state, pool)
    state["layer.weight"].add_(1)
    assert staged.deferred is not None
    with pytest.raises(InvalidRequestError, match=r"'layer\.weight' was changed before"):
        staged.deferred.finish()
    assert stream.done == stream.queued
    pool.release(arena)


def test_a_change_that_waited_is_none(stream: FakeStream, pool: ArenaPool) -> None:
    state = {"w": torch.ones(300_000)}
    staged, arena = staged_by(DeviceCopies(everything, fake_backend(stream)), state, pool)
    assert staged.deferred is not None
    staged.deferred.make_stream_wait()
    state["w"].add_(1)
    staged.deferred.finish()
    assert torch.equal(stored(staged)[0], torch.ones(300_000))
    # Later steps have nothing to wait for.
    staged.deferred.make_stream_wait()
    assert stream.stream_waits == 1
    pool.release(arena)


def test_pinned_memory_never_keeps_the_host_waiting(stream: FakeStream, pool: ArenaPool) -> None:
    # More small tensors than the ring has room for.
    state = {f"w{i}": torch.full((4000,), float(i)) for i in range(40)}
    copies = DeviceCopies(everything, fake_backend(stream, buffers=2, buffer_bytes=100_000))
    staged, arena = staged_by(copies, state, pool)
    assert staged.deferred is not None
    staged.deferred.make_stream_wait()
    assert max(stream.copied) > min(stream.copied) == 16_000
    staged.deferred.finish()
    assert_same(staged, state)
    pool.release(arena)


def test_the_ring_stays_as_small_as_it_is(stream: FakeStream, pool: ArenaPool) -> None:
    made = []

    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    found = fake_backend(stream, refusal="it is on a disk", buffers=2)
    found.pool._allocate = allocate
    state = {f"w{i}": torch.full((300_000,), float(i)) for i in range(10)}
    staged = []
    for _ in range(2):
        one, arena = staged_by(DeviceCopies(everything, found), state, pool)
        staged.append((one, arena))
    threads = [threading.Thread(target=one.deferred.finish) for one, _ in staged if one.deferred]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [MIB, MIB]
    for one, arena in staged:
        assert_same(one, state)
        pool.release(arena)


def test_copies_that_another_thread_queues_are_queued_on_the_callers_current_device(
    stream: FakeStream, pool: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CurrentDevice()
    queued_on = []

    def copy(*arguments: Any) -> None:
        queued_on.append(device.is_set)
        FakeStream.copy(stream, *arguments)

    monkeypatch.setattr(torch_compat, "on_current_device", lambda: device)
    monkeypatch.setattr(stream, "copy", copy)
    found = fake_backend(stream, refusal="it is on a disk", buffers=2)
    state = {f"w{i}": torch.randn(300_000) for i in range(10)}
    staged, arena = staged_by(DeviceCopies(everything, found), state, pool)
    assert staged.deferred is not None
    queued_on.clear()
    finishing = threading.Thread(target=staged.deferred.finish)
    finishing.start()
    finishing.join()
    assert queued_on
    assert all(queued_on)
    assert_same(staged, state)
    pool.release(arena)


@pytest.mark.parametrize("refusal", ["", "it is on a disk"])
def test_a_device_that_fails_fails_the_save_and_gives_all_back(
    refusal: str, stream: FakeStream, pool: ArenaPool
) -> None:
    found = fake_backend(stream, refusal=refusal, buffers=2)
    state = {f"w{i}": torch.randn(300_000) for i in range(10)}
    staged, arena = staged_by(DeviceCopies(everything, found), state, pool)

    def breaks() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    stream._queue[1] = breaks
    stream.failure = RuntimeError("an illegal memory access was encountered")
    assert staged.deferred is not None
    with pytest.raises(
        RuntimeError, match=r"illegal memory access.*\ncopying from cpu failed after"
    ):
        staged.deferred.finish()
    # Nothing waits for it any more.
    staged.deferred.make_stream_wait()
    stream.failure = None
    slots = [found.pool.acquire(wait=False) for _ in range(3)]
    assert slots[:2] != [None, None]
    assert slots[2] is None
    pool.release(arena)


def test_a_cancelled_save_copies_no_more(stream: FakeStream, pool: ArenaPool) -> None:
    found = fake_backend(stream, refusal="it is on a disk", buffers=2)
    state = {f"w{i}": torch.randn(300_000) for i in range(10)}
    staged, arena = staged_by(DeviceCopies(everything, found), state, pool)
    queued = stream.queued
    assert staged.deferred is not None
    staged.deferred.finish(stop=lambda: True)
    assert staged.deferred.done
    assert stream.done == stream.queued == queued
    assert all(found.pool.acquire(wait=False) for _ in range(2))
    pool.release(arena)
