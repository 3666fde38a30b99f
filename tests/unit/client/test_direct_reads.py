"""Tensors of any kind are filled bit for bit, and large ones without a copy between."""

import ctypes
import pickle
import random
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from pannier.client.loading import storage_reader
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.load import load
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.ranks.load_error import LoadError
from pannier.client.restore import sources
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.staging import archives
from pannier.common import timeouts
from pannier.wire.errors import IntegrityError, InvalidRequestError
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S
from support.states.bits import bits, differences
from support.states.plain import random_tensor, saved
from support.storage.shared_files import SharedFiles

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
]
LARGE = (700, 1000)
"""The shape of a tensor that is read in parts, whatever the request size."""


class SharedSources(sources.Sources):
    """All blocks come through sidecars."""

    def __init__(self, storage: Any, url: str, *arguments: Any) -> None:
        self.files = SharedFiles(Path(url))
        super().__init__(storage, url, arguments[0], arguments[1], self.files)

    def is_near(self, name: str) -> bool:
        return False


class FarSources(sources.Sources):
    """Each read is a request to another host."""

    def is_near(self, name: str) -> bool:
        return False


@pytest.fixture(params=["in parts", "together", "shared", "far"])
def request_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, shared and far: every archive is longer than a request, as if it were a large one."""
    if request.param != "together":
        monkeypatch.setattr(sources, "LOCAL_REQUEST_BYTES", 100)
    if request.param == "shared":
        monkeypatch.setattr(sources, "REMOTE_REQUEST_BYTES", 100)
        monkeypatch.setattr(storage_reader, "Sources", SharedSources)
    if request.param == "far":
        monkeypatch.setattr(sources, "REMOTE_REQUEST_BYTES", 800)
        monkeypatch.setattr(storage_reader, "Sources", FarSources)


@pytest.mark.usefixtures("request_bytes")
def test_all_dtypes_and_shapes(tmp_path: Path) -> None:
    dtypes = sorted((each for each in archives.DTYPES), key=str)
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 11), (2, 3, 40)]
    state = {f"{d} {s}": random_tensor(d, s) for d in dtypes for s in shapes}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    # Not every dtype can be filled.
    got = {name: random_tensor(t.dtype, tuple(t.shape), seed=2) for name, t in state.items()}
    assert differences(got, state)
    load(got, checkpoint_id=tmp_path)
    assert differences(got, state) == []


@pytest.mark.usefixtures("request_bytes")
def test_all_layouts_of_source_and_target(tmp_path: Path) -> None:
    base = torch.randn(12, 14, 3)
    layouts = {
        "contiguous": lambda t: t.contiguous(),
        "transposed": lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "strided": lambda t: torch.stack([t, t], -1)[..., 0],
        "channels": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "Parameter": lambda t: torch.nn.Parameter(t.clone()),
    }
    state = {f"{a} to {b}": make(base) for a, make in layouts.items() for b in layouts}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    got = {
        f"{a} to {b}": make(torch.zeros(12, 14, 3)) for a in layouts for b, make in layouts.items()
    }
    strides = {name: tensor.stride() for name, tensor in got.items()}
    load(got, checkpoint_id=tmp_path)
    assert differences(got, state) == []
    assert {name: tensor.stride() for name, tensor in got.items()} == strides


@pytest.mark.usefixtures("request_bytes")
def test_conjugated_and_negated_targets(tmp_path: Path) -> None:
    state = {"conj": torch.randn(7, dtype=torch.complex64), "neg": torch.randn(7)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    got = {"conj": torch.zeros(7, dtype=torch.complex64).conj()}
    got["neg"] = torch.zeros(7, dtype=torch.complex64).conj().imag
    assert got["conj"].is_conj()
    assert got["neg"].is_neg()
    load(got, checkpoint_id=tmp_path)
    assert differences(got, state) == []


@pytest.mark.usefixtures("request_bytes")
def test_other_dtypes_are_converted_as_torch_does(tmp_path: Path) -> None:
    want = torch.randn(40, 30)
    dcp.save({"w": want}, checkpoint_id=tmp_path, no_dist=True)
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        got = {"w": torch.zeros(40, 30, dtype=dtype)}
        load(got, checkpoint_id=tmp_path)
        assert torch.equal(got["w"], want.to(dtype))


class Targets:
    """The memory that is read into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[tuple[int, int]] = []
        original = StorageDir.read_into

        def recording(place: StorageDir, name: str, offset: int, target: memoryview) -> None:
            if len(target):
                self.places.append(
                    (ctypes.addressof(ctypes.c_char.from_buffer(target)), len(target))
                )
            original(place, name, offset, target)

        monkeypatch.setattr(StorageDir, "read_into", recording)

    def outside(self, tensor: torch.Tensor) -> list[int]:
        """Lengths of the reads into other memory than the tensor's."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return [size for at, size in self.places if not start <= at <= at + size <= end]


def test_large_tensors_are_read_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = torch.randn(LARGE)
    dcp.save({"w": want}, checkpoint_id=tmp_path, no_dist=True)
    got = torch.zeros(LARGE)
    version, targets = got._version, Targets(monkeypatch)
    load({"w": got}, checkpoint_id=tmp_path)
    assert torch.equal(got, want)
    assert got._version > version
    assert sum(targets.outside(got)) < 4096


def test_what_is_not_row_major_goes_through_small_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.randn(LARGE)}, checkpoint_id=tmp_path, no_dist=True)
    targets = Targets(monkeypatch)
    load({"w": torch.zeros(LARGE[::-1]).t()}, checkpoint_id=tmp_path)
    assert max(size for _, size in targets.places) <= sources.LOCAL_REQUEST_BYTES


def test_tied_targets_get_one_value_whole(tmp_path: Path) -> None:
    """Written by several threads at the same time they would have parts of both."""
    dcp.save(
        {"a": torch.zeros(LARGE), "b": torch.ones(LARGE)}, checkpoint_id=tmp_path, no_dist=True
    )
    for _ in range(5):
        tied = torch.full(LARGE, 5.0)
        load({"a": tied, "b": tied}, checkpoint_id=tmp_path)
        assert len(tied.unique()) == 1


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_tied_targets_get_the_last_value_whatever_its_way(
    tmp_path: Path, stored: torch.dtype
) -> None:
    """One is converted or scattered by the caller's thread, the other read by threads."""
    first = {"a": torch.full(LARGE, 2.0, dtype=stored), "small": torch.full((3,), 3.0)}
    dcp.save({**first, "z": torch.ones(LARGE)}, checkpoint_id=tmp_path, no_dist=True)
    for _ in range(5):
        tied = torch.zeros(LARGE)
        a = tied if stored is torch.bfloat16 else tied.view(LARGE[::-1]).t()
        load({"a": a, "small": tied[0, :3], "z": tied}, checkpoint_id=tmp_path)
        assert torch.equal(tied, torch.ones(LARGE))


def test_slices_of_a_stored_tensor_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a piece of every row."""
    want = torch.randn(LARGE)
    dcp.save({"w": want}, checkpoint_id=tmp_path, no_dist=True)
    targets = Targets(monkeypatch)

    class Columns(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            (item,) = plan.items
            rows, columns = LARGE
            step = columns // 4
            items = [
                replace(
                    item,
                    dest_offsets=torch.Size([0, at]),
                    storage_offsets=torch.Size([0, at]),
                    lengths=torch.Size([rows, step]),
                )
                for at in range(0, columns, step)
            ]
            return replace(plan, items=items)

    got = torch.zeros(LARGE)
    load({"w": got}, checkpoint_id=tmp_path, planner=Columns())
    assert torch.equal(got, want)
    assert sum(size for _, size in targets.places) < want.nbytes + 4096


def test_the_progress_of_a_load_of_parts_ends_where_its_reads_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.ones(LARGE), "small": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(sources, "LOCAL_REQUEST_BYTES", 4096)
    expected, progress = [], []
    original = LoadProgress.expect

    def expect(self: LoadProgress, sizes: Mapping[str, int]) -> None:
        expected.append(sum(sizes.values()))
        original(self, sizes)

    def reporting(made: LoadProgress) -> AbstractContextManager[None]:
        progress.append(made)
        return nullcontext()

    class Rows(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            few = torch.Size([10, LARGE[1]])
            items = [
                replace(item, lengths=few) if item.lengths == LARGE else item for item in plan.items
            ]
            return replace(plan, items=items)

    monkeypatch.setattr(LoadProgress, "expect", expect)
    got = {"w": torch.zeros(LARGE), "small": torch.zeros(3)}
    load(got, checkpoint_id=tmp_path, planner=Rows(), reporting=reporting)
    assert got["w"].sum() == 10 * LARGE[1]
    status = progress[0].report().status
    assert status.bytes_total == sum(each.bytes for each in status.sources)
    part = 10 * LARGE[1] * 4
    for size in (*expected, status.bytes_total):
        assert part < size < part + 2 * 4096


def test_no_thread_writes_into_a_tensor_after_interrupts_have_ended_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    dcp.save({"w": torch.ones(LARGE)}, checkpoint_id=tmp_path, no_dist=True)
    begun, go_on = threading.Event(), threading.Event()
    original = StorageDir.read_into

    def held(place: StorageDir, name: str, offset: int, target: memoryview) -> None:
        if len(target) > 4096:
            begun.set()
            assert go_on.wait(BOUND_S)
        original(place, name, offset, target)

    monkeypatch.setattr(StorageDir, "read_into", held)
    handled = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal handled
        handled += 1
        raise KeyboardInterrupt

    def press() -> None:
        assert begun.wait(BOUND_S)
        for number in range(1, 4):
            deadline = time.monotonic() + BOUND_S
            while handled < number:
                assert time.monotonic() < deadline
                # More than once: one that comes just before the main thread blocks is handled only when
                # another one wakes it.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.02)
        go_on.set()

    usual = signal.signal(signal.SIGINT, interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, usual))
    presser = threading.Thread(target=press)
    presser.start()
    got = torch.zeros(LARGE)
    with pytest.raises((KeyboardInterrupt, LoadError)):
        load({"w": got}, checkpoint_id=tmp_path)
    # Whatever the load has left of it is final.
    assert go_on.is_set()
    assert handled >= 3
    presser.join(BOUND_S)


def test_an_interrupt_ends_a_load_that_waits_for_a_sidecar_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    dcp.save({"w": torch.ones(LARGE)}, checkpoint_id=tmp_path, no_dist=True)
    made: list[SharedFiles] = []

    class Waiting(SharedSources):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.files.wait = True
            made.append(self.files)

    monkeypatch.setattr(sources, "REMOTE_REQUEST_BYTES", 100)
    monkeypatch.setattr(storage_reader, "Sources", Waiting)
    # Only the interrupt ends the wait.
    monkeypatch.setattr(timeouts, "FETCH_STALL_S", 10 * BOUND_S)
    monkeypatch.setattr(timeouts, "FETCH_SLOW_S", 10 * BOUND_S)
    ended = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    def press() -> None:
        wait_until(lambda: made and made[0].pending)
        while not ended.wait(0.02):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    usual = signal.signal(signal.SIGINT, interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, usual))
    presser = threading.Thread(target=press)
    presser.start()
    got = torch.zeros(LARGE)
    with pytest.raises((KeyboardInterrupt, LoadError)):
        load({"w": got}, checkpoint_id=tmp_path)
    presser.join(BOUND_S)
    assert not any(each.name.startswith("pannier-read") for each in threading.enumerate())
    assert torch.equal(got, torch.zeros(LARGE))


@pytest.mark.usefixtures("request_bytes")
def test_a_planner_may_hand_out_the_same_memory_for_each_item(tmp_path: Path) -> None:
    want = {f"w{i}": torch.randn(30, 40) for i in range(20)}
    dcp.save(want, checkpoint_id=tmp_path, no_dist=True)

    class OneBuffer(DefaultLoadPlanner):
        buffer = torch.zeros(30, 40)

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return self.buffer

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            assert tensor.data_ptr() == self.buffer.data_ptr()
            self.state_dict[read_item.dest_index.fqn].copy_(tensor)

    got = {name: torch.zeros(30, 40) for name in want}
    load(got, checkpoint_id=tmp_path, planner=OneBuffer())
    assert differences(got, want) == []


@pytest.mark.usefixtures("request_bytes")
def test_a_target_without_memory_or_of_another_shape_is_named(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3, 4)}, checkpoint_id=tmp_path, no_dist=True)

    class Other(DefaultLoadPlanner):
        def __init__(self, target: torch.Tensor) -> None:
            super().__init__()
            self.target = target

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return self.target

    for target, text in (
        (torch.empty(3, 4, device="meta"), r"'w' .* torch.float32 of \(3, 4\) is stored.* on meta"),
        (torch.zeros(4, 3), r"'w' .* \(3, 4\) is stored, .* torch.float32 of \(4, 3\) on cpu"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            load({"w": torch.ones(3, 4)}, checkpoint_id=tmp_path, planner=Other(target))


# Archives of other writers.


def rewrite(checkpoint: Path, contents: dict[str, bytes]) -> None:
    """Puts other archives in place of those of a checkpoint's items."""
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        name = f"other-{index.fqn}.distcp"
        (checkpoint / name).write_bytes(b"before" + contents[index.fqn])
        info.relative_path, info.offset, info.length = name, 6, len(contents[index.fqn])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.usefixtures("request_bytes")
def test_archives_of_other_writers_are_read(tmp_path: Path) -> None:
    want = torch.randn(20, 30)
    imaginary = torch.complex(torch.zeros(20, 30), -want).conj().imag
    others = {
        "old": saved(want, _use_new_zipfile_serialization=False),
        "Parameter": saved(torch.nn.Parameter(want.clone())),
        "part of a larger one": saved(torch.cat([want, want])[20:]),
        "transposed": saved(want.t().contiguous().t()),
        "negated": saved(imaginary),
        "other dtype than planned": saved(want.double()),
    }
    dcp.save({name: torch.zeros(20, 30) for name in others}, checkpoint_id=tmp_path, no_dist=True)
    rewrite(tmp_path, others)
    got = {name: torch.ones(20, 30) for name in others}
    load(got, checkpoint_id=tmp_path)
    assert differences(got, dict.fromkeys(others, want)) == []


@pytest.mark.usefixtures("request_bytes")
@pytest.mark.parametrize("start", [0, 100, -150], ids=["header", "pickle", "directory"])
def test_a_damaged_archive_is_named_and_harms_no_other(tmp_path: Path, start: int) -> None:
    whole = torch.randn(20, 30)
    dcp.save({"a": whole, "b": whole}, checkpoint_id=tmp_path, no_dist=True)
    damaged = bytearray(saved(whole))
    damaged[start : start + 150] = random.Random(1).randbytes(150)
    rewrite(tmp_path, {"a": bytes(damaged), "b": saved(whole)})
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(IntegrityError, match="'a' can't be read from bytes 6 to"):
        load({"a": torch.zeros(20, 30)}, checkpoint_id=tmp_path, planner=planner)
    got = {"b": torch.zeros(20, 30)}
    load(got, checkpoint_id=tmp_path)
    assert torch.equal(got["b"], whole)


@pytest.mark.usefixtures("request_bytes")
def test_a_head_that_no_torch_writes_though_of_its_length_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    want = torch.randn(20, 30)
    dcp.save({"w": want, "x": want + 1}, checkpoint_id=tmp_path, no_dist=True)
    (path,) = tmp_path.glob("*.distcp")
    content = bytearray(path.read_bytes())
    # In the padding of the first member's header.
    content[60] ^= 1
    path.write_bytes(content)
    got = {"w": torch.zeros(20, 30), "x": torch.zeros(20, 30, dtype=torch.float64)}
    load(got, checkpoint_id=tmp_path)
    assert torch.equal(got["w"], want)
    assert torch.equal(got["x"], (want + 1).double())


def test_large_tensors_are_read_in_parts_from_other_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "REMOTE_REQUEST_BYTES", 1 << 20)
    want = {"w": torch.randn(LARGE), "small": torch.randn(3)}
    dcp.save(want, checkpoint_id=tmp_path, no_dist=True)
    fs = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        fs.pipe_file(f"/direct/step/{file.name}", file.read_bytes())
    requested: list[int] = []
    original = StorageDir.read_range

    def recording(place: StorageDir, name: str, offset: int, size: int) -> bytes:
        requested.append(size)
        return original(place, name, offset, size)

    monkeypatch.setattr(StorageDir, "read_range", recording)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp.load(got, storage_reader=StorageReader("memory://direct/step"), no_dist=True)
    assert differences(got, want) == []
    assert bits(got["w"]) == bits(want["w"])
    # The first one has the head, too, and the last one the small tensor.
    assert len(requested) == -(-want["w"].nbytes // (1 << 20))
    assert max(requested) <= 1 << 20
