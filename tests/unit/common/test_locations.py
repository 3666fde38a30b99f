"""What a user writes for a place becomes one path or URL, and a typo no directory."""

import os
from pathlib import Path

import pytest

from pannier.client.loading.filesystem import open_dir
from pannier.client.options import checkpoint_path
from pannier.common.locations import absolute
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
