"""A sidecar that is killed or stopped resumes where it was when it is started on its spool."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.v1 import save_pb2
from pannier.wire import addresses
from support.actors.scripted import ScriptedCoordinator, Trainer
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import (
    Daemon,
    Daemons,
    clean_environment,
    memory_directory,
    short_directory,
)
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import all_in, await_save, listed
from support.states.dcp_readers import plain_load
from support.storage.directories import files_below
from support.storage.gcs_server import GcsServer

MIB = 1 << 20
INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)
STREAMING = save_pb2.RANK_PHASE_STREAMING
DURABLE = save_pb2.RANK_PHASE_DURABLE
COMMITTED = save_pb2.SAVE_STATE_COMMITTED
ABORTED = save_pb2.SAVE_STATE_ABORTED


class Host:
    """A real sidecar between a scripted coordinator and scripted trainers."""

    def __init__(self, logs: Path, sockets: Path, memory: Path) -> None:
        self.coordinator = ScriptedCoordinator(f"unix://{sockets}/c.sock")
        self.root, self.spool = memory / "root", memory / "spool"
        self.sidecar = Daemon(
            "sidecar",
            f"unix://{sockets}/s.sock",
            [
                *("sidecar", "--address", f"unix://{sockets}/s.sock", "--host", "node-0"),
                *("--coordinator", self.coordinator.address, "--spool", str(self.spool)),
                *("--grace", "1"),
            ],
            clean_environment(),
            logs,
        )

    def id(self, step: int = 1) -> str:
        return f"{self.root}/step-{step}"

    def left(self) -> list[str]:
        """Names of what lies in the spool."""
        return sorted(path.name for path in self.spool.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    sockets, memory = short_directory(), memory_directory()
    made = Host(tmp_path, sockets, memory)
    try:
        with made.coordinator:
            yield made
    finally:
        made.sidecar.close()
        shutil.rmtree(sockets)
        shutil.rmtree(memory)


def test_a_stream_goes_on_at_the_offset_that_the_killed_sidecar_held(host: Host) -> None:
    host.sidecar.start()
    data = os.urandom(40 * MIB)
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(host.id())
        header = trainer.header(context, "0", len(data))
        with trainer.stream(header) as stream:
            assert stream.committed() == 0
            for offset in range(0, 36 * MIB, MIB):
                stream.send(data[offset : offset + MIB], offset)
            assert [stream.committed(), stream.committed()] == [16 * MIB, 32 * MIB]
            host.sidecar.kill()
        # Its last reports have been read.
        wait_until(lambda: not host.coordinator._streams)
        before = len(host.coordinator.reports)
        host.sidecar.start()
        trainer.connect()
        # The report reaches the coordinator before it would count the rank as lost.
        report = host.coordinator.await_phase(context, STREAMING, after=before)
        assert report.status.bytes_ingested == 32 * MIB
        with trainer.stream(header) as stream:
            assert stream.committed() == 32 * MIB
        trainer.hand_over(context, trainer.write(context, "0", data))
        host.coordinator.await_phase(context, DURABLE)
        host.coordinator.decide(context, COMMITTED)
        trainer.await_state(context, COMMITTED)
    assert (Path(host.id()) / header.name).read_bytes() == data
    assert host.sidecar.stop() == 0
    # Its local copy.
    assert host.left() == ["00000001.data", "journal"]


def test_an_abort_that_no_sidecar_received_is_cleaned_up_after_the_restart(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(host.id())
        trainer.hand_over(context, trainer.write(context, "0", os.urandom(MIB)))
        host.coordinator.await_phase(context, DURABLE)
    host.sidecar.kill()
    # Its last reports have been read.
    wait_until(lambda: not host.coordinator._streams)
    before = len(host.coordinator.reports)
    host.sidecar.start()
    report = host.coordinator.await_phase(context, DURABLE, after=before)
    assert report.HasField("receipt")
    assert files_below(host.root)
    host.coordinator.decide(context, ABORTED)
    wait_until(lambda: not files_below(host.root))
    assert host.sidecar.stop() == 0
    assert host.left() == []


def test_what_sigterm_finds_pending_is_carried_on_by_the_next_sidecar(host: Host) -> None:
    host.sidecar.start()
    data = [os.urandom(3 * MIB), os.urandom(20 * MIB)]
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(host.id())
        first = trainer.write(context, "0", data[0])
        wait_until((Path(host.id()) / first.name).exists)
        with trainer.stream(trainer.header(context, "1", 20 * MIB)) as stream:
            stream.committed()
            for offset in range(0, 18 * MIB, MIB):
                stream.send(data[1][offset : offset + MIB], offset)
            assert stream.committed() == 16 * MIB
            assert host.sidecar.stop() == 0
        assert "left behind, streaming" in host.sidecar.log()
        # The first file is in storage, and will be a part of the local copy.
        assert host.left() == ["00000001.data", "00000002.data", "journal"]
        host.sidecar.start()
        trainer.connect()
        # Its client may not know that it arrived.
        assert trainer.write(context, "0", data[0]) == first
        trainer.hand_over(context, first, trainer.write(context, "1", data[1]))
        host.coordinator.await_phase(context, DURABLE)
    found = {path.read_bytes() for path in Path(host.id()).glob("*.distcp")}
    assert found == set(data)


# With the real coordinator, client and store.


@pytest.fixture
def daemons(server: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    flags = ("--grace", "1")
    with Daemons(tmp_path, environment=server.env, sidecar_arguments=flags) as running:
        yield running
    server.clear()


def slow_down(server: GcsServer) -> None:
    """Of each large file one piece is taken, and then nothing, until ``server.clear()``."""
    server.fault(kind="status", method="PUT", path="upload_id", status=503, times=-1, skip=1)


TRAINER = """
import os, time, torch
from pannier import client
state = {"w": torch.arange(5 * 2**20, dtype=torch.float64), "step": 7}
handle = client.async_save(state, checkpoint_id=os.environ["TARGET"])
print("result", handle.result(60).attempt, flush=True)
"""
LENGTH = 5 * 2**20


def check(target: str, server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    loaded = {"w": torch.zeros(LENGTH, dtype=torch.float64), "step": 0}
    plain_load(loaded, target)
    assert torch.equal(loaded["w"], torch.arange(LENGTH, dtype=torch.float64))
    assert loaded["step"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mapped", "streamed"])
def test_a_half_uploaded_save_is_committed_though_its_trainer_is_dead(
    daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    target = f"gs://bucket/half-{transport}/step-1"
    slow_down(server)
    environment = {**daemons.env(PANNIER_TRANSPORT=transport), **server.env, "TARGET": target}
    with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
        await_save(daemons.coordinator_address, target, INGESTED)
        wait_until(lambda: any("upload_id" in path for _, path, _ in server.requests()))
        ranks.kill()
    daemons.sidecar.kill()
    server.clear()
    daemons.sidecar.start()
    await_save(daemons.coordinator_address, target, lambda s: s.state == COMMITTED)
    check(target, server, monkeypatch)
    wait_until(lambda: bool(listed(daemons.sidecar_address).local_copies))
    (copy,) = listed(daemons.sidecar_address).local_copies
    assert daemons.sidecar.stop() == 0
    assert len(list((daemons.spool / "0").glob("*.data"))) == copy.files


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mapped", "streamed"])
def test_the_client_goes_on_by_itself_when_both_daemons_are_killed(
    daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    target = f"gs://bucket/both-{transport}/step-1"
    slow_down(server)
    environment = {**daemons.env(PANNIER_TRANSPORT=transport), **server.env, "TARGET": target}
    with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
        await_save(daemons.coordinator_address, target, INGESTED)
        daemons.sidecar.kill()
        daemons.coordinator.kill()
        server.clear()
        daemons.sidecar.start()
        daemons.coordinator.start()
        ranks.wait_for("result")
        ranks.wait(BOUND_S).check()
    check(target, server, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)]
)
def test_embedded_daemons_that_end_with_their_trainer_leave_it_to_the_next(
    embedded: Path, server: GcsServer, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    """All processes of the job are gone; the next run's first call finishes what it had saved."""
    target = f"gs://bucket/embedded-{ending.name}/step-1"
    slow_down(server)
    environment = {
        **server.env,
        "PANNIER_RUNTIME_DIR": str(embedded),
        "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
        "PANNIER_GRACE": "1",
        "TARGET": target,
    }
    with start_ranks(TRAINER, 1, environment, torchrun=False) as ranks:
        sidecar = addresses.embedded_sidecar(embedded)
        wait_until(Path(sidecar.removeprefix("unix://")).exists)
        await_save(sidecar, target, INGESTED)
        ranks.kill()
    supervisor = psutil.Process(int((embedded / "up.pid").read_text()))
    daemons = supervisor.children(recursive=True)
    if ending == signal.SIGTERM:
        supervisor.terminate()
    else:
        # In the order in which none can start the others again.
        for process in (supervisor, *daemons):
            process.kill()
    _, alive = psutil.wait_procs([supervisor, *daemons], timeout=BOUND_S)
    assert not alive
    server.clear()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Client(load_settings()) as client:
        client.save({"w": torch.ones(10)}, checkpoint_id=target + "-next", timeout=BOUND_S)
        root = target.rpartition("/")[0]
        wait_until(lambda: target in [i.checkpoint_id for i in client.list(root)])
    check(target, server, monkeypatch)
