"""A URL whose package isn't installed where the trainer runs."""

import sys

import pytest
from fsspec.registry import _registry

from pannier.client.loading.filesystem import open_dir
from pannier.wire.errors import ConfigurationError


@pytest.mark.parametrize(("url", "package"), [("gs://b/a", "gcsfs"), ("s3://b/a", "s3fs")])
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str
) -> None:
    # As if no other test had used it.
    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"{url} needs {package}.*pip install {package}"):
        open_dir(url)


def test_a_package_of_another_scheme_is_named_by_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_registry, "hf", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigurationError, match="huggingface_hub"):
        open_dir("hf://datasets/a")
