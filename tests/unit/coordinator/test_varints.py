"""Packed columns against protobuf's own reading and writing of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.coordinator.planning import varints
from pannier.v1 import plan_pb2

numbers = st.one_of(
    st.integers(0, 300), st.sampled_from([127, 128, 16383, 16384]), st.integers(0, 2**62)
)
columns = st.lists(st.lists(numbers, max_size=20), max_size=5)


def packed(values: list[int]) -> bytes:
    """As protobuf writes them."""
    fields, _ = varints.cut(plan_pb2.Placement(offset=values).SerializeToString())
    return fields.get(2, b"")


@given(columns)
def test_columns_are_read_as_protobuf_writes_them(parts: list[list[int]]) -> None:
    values, counts = varints.decode([packed(part) for part in parts])
    assert values.tolist() == [value for part in parts for value in part]
    assert counts.tolist() == [len(part) for part in parts]


@given(st.lists(numbers, max_size=40))
def test_columns_are_written_as_protobuf_writes_them(values: list[int]) -> None:
    data, ends = varints.encode(np.array(values, np.int64))
    assert data == packed(values)
    begin = 0
    for value, end in zip(values, ends.tolist(), strict=True):
        assert data[begin:end] == packed([value])
        begin = end


@given(st.lists(st.lists(numbers, max_size=6), min_size=1, max_size=4), st.lists(st.integers(0, 3)))
def test_parts_that_are_alike_are_written_as_others(
    distinct: list[list[int]], which: list[int]
) -> None:
    parts = [distinct[number % len(distinct)] for number in which]
    values = np.array([value for part in parts for value in part], np.int64)
    edges = np.cumsum([0, *(len(part) for part in parts)])
    assert varints.encode_parts(values, edges) == [packed(part) for part in parts]
    assert [varints.count(packed(part)) for part in parts] == [len(part) for part in parts]


@given(st.lists(st.tuples(numbers, st.integers(1, 40)), max_size=5))
def test_numbers_that_come_many_times_are_written_as_others(runs: list[tuple[int, int]]) -> None:
    values = [value for value, times in runs for _ in range(times)]
    assert varints.encode_runs(np.array(values, np.int64)) == packed(values)


@given(st.lists(st.integers(-(2**40), 2**40), max_size=20))
def test_signed_numbers(values: list[int]) -> None:
    data, _ = varints.encode(varints.zigzag(np.array(values, np.int64)))
    fields, _ = varints.cut(plan_pb2.Items(hint=values).SerializeToString())
    assert data == fields.get(5, b"")


def test_numbers_above_int64_are_negative() -> None:
    values, _ = varints.decode([packed([2**63, 2**64 - 1])])
    assert (values < 0).all()


@pytest.mark.parametrize("data", [b"\x80", b"\x01\xff", b"\x80" * 11 + b"\x01"])
def test_what_is_no_column(data: bytes) -> None:
    with pytest.raises(ValueError, match="number"):
        varints.decode([data])


@pytest.mark.parametrize("data", [b"\x0a\x05a", b"\x08\x01", b"\x0a\x01a\x0a\x01b", b"\x0a"])
def test_what_is_no_message_of_columns(data: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        varints.cut(data)


def test_a_message_is_cut_before_a_field() -> None:
    message = plan_pb2.Placement(file=[1, 2], offset=[300], length=[7])
    data = message.SerializeToString()
    fields, at = varints.cut(data, before=3)
    assert fields == {1: b"\x01\x02", 2: b"\xac\x02"}
    assert data[at:] == b"\x1a\x01\x07"
    assert varints.field(3, b"\x07") == data[at:]
    assert varints.field(3, b"") == b""
