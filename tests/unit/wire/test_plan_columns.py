"""Columns of plans: the narrowest width, the inverse, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import column_length, decode_column, encode_column


@given(st.lists(st.integers(0, 300) | st.integers(0, 2**64 - 1), max_size=40))
def test_what_is_encoded_is_decoded(values: list[int]) -> None:
    column = encode_column(values)
    assert decode_column(column) == values
    assert column_length(column) == len(values)


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ([], b""),
        ([0], b"\x01\x00"),
        ([255, 1], b"\x01\xff\x01"),
        ([256, 1], b"\x02\x00\x01\x01\x00"),
        ([2**16], b"\x04\x00\x00\x01\x00"),
        ([2**32], b"\x08\x00\x00\x00\x00\x01\x00\x00\x00"),
        ([2**64 - 1], b"\x08" + b"\xff" * 8),
    ],
)
def test_the_narrowest_width_that_holds_all_is_used(values: list[int], column: bytes) -> None:
    assert encode_column(values) == column


@pytest.mark.parametrize("values", [[-1], [1, -1], [2**64]])
def test_what_is_out_of_range_is_not_encoded(values: list[int]) -> None:
    with pytest.raises(OverflowError):
        encode_column(values)


@pytest.mark.parametrize("column", [b"\x00", b"\x00\x00", b"\x03abc", b"\x02abc", b"\x09", b"\x10"])
def test_a_malformed_column_is_refused(column: bytes) -> None:
    for read in (decode_column, column_length):
        with pytest.raises(InvalidRequestError, match="a column"):
            read(column)
