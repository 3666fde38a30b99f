"""Every test leaves the machine as it found it, and shows its daemons' logs when it fails."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from support.processes import processes
from support.processes.daemons import Daemons, memory_directory, short_directory
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

if TYPE_CHECKING:
    from pannier.client import Client

# The environment's settings don't reach the tests, but for the scale of all durations and the
# transport of tests that have no opinion on it; what they set themselves is inherited.
_KEPT = ["PANNIER_TIME_SCALE", "PANNIER_TRANSPORT"]
if os.environ.get("STORE_URL"):
    # See support.storage.given_store.
    _KEPT.append("PANNIER_STORAGE_OPTIONS")
for _name in [name for name in os.environ if name.startswith("PANNIER_")]:
    if _name not in _KEPT:
        del os.environ[_name]
os.environ[processes.MARKER] = processes.SESSION
# Of the terminal that pytest itself writes to.
os.environ.pop("COLUMNS", None)
# Inherited by everything that is started here; see gcsfs' layout lookup.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# The same examples each time, however slow the machine is. `--hypothesis-profile=random` tries others.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")

# A shell's background job ignores it, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers of Python itself that live as long as the interpreter.
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.extend((f"log of {title}", text) for title, text in processes.logs())
    return report


def _started_since(known: set[int]) -> list[psutil.Process]:
    found = []
    for process in processes.marked(known):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not any(word in command for word in _PYTHONS_OWN):
            found.append(process)
    return found


def _left_files() -> set[str]:
    pattern = f"pannier-{processes.SESSION}*"
    return {str(path) for root in ("/tmp", "/dev/shm") for path in Path(root).glob(pattern)}


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}"


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves processes, sockets or shared memory; removes them all the same."""
    processes.forget_logs()
    known = {*psutil.pids()}
    files = _left_files()
    yield
    deadline = time.monotonic() + BOUND_S
    while True:
        left = _started_since(known)
        if not left or time.monotonic() > deadline:
            break
        # Processes that were just signalled to end may need a moment.
        psutil.wait_procs(left, timeout=0.05)
    complaints = [_describe(process) for process in left]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for path in _left_files() - files:
        complaints.append(path)
        shutil.rmtree(path, ignore_errors=True)
        Path(path).unlink(missing_ok=True)
    if complaints:
        pytest.fail("left behind: " + ", ".join(complaints))


@pytest.fixture(scope="module", autouse=True)
def leaves_no_default_client() -> Iterator[None]:
    """The client of the module-level functions: the next file's would save through daemons that are gone."""
    yield
    module = sys.modules.get("pannier.client.default")
    if module is not None and module._default is not None:
        module.close(BOUND_S)
        pytest.fail("left open: the default client")


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory whose path leaves room for a Unix socket's name."""
    directory = short_directory()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """One coordinator and one sidecar, ready."""
    with Daemons(tmp_path) as running:
        yield running


@pytest.fixture
def client(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Client]":
    """One beside the test's daemons, of a single process without torch.distributed."""
    # Not above: it imports torch, and the environment is cleaned first.
    from pannier.client import Client
    from pannier.client.config import load_settings

    for name, value in {**daemons.env(), **daemons.environment}.items():
        monkeypatch.setenv(name, value)
    with Client(load_settings()) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A bucket, ``gs://bucket``; a test that makes it fail clears that again."""
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runtime directory for embedded daemons of this test, which are ended with it."""
    directory, spool = short_directory(), memory_directory()
    monkeypatch.setenv("PANNIER_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("PANNIER_SPOOL", str(spool))
    before = {*psutil.pids()}
    yield directory
    logs = [(path.name, path.read_text(errors="replace")) for path in directory.glob("*.log")]
    processes.keep_logs(logs)
    processes.end(_started_since(before))
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(spool, ignore_errors=True)
