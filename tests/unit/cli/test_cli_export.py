"""``pannier export``, which exports in a process of its own."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from pannier.client.loading.filesystem import open_dir
from support.processes.cli import pannier, pannier_here
from support.processes.daemons import clean_environment
from support.processes.processes import Process, python
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "step-3"
    state = {"model": {"a": torch.arange(6.0), "b": torch.ones(2, 2), "_extra": 1}, "step": 3}
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def test_tensors_are_written_and_counted(checkpoint: Path, tmp_path: Path) -> None:
    result = pannier(
        *("export", str(checkpoint), str(tmp_path / "out"), "--json", "--prefix", "model."),
        *("--key", "[ab]", "--key", "_extra", "--exclude", "_*", "--dtype", "bfloat16"),
        *("--max-file-size", "12B"),
    )
    assert result.code == 0, result
    assert result.err == ""
    answer = result.json()
    seconds = answer.pop("seconds")
    assert 0 < seconds < BOUND_S
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert answer == {
        "checkpoint": str(checkpoint),
        "directory": str(tmp_path / "out"),
        "files": sizes,
        "tensors": 2,
        "bytes": sum(sizes.values()),
    }
    assert len(sizes) == 3
    first = safetensors.torch.load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")
    assert torch.equal(first["a"], torch.arange(6.0, dtype=torch.bfloat16))


def test_an_error_of_the_worker_is_the_commands(tmp_path: Path) -> None:
    result = pannier("export", str(tmp_path / "nothing"), str(tmp_path / "out"))
    assert result.code == 1, result
    assert result.err.startswith(f"error: {tmp_path}/nothing is no checkpoint: it doesn't exist")
    assert "credentials" not in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = pannier_here("export", str(checkpoint), "/nowhere/out")
    assert result.code == 2
    assert "needs torch, numpy, safetensors, not installed in" in result.err
    assert "pip install torch numpy safetensors there" in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """While its worker waits for storage; SIGTERM ends the command as SIGKILL does."""
    (tmp_path / "out").mkdir()
    with GcsServer(tmp_path / "gcs") as server:
        store = open_dir("gs://bucket/step-3", {"endpoint_url": server.url})
        for file in checkpoint.iterdir():
            store.write(file.name, file.read_bytes())
        server.fault(kind="delay", method="GET", path="distcp", seconds=2 * BOUND_S, times=-1)
        arguments = ("export", "gs://bucket/step-3", str(tmp_path / "out/step-3"), "--key", "*.a")
        process = Process(
            "export",
            python("-m", "pannier.cli", *arguments),
            environment=clean_environment(server.env),
            log=tmp_path / "log",
        )
        try:
            until(lambda: any(fault["hits"] for fault in server.faults()), process)
            (worker,) = psutil.Process(process.pid).children()
            assert [p.suffix for p in (tmp_path / "out").iterdir()] == [".partial"]
            process.signal(number)
            process.wait(BOUND_S)
            psutil.wait_procs([worker], timeout=BOUND_S)
            assert not worker.is_running(), process.log()
        finally:
            process.close()
    assert list((tmp_path / "out").iterdir()) == []
    assert "Traceback" not in process.log()


def until(condition: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert process.returncode is None, process.log()
        assert time.monotonic() < deadline, process.log()
        time.sleep(0.05)
