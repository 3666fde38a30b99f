"""On a GPU: copies that are right, in order, and hold nothing afterwards.

``pytest -m cuda`` on a machine with one; skipped elsewhere.
"""

import ctypes
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.client.staging import pinned_memory
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.staging.device_copy import CopyBackend, DeviceCopies
from pannier.client.staging.optimizer_guard import Guards
from pannier.client.staging.stager import Staged
from pannier.wire.errors import InvalidRequestError
from support.actors.staged import final_plan, plan, stage_by
from support.processes.daemons import Daemons

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf"),
]
REFUSALS = ("", "for the sake of the test")
BUSY_CYCLES = 2_000_000_000
"""For ``torch.cuda._sleep``: about a second."""


@pytest.fixture
def pool() -> Iterator[ArenaPool]:
    pool = ArenaPool(2)
    yield pool
    torch.cuda.synchronize()
    pool.close()


def copy_backend(refusal: str) -> CopyBackend:
    """The usual ones; with a refusal, as if no arena could be pinned."""
    return CopyBackend(pin=lambda mapping, kind: refusal) if refusal else CopyBackend()


def staged_by(copies: DeviceCopies, state: dict[str, Any], pool: ArenaPool) -> tuple[Staged, Arena]:
    planning = plan(state)
    staged = stage_by(planning, final_plan(planning.message), pool, copies)
    return staged, staged.arena


def warm(state: dict[str, Any], pool: ArenaPool, refusal: str = "") -> None:
    """Pins what a save of the state needs: that may make the host wait for the device."""
    _, arena = staged_by(DeviceCopies(backend=copy_backend(refusal)), state, pool)
    pool.release(arena)
    torch.cuda.synchronize()


def stored(staged: Staged) -> list[torch.Tensor]:
    files = {file.name: ctypes.string_at(file.address, file.size) for file in staged.files}
    return [
        torch.load(io.BytesIO(files[p.file][p.offset : p.offset + p.length]), weights_only=True)
        for p in staged.locations
    ]


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).cpu()


def assert_same(staged: Staged, state: dict[str, torch.Tensor]) -> None:
    for key, found in zip(state, stored(staged), strict=True):
        assert (found.dtype, found.shape) == (state[key].dtype, state[key].shape), key
        assert torch.equal(raw(found), raw(state[key])), key


def mixture() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {
        "large": torch.randn(30 << 20, device="cuda"),
        "transposed": torch.randn(3000, 5000, device="cuda").t(),
        "deep": torch.randn(2, 3, 3 << 20, device="cuda").transpose(0, 1),
        "strided": torch.randn(10 << 20, device="cuda")[::2],
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.ones(0, 3, device="cuda"),
        "conj": torch.randn(1 << 20, dtype=torch.complex64, device="cuda").conj(),
        "on the host": torch.randn(1 << 20),
    }
    dtypes = [torch.bfloat16, torch.half, torch.double, torch.bool, torch.int8, torch.int64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64]
    for dtype in dtypes:
        for number in range(40):
            value = torch.randn(number % 7 + 1, 5, device="cuda").mul(50).to(dtype)
            state[f"{dtype}.{number}"] = value.t() if number % 2 else value
    return state


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_blocking_save_has_every_byte(refusal: str, pool: ArenaPool) -> None:
    state = mixture()
    copies = DeviceCopies(backend=copy_backend(refusal))
    staged, arena = staged_by(copies, state, pool)
    assert staged.deferred is None
    assert_same(staged, state)
    assert copies.copy_description.partition(":")[0] == ("bounced" if refusal else "pinned"), (
        copies.copy_description
    )
    pool.release(arena)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_an_overlapped_save_is_what_the_state_was_at_the_call(
    refusal: str, pool: ArenaPool
) -> None:
    state = {f"w{i}": torch.full((4 << 20,), float(i), device="cuda") for i in range(40)}
    state |= {f"s{i}": torch.full((100,), float(i), device="cuda") for i in range(500)}
    before = {key: value.clone() for key, value in state.items()}
    warm(state, pool, refusal)
    # What the training stream has yet to do comes first.
    torch.cuda._sleep(BUSY_CYCLES)
    for value in state.values():
        value.add_(1)
    staged, arena = staged_by(DeviceCopies(lambda _: True, copy_backend(refusal)), state, pool)
    assert staged.deferred is not None
    if not refusal:
        # Nothing has waited for the device.
        assert not torch.cuda.current_stream().query()
        staged.deferred.make_stream_wait()
        for value in state.values():
            value.zero_()
        staged.deferred.finish()
    else:
        staged.deferred.finish()
        for value in state.values():
            value.zero_()
    torch.cuda.synchronize()
    assert_same(staged, {key: value + 1 for key, value in before.items()})
    pool.release(arena)


def test_what_may_change_at_once_may_change_at_once(pool: ArenaPool) -> None:
    state = {"average": torch.randn(8 << 20, device="cuda"), "n": torch.ones(3, device="cuda")}
    before = {key: value.clone() for key, value in state.items()}
    warm(state, pool)
    torch.cuda._sleep(BUSY_CYCLES)
    staged, arena = staged_by(DeviceCopies(lambda _: False), state, pool)
    assert not torch.cuda.current_stream().query()
    for value in state.values():
        value.zero_()
    assert staged.deferred is not None
    staged.deferred.finish()
    assert_same(staged, before)
    pool.release(arena)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_no_memory_of_the_device_is_held_after_staging(refusal: str, pool: ArenaPool) -> None:
    state = mixture()

    def save(late: bool) -> None:
        copies = DeviceCopies((lambda _: True) if late else None, copy_backend(refusal))
        staged, arena = staged_by(copies, state, pool)
        if staged.deferred is not None:
            staged.deferred.finish()
        pool.release(arena)

    for late in (True, False):
        save(late)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for late in (True, False, True):
        save(late)
        assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    # What the side stream keeps for the next save.
    size = sum(value.nbytes for value in state.values())
    torch.cuda.empty_cache()
    assert reserved - torch.cuda.memory_reserved() < max(400 << 20, size)


def test_sources_may_be_dropped_while_they_are_copied(pool: ArenaPool) -> None:
    state = {f"w{i}": torch.full((16 << 20,), float(i), device="cuda") for i in range(8)}
    warm(state, pool)
    torch.cuda._sleep(BUSY_CYCLES)
    staged, arena = staged_by(DeviceCopies(lambda _: True), state, pool)
    names = list(state)
    state.clear()
    gc.collect()
    # Would be given the same memory.
    others = [torch.full((16 << 20,), -1.0, device="cuda") for _ in range(8)]
    assert staged.deferred is not None
    staged.deferred.finish()
    expected = {name: torch.full((16 << 20,), float(i)) for i, name in enumerate(names)}
    assert_same(staged, expected)
    del others
    pool.release(arena)


def test_arenas_are_pinned_and_unpinned(pool: ArenaPool) -> None:
    arena = pool.acquire([64 << 20])
    mapping = arena.files[0].mapping
    assert mapping is not None
    assert pinned_memory.pin(mapping, "cuda") == ""
    view = torch.frombuffer(arena.files[0].memory, dtype=torch.uint8)
    assert view.is_pinned()
    del view
    pool.release(arena)
    address = arena.files[0].address
    del arena, mapping
    pool.close()
    gc.collect()
    # The next owner of the address can register it again.
    other = ArenaPool(1).acquire([64 << 20])
    assert other.files[0].mapping is not None
    assert pinned_memory.pin(other.files[0].mapping, "cuda") == "", hex(address)


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(pool: ArenaPool) -> None:
    class Nowhere:
        address = 4096
        capacity = 4096

    reason = pinned_memory._register(Nowhere(), "cuda")  # type: ignore[arg-type]
    assert reason.startswith("cudaHostRegister refuses 4096 bytes of the arena: ")
    # The next kernel's check would find it.
    torch.ones(3, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_a_guarded_step_waits_on_the_device_and_not_on_the_host(pool: ArenaPool) -> None:
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    state = dict(model.state_dict())
    for number, found in optimizer.state_dict()["state"].items():
        state |= {f"o.{number}.{key}": value for key, value in found.items()}
    before = {key: value.clone() for key, value in state.items()}
    guards = Guards()
    guards.add(optimizer, wait=True)
    warm(state, pool)
    torch.cuda._sleep(BUSY_CYCLES)
    staged, arena = staged_by(guards.copies("overlapped"), state, pool)
    assert staged.deferred is not None
    guards.add_copies(staged.deferred)
    optimizer.step()
    assert not torch.cuda.current_stream().query()
    staged.deferred.finish()
    torch.cuda.synchronize()
    assert_same(staged, before)
    assert not torch.equal(state["weight"], before["weight"])
    pool.release(arena)


def test_a_step_in_a_graph_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(10, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], capturable=True)
    guards = Guards()
    guards.add(optimizer, wait=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    guards.copies("overlapped")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    with pytest.raises(InvalidRequestError, match="captured in a CUDA graph"):
        guards.copies("overlapped")


@pytest.mark.parametrize("transport", ["mapped", "streamed"])
def test_training_goes_on_while_its_checkpoint_is_copied(transport: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(64, 2048, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def flat() -> dict[str, torch.Tensor]:
        found = dict(model.state_dict())
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": value for key, value in state.items()}
        return found

    step()
    expected, handles = [], []
    with Daemons(tmp_path) as daemons:
        settings = load_settings(sidecar=daemons.sidecar_address, transport=transport)
        with Client(settings) as client:
            client.guard(optimizer)
            for number in range(5):
                expected.append({key: value.cpu().clone() for key, value in flat().items()})
                handle = client.async_save(
                    flat(), checkpoint_id=tmp_path / str(number), staging="overlapped"
                )
                handles.append(handle)
                for _ in range(3):
                    step()
            for handle in handles:
                handle.result(60)
                assert handle.status().staging == "pinned"
    for number, state in enumerate(expected):
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(into, checkpoint_id=tmp_path / str(number), no_dist=True)
        for key, value in state.items():
            assert torch.equal(into[key], value), (number, key)
