"""An error's traceback shows the user's line and little of Pannier; the rest is at level DEBUG."""

import logging
import traceback
from typing import Any

import pytest

from pannier.client.ranks.load_error import LoadError
from pannier.client.user_errors import at_call
from pannier.wire.errors import PannierError, StorageError


def fail(error: Exception, cause: Exception | None) -> None:
    try:
        raise cause or OSError("low")
    except Exception as lower:
        raise error from lower


@at_call
def call(error: Exception, cause: Exception | None = None) -> None:
    fail(error, cause)


@at_call
def outer(error: Exception) -> None:
    call(error)


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_frames_and_causes_inside_the_package_are_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "pannier"), pytest.raises(StorageError) as raised:
        outer(StorageError("no such bucket"))
    text = shown(raised.value)
    assert [frame.name for frame in traceback.extract_tb(raised.tb)][1:] == ["call"]
    assert "low" not in text
    assert "fail(" not in text
    assert text.endswith("StorageError: no such bucket\n")
    assert "OSError: low" in caplog.text
    assert raised.value.__context__ is None


def test_what_the_caller_was_handling_is_shown() -> None:
    try:
        try:
            raise KeyError("theirs")
        except KeyError:
            outer(StorageError("no such bucket"))
    except StorageError as error:
        text = shown(error)
    assert "KeyError: 'theirs'" in text
    assert "During handling" in text


def test_an_exception_of_the_users_code_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        outer(ZeroDivisionError("theirs"))
    assert "fail(" in shown(raised.value)
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("cause", "stays"), [(ZeroDivisionError("theirs"), True), (PannierError("inner"), False)]
)
def test_the_users_exception_stays_the_cause_of_a_load_error(cause: Any, stays: bool) -> None:
    with pytest.raises(LoadError) as raised:
        call(LoadError("rank 0"), cause)
    assert raised.value.__cause__ is (cause if stays else None)
    assert ("raise cause or" in shown(raised.value)) is stays
