"""Names from requests, fuzzed: none of them leads out of the spool, the checkpoint or the roots."""

import os
import posixpath
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pannier.storage import check_allowed, open_store, url
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import PannierError
from support.fuzzing import FUZZ, accepted, messages, names, places


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with ways out of it."""
    top = tmp_path_factory.mktemp("names")
    inside = top / "root"
    (inside / "deep").mkdir(parents=True)
    (top / "outside").mkdir()
    (inside / "link").symlink_to(top / "outside")
    (inside / "deep" / "link").symlink_to("../../outside")
    (inside / "deep" / "loop").symlink_to("loop")
    return inside


@FUZZ
@given(id_=places)
@example(id_="/a/..")
@example(id_="file:///a/.pannier://x/y")
@example(id_="/a/\ud800/x")
@example(id_="/" + "a/" * 100_000)
@example(id_="/" + "a" * 100_000)
def test_a_checkpoint_id_is_refused_or_means_one_place(id_: str) -> None:
    for place in accepted(url.parse, id_):
        assert ".." not in place.parts
        assert not any("\0" in part or "/" in part or part in ("", ".") for part in place.parts)
        assert posixpath.normpath(place.path) == place.path
        for root, name in accepted(object_names.split_checkpoint_id, id_):
            # Where attempts are ordered is the parent of where files go.
            assert url.parse(root).parts == place.parts[:-1]
            assert name == place.parts[-1]
            assert ".pannier" not in place.parts


@FUZZ
@given(parts=st.lists(names, max_size=4), scheme=st.sampled_from(["", "file://"]))
@example(parts=["link", "step-1"], scheme="")
@example(parts=["deep", "link", "step-1"], scheme="file://")
@example(parts=["deep", "loop", "step-1"], scheme="")
@example(parts=["deep", "..", "..", "outside", "x"], scheme="")
@example(parts=["%2e%2e", "outside"], scheme="")
@example(parts=["\ud800", "x"], scheme="")
@example(parts=["a" * 300, "x"], scheme="")
@example(parts=["x"] * 5000, scheme="")
def test_no_path_leads_out_of_an_allowed_root(root: Path, parts: list[str], scheme: str) -> None:
    id_ = scheme + posixpath.join(str(root), *parts) if parts else f"{scheme}{root}"
    try:
        check_allowed(id_, [str(root)])
        store = open_store(id_)
    except PannierError:
        return
    real = os.path.realpath(url.parse(id_).path)
    assert real.startswith(f"{root}/"), (id_, real)
    assert store.url == url.parse(id_).path


@FUZZ
@given(id_=places, allowed=st.lists(places, min_size=1, max_size=3))
def test_roots_and_ids_of_any_kind_are_compared_without_an_accident(
    id_: str, allowed: list[str]
) -> None:
    accepted(check_allowed, id_, allowed)


@FUZZ
@given(key=st.lists(names, max_size=4).map("/".join))
@example(key="../x")
@example(key="a/../../x")
@example(key="/etc/passwd")
def test_a_key_names_something_below_its_checkpoint(key: str) -> None:
    for known in accepted(url.check_key, key):
        path = posixpath.normpath(posixpath.join("/base", known))
        assert path.startswith("/base/")
        assert "\0" not in known


@FUZZ
@given(
    name=st.one_of(names, st.builds("__{}_{}_{}.distcp".format, names, st.integers(), names)),
    attempt=st.one_of(names, st.builds("i{}-{}-g00000000-s{}".format, names, names, st.integers())),
    rank=st.integers(0, (1 << 32) - 1),
)
@example(name="__i1-a1-g00000000-s1_0_../x.distcp", attempt="i1-a1-g00000000-s1", rank=0)
@example(name="__i1-a1-g00000000-s1_0_0.distcp\n", attempt="i1-a1-g00000000-s1", rank=0)
@example(name="__i1-a1-g00000000-s1_0_0.distcp", attempt="i1-a1-g00000000-s1", rank=0)
@example(name="__i1-a1-g00000000-s1_0_٣.distcp", attempt="i1-a1-g00000000-s1", rank=0)
def test_a_data_file_is_its_own_ranks_and_attempts(name: str, attempt: str, rank: int) -> None:
    for _ in accepted(object_names.check_data_file, name, attempt, rank):
        assert name.isascii()
        assert "/" not in name
        assert name.startswith(f"__{attempt}_{rank}_")
        assert object_names.Attempt.parse(attempt).name == attempt


@FUZZ
@given(
    text=st.one_of(
        names,
        st.from_regex(
            r"i[0-9٣]{1,14}-[a-zA-Z0-9_.]{0,33}-g[0-9a-fA-F]{8}-s[0-9]{1,14}\n?", fullmatch=True
        ),
    )
)
def test_an_attempt_has_one_spelling(text: str) -> None:
    for attempt in accepted(object_names.Attempt.parse, text):
        assert attempt.name == text
        assert object_names.leased_attempt(object_names.lease(text, "t0")) == text
    assert "/" not in object_names.leased_attempt(text)


@FUZZ
@given(save=messages(save_pb2.SaveId))
def test_a_saves_name_is_plain_words(save: save_pb2.SaveId) -> None:
    for _ in accepted(object_names.check_save_id, save):
        text = object_names.save_text(save)
        assert text.count("/") == 3
        assert text.isascii()
        assert text.isprintable()
        assert ".." not in text.split("/")


@FUZZ
@given(context=messages(sidecar_pb2.SaveContext))
def test_a_context_is_refused_or_within_its_limits(context: sidecar_pb2.SaveContext) -> None:
    for _ in accepted(limits.check_context, context):
        assert context.rank in context.ranks
        assert max(context.ranks) < context.world_size <= limits.MAX_WORLD
        assert context.host.isprintable()
