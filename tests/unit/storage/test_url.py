"""Which places a daemon may touch."""

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from pannier.common.locations import parse
from pannier.storage import check_allowed, open_store
from pannier.wire.errors import ConfigurationError, InvalidRequestError


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "path"),
    [
        ("/a/b", "file", "", "/a/b"),
        ("/a//b/./c/", "file", "", "/a/b/c"),
        ("/a/odd://name", "file", "", "/a/odd:/name"),
        ("file:///a/b", "file", "", "/a/b"),
        ("gs://bucket/run/1", "gs", "bucket", "/run/1"),
        ("gcs://bucket/run/1/", "gs", "bucket", "/run/1"),
        ("gs://bucket", "gs", "bucket", "/"),
        ("s3://bucket/a#b?c", "s3", "bucket", "/a#b?c"),
        ("memory://a/b", "memory", "", "/a/b"),
        ("memory:///a/b", "memory", "", "/a/b"),
    ],
)
def test_parse(url: str, scheme: str, bucket: str, path: str) -> None:
    location = parse(url)
    assert (location.scheme, location.bucket, location.path) == (scheme, bucket, path)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "relative/path",
        "~/runs",
        "file://relative",
        "http://host/a",
        "az://container/a",
        "://a",
        "GS://bucket/a",
        "gs:///a",
        "gs://",
        "gs://bucket/a//b",
        "gs://bucket/./b",
        "gs://bucket/../b",
        "/a/../b",
        "/a/\nb",
        "/a/\0b",
    ],
)
def test_malformed_places_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        open_store(url)
    with pytest.raises(InvalidRequestError):
        check_allowed(url, [])


def test_an_unknown_scheme_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"gs:// .*s3://.*memory://"):
        open_store("hdfs://name/a")


@pytest.mark.parametrize(
    ("checkpoint_id", "allowed"),
    [
        ("/a/b/c", ["/a/b"]),
        ("/a/b/c", ["/x", "file:///a/b/"]),
        ("file:///a/b/c", ["/a"]),
        ("/a", ["/"]),
        ("gs://bucket/a/b", ["gs://bucket"]),
        ("gcs://bucket/a/b", ["gs://bucket/a/"]),
        ("s3://bucket/a", []),
        ("memory://x/y", ["memory://x"]),
    ],
)
def test_allowed(checkpoint_id: str, allowed: list[str]) -> None:
    check_allowed(checkpoint_id, allowed)


@pytest.mark.parametrize(
    ("checkpoint_id", "allowed"),
    [
        ("/a/bc", ["/a/b"]),
        ("/a/b", ["/a/b"]),
        ("/a", ["/a/b"]),
        ("/a/b/../c", ["/a/b"]),
        ("gs://bucket-2/a", ["gs://bucket"]),
        ("gs://bucket/ab", ["gs://bucket/a"]),
        ("s3://bucket/a/b", ["gs://bucket/a"]),
        ("/bucket/a", ["gs://bucket"]),
        ("memory://a/b", ["/a"]),
    ],
)
def test_not_allowed(checkpoint_id: str, allowed: list[str]) -> None:
    with pytest.raises(InvalidRequestError):
        check_allowed(checkpoint_id, allowed)


def test_symbolic_links_do_not_lead_out(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    (tmp_path / "alias").symlink_to(inside)
    with pytest.raises(InvalidRequestError, match="not below an allowed root"):
        check_allowed(str(inside / "link" / "step-1"), [str(inside)])
    check_allowed(str(tmp_path / "alias" / "step-1"), [str(inside)])
    check_allowed(str(inside / "step-1"), [str(tmp_path / "alias")])


def test_no_file_system_is_asked_whose_answer_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    original = os.path.realpath

    def realpath(path: str) -> str:
        asked.append(path)
        return original(path)

    monkeypatch.setattr(os.path, "realpath", realpath)
    check_allowed("/mnt/dead/step-1", [])
    check_allowed("gs://bucket/step-1", ["/mnt/dead", "gs://bucket"])
    assert asked == []
    root = original(tmp_path)
    check_allowed(f"{root}/step-1", ["/mnt/dead", root])
    assert asked == [f"{root}/step-1"]


@pytest.mark.parametrize(("url", "package"), [("gs://b/a", "gcsfs"), ("s3://b/a", "s3fs")])
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str
) -> None:
    import sys

    for name in list(sys.modules):
        if name.startswith(("pannier.storage.gcs", "pannier.storage.s3")):
            monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigurationError, match=rf"{url} needs {package}.*pip install {package}"):
        open_store(url)
