"""Pickles that anybody may have put into a bucket: read as what they say, in time and memory of their own size."""

import gc
import pickle
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.attempts.metadata_refs import referenced_files, saved_by
from pannier.wire.errors import IntegrityError
from pannier.wire.metadata_pickle import Named, Record, read_pickle
from support.fuzzing import FUZZ, accepted

HEAD = b"\x80\x04"

plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 120), 1 << 120),
        st.floats(allow_nan=False),
        st.text(max_size=300),
        st.binary(max_size=300),
    ),
    lambda some: st.one_of(
        st.lists(some, max_size=5),
        st.lists(some, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.text())), some),
        st.sets(st.one_of(st.text(), st.integers())),
        st.frozensets(st.text()),
    ),
)


@FUZZ
@given(value=plain, protocol=st.integers(4, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_python_does(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps([value, value], protocol), "here") == [value, value]


class Point:
    def __init__(self) -> None:
        self.x = 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_of_an_instance_its_class_and_fields_are_known_and_nothing_is_imported(
    protocol: int,
) -> None:
    point, ordered = read_pickle(
        pickle.dumps([Point(), OrderedDict(a=1, b=2)], protocol=protocol), "here"
    )
    assert type(point) is Record
    assert (point.cls.module, point.cls.name) == (__name__, "Point")
    assert (point.args, point.state) == ((), {"x": 1})
    assert (ordered.cls.name, ordered.items) == ("OrderedDict", {"a": 1, "b": 2})


def pairs(depth: int) -> bytes:
    """A tuple with itself inside twice, ``depth`` times."""
    return b"K\x00" + b"".join(
        b"\x94" + b"0h" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(depth)
    )


HOSTILE = {
    "a nested tuple as a key, of which each hash takes years": HEAD + b"}" + pairs(60) + b"Ns.",
    "the same in a set": HEAD + b"\x8f(" + pairs(60) + b"\x90.",
    "the same in a frozenset": HEAD + b"(" + pairs(60) + b"\x91.",
    "tuples nested so deep that their hash overflows the stack": HEAD
    + b"}K\x00"
    + b"\x85" * 100_000
    + b"Ns.",
    "a long tuple as a key, each time it is used": HEAD
    + b"}("
    + b"N" * 10_000
    + b"t\x94"
    + b"Nsh\x00" * 10_000
    + b"Ns.",
    "a long text as a key": HEAD + b"}X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"Ns.",
    "an entry far behind the memo's end": HEAD + b"Nr\x00\x00\x00\x20.",
    "a text of 2 EiB": HEAD + b"\x8d" + b"\x00" * 7 + b"\x20.",
    "bytes of 2 EiB": HEAD + b"\x8e" + b"\x00" * 7 + b"\x20.",
    "a bytearray of 1 GiB": b"\x80\x05\x96\x00\x00\x00\x40\x00\x00\x00\x00.",
    "an integer of 1 MiB": HEAD + b"\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b".",
    "a persistent id": HEAD + b"K\x01Q.",
    "a registered extension": HEAD + b"\x82\x01.",
    "a buffer outside of it": b"\x80\x05\x97.",
    "an old protocol": b"\x80\x01N.",
    "attributes of a class": HEAD + b"\x8c\x01a\x8c\x01b\x93}\x8c\x01xK\x01sb.",
    "attributes of what isn't an instance": HEAD + b"]}\x8c\x01xK\x01sb.",
    "a second state": HEAD + b"\x8c\x01a\x8c\x01b\x93)\x81}b}b.",
    "a call of a text": HEAD + b"\x8c\x01a)R.",
    "items of a text": HEAD + b"\x8c\x01aNNs.",
    "nothing on the stack": HEAD + b"0.",
    "no end": HEAD + b"N",
}


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_pickle_is_refused_in_time_and_memory_of_its_size(what: str) -> None:
    content = HOSTILE[what]
    # Each reader refuses it, also where it is what a service takes for `.metadata`.
    with little_memory(100 * len(content) + (4 << 20)):
        for read in (read_pickle, referenced_files, saved_by):
            with pytest.raises(IntegrityError, match="here"):
                read(content, "here")


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_value_or_damage(content: bytes) -> None:
    for begin in (b"", HEAD):
        accepted(read_pickle, begin + content, "here")


def test_what_the_caller_refuses_by_name_is_raised_as_it_is() -> None:
    def refuse(named: Named) -> None:
        raise LookupError(repr(named))

    with pytest.raises(LookupError, match=r"os\.system"):
        read_pickle(b"\x80\x02cos\nsystem\n.", "here", refuse)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_afterwards_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        read_pickle(HEAD + b"N.", "here")
        with pytest.raises(IntegrityError):
            read_pickle(HEAD, "here")
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was else gc.disable()
