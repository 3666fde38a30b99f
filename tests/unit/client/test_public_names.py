"""What a program may rely on: names of ``pannier.client``, the arguments' types, errors as tracebacks show them."""

import dataclasses
import pickle
import re
import traceback
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pannier import client
from pannier.v1 import save_pb2
from pannier.wire import errors

GUIDE = Path(__file__).parents[3] / "docs/guide.md"
# The first one is PannierError itself.
ERRORS = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.PannierError)
]


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    client.close()


def public(error: type[errors.PannierError]) -> type[errors.PannierError]:
    """The one that a program catches."""
    found: type[errors.PannierError] = getattr(client, error.__name__)
    return found


@pytest.mark.parametrize("error", [*ERRORS, client.MissingError])
def test_an_error_is_caught_by_the_name_that_its_traceback_shows(
    error: type[errors.PannierError],
) -> None:
    assert error.__name__ in client.__all__
    caught = public(error)
    assert issubclass(caught, error)
    raised = caught("why", [save_pb2.Failure(rank=3, host="node-1", message="why")])
    (line,) = traceback.format_exception_only(raised)
    assert line == f"pannier.client.{error.__name__}: why\n"
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is caught
    assert again.failures.keys() == {3}


@pytest.mark.parametrize("error", [*ERRORS[1:], client.MissingError])
def test_the_guide_says_when_an_error_is_raised(error: type[errors.PannierError]) -> None:
    (table,) = re.findall(r"^\| error \|.*?\n\n", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert f"`{error.__name__}`" in table
    for base in error.__bases__:
        if base.__name__ not in ("PannierError", "Exception"):
            (row,) = [
                line
                for line in table.strip().splitlines()
                if f"`{error.__name__}`" in line.split("|")[1]
            ]
            assert f"`{base.__name__}`" in row, base


@pytest.mark.parametrize(
    ("call", "argument", "values"),
    [
        (client.async_save, "on_busy", ("wait", "skip", "raise")),
        (client.async_save, "staging", ("blocking", "overlapped")),
        (client.save, "on_busy", ("wait", "skip", "raise")),
        (client.Client.async_save, "on_busy", ("wait", "skip", "raise")),
        (client.Client.async_save, "staging", ("blocking", "overlapped")),
        (client.latest, "include", ("committed", "ingested")),
        (client.export, "format", ("safetensors",)),
    ],
)
def test_a_type_checker_knows_the_values_of_an_argument(
    call: Callable[..., Any], argument: str, values: tuple[str, ...]
) -> None:
    assert typing.get_args(typing.get_type_hints(call)[argument]) == values


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda **given: client.async_save({}, checkpoint_id="/x/y", **given), "on_busy"),
        (lambda **given: client.async_save({}, checkpoint_id="/x/y", **given), "staging"),
        (lambda **given: client.latest("/x", **given), "include"),
        (lambda **given: client.export("/x/y", "/x/z", **given), "format"),
    ],
)
def test_another_value_is_refused(call: Callable[..., Any], argument: str) -> None:
    with pytest.raises(client.InvalidRequestError, match=f"{argument}='typo'"):
        call(**{argument: "typo"})


@pytest.mark.parametrize(
    "read",
    [
        lambda target: client.load({"w": torch.zeros(1)}, checkpoint_id=target),
        lambda target: client.read_extra_file(target, "trainer.json"),
        lambda target: client.StorageReader(target).read_metadata(),
    ],
)
def test_a_missing_checkpoint_is_a_missing_file(
    tmp_path: Path, read: Callable[[str], object]
) -> None:
    with pytest.raises(FileNotFoundError, match="step-3 is no checkpoint: it doesn't exist") as it:
        read(str(tmp_path / "step-3"))
    assert isinstance(it.value, client.MissingError)


def test_failures_are_plain_records() -> None:
    message = save_pb2.Failure(
        rank=3, host="node-1", kind=save_pb2.FAILURE_KIND_STORAGE, message="disk full"
    )
    failure = client.Failure(rank=3, host="node-1", kind="STORAGE", message="disk full")
    for error in (client.SaveAbortedError("x", [message]), pickle.loads(pickle.dumps(failure))):
        found = error if error == failure else error.failures[3]
        assert found == failure
    with pytest.raises(dataclasses.FrozenInstanceError):
        failure.rank = 4  # type: ignore[misc]
    loading = client.LoadError("x", [message]).failures[3]
    assert (loading.rank, loading.host, loading.kind) == (3, "node-1", "STORAGE")


def test_a_kind_of_a_newer_daemon_is_shown_by_its_number() -> None:
    assert errors.kind_name(99) == "99"
