"""``pannier sidecar --jobs``: a process for each job, which come, change, fail and go by themselves."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import PannierError, UnauthenticatedError
from support.actors.hosts import await_true
from support.actors.nodes import JobFiles, TokenTrainer
from support.actors.scripted import ScriptedCoordinator
from support.network.status_pages import Scrape, get
from support.processes.cli import pannier, pannier_here
from support.processes.daemons import Daemon, await_serving, clean_environment, short_directory
from support.processes.ranks import free_port
from support.processes.stretch import stretched
from support.storage.bucket import hold_up
from support.storage.gcs_server import GcsServer

MIB = 1 << 20
COMMITTED = save_pb2.SAVE_STATE_COMMITTED
DURABLE = save_pb2.RANK_PHASE_DURABLE


class Node:
    """A node's supervisor, a coordinator that is played, and trainers of its jobs."""

    def __init__(self, directory: Path) -> None:
        self.sockets = short_directory()
        self.root = directory / "root"
        self.spool = directory / "spool"
        self.files = JobFiles(directory / "jobs")
        self.coordinator = ScriptedCoordinator(f"unix://{self.sockets}/c.sock")
        self.address = f"unix://{self.sockets}/s.sock"
        self.metrics, self.health = (f"127.0.0.1:{free_port()}" for _ in range(2))
        arguments = ["sidecar", "--address", self.address, "--spool", str(self.spool)]
        arguments += ["--coordinator", self.coordinator.address, "--host", "node-0"]
        arguments += ["--jobs", str(self.files.directory), "--grace", "5"]
        arguments += ["--metrics", self.metrics, "--health", self.health]
        self.daemon = Daemon("sidecar", self.address, arguments, clean_environment(), directory)
        self._trainers: list[TokenTrainer] = []

    def job(self, name: str, **fields: object) -> str:
        fields.setdefault("allow", [str(self.root / name)])
        return self.files.add(name, **fields)

    def socket(self, job: str) -> str:
        return f"unix://{self.sockets}/jobs/{job}/sidecar.sock"

    def trainer(self, job: str) -> TokenTrainer:
        token = self.files.tokens[job]
        made = TokenTrainer(self.socket(job), token=token, job=job, client=f"c-{job}")
        self._trainers.append(made)
        await_true(lambda: connects(made), f"job {job} is served")
        return made

    def ingest(
        self, trainer: TokenTrainer, step: int, size: int = 100, root: str = ""
    ) -> sidecar_pb2.SaveContext:
        """Hands one file of a save over."""
        context = trainer.context(f"{root or self.root}/{trainer.job}/step-{step}", step)
        self.coordinator.files[0] = {"0": size}
        trainer.plan(context)
        trainer.hand_over(context, trainer.write(context, "0", b"x" * size))
        return context

    def save(self, trainer: TokenTrainer, step: int) -> None:
        """A whole save."""
        context = self.ingest(trainer, step)
        self.coordinator.await_phase(context, DURABLE)
        self.coordinator.decide(context, COMMITTED)
        trainer.await_state(context, COMMITTED)

    def process(self, job: str) -> psutil.Process:
        """The sidecar of a job."""
        lines = [x for x in self.daemon.log().splitlines() if f"of job {job} started" in x]
        return psutil.Process(int(lines[-1].split()[-1]))

    def logged(self, text: str, times: int = 1) -> None:
        await_true(lambda: self.daemon.log().count(text) >= times, f"{text!r} is logged", 30)

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.die()
        self.daemon.close()
        shutil.rmtree(self.sockets, ignore_errors=True)


def connects(trainer: TokenTrainer) -> bool:
    try:
        trainer.connect()
    except (grpc.RpcError, PannierError):
        return False
    return True


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    with made.coordinator:
        try:
            yield made
        finally:
            made.close()


def test_the_killed_sidecar_of_a_job_recovers_while_the_others_save(node: Node) -> None:
    with GcsServer(node.sockets / "gcs") as server:
        node.daemon.environment.update(server.env)
        node.job("a", allow=["gs://bucket/a"])
        node.job("b")
        node.daemon.start()
        a, b = node.trainer("a"), node.trainer("b")
        hold_up(server)
        context = node.ingest(a, 1, MIB, "gs://bucket")
        victim, other = node.process("a"), node.process("b")
        assert victim.ppid() == other.ppid() == node.daemon.pid
        victim.kill()
        node.save(b, 1)
        node.logged("recovered 1 ranks")
        assert node.process("b") == other
        server.clear()
        node.coordinator.await_phase(context, DURABLE)
    operator = pannier("doctor", "--address", node.address, "--json").json()
    (jobs,) = (each for each in operator["checks"] if each["name"] == "jobs")
    assert "job a: its sidecar ended with SIGKILL" in jobs["found"]


def test_a_stopped_sidecar_holds_up_no_other_and_no_operator(node: Node) -> None:
    node.daemon.constants["pannier.common.timeouts.JOB_CALL_S"] = stretched(8)
    node.job("a")
    node.job("b")
    node.daemon.start()
    a, b = node.trainer("a"), node.trainer("b")
    node.save(a, 1)
    node.process("a").suspend()
    node.save(b, 1)
    shown = pannier("status", "--address", node.address, "--json").json()
    assert {save["save"]["job"] for save in shown["saves"]} == {"b"}
    samples = Scrape(node.metrics).samples
    up = {job: samples["pannier_job_up", frozenset({("training_job", job)})] for job in "ab"}
    assert up == {"a": 0, "b": 1}
    process = node.process("a")
    # One that doesn't end when it is to have other settings is killed.
    node.job("a", tokens=[node.files.tokens["a"]], memory="64MiB")
    node.save(b, 2)
    await_true(lambda: not process.is_running(), "the stopped one is killed", 30)
    node.save(node.trainer("a"), 2)


def test_a_removed_job_is_refused_and_what_it_handed_over_is_uploaded(node: Node) -> None:
    with GcsServer(node.sockets / "gcs") as server:
        node.daemon.environment.update(server.env)
        node.job("a", allow=["gs://bucket/a"])
        node.job("b")
        node.daemon.start()
        a, b = node.trainer("a"), node.trainer("b")
        hold_up(server)
        done = node.ingest(a, 1, MIB, "gs://bucket")
        begun = a.context("gs://bucket/a/step-2", 2)
        a.plan(begun)
        life = node.process("b")
        node.files.remove("a")
        node.logged("job a was removed from --jobs")
        late = a.context("gs://bucket/a/step-3", 3)

        def refused() -> bool:
            try:
                a.plan(late)
            except UnauthenticatedError as error:
                return "no longer served" in str(error)
            except PannierError:
                return False
            return False

        await_true(refused, "the job is refused", 30)
        assert node.coordinator.await_phase(begun, save_pb2.RANK_PHASE_FAILED)
        # The late one was perhaps planned before the job's sidecar knew: its rank has failed, too.
        for each in (begun, late):
            node.coordinator.decide(each, save_pb2.SAVE_STATE_ABORTED)
        server.clear()
        node.coordinator.await_phase(done, DURABLE)
        node.coordinator.decide(done, COMMITTED)
        node.logged("job a is no longer served: nothing of it is left to upload")
        assert not (node.spool / "a").exists()
        assert not os.path.exists(node.socket("a").removeprefix("unix://"))
        node.save(b, 1)
        assert node.process("b") == life
        # And it may come back, with a new token.
        node.job("a")
        node.save(node.trainer("a"), 4)


def test_other_settings_restart_the_job_alone(node: Node) -> None:
    node.job("a")
    node.job("b")
    node.daemon.start()
    a, b = node.trainer("a"), node.trainer("b")
    former, other = node.process("a"), node.process("b")
    context = node.ingest(a, 1)
    own = ScriptedCoordinator(f"unix://{node.sockets}/own.sock")
    with own:
        node.job("a", tokens=[node.files.tokens["a"]], coordinator=own.address)
        # Its journal recorded what was ingested, which is reported to its own coordinator.
        own.await_phase(context, DURABLE)
        assert node.process("b") == other
        assert not former.is_running()
        node.save(b, 1)


def test_a_job_that_cannot_be_served_harms_no_other_and_is_named(node: Node) -> None:
    node.job("a")
    node.files.write("bad", "{")
    node.job("small", memory="1MiB")
    # Something else is where the job's directory should be.
    in_the_way = node.sockets / "jobs/c"
    in_the_way.parent.mkdir(mode=0o700)
    in_the_way.touch()
    node.job("c")
    node.daemon.start()
    node.save(node.trainer("a"), 1)
    node.logged("job small is not served", 2)
    answer = pannier("doctor", "--address", node.address, "--json")
    assert answer.code == 1
    checks = answer.json()["checks"]
    (jobs,) = (each for each in checks if each["name"] == "jobs")
    for text in ("bad.json", "in the way of the job's sockets", "job small", "--memory"):
        assert text in jobs["found"]
    assert [each["found"][:6] for each in checks if each["name"] == "spool"] == ["job a:"]
    assert node.daemon.log().count("in the way") == 1
    in_the_way.unlink()
    node.job("small")
    node.save(node.trainer("c"), 1)
    node.save(node.trainer("small"), 1)


def test_probes_and_metrics_cover_the_node(node: Node) -> None:
    node.daemon.constants["pannier.common.timeouts.SUPERVISOR_REPORT_S"] = stretched(8)
    node.daemon.constants["pannier.common.timeouts.JOB_CALL_S"] = stretched(8)
    node.job("a")
    node.job("b")
    node.daemon.start()
    for job in "ab":
        node.save(node.trainer(job), 1)
    for service in ("liveness", "readiness", ""):
        assert pannier("health", "--address", node.health, "--service", service).code == 0
    samples = Scrape(node.metrics).samples
    for job in "ab":
        label = ("training_job", job)
        assert samples["pannier_job_up", frozenset({label})] == 1
        assert samples["pannier_job_starts_total", frozenset({label})] == 1
        assert samples["pannier_coordinator_connected", frozenset({label})] == 1
        assert samples["pannier_bytes_total", frozenset({label, ("phase", "durable")})] == 100
        ended = frozenset({label, ("outcome", "committed")})
        assert samples["pannier_saves_ended_total", ended] == 1
    page = get(node.metrics, "/status.json").json()
    assert {save["save"]["job"] for save in page["saves"]} == {"a", "b"}
    one = get(node.metrics, f"/save.json?id={page['saves'][0]['id']}").json()
    assert one["save"]["ranks"]
    gateway = next(x for x in node.daemon.log().splitlines() if "the gateway started" in x)
    os.kill(int(gateway.split()[-1]), signal.SIGKILL)
    node.logged("the gateway started", 2)
    await_serving(node.address)
    # A supervisor that is stuck is not alive; its jobs go on meanwhile.
    os.kill(node.daemon.pid, signal.SIGSTOP)
    await_true(
        lambda: pannier_here("health", "--address", node.health, "--service", "liveness").code == 1,
        "it is not alive",
    )
    os.kill(node.daemon.pid, signal.SIGCONT)


def test_nothing_outlives_the_supervisor(node: Node) -> None:
    node.job("a")
    node.daemon.start()
    children = psutil.Process(node.daemon.pid).children()
    assert len(children) == 2
    second = pannier(*node.daemon.arguments, env=clean_environment())
    assert second.code == 2
    assert "another daemon listens" in second.err
    node.daemon.kill()
    await_true(lambda: not any(each.is_running() for each in children), "all are killed")
    (node.spool / "gone").mkdir()
    node.daemon.start()
    node.logged(f"gone in the spool {node.spool} belongs to no job")
    node.save(node.trainer("a"), 1)
    assert node.daemon.stop() == 0
