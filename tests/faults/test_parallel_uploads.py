"""Several data files go up at the same time when the sidecar is killed or stopped, or their save is aborted; and their limit."""

import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import PannierError
from support.actors.scripted import ScriptedCoordinator, Trainer
from support.actors.scripted_sidecar import wait_until
from support.network.certificates import Authority
from support.processes.daemons import Daemon, clean_environment, memory_directory, short_directory
from support.processes.stretch import BOUND_S
from support.processes.watching import await_save, listed
from support.storage.bucket import content, generations
from support.storage.gcs_server import GcsServer
from support.storage.sources import some_bytes

MIB = 1 << 20
FILES = 4
SIZE = 9 * MIB + 77
"""Of a file: more than one request takes."""
PIECES = {"method": "PUT", "path": "upload_id"}
COMMITTED = save_pb2.SAVE_STATE_COMMITTED
ABORTED = save_pb2.SAVE_STATE_ABORTED
DURABLE = save_pb2.RANK_PHASE_DURABLE


class Host:
    """A sidecar with two upload threads, a scripted coordinator, and a bucket."""

    def __init__(self, server: GcsServer, logs: Path, sockets: Path, memory: Path) -> None:
        self.server = server
        self.coordinator = ScriptedCoordinator(f"unix://{sockets}/c.sock")
        self.sidecar = Daemon(
            "sidecar",
            f"unix://{sockets}/s.sock",
            [
                *("sidecar", "--address", f"unix://{sockets}/s.sock", "--host", "node-0"),
                *("--coordinator", self.coordinator.address, "--spool", str(memory / "spool")),
                *("--upload-threads", "2", "--grace", str(BOUND_S)),
            ],
            clean_environment(server.env),
            logs,
        )

    @property
    def under_way(self) -> set[str]:
        """Files of which a part is on its way to the bucket, which answers none of them."""
        return {path for method, path, _ in self.server.requests() if method == "PUT"}

    def save(self, trainer: Trainer, step: int) -> sidecar_pb2.SaveContext:
        """Hands over a save, all of whose files are on their way when it returns."""
        before = self.under_way
        context = trainer.context(f"gs://bucket/{self.sidecar.pid}/step-{step}", step)
        trainer.hand_over(
            context,
            *(trainer.write(context, str(n), some_bytes(SIZE, n)) for n in range(FILES)),
        )
        wait_until(lambda: len(self.under_way - before) == FILES)
        return context

    def check(self, trainer: Trainer, context: sidecar_pb2.SaveContext) -> None:
        """Awaits that the rank is durable, and compares its objects with what was handed over."""
        self.coordinator.await_phase(context, DURABLE)
        for number in range(FILES):
            name = trainer.header(context, str(number), SIZE).name
            assert content(self.server, f"{place(context)}/{name}") == some_bytes(SIZE, number)


def place(context: sidecar_pb2.SaveContext) -> str:
    """Of the save's objects in the bucket."""
    return context.checkpoint_id.removeprefix("gs://bucket/")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


@pytest.fixture
def host(server: GcsServer, tmp_path: Path) -> Iterator[Host]:
    sockets, memory = short_directory(), memory_directory()
    made = Host(server, tmp_path, sockets, memory)
    try:
        with made.coordinator:
            yield made
    finally:
        server.clear()
        made.sidecar.close()
        shutil.rmtree(sockets)
        shutil.rmtree(memory)


def test_a_sidecar_that_is_killed_while_several_files_go_up_is_resumed_by_the_next(
    host: Host,
) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        host.server.fault(kind="delay", seconds=BOUND_S, times=-1, **PIECES)
        context = host.save(trainer, 1)
        host.sidecar.kill()
        host.server.clear()
        host.server.release()
        before = len(host.coordinator.reports)
        host.sidecar.start()
        host.coordinator.await_phase(context, DURABLE, after=before)
        host.check(trainer, context)


def test_data_files_go_up_over_tls(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ca").issue("store")
    sockets, memory = short_directory(), memory_directory()
    with GcsServer(tmp_path / "encrypted", tls=tls) as server:
        made = Host(server, tmp_path, sockets, memory)
        # aiohttp reads the authority's certificate when it is imported.
        made.sidecar.forked = False
        try:
            with made.coordinator:
                made.sidecar.start()
                with Trainer(made.sidecar.address) as trainer:
                    made.check(trainer, made.save(trainer, 1))
        finally:
            made.sidecar.close()
            shutil.rmtree(sockets)
            shutil.rmtree(memory)


def test_sigterm_lets_all_files_that_go_up_arrive(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        host.server.fault(kind="delay", seconds=BOUND_S, times=-1, **PIECES)
        context = host.save(trainer, 1)
        host.sidecar.process.signal(signal.SIGTERM)
        wait_until(lambda: listed(host.sidecar.address).daemon_state == "draining")
        host.server.clear()
        host.server.release()
        host.check(trainer, context)
        assert host.sidecar.process.wait(BOUND_S) == 0


def test_an_abort_stops_all_files_that_go_up_although_storage_does_not_answer(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        host.server.fault(kind="delay", seconds=10 * BOUND_S, times=-1, **PIECES)
        before = set(host.server.sessions())
        context = host.save(trainer, 1)
        host.coordinator.decide(context, ABORTED)
        # Their room is free, and no session is left, long before storage would have answered.
        wait_until(lambda: listed(host.sidecar.address).spool_saves_bytes == 0)
        wait_until(lambda: not set(host.server.sessions()) - before)
        host.server.clear()
        host.server.release()
        after = host.save(trainer, 2)
        host.check(trainer, after)
        assert not generations(host.server, place(context))
        host.coordinator.decide(after, COMMITTED)
        trainer.await_state(after, COMMITTED)


def test_what_goes_wrong_with_one_of_several_files_is_the_ranks_failure_by_name(host: Host) -> None:
    host.sidecar.start()
    with Trainer(host.sidecar.address) as trainer:
        host.server.fault(kind="status", method="PUT", status=403, message="no quota", path="_2.d")
        context = trainer.context("gs://bucket/refused/step-1")
        # It may have failed before all of them are here.
        with suppress(PannierError):
            trainer.hand_over(
                context,
                *(trainer.write(context, str(n), some_bytes(SIZE, n)) for n in range(FILES)),
            )
        report = host.coordinator.await_phase(context, save_pb2.RANK_PHASE_FAILED)
        assert "_2.distcp: 403 no quota" in report.failure.message
        assert report.failure.kind == save_pb2.FAILURE_KIND_STORAGE


def test_the_limit_of_uploads_is_shown_while_it_limits(host: Host) -> None:
    host.sidecar.arguments += ["--upload-limit", "2MiB"]
    host.sidecar.start()
    assert listed(host.sidecar.address).upload_limit == 2 * MIB
    assert not listed(host.sidecar.address).upload_limited
    with Trainer(host.sidecar.address) as trainer:
        context = trainer.context("gs://bucket/limited/step-1")
        trainer.hand_over(
            context, *(trainer.write(context, str(n), some_bytes(12 * MIB, n)) for n in range(2))
        )
        wait_until(lambda: listed(host.sidecar.address).upload_limited)
        host.coordinator.await_phase(context, DURABLE)
        reached = await_save(host.sidecar.address, context.checkpoint_id, lambda save: True)
        (rank,) = reached.ranks
        assert rank.bytes_durable == 24 * MIB
        wait_until(lambda: not listed(host.sidecar.address).upload_limited)
