"""Archives put together by hand are what torch.load and torch.save agree on."""

import io
import resource
import zipfile

import pytest
import torch

from pannier.client.staging import archives

SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (3, 4), (2, 3, 4, 5)]


def _random_bytes(dtype: torch.dtype, count: int) -> bytes:
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).numpy().tobytes()


def _raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(archives.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_archive_loads_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    archive = archives.archive(dtype, shape)
    body = _random_bytes(dtype, archive.body)

    blob = archive.head + body + archive.tail
    loaded = torch.load(io.BytesIO(blob), weights_only=True)

    assert archive.length == len(blob)
    assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
    assert loaded.is_contiguous()
    assert _raw(loaded) == body


def test_every_plain_dtype_of_torch_has_a_template() -> None:
    missing = set()
    for value in vars(torch).values():
        if isinstance(value, torch.dtype) and value not in archives.DTYPES:
            missing.add(str(value).removeprefix("torch."))
    # Bits and quantised types, and integers of under a byte, which DCP can't plan.
    expected = set() if torch.__version__ >= "2.10" else {"float4_e2m1fn_x2"}
    found = {name for name in missing if not name.startswith(("bits", "q", "int", "uint"))}
    assert found == expected
    assert len(archives.DTYPES) >= 17


def test_an_archive_has_the_members_and_lengths_of_torch_save() -> None:
    archive = archives.archive(torch.bfloat16, (7, 5))
    saved = io.BytesIO()
    torch.save(torch.zeros(7, 5, dtype=torch.bfloat16), saved)

    ours = zipfile.ZipFile(io.BytesIO(archive.head + bytes(archive.body) + archive.tail))
    theirs = zipfile.ZipFile(saved)

    assert archive.length == len(saved.getvalue())
    assert [(m.filename, m.file_size, m.header_offset) for m in ours.infolist()] == [
        (m.filename, m.file_size, m.header_offset) for m in theirs.infolist()
    ]


def test_raw_bytes_are_aligned_within_the_archive() -> None:
    for dtype in archives.DTYPES:
        assert len(archives.archive(dtype, (3,)).head) % 64 == 0


def test_templates_beyond_four_gigabytes_take_no_memory_even_when_empty_memory_is_filled() -> None:
    numel = (5 << 30) // 4
    archives.archive.cache_clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.use_deterministic_algorithms(True)
    try:
        archive = archives.archive(torch.float32, (numel,))
    finally:
        torch.use_deterministic_algorithms(False)

    assert archive.body == 5 << 30
    # zip64 has longer records.
    assert len(archive.tail) > len(archives.archive(torch.float32, (3,)).tail)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 << 10


def test_templates_ignore_and_leave_torchs_settings() -> None:
    plain = archives.archive(torch.float32, (2, 2))
    archives.archive.cache_clear()
    crc = torch.serialization.get_crc32_options()
    with torch.device("meta"), torch.inference_mode():
        assert archives.archive(torch.float32, (2, 2)) == plain
        assert archives.archive(torch.float32, (2, 0)).body == 0
    assert torch.serialization.get_crc32_options() is crc
    blob = io.BytesIO()
    torch.save(torch.ones(3), blob)
    blob.seek(0)
    assert torch.equal(torch.load(blob), torch.ones(3))


def test_quantized_dtypes_have_no_template() -> None:
    with pytest.raises(ValueError, match="qint8"):
        archives.archive(torch.qint8, (3,))
