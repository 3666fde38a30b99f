"""What a clone and a wheel promise: commands, pins, floors, fresh stubs, complete contents."""

import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("proto", "client", "service")
PROTOS = sorted(path.stem for path in (REPOSITORY / "proto/pannier/v1").glob("*.proto"))


def pyproject() -> dict[str, Any]:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def requirements(*extras: str) -> list[Requirement]:
    described = pyproject()["project"]
    lines = list(described["dependencies"])
    for extra in extras:
        lines += described["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != "pannier"]


def locked(path: str) -> dict[str, Version]:
    """Pins of a lock file; fails on a line that isn't one."""
    pins = {}
    for line in (REPOSITORY / path).read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line)
            assert match, f"{path}: {line!r} is not an exact version"
            pins[canonicalize_name(match[1])] = Version(match[2])
    return pins


def floor(name: str) -> Version:
    """Oldest version that pyproject.toml accepts."""
    (requirement,) = (r for r in requirements() if r.name == name)
    (version,) = (s.version for s in requirement.specifier if s.operator == ">=")
    return Version(version)


@pytest.mark.parametrize(
    "target",
    [
        *("demo", "test", "demo-xla", "test-xla", "test-torch", "test-frameworks"),
        *("lint", "stubs", "bench", "format", "clean"),
    ],
)
def test_make_knows_its_targets(target: str) -> None:
    run = subprocess.run(
        ["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_make_help_lists_every_public_target() -> None:
    out = subprocess.run(
        ["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    makefile = (REPOSITORY / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    for target in {each for each in phony.split() if not each.startswith("check-")}:
        assert re.search(rf"^  make {target} +\S", out, re.MULTILINE), target


def test_ci_runs_the_readmes_commands() -> None:
    script = REPOSITORY / ".ci/run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    commands = script.read_text()
    readme = (REPOSITORY / "README.md").read_text()
    for command in ("make test", "make demo", "make test-xla", "make demo-xla"):
        assert re.search(rf"{command}$|{command}[ ;]", commands, re.MULTILINE), command
        assert re.search(rf"{command}[ `]", readme), command


def test_the_supported_pythons_are_said_alike() -> None:
    project = pyproject()["project"]
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(f"{prefix}3.")]
    oldest, newest = named[0], named[-1]
    assert named == [f"3.{minor}" for minor in range(int(oldest[2:]), int(newest[2:]) + 1)]
    assert project["requires-python"].split(",")[0] == f">={oldest}"
    readme = (REPOSITORY / "README.md").read_text()
    assert f"Python {oldest} to {newest} and torch {floor_of('torch')} to " in readme


def floor_of(name: str) -> Version:
    (requirement,) = (r for r in requirements("torch") if r.name == name)
    (specifier,) = requirement.specifier
    return Version(specifier.version)


def test_ci_runs_the_demo_with_the_systems_python() -> None:
    commands = (REPOSITORY / ".ci/run").read_text()
    (line,) = re.findall(r"make demo PYTHON=/usr/bin/python3 VENV=(\S+)", commands)
    for ignored in (f"{line}/", ".venv-torch-2.15.0/"):
        run = subprocess.run(["git", "check-ignore", ignored], cwd=REPOSITORY, check=False)
        assert run.returncode == 0, ignored


def test_the_lock_pins_all_that_is_required() -> None:
    pins = locked("requirements.lock")
    for requirement in requirements("torch", "gcs", "s3", "dev"):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in the lock: run `make lock`"
        assert requirement.specifier.contains(version), f"{requirement}: {version}"
    assert pins["torch"] == Version("2.13.0"), "without a platform suffix: pip chooses the build"


def test_the_xla_environment_has_the_working_pair_and_the_oldest_torch() -> None:
    pins = locked("requirements-xla.lock")
    pair = {"torch": Version("2.9.0"), "torch-xla": Version("2.9.0")}
    assert pins.items() >= pair.items()
    usual = locked("requirements.lock")
    for requirement in requirements("xla"):
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains({**usual, **pins}[name]), requirement
        if name in pair:
            assert str(requirement.specifier) == f"=={pair[name]}", "newer ones don't load together"
    (torch,) = (r for r in requirements("torch") if r.name == "torch")
    assert str(torch.specifier) == ">=2.9", "what test-xla tests is the floor"


def test_the_frameworks_are_those_that_their_page_names() -> None:
    pins = locked("requirements-frameworks.lock")
    assert "torch" not in pins, "they are tested with the usual torch"
    page = (REPOSITORY / "docs/frameworks.md").read_text()
    for name, version in locked("tests/frameworks/requirements.txt").items():
        assert pins[name] == version, f"{name}: run `make lock`"
        assert str(version) in page, f"{name} {version}"


def test_the_floors_are_those_of_the_generated_stubs() -> None:
    for name in PROTOS:
        module = (REPOSITORY / f"proto/pannier/v1/{name}_pb2.py").read_text()
        match = re.search(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)", module)
        assert match is not None
        assert Version(".".join(match.groups())) == floor("protobuf")
    services = list((REPOSITORY / "proto/pannier/v1").glob("*_pb2_grpc.py"))
    assert services
    for path in services:
        generated = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", path.read_text())
        assert generated is not None
        assert Version(generated[1]) == floor("grpcio")
    assert locked("proto/requirements.lock")["grpcio-tools"] == floor("grpcio")


def test_the_stubs_describe_the_protos(tmp_path: Path) -> None:
    image = tmp_path / "image.binpb"
    buf = Path(sys.executable).with_name("buf")
    subprocess.run(
        [buf, "build", "--exclude-source-info", "-o", image],
        cwd=REPOSITORY / "proto",
        env={**os.environ, "HOME": str(tmp_path)},
        check=True,
    )
    described = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    files = {file.name: file for file in described.file}
    assert sorted(files) == [f"pannier/v1/{name}.proto" for name in PROTOS]
    for name in PROTOS:
        stub = descriptor_pb2.FileDescriptorProto()
        importlib.import_module(f"pannier.v1.{name}_pb2").DESCRIPTOR.CopyToProto(stub)
        proto = files[stub.name]
        for message in proto.message_type:
            # A map's entries are a message of its own.
            for part in (message, *message.nested_type):
                for field in part.field:
                    field.ClearField("json_name")
        proto.DiscardUnknownFields()  # type: ignore[attr-defined]
        assert stub == proto, f"{stub.name} was changed without `make stubs`"


def packages() -> set[str]:
    return {
        f"pannier.{package.name}"
        for root in ROOTS
        for package in (REPOSITORY / root / "pannier").iterdir()
        if package.is_dir() and package.name != "__pycache__"
    }


def test_every_package_is_typed_and_checked() -> None:
    tools = pyproject()["tool"]
    assert set(tools["mypy"]["packages"]) == packages()
    for root in ROOTS:
        for package in (REPOSITORY / root / "pannier").iterdir():
            if f"pannier.{package.name}" in packages():
                assert (package / "py.typed").exists(), package


def test_the_version_is_that_of_the_distribution_and_read_when_asked_for() -> None:
    program = (
        "import sys, pannier\n"
        "assert 'importlib.metadata' not in sys.modules\n"
        "assert not hasattr(pannier, 'versoin')\n"
        "print(pannier.__version__)"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == pyproject()["project"]["version"]


def test_the_layers_of_all_three_roots_are_checked() -> None:
    """The tool looks for modules where the imported ``pannier`` says that they are."""
    import pannier

    assert {*pannier.__path__} >= {str(REPOSITORY / root / "pannier") for root in ROOTS}
    assert pyproject()["tool"]["importlinter"]["root_package"] == "pannier"
    assert "import pannier; from importlinter.cli" in (REPOSITORY / "Makefile").read_text()
    assert "make check-layers" in (REPOSITORY / ".pre-commit-config.yaml").read_text()


def test_the_wheel_holds_all_three_roots(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, REPOSITORY),
        ],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(REPOSITORY / root))
        for root in ROOTS
        for path in (REPOSITORY / root / "pannier").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"pannier/v1/{name}.proto" for name in PROTOS} <= sources
    assert {name for name in names if ".dist-info/" not in name} == sources
    metadata = {name.partition(".dist-info/")[2] for name in names}
    assert "licenses/LICENSE" in metadata
    scripts = next(name for name in names if name.endswith("entry_points.txt"))
    assert "pannier = pannier.cli.main:main" in zipfile.ZipFile(wheel).read(scripts).decode()
