"""The images that ``make images`` builds, each as a root file system that containers of pods run in.

In: buildah's storage in build/images, with a container of each image. Out: its files and the settings that it has
for its processes. Needs root and buildah.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.kubernetes.manifests import REPOSITORY

_STORAGE = REPOSITORY / "build/images"
WHEELS = _STORAGE / "wheels"
_SOURCES = ("proto", "client", "service")


@dataclass(frozen=True)
class Image:
    """An image's root file system, not to be written, and what its processes are started with."""

    root: Path
    environment: dict[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    healthcheck: tuple[str, ...]
    user: str
    labels: dict[str, str]

    def size(self) -> int:
        """Bytes of all files."""
        return sum(
            (Path(top) / name).lstat().st_size
            for top, _, names in os.walk(self.root)
            for name in names
        )

    def sources(self) -> dict[str, bytes]:
        """The package as it is installed in the image: files by their path below it."""
        (package,) = self.root.glob("opt/pannier/lib/python*/site-packages/pannier")
        return _files(package)


def check_built() -> None:
    """Skips a test on a machine where ``make images`` wasn't run, or can't be."""
    if shutil.which("buildah") is None or not (_STORAGE / "storage").exists():
        pytest.skip("no images: `make images` builds them, with Debian's buildah and mmdebstrap")


def of_checkout() -> dict[str, bytes]:
    """What the package in an image must be."""
    return {
        path: content
        for root in _SOURCES
        for path, content in _files(REPOSITORY / root / "pannier").items()
    }


def image(name: str) -> Image:
    """``pannier-<name>`` as it was built last."""
    container = f"pannier-{name}"
    config: dict[str, Any] = json.loads(_buildah("inspect", container))["Docker"]["config"]
    return Image(
        Path(_buildah("mount", container).strip()),
        dict(each.partition("=")[::2] for each in config.get("Env") or ()),
        tuple(config.get("Entrypoint") or ()),
        tuple(config.get("Cmd") or ()),
        tuple(config.get("Healthcheck", {}).get("Test", ())),
        config.get("User", ""),
        dict(config.get("Labels") or {}),
    )


def _files(top: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(top)): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _buildah(*arguments: str) -> str:
    where = ["--root", str(_STORAGE / "storage"), "--runroot", str(_STORAGE / "run")]
    done = subprocess.run(
        ["buildah", *where, "--storage-driver", "vfs", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
