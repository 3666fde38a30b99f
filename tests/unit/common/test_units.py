"""Durations as people write and read them; the sizes are tested with the command line's options."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.common.units import duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("250 ms", 0.25),
        ("30min", 1800),
        ("30m", 1800),
        ("1.5 h", 5400),
        ("2d 12h", 216000),
        (" 1h30min ", 5400),
    ],
)
def test_durations_in_the_units_people_write(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "6", "h", "-6h", "6 hours", "0s", "1h and 2min", "1 2h", "nan h", "9" * 400 + "d"]
)
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.059, "59 ms"),
        (0.0999, "0.1 s"),
        (0.25, "0.25 s"),
        (0.94, "0.94 s"),
        (0.996, "1.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (250, "4 min 10 s"),
        (3599.7, "1 h"),
        (5400, "1 h 30 min"),
        (86399, "1 d"),
        (100_000, "1 d 4 h"),
    ],
)
def test_durations_in_two_units_at_most(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(0.001, 1e9))
def test_what_is_shown_is_close_to_what_was_measured(seconds: float) -> None:
    assert parse_duration(duration_text(seconds)) == pytest.approx(seconds, rel=0.5 / 9, abs=5e-4)
