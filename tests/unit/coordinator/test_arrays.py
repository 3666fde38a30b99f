"""Columns as numpy reads and writes them, against :mod:`pannier.wire.plan_columns`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.coordinator.planning import arrays
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import encode_column

numbers = st.one_of(
    st.integers(0, 300),
    st.sampled_from([255, 256, 65535, 65536, 2**32 - 1, 2**32]),
    st.integers(0, 2**62 - 1),
)


@given(st.lists(st.lists(numbers, max_size=20), max_size=5))
def test_columns_are_read_one_after_another(parts: list[list[int]]) -> None:
    values, counts = arrays.read_columns([encode_column(part) for part in parts])
    assert values.tolist() == [value for part in parts for value in part]
    assert counts.tolist() == [len(part) for part in parts]


@given(st.lists(numbers, max_size=40))
def test_columns_are_written_as_from_lists(values: list[int]) -> None:
    assert arrays.write_column(np.array(values, np.int64)) == encode_column(values)


@pytest.mark.parametrize("number", [2**62, 2**63, 2**64 - 1])
def test_a_number_that_no_plan_has_is_refused(number: int) -> None:
    with pytest.raises(InvalidRequestError, match="out of range"):
        arrays.read_column(encode_column([1, number]))


@pytest.mark.parametrize("column", [b"\x00", b"\x03abc", b"\x02abc", b"\x08" + b"a" * 12, b"\xff"])
def test_a_malformed_column_is_refused(column: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="a column"):
        arrays.read_columns([encode_column([1]), column])
