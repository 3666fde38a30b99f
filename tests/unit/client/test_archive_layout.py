"""Tensors are found in archives without loading these, and nothing in them is trusted."""

import io
import pickle
import random
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pannier.client.loading import archive_layout
from pannier.client.loading.archive_layout import PlainTensor
from pannier.client.staging import archives
from pannier.wire.errors import IntegrityError
from support.states.bits import bits
from support.states.plain import random_tensor, saved

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (3, 4), (2, 3, 4, 5)]


class Archive:
    """Bytes that refuse to be read outside."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.read_bytes = 0

    def read(self, offset: int, target: memoryview) -> None:
        assert 0 <= offset <= offset + len(target) <= len(self.content)
        self.read_bytes += len(target)
        target[:] = self.content[offset : offset + len(target)]

    def find(self) -> PlainTensor | None:
        return archive_layout.find_tensor(self.read, len(self.content), None)


def value_in(found: PlainTensor, content: bytes) -> torch.Tensor:
    return found.view(memoryview(bytearray(content[found.offset : found.offset + found.span])))


@pytest.mark.parametrize("dtype", sorted(archives.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_torch_saves_is_found_by_template_and_by_directory(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(dtype, shape)
    content = saved(tensor)
    expected = archive_layout.expect(dtype, torch.Size(shape), len(content))
    assert expected is not None
    found = archive_layout.find_in(memoryview(content), expected)
    assert found is expected.tensor
    assert archive_layout.find_tensor(Archive(content).read, len(content), expected) is found
    parsed = Archive(content).find()
    assert parsed is not None
    for each in (found, parsed):
        value = value_in(each, content)
        assert (value.dtype, value.shape) == (dtype, torch.Size(shape))
        assert bits(value) == bits(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t[2],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.requires_grad_(),
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["transposed", "strided", "a row", "expanded", "requires_grad", "Parameter"],
)
def test_any_strided_tensor_is_found(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = change(random_tensor(torch.float32, (5, 6)))
    content = saved(tensor)
    found = Archive(content).find()
    assert found is not None
    assert bits(value_in(found, content)) == bits(tensor.detach())


def test_an_archive_of_a_file_has_its_name(tmp_path: Any) -> None:
    tensor = random_tensor(torch.int16, (3, 4))
    torch.save(tensor, tmp_path / "weights.pt")
    content = (tmp_path / "weights.pt").read_bytes()
    assert zipfile.ZipFile(io.BytesIO(content)).namelist()[0] == "weights/data.pkl"
    found = Archive(content).find()
    assert found is not None
    assert bits(value_in(found, content)) == bits(tensor)


def test_a_large_archive_is_not_read_whole() -> None:
    archive = Archive(saved(torch.zeros(1 << 20)))
    assert archive.find() is not None
    assert archive.read_bytes < 64 << 10


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archived(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return sink.getvalue()


PLAIN = saved(random_tensor(torch.float32, (5, 6)))


@pytest.mark.parametrize(
    "content",
    [
        saved({"a": 1}),
        saved([torch.ones(3)]),
        saved(torch.ones(3, dtype=torch.complex64).conj()),
        saved(torch.ones(3, dtype=torch.complex64).conj().imag),
        saved(torch.ones(3).to_sparse()),
        saved(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        saved(torch.ones(3), _use_new_zipfile_serialization=False),
        archived(members_of(PLAIN) | {"archive/byteorder": b"big"}),
        archived(members_of(PLAIN), zipfile.ZIP_DEFLATED),
        archived(members_of(PLAIN) | {"other/data.pkl": b""}),
        archived({"readme": b""}),
        b"",
        b"nothing like it",
    ],
    ids=[
        *("a dict", "a list", "conjugated", "negated", "sparse", "quantized", "the old format"),
        *("big-endian", "compressed", "two pickles", "no pickle", "empty", "other bytes"),
    ],
)
def test_what_is_no_plain_tensor_is_left_to_torch(content: bytes) -> None:
    assert Archive(content).find() is None


def test_an_archive_without_byte_order_is_this_machines() -> None:
    content = archived({n: c for n, c in members_of(PLAIN).items() if "byteorder" not in n})
    found = Archive(content).find()
    assert found is not None
    assert bits(value_in(found, content)) == bits(random_tensor(torch.float32, (5, 6)))


class _Described:
    """Pickled as a tensor with any numbers."""

    def __init__(self, offset: Any, size: Any, stride: Any, elements: Any = 30) -> None:
        self.arguments = (offset, size, stride)
        self.elements = elements

    def pickled(self) -> bytes:
        sink = io.BytesIO()
        described = self

        class Storage:
            pass

        class Tensor:
            def __reduce__(self) -> Any:
                return torch._utils._rebuild_tensor_v2, (Storage(), *described.arguments, False, {})

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                if isinstance(value, Storage):
                    return ("storage", torch.FloatStorage, "0", "cpu", described.elements)
                return None

        Pickler(sink, protocol=2).dump(Tensor())
        return sink.getvalue()


@pytest.mark.parametrize(
    "described",
    [
        _Described(0, (5, 7), (7, 1)),
        _Described(1, (5, 6), (6, 1)),
        _Described(0, (5, 6), (6, 2)),
        _Described(-1, (5, 6), (6, 1)),
        _Described(0, (5, -6), (6, 1)),
        _Described(0, (5, 6), (6, -1)),
        _Described(0, (5, 6), (1,)),
        _Described(0, (5.0, 6), (6, 1)),
        _Described(0, None, (6, 1)),
        _Described(0, (5, 6), (6, 1), elements=31),
        _Described(0, (5, 6), (6, 1), elements="30"),
        _Described(0, (1 << 62, 6), (6, 1), elements=1 << 62),
    ],
)
def test_a_pickle_that_wants_other_bytes_than_there_are_is_refused(described: _Described) -> None:
    content = archived(members_of(PLAIN) | {"archive/data.pkl": described.pickled()})
    with pytest.raises(IntegrityError):
        Archive(content).find()


def test_no_name_in_a_pickle_is_called() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return pytest.fail, ("called",)

    content = archived(members_of(PLAIN) | {"archive/data.pkl": pickle.dumps(Evil(), protocol=2)})
    assert Archive(content).find() is None


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_archive_is_refused_or_found_within_its_bounds(seed: int) -> None:
    noise = random.Random(seed)
    source = saved(random_tensor(torch.bfloat16, (5, 6)).t() if seed % 2 else torch.ones(4, 4))
    content = bytearray(source)
    for _ in range(noise.randrange(1, 8)):
        # Head, pickle and directory; few bytes are the tensor's.
        content[noise.randrange(len(content))] = noise.choice((0, 255, noise.randrange(256)))
    if noise.random() < 0.2:
        del content[noise.randrange(len(content)) :]
    archive = Archive(bytes(content))
    try:
        found = archive.find()
    except IntegrityError:
        return
    if found is not None:
        assert 0 <= found.offset <= found.offset + found.span <= len(content)
        value_in(found, bytes(content))


# Parts.


@pytest.mark.parametrize("most", [1, 8, 20, 50, 10_000])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 5, 3), (15, 3, 1)),
        ((4, 5, 3), (1, 4, 20)),
        ((6,), (3,)),
        ((3, 4), (0, 1)),
        ((3, 4), (2, 1)),
        ((), ()),
        ((2, 0), (1, 1)),
    ],
)
def test_blocks_are_small_and_have_every_element_once(
    shape: tuple[int, ...], strides: tuple[int, ...], most: int
) -> None:
    whole = PlainTensor(torch.int16, shape, strides, 6)
    raw = bytearray(random.Random(1).randbytes(6 + whole.span))
    target = torch.full(shape, -1, dtype=torch.int16)
    seen = torch.zeros(shape, dtype=torch.int16)
    for at, block in whole.blocks(most):
        assert block.span <= most or torch.Size(block.shape).numel() == 1
        place = tuple(slice(a, a + n) for a, n in zip(at, block.shape, strict=True))
        target[place] = value_in(block, bytes(raw))
        seen[place] += 1
    assert bits(target) == bits(value_in(whole, bytes(raw)))
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize("at", range(16))
def test_views_are_aligned_wherever_the_bytes_are(at: int) -> None:
    want = random_tensor(torch.complex128, (3, 4))
    content = bytearray(at) + bytearray(bits(want))
    tensor = PlainTensor(torch.complex128, (3, 4), (4, 1), 0)
    value = tensor.view(memoryview(content)[at:])
    assert value.data_ptr() % 16 == 0
    assert bits(value) == bits(want)


def test_a_part_that_is_not_there_is_refused() -> None:
    whole = PlainTensor(torch.float32, (4, 5), (5, 1), 0)
    assert whole.narrow((1, 2), (2, 3)) == PlainTensor(torch.float32, (2, 3), (5, 1), 28)
    for offsets, sizes in [((3, 0), (2, 5)), ((0, -1), (4, 2)), ((0, 0), (4, -1))]:
        with pytest.raises(IntegrityError, match=r"of a tensor of \(4, 5\)"):
            whole.narrow(offsets, sizes)
