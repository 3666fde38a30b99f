"""The client with nothing configured: its own daemons, on this machine, for real."""

import fcntl
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client.client import Client
from pannier.client.config import load_settings
from pannier.client.embedded.daemon_spec import host_daemons
from pannier.client.embedded.launcher import is_idle
from pannier.wire.errors import ConfigurationError, UnavailableError
from support.actors.scripted_sidecar import wait_until
from support.network.several_hosts import listeners
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S


def load(path: Path, **like: torch.Tensor) -> dict[str, torch.Tensor]:
    """What plain DCP finds there."""
    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def running(directory: Path) -> list[psutil.Process]:
    """The supervisor of a runtime directory and its children."""
    supervisor = psutil.Process(int((directory / "up.pid").read_text()))
    return [supervisor, *supervisor.children(recursive=True)]


@pytest.mark.usefixtures("embedded")
def test_a_first_save_needs_nothing_but_the_call(tmp_path: Path) -> None:
    weights = torch.randn(300, 200)
    with Client(load_settings()) as client:
        handle = client.async_save({"w": weights}, checkpoint_id=tmp_path / "step-1")
        expected = weights.clone()
        weights.zero_()
        result = handle.result(BOUND_S)
        assert client.latest(tmp_path) == str(tmp_path / "step-1")
    assert torch.equal(load(tmp_path / "step-1", w=expected)["w"], expected)
    assert result.metadata().state_dict_metadata["w"].size == expected.shape


_RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 16
    def __getitem__(self, index): return os.getpid()

from pannier import client

root = sys.argv[1] if len(sys.argv) > 1 else os.environ["ROOT"]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 0}

collectives = []
def forbid(name, original):
    def call(*arguments, **keywords):
        collectives.append(name)
        return original(*arguments, **keywords)
    return call
for name in ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
             "all_reduce", "barrier", "all_gather", "broadcast", "reduce", "gather", "scatter"):
    setattr(dist, name, forbid(name, getattr(dist, name)))

handles = []
for step in range(3):
    state["step"] = step
    handles.append(client.async_save(state, checkpoint_id=f"{root}/step-{step}"))
    # Workers are forked while bytes are on their way.
    pids = {int(p) for batch in DataLoader(Numbers(), num_workers=2) for p in batch}
    assert len(pids) == 2
results = [handle.result(60) for handle in handles]
client.close()
assert not collectives, collectives
print("numbers", [result.attempt.rsplit("-", 1)[1] for result in results])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_needs_no_other_step(embedded: Path, tmp_path: Path) -> None:
    environment = {
        "PANNIER_RUNTIME_DIR": str(embedded),
        "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
        "ROOT": str(tmp_path / "run"),
    }
    with start_ranks(_RANKS, 2, environment) as ranks:
        finished = ranks.wait(120).check()
    assert all("numbers ['s1', 's2', 's3']" in output for output in finished.outputs)
    full = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
    for step in range(3):
        assert torch.equal(load(tmp_path / "run" / f"step-{step}", w=full)["w"], full)


_BOUND = """
import ctypes, os, torch
from pannier import client
# As `numactl --membind=0` (MPOL_BIND); EPERM: a container that forbids it.
bound = os.uname().machine == "x86_64" and not ctypes.CDLL(None).syscall(
    238, 2, ctypes.byref(ctypes.c_ulong(1)), 64
)
client.save({"w": torch.ones(10)}, checkpoint_id=os.environ["ROOT"] + "/step-1")
assert os.sched_getaffinity(0) == {int(os.environ["CORE"])}
print("memory", bound, "policy", open("/proc/self/numa_maps").readline().split()[1])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process is bound to one core")
def test_daemons_do_not_share_the_core_and_memory_that_their_rank_is_bound_to(
    embedded: Path, tmp_path: Path
) -> None:
    """As ``torchrun --numa-binding`` and ``srun --cpu-bind`` bind the rank that starts them."""
    cores = os.sched_getaffinity(0)
    environment = {
        "PANNIER_RUNTIME_DIR": str(embedded),
        "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
        "ROOT": str(tmp_path),
        "CORE": str(min(cores)),
    }
    script = f"import os\nos.sched_setaffinity(0, {{{min(cores)}}})\n{_BOUND}"
    with start_ranks(script, 1, environment) as ranks:
        (output,) = ranks.wait(120).check().outputs
    daemons = running(embedded)
    assert len(daemons) == 3
    for daemon in daemons:
        assert cores <= set(daemon.cpu_affinity())
        if "memory True policy bind:0" in output:
            policy = Path(f"/proc/{daemon.pid}/numa_maps").read_text().split()[1]
            assert policy == "default"


_INTERRUPTED = """
import os, time, torch
from pannier import client
handle = client.async_save(
    {"w": torch.ones(4_000_000)}, checkpoint_id=os.environ["ROOT"] + "/step-1"
)
while handle.status().bytes_ingested < 16_000_000 or handle.status().state == "STAGING":
    time.sleep(0.01)
print("ingested", flush=True)
time.sleep(60)
"""


def test_the_daemons_outlive_ctrl_c_and_a_launcher_that_ends_its_workers(
    embedded: Path, tmp_path: Path
) -> None:
    environment = {
        "PANNIER_RUNTIME_DIR": str(embedded),
        "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
        "ROOT": str(tmp_path),
    }
    with start_ranks(_INTERRUPTED, 1, environment, torchrun=False) as ranks:
        ranks.wait_for("ingested")
        before = running(embedded)
        assert len(before) == 3
        trainer = ranks.processes[0]
        assert not set(before) & set(psutil.Process(trainer.pid).children(recursive=True))
        assert not {os.getsid(p.pid) for p in before} & {os.getsid(trainer.pid)}
        os.killpg(os.getpgid(trainer.pid), signal.SIGINT)
        os.killpg(os.getpgid(trainer.pid), signal.SIGKILL)
        ranks.wait(BOUND_S)
    deadline = time.monotonic() + 30
    while not (tmp_path / "step-1" / ".metadata").exists():
        assert time.monotonic() < deadline, "the save was not committed"
        time.sleep(0.05)
    assert running(embedded) == before
    assert torch.equal(
        load(tmp_path / "step-1", w=torch.ones(4_000_000))["w"], torch.ones(4_000_000)
    )


def test_daemons_that_were_killed_are_started_again(embedded: Path, tmp_path: Path) -> None:
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-1")
        for process in running(embedded):
            # They end with their supervisor.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-2")
    assert torch.equal(load(tmp_path / "step-2", w=torch.ones(10))["w"], torch.ones(10))


def test_they_listen_on_this_users_sockets_only(embedded: Path, tmp_path: Path) -> None:
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-1")
        for process in running(embedded):
            assert not [c for c in process.net_connections("inet") if c.status == "LISTEN"]
        assert (embedded / "sidecar.sock").stat().st_mode & 0o777 == 0o600
        assert embedded.stat().st_mode & 0o777 == 0o700


_ALONE = """
import os, torch, torch.distributed as dist
from pannier import client
dist.init_process_group("gloo")
client.save({"w": torch.ones(10)}, checkpoint_id=os.environ["ROOT"] + "/step-1")
client.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_one_host_open_no_port_whatever_the_launcher_says(
    embedded: Path, tmp_path: Path
) -> None:
    environment = {
        "PANNIER_RUNTIME_DIR": str(embedded),
        "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
        "ROOT": str(tmp_path),
    }

    def as_of_two_agents(rank: int) -> dict[str, str]:
        return {"LOCAL_WORLD_SIZE": "1"}

    with start_ranks(_ALONE, 2, environment, torchrun=False, rank_env=as_of_two_agents) as ranks:
        ranks.wait(120).check()
    assert [path.name for path in embedded.glob("*/up.pid")] == []
    for process in running(embedded):
        assert listeners(process) == []
    assert torch.equal(load(tmp_path / "step-1", w=torch.ones(10))["w"], torch.ones(10))


def test_a_trainer_with_another_endpoint_is_refused_and_one_with_new_credentials_gets_new_daemons(
    embedded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {"w": torch.ones(10)}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with Client(load_settings()) as client:
        client.save(state, checkpoint_id=tmp_path / "step-1")
    before = running(embedded)

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:2")
    with (
        Client(load_settings()) as client,
        pytest.raises(ConfigurationError, match=f"STORAGE_EMULATOR_HOST.*pannier down.*{embedded}"),
    ):
        client.save(state, checkpoint_id=tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    wait_until(lambda: is_idle(host_daemons(load_settings())))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "rotated")
    with Client(load_settings()) as client:
        # Idle daemons would go on with what may have expired.
        client.save(state, checkpoint_id=tmp_path / "step-2")
        new = running(embedded)
        assert not set(new) & set(before)

        monkeypatch.setenv("AWS_SESSION_TOKEN", "rotated again")
        with Client(load_settings()) as other:
            other.save(state, checkpoint_id=tmp_path / "step-3")
        assert "other credentials" in caplog.text
        assert running(embedded) == new


def test_an_embedded_sidecar_uses_the_coordinator_that_is_named(
    daemons: Daemons, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANNIER_COORDINATOR", daemons.coordinator_address)
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-1")
    supervisor = psutil.Process(int((embedded / "up.pid").read_text()))
    (sidecar,) = supervisor.children()
    assert "sidecar" in sidecar.cmdline()
    assert not (embedded / "coordinator.sock").exists()
    assert torch.equal(load(tmp_path / "step-1", w=torch.ones(10))["w"], torch.ones(10))


def has_ended(process: psutil.Process) -> bool:
    """Perhaps as a zombie."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


_ONE_SAVE = """
import os, torch
from pannier import client
client.save({"w": torch.ones(1000)}, checkpoint_id=os.environ["ROOT"] + "/step-2")
"""


def test_a_cleaner_of_tmp_leaves_the_runtime_directory_alone(
    embedded: Path, tmp_path: Path
) -> None:
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-1")
        fd = os.open(embedded, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # So does systemd-tmpfiles before it removes anything below a directory.
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)


def remove(directory: Path) -> None:
    """Removes a directory; the supervisor may put its files back meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("removed", ["sockets", "directory"])
def test_saves_go_on_when_a_cleaner_has_removed_the(
    removed: str, embedded: Path, tmp_path: Path
) -> None:
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "step-1")
        before = running(embedded)
        if removed == "directory":
            remove(embedded)
        else:
            for socket in embedded.glob("*.sock*"):
                socket.unlink()
        # Another trainer finds the same daemons again, and starts no others.
        environment = {
            "PANNIER_RUNTIME_DIR": str(embedded),
            "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
            "ROOT": str(tmp_path),
        }
        with start_ranks(_ONE_SAVE, 1, environment, torchrun=False) as ranks:
            ranks.wait(BOUND_S).check()
        assert running(embedded)[0] == before[0]
        # The one that was connected saves another structure.
        client.save({"v": torch.ones(2000)}, checkpoint_id=tmp_path / "step-3")
    assert load(tmp_path / "step-2", w=torch.ones(1000))
    assert "step-3" in pannier("status", env=environment).out
    assert "the daemons have exited" in pannier("down", env=environment).out
    assert has_ended(before[0])


def test_daemons_whose_directory_was_removed_just_now_are_ended_by_down(
    embedded: Path, tmp_path: Path
) -> None:
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "step-1")
    (supervisor, *_) = running(embedded)
    remove(embedded)
    ended = pannier("down", "--runtime-dir", str(embedded))
    assert "the daemons have exited" in ended.out, ended
    assert has_ended(supervisor)


def test_a_coordinator_that_refuses_its_configuration_is_an_error_at_once(
    embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANNIER_KEEP_NEWEST", "many")
    with (
        Client(load_settings()) as client,
        pytest.raises(UnavailableError, match=r"(?s)exited while starting.*PANNIER_KEEP_NEWEST"),
    ):
        client.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "step-1")
