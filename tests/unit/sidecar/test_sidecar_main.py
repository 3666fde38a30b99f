"""A real sidecar process, from the command line to its exit."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pannier.v1 import save_pb2
from pannier.wire import errors
from support.actors.scripted import PLAN_ID, ScriptedCoordinator, Trainer, data_file
from support.processes.daemons import Daemon, clean_environment, memory_directory, short_directory
from support.processes.stretch import BOUND_S

MIB = 1 << 20


class Host:
    def __init__(self, tmp_path: Path, sockets: Path, memory: Path, *flags: str) -> None:
        self.coordinator = ScriptedCoordinator(f"unix://{sockets}/c.sock")
        self.root = memory / "root"
        self.spool = memory / "spool"
        self.sidecar = Daemon(
            "sidecar",
            f"unix://{sockets}/s.sock",
            [
                *("sidecar", "--address", f"unix://{sockets}/s.sock", "--host", "node-0"),
                *("--coordinator", self.coordinator.address, "--spool", str(self.spool)),
                *flags,
            ],
            clean_environment({}),
            tmp_path,
        )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    sockets, memory = short_directory(), memory_directory()
    made = Host(tmp_path, sockets, memory, "--grace", "10")
    try:
        with made.coordinator:
            yield made
    finally:
        made.sidecar.close()
        shutil.rmtree(sockets)
        shutil.rmtree(memory)


def test_sigterm_finishes_uploads_and_leaves_what_a_restart_needs(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(f"{host.root}/step-1")
        trainer.hand_over(context, trainer.write(context, "0", os.urandom(64 * MIB)))
        assert host.sidecar.stop() == 0
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    # The local copy, should the save be committed.
    assert len(list(host.spool.glob("*.data"))) == 1
    assert not Path(host.sidecar.address.removeprefix("unix://")).exists()


def test_a_second_signal_ends_the_grace_period(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        trainer.plan(trainer.context(f"{host.root}/step-1"))
        host.sidecar.process.signal(signal.SIGTERM)
        time.sleep(0.5)
        assert host.sidecar.process.returncode is None
        host.sidecar.process.signal(signal.SIGTERM)
        assert host.sidecar.process.wait(BOUND_S) == 0
    assert "left behind, planned" in host.sidecar.log()


def test_an_idle_sidecar_leaves(host: Host) -> None:
    host.sidecar.arguments += ["--idle-exit", "5"]
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(f"{host.root}/step-1")
        trainer.hand_over(context)
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        host.coordinator.decide(context, save_pb2.SAVE_STATE_COMMITTED)
        trainer.await_state(context, save_pb2.SAVE_STATE_COMMITTED)
    assert host.sidecar.process.wait(BOUND_S) == 0


def test_after_sigkill_it_starts_again_on_the_same_spool_and_socket(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(f"{host.root}/step-1")
        trainer.write(context, "0", b"x" * MIB)
        host.sidecar.kill()
        with pytest.raises(errors.UnavailableError):
            trainer.plan(context, timeout_s=1)
        host.sidecar.start()
        trainer.connect()
        again = trainer.context(f"{host.root}/step-1", 2)
        trainer.hand_over(again, trainer.write(again, "0", b"y" * MIB))
        host.coordinator.await_phase(again, save_pb2.RANK_PHASE_DURABLE)


def test_a_sidecar_whose_spool_is_removed_leaves_to_be_started_again(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(f"{host.root}/step-1")
        data = os.urandom(20 * MIB)
        with trainer.stream(trainer.header(context, "0", len(data))) as stream:
            stream.committed()
            shutil.rmtree(host.spool)
            for offset in range(0, len(data), MIB):
                stream.send(data[offset : offset + MIB], offset)
            while stream.committed() < len(data):
                pass
        # The bytes are there, but no process would find them after a crash.
        with pytest.raises(errors.PannierError, match="was removed under the running sidecar"):
            trainer.hand_over(context, data_file(trainer.header(context, "0", 0).name, data))
        report = host.coordinator.await_report(lambda report: report.HasField("failure"))
        assert report.failure.kind == save_pb2.FAILURE_KIND_SPOOL
        host.coordinator.decide(context, save_pb2.SAVE_STATE_ABORTED, report.failure)
    assert host.sidecar.process.wait(BOUND_S) == 1
    assert f"the spool {host.spool} was removed" in host.sidecar.log()
    host.sidecar.start()


def test_memory_stays_small_whatever_the_size(host: Host) -> None:
    host.coordinator.files = {0: {str(n): 128 * MIB for n in range(4)}}
    host.sidecar.start()
    data = os.urandom(MIB) * 128
    process = psutil.Process(host.sidecar.pid)
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context(f"{host.root}/step-1")
        trainer.plan(context)
        files = [trainer.write(context, str(n), data) for n in range(4)]
        trainer.hand_over(context, *files, plan_id=PLAN_ID)
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        full = process.memory_full_info()
        # The files lie in the spool; what is resident beyond the code is buffers.
        assert full.uss < 300 * MIB


def test_it_never_imports_torch(host: Host) -> None:
    host.sidecar.start()
    maps = Path(f"/proc/{host.sidecar.pid}/maps").read_text()
    assert "/torch/" not in maps
    assert "/numpy/" not in maps
