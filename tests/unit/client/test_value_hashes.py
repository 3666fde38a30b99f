"""Hashes of replicated values: equal for equal values on any rank, and others for others."""

import random
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from support.actors.staged import plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def hashes(state: dict[str, Any], *, tensors: bool = False) -> dict[str, int]:
    return plan(state).value_hashes(tensors=tensors)


SHARED = "one " + "string"
EQUAL: dict[str, tuple[Any, Any]] = {
    # A pickle has the first as a reference.
    "shared parts": ((SHARED, SHARED), (SHARED, "".join(["one ", "string"]))),
    "sets": (set("abcdefgh"), set("hgfedcba")),
    "arrays of other strides": (np.ones((4, 6)).T.copy(), np.ones((6, 4))),
    "not a number": (float("nan"), float("nan")),
    "tuples of arrays": (("MT19937", np.arange(5)), ("MT19937", np.arange(5))),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 2),
    "types of numbers": (1, 1.0),
    "signs of zero": (0.0, -0.0),
    "strings": ("a", "b"),
    "orders of a list": ([1, 2], [2, 1]),
    "kinds of sequences": ((1, 2), [1, 2]),
    "where parts end": (["ab", "c"], ["a", "bc"]),
    "random states": (random.Random(1).getstate(), random.Random(2).getstate()),
    "states of numpy": tuple(np.random.RandomState(n).get_state() for n in (1, 2)),
    "array shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "array dtypes": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "paths": (PurePosixPath("a"), PurePosixPath("b")),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_equal_values_have_one_hash(pair: tuple[Any, Any]) -> None:
    one, other = ({"o": (value,)} for value in pair)
    assert hashes(one) == hashes(other)
    assert list(hashes(one)) == ["o"]


@pytest.mark.parametrize("pair", OTHERS.values(), ids=OTHERS)
def test_other_values_have_other_hashes(pair: tuple[Any, Any]) -> None:
    one, other = ({"o": (value,)} for value in pair)
    assert list(hashes(one)) == ["o"]
    assert hashes(one) != hashes(other)


def test_the_order_of_keys_does_not_count() -> None:
    one = OrderedDict([("a", 1), ("b", 2)])
    other = OrderedDict([("b", 2), ("a", 1)])
    assert hashes({"o": (one,)}) == hashes({"o": (other,)})


class Opaque:
    """A type without a rule."""


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], np.array([Opaque()])])
def test_a_value_without_a_rule_is_not_compared(value: Any) -> None:
    assert hashes({"o": value}) == {}


def test_an_object_that_contains_itself_is_not_compared() -> None:
    value: list[Any] = []
    value.append((value,))
    assert hashes({"o": (value,)}) == {}


def test_tensors_are_compared_on_request() -> None:
    states = [{"w": torch.full((3,), float(n)), "step": 1} for n in (0, 0, 1)]
    assert [list(hashes(each)) for each in states] == [["step"]] * 3
    first, equal, other = (hashes(each, tensors=True) for each in states)
    assert first == equal
    assert first["w"] != other["w"]
    assert first["step"] == other["step"]
