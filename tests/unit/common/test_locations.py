"""What a user writes for a place becomes one path or URL, and a typo no directory."""

import os
from pathlib import Path

import pytest

from pannier.client.loading.filesystem import open_dir
from pannier.client.options import checkpoint_path
from pannier.common.locations import CHILDREN, Pattern, absolute
from pannier.wire.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("gs://b/run/step-1", "gs://b/run/step-1"),
        ("GS://B/run/", "gs://B/run"),
        ("S3://b", "s3://b"),
        ("File:///a/b/", "file:///a/b"),
        ("file:///", "file:///"),
        ("memory:///a", "memory:///a"),
        ("~", "/home/me"),
        ("~/run/step-1", "/home/me/run/step-1"),
        ("/a/~/b", "/a/~/b"),
        ("gs://b/~", "gs://b/~"),
        ("/a//b/../c/", "/a/c"),
        ("/gs:/b", "/gs:/b"),
        (Path("/a") / "b", "/a/b"),
    ],
)
def test_a_place_is_an_absolute_path_or_a_url(text: str, meant: str) -> None:
    assert absolute(text) == meant
    assert absolute(meant) == meant


@pytest.mark.parametrize(
    "text", ["run/step-1", "gs/b", "./gs:/b", "./gs//b", "a:b", "runs//x", "x~"]
)
def test_a_relative_path_is_below_the_working_directory(text: str) -> None:
    assert absolute(text) == os.path.abspath(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gs:/b/x", "use gs://b/x, or ./gs:/b/x"),
        ("GS:/b/x", "use gs://b/x"),
        ("gs//b/x", "use gs://b/x, or ./gs//b/x"),
        ("s3//x", "use s3://x"),
        ("gs:b/x", "use gs://b/x"),
        ("hdfs:/x", "use hdfs://x"),
        ("gd:/b/x", "use gd://b/x"),
        ("file:/a/b", "use file:///a/b"),
        ("gs:///b/x", "names no bucket: use gs://b/x"),
        ("gs://", "names no bucket"),
        ("~no-such-user/x", "no home directory"),
        ("", "neither a path nor a URL"),
    ],
)
def test_a_typo_is_refused_by_all_that_take_a_place(text: str, says: str) -> None:
    for take in (absolute, checkpoint_path, open_dir):
        with pytest.raises(InvalidRequestError) as raised:
            take(text)
        assert says in str(raised.value)


@pytest.mark.parametrize("text", ["nonsense://b/x", "gs://b//x", "gs://b/../x", "file://a/b"])
def test_a_save_is_refused_where_the_daemons_would_refuse_it(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        checkpoint_path(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no text"),
        ("/checkpoint-*", "not relative"),
        ("~/checkpoint-*", "not relative"),
        ("gs://bucket/checkpoint-*", "not relative"),
        ("../checkpoint-*", "contains '..'"),
        ("checkpoint-*/../dcp", "contains '..'"),
        ("checkpoint-*/", "has an empty or '.' segment"),
        ("checkpoint-*//dcp", "has an empty or '.' segment"),
        ("./checkpoint-*", "has an empty or '.' segment"),
        ("**/dcp", "contains '**'"),
        ("checkpoint-**", "contains '**'"),
        ("*/.pannier", "names Pannier's directory of records"),
        ("a\nb", "a control character"),
        (None, "is no text"),
    ],
)
def test_a_pattern_that_can_not_be_used_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Pattern(text)
    assert f"pattern {text!r} " in str(caught.value)
    assert why in str(caught.value)
    assert "like '*' or 'checkpoint-*/dcp'" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "step-1", True),
        ("*", "step-1/dcp", False),
        ("*", ".pannier", False),
        ("*", ".hidden", True),
        ("checkpoint-*/dcp", "checkpoint-5/dcp", True),
        ("checkpoint-*/dcp", "checkpoint-5/model", False),
        ("checkpoint-*/dcp", "checkpoint-5", False),
        ("checkpoint-*/dcp", "checkpoint-5/a/dcp", False),
        ("checkpoint-*/dcp", "Checkpoint-5/dcp", False),
        ("run-?/step-[0-9]*", "run-a/step-10", True),
        ("run-?/step-[0-9]*", "run-a/step-final", False),
        ("*/*", "run/.pannier", False),
    ],
)
def test_what_a_pattern_matches(pattern: str, name: str, matches: bool) -> None:
    assert Pattern(pattern).matches(name) == matches
    assert Pattern(pattern).name_below("gs://b/run", f"gs://b/run/{name}") == (
        name if matches else None
    )
    assert Pattern(pattern).name_below("gs://b/ru", f"gs://b/run/{name}") is None


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        *(("*", name, step) for name, step in (("step-1000", 1000), ("v2-step_7", 7), ("12", 12))),
        *(("*", name, step) for name, step in (("epoch3-final", 3), ("best", None))),
        ("checkpoint-*/dcp", "checkpoint-5/dcp", 5),
        ("checkpoint-*/dcp2", "checkpoint-5/dcp2", 5),
        ("checkpoint-*/*", "checkpoint-5/dcp", 5),
        ("run-*/step-*", "run-3/step-100", 100),
        ("run-*/step-*", "run-3/step-final", 3),
        ("run2/*", "run2/final", None),
        ("step-7/dcp", "step-7/dcp", 7),
    ],
)
def test_the_step_is_where_the_wildcard_is(pattern: str, name: str, step: int | None) -> None:
    assert Pattern(pattern).step(name) == step


@pytest.mark.parametrize(
    ("pattern", "checkpoint_id", "root"),
    [
        ("*", "gs://bucket/run/step-1", "gs://bucket/run"),
        ("checkpoint-*/dcp", "gs://bucket/run/checkpoint-5/dcp", "gs://bucket/run"),
        ("checkpoint-*/dcp", "/data/checkpoint-5/dcp", "/data"),
        ("checkpoint-*/dcp", "/checkpoint-5/dcp", "/"),
        ("checkpoint-*/dcp", "gs://bucket/checkpoint-5/dcp", "gs://bucket"),
        ("checkpoint-*/dcp", "/data/step-5/dcp", None),
        ("*/*/*", "gs://bucket/a/b", None),
        ("*/*/*", "/a/b", None),
    ],
)
def test_the_root_follows_from_an_id_and_the_pattern(
    pattern: str, checkpoint_id: str, root: str | None
) -> None:
    assert Pattern(pattern).root_of(checkpoint_id) == root


def test_only_wildcards_above_the_last_level_make_several_parents() -> None:
    assert [Pattern(text).one_parent for text in ("*", "run/step-*", "checkpoint-*/dcp")] == [
        *(True, True, False),
    ]
    assert CHILDREN.one_parent
