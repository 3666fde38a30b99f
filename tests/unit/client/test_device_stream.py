"""The calls of torch that a stream makes, as far as torch's own stand-in for the CPU takes them."""

import inspect

import pytest
import torch

from pannier.client.staging import device_stream
from pannier.client.staging.device_stream import SideStream
from support.states.host_streams import FakeStream

CPU = torch.device("cpu")


def test_a_copy_is_marked_and_waited_for() -> None:
    stream = SideStream(CPU)
    source, target = torch.randn(30, 20).t(), torch.zeros(20, 30)
    stream.wait_for_caller()
    stream.copy([target], [source])
    event = stream.record_event()
    stream.make_caller_wait(event)
    event.synchronize()
    assert event.query()
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.uint16),
        *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint64),
    ],
)
def test_packed_tensors_are_their_bytes_one_behind_the_other(dtype: torch.dtype) -> None:
    sources = [torch.randn(6, 4).mul(50).to(dtype).t(), torch.ones(()).to(dtype)]
    sources += [torch.zeros(3).to(dtype)[1:2]]
    if dtype.is_complex:
        sources = [source.conj() for source in sources]
    expected = b"".join(
        source.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for source in sources
    )
    assert SideStream(CPU).pack(sources).numpy().tobytes() == expected
    assert SideStream(CPU).pack(sources[:1]).numel() == 24 * dtype.itemsize


def test_a_snapshot_shares_nothing() -> None:
    source = torch.nn.Parameter(torch.ones(3, 4).t())
    taken = SideStream(CPU).snapshot(source)
    source.data.zero_()
    assert taken.is_contiguous()
    assert not taken.requires_grad
    assert torch.equal(taken, torch.ones(4, 3))


def test_there_is_one_lane_for_a_device() -> None:
    assert device_stream.side_stream(CPU) is device_stream.side_stream(torch.device("cpu"))


def test_nothing_is_recorded_where_there_is_no_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is")
    assert not device_stream.is_capturing()


def test_the_fake_has_the_signatures_of_the_real_one() -> None:
    for name, method in inspect.getmembers(SideStream, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(method) == inspect.signature(getattr(FakeStream, name)), name
