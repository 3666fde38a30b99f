"""``pannier sidecar --jobs`` as a process, with real trainers: tokens, their replacement, and the end."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pannier.client import Client, StorageReader
from pannier.client.config import load_settings
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_report import LoadReporter
from pannier.client.restore.load_result import LoadResult
from support.actors.block_reader import BlockReader, Checkpoint, committed
from support.actors.nodes import JobFiles
from support.actors.scripted_sidecar import wait_until
from support.network.status_pages import Scrape, get, until
from support.processes.cli import Result, pannier
from support.processes.daemons import Daemons
from support.processes.ranks import Ranks, free_port, start_ranks
from support.processes.steering import TRAINER, order, outcome
from support.storage.bucket import check_whole, hold_up, listed
from support.storage.gcs_server import GcsServer

JOBS = ("one", "two")


class Scene:
    """A sidecar of two jobs, a coordinator of both, a bucket, and the settings of a job's trainers."""

    def __init__(self, directory: Path, server: GcsServer) -> None:
        self.directory = directory
        self.server = server
        self.files = JobFiles(directory / "jobs")
        for job in JOBS:
            (directory / job).mkdir()
            self.show(job, self.files.add(job, allow=[f"gs://bucket/{job}"]))
        self.metrics = f"127.0.0.1:{free_port()}"
        self.daemons = Daemons(
            directory,
            environment=server.env,
            sidecar_arguments=["--jobs", str(self.files.directory), "--metrics", self.metrics],
            start=False,
        )
        for daemon in (self.daemons.coordinator, self.daemons.sidecar):
            daemon.start()

    def show(self, job: str, token: str) -> None:
        """The job's trainers have this token from now on."""
        new = self.directory / "new"
        new.write_text(token + "\n")
        new.chmod(0o440)
        new.rename(self.token(job))

    def token(self, job: str) -> Path:
        return self.directory / f"{job}.token"

    def socket(self, job: str) -> str:
        return f"unix://{self.daemons.directory}/jobs/{job}/sidecar.sock"

    def environment(self, job: str) -> dict[str, str]:
        """Of its trainers."""
        return {
            "PANNIER_SIDECAR": self.socket(job),
            "PANNIER_TOKEN_FILE": str(self.token(job)),
            "PANNIER_JOB": job,
        }

    def train(self, job: str, transport: str = "auto", *, forked: bool = True) -> Ranks:
        steered = {"GO": str(self.directory / job), "ROOT": f"gs://bucket/{job}"}
        variables = {**self.environment(job), **steered, "PANNIER_TRANSPORT": transport}
        return start_ranks(TRAINER, 1, variables, torchrun=False, forked=forked)

    def save(self, job: str, step: int, **arguments: float) -> None:
        order(self.directory / job, step, 0, **arguments)

    def run(self, job: str, *words: str) -> Result:
        """A command in a pod of the job, as it were."""
        return pannier(*words, env=self.environment(job))

    def log(self) -> str:
        return self.daemons.sidecar.log()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with GcsServer(tmp_path / "gcs") as server:
        made = Scene(tmp_path, server)
        with made.daemons:
            yield made
            for token in made.files.tokens.values():
                assert token not in made.log()


def fetch_blocks(scene: Scene) -> None:
    """Ranks that load share what their sidecar reads, below the roots of their job."""
    place = "gs://bucket/one/step-1"
    names = [name.rpartition("/")[2] for name in listed(scene.server, "one/step-1")]
    name = next(each for each in names if each.endswith(".distcp"))
    attempt = name[2:].rpartition("_")[0].rpartition("_")[0]
    one, two = (scene.files.tokens[job] for job in JOBS)
    known = BlockReader(scene.socket("one"), Checkpoint(place, attempt, [], "load"), token=one)
    located = known.locate([name])
    assert located.restore_budget
    assert not located.peer_address
    options = {"endpoint_url": scene.server.url, "token": "anon"}
    loaded = Checkpoint(place, attempt, committed(place, attempt, [name], options), "load")
    with BlockReader(scene.socket("one"), loaded, token=one) as reader:
        reader.request(0)
        reader.content(reader.next())
    for socket, token, why in (
        (scene.socket("one"), two, "token"),
        (scene.socket("two"), two, "is not below an allowed root"),
    ):
        with (
            BlockReader(socket, loaded, token=token) as reader,
            pytest.raises(grpc.RpcError, match=why),
        ):
            reader.next()


def load(scene: Scene, job: str, token: str) -> LoadResult:
    """Loads the job's first checkpoint with the token of a job."""
    settings = load_settings(sidecar=scene.socket(job), token_file=scene.token(token), job=job)
    reader = StorageReader(
        f"gs://bucket/{job}/step-1",
        storage_options={"endpoint_url": scene.server.url, "token": "anon"},
    )
    state = {key: torch.zeros(data.size) for key, data in tensors(reader).items()}
    with Client(settings) as client:
        result = client.load(state, reader, no_dist=True)
    assert all(value.any() for value in state.values())
    return result


def tensors(reader: StorageReader) -> dict[str, TensorStorageMetadata]:
    found = reader.read_metadata().state_dict_metadata
    return {key: data for key, data in found.items() if isinstance(data, TensorStorageMetadata)}


def test_operators_see_the_loads_of_all_jobs_and_a_job_its_own(scene: Scene) -> None:
    for job in JOBS:
        settings = load_settings(
            sidecar=scene.socket(job), token_file=scene.token(job), job="another"
        )
        progress = LoadProgress(checkpoint_id=f"gs://bucket/{job}/step-1")
        with LoadReporter(lambda settings=settings: settings).reporting(progress):
            progress.end()
    host = scene.daemons.sidecar_address

    def loads() -> dict[str, Any]:
        listed = pannier("status", "--address", host, "--json").json()["loads"]
        return {load["job"]: load for load in listed}

    shown = until(loads, lambda found: set(found) == set(JOBS))
    own = scene.run("one", "status", "--json").json()["loads"]
    assert [load["id"] for load in own] == [shown["one"]["id"]]
    name = shown["two"]["id"]
    assert pannier("watch", name, "--address", host).code == 0
    answer = get(scene.metrics, f"/load.json?id={name}")
    assert answer.json()["load"]["checkpoint_id"] == "gs://bucket/two/step-1"
    unknown = scene.run("one", "status", name)
    assert (unknown.code, name in unknown.err) == (1, True)


def test_two_jobs_save_and_load_and_operators_see_both(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    # What others see of these in /proc is their own, not the fork server's.
    scene.daemons.sidecar.forked = False
    scene.daemons.sidecar.restart()
    with scene.train("one", forked=False) as one, scene.train("two", "streamed") as two:
        for job, ranks, way in (("one", one, "mapped"), ("two", two, "streamed: ")):
            scene.save(job, 1)
            assert outcome(ranks, 1, 0) == "committed"
            check_whole(scene.server, f"gs://bucket/{job}/step-1")
            assert scene.run(job, "watch", f"gs://bucket/{job}/step-1").code == 0
            shown = scene.run(job, "status", "--json").json()
            assert {save["save"]["job"] for save in shown["saves"]} == {job}
            (rank,) = (rank for save in shown["saves"] for rank in save["ranks"])
            assert rank["transport"].startswith(way)
        everything = until(
            lambda: pannier("status", "--address", scene.daemons.sidecar_address, "--json").json(),
            lambda shown: {save["save"]["job"] for save in shown["saves"]} == set(JOBS),
        )
        # Each has its own; to the host's they add up.
        own = [scene.run(job, "status", "--json").json() for job in JOBS]
        for name in ("spool_bytes", "spool_leased_bytes"):
            assert int(everything[name]) == sum(int(each[name]) for each in own) > 0
        samples = Scrape(scene.metrics).samples
        for job in JOBS:
            labels = frozenset({("training_job", job), ("phase", "durable")})
            assert samples["pannier_bytes_total", labels] > 1 << 20
            assert samples["pannier_trainers", frozenset({("training_job", job)})] == 1
            assert samples["pannier_coordinator_connected", frozenset({("training_job", job)})] == 1
        page = get(scene.metrics, "/status.json").json()
        assert {save["save"]["job"] for save in page["saves"]} == set(JOBS)
        fetch_blocks(scene)
        assert load(scene, "one", "one").files.keys() == {"own spool"}
        with caplog.at_level("WARNING"):
            assert load(scene, "one", "two").files.keys() == {"bucket"}
        assert "can't be asked for local copies" in caplog.text
        # What others on the host may see of a process.
        for pid in (scene.daemons.sidecar.pid, one.processes[0].pid):
            for name in ("cmdline", "environ"):
                seen = Path(f"/proc/{pid}/{name}").read_text()
                assert not any(token in seen for token in scene.files.tokens.values())


def test_commands_say_what_is_wrong_with_the_token(scene: Scene) -> None:
    variables = scene.environment("one")
    other = scene.run("one", "status", "--token-file", str(scene.token("two")))
    assert other.code == 2
    assert "not one of that job's" in other.err
    nothing = pannier("status", env={"PANNIER_SIDECAR": variables["PANNIER_SIDECAR"]})
    assert nothing.code == 2
    assert "carries no token" in nothing.err
    assert "--token-file" in nothing.err
    missing = scene.run("one", "watch", "--token-file", str(scene.directory / "none"))
    assert missing.code == 2
    assert "--token-file" in missing.err
    scene.token("one").chmod(0o666)
    writable = scene.run("one", "doctor")
    assert writable.code == 2
    assert "mode 0666" in writable.err
    scene.token("one").chmod(0o440)
    refused = scene.run("one", "doctor", "--token-file", str(scene.token("two")), "--json")
    assert refused.code == 1
    (check,) = (each for each in refused.json()["checks"] if each["name"] == "token")
    assert (check["result"], "not one of that job's" in check["found"]) == ("failed", True)
    assert scene.run("one", "health").code == 0


def test_doctor_over_a_jobs_socket_and_the_operators(scene: Scene) -> None:
    well = scene.run("one", "doctor", "gs://bucket/one")
    assert well.code == 0, well
    assert "mapped" in well.out
    outside = scene.run("one", "doctor", "gs://bucket/two", "--json")
    assert outside.code == 1
    targets = [each for each in outside.json()["checks"] if each["name"] == "target"]
    assert [each["of"] for each in targets] == ["sidecar"], "the coordinator isn't asked to try it"
    assert not listed(scene.server, "two")
    scene.files.write("three", '{"tokens": []}')
    # The gateway learns it after the log has it.
    operator = until(
        lambda: pannier("doctor", "--address", scene.daemons.sidecar_address, "--json"),
        lambda shown: shown.code == 1,
    )
    found = {each["name"]: each for each in operator.json()["checks"] if each["of"] == "sidecar"}
    assert '"tokens" is empty' in found["jobs"]["found"]
    assert "one, two" in found["jobs"]["hint"]
    assert "transport" not in {each["name"] for each in operator.json()["checks"]}


def test_a_token_is_replaced_under_a_trainer_that_goes_on(scene: Scene) -> None:
    with scene.train("one") as ranks:
        scene.save("one", 1)
        assert outcome(ranks, 1, 0) == "committed"
        old = scene.files.tokens["one"]
        settings = {"allow": ["gs://bucket/one"]}
        new = scene.files.add("one", tokens=["n" * 40, old], **settings)
        wait_until(lambda: "job one has other tokens" in scene.log(), 20)
        scene.show("one", new)
        scene.save("one", 2)
        assert outcome(ranks, 2, 0) == "committed"
        scene.files.add("one", tokens=[new], **settings)
        wait_until(lambda: scene.log().count("job one has other tokens") == 2, 20)
        scene.save("one", 3)
        assert outcome(ranks, 3, 0) == "committed"
        # A call that is refused is made again if the file has another token by then; else the save fails.
        scene.show("one", old)
        scene.save("one", 4)
        wait_until(lambda: "refused: the token of a call" in scene.log(), 20)
        scene.show("one", new)
        scene.save("one", 5)
        assert outcome(ranks, 5, 0) == "committed"
        ended = outcome(ranks, 4, 0, timeout=60)
        assert ended == "committed" or "not one of that job's" in ended
        assert "job one is restarted" not in scene.log()
        assert old not in ranks.output(0)


def test_a_stopped_sidecar_leaves_what_each_job_has(scene: Scene) -> None:
    scene.daemons.sidecar.arguments += ["--grace", "1"]
    scene.daemons.sidecar.stop()
    scene.daemons.sidecar.start()
    with scene.train("one") as one, scene.train("two") as two:
        hold_up(scene.server)
        for job in JOBS:
            scene.save(job, 1, mib=8)
        wait_until(lambda: scene.log().count("is ingested") == 2, 40)
        assert scene.daemons.sidecar.stop() == 0
        assert scene.log().count("is left behind, ingested") == 2
        # Its trainers are gone by then.
        for ranks in (one, two):
            ranks.processes[0].kill()
        scene.daemons.sidecar.start()
        assert scene.log().count("recovered 1 ranks") == 2
        scene.server.clear()
        for job in JOBS:
            wait_until(
                lambda job=job: f"{job}/step-1/.metadata" in listed(scene.server, job),  # type: ignore[misc]
                40,
            )
            check_whole(scene.server, f"gs://bucket/{job}/step-1")


def test_killed_at_any_moment_the_next_one_serves_all_jobs(scene: Scene) -> None:
    with scene.train("one") as one, scene.train("two") as two:
        trainers = [("one", one), ("two", two)]
        # A first connection isn't waited for as long as a broken one.
        for job, ranks in trainers:
            scene.save(job, 1)
            assert outcome(ranks, 1, 0, timeout=60) == "committed"
        for step in (2, 3):
            for job, ranks in trainers:
                scene.save(job, step)
                scene.daemons.sidecar.kill()
                scene.daemons.sidecar.start()
                assert outcome(ranks, step, 0, timeout=60) == "committed"
    # The sockets of the former life don't lie in the way, and are not followed.
    assert os.path.exists(scene.socket("one").removeprefix("unix://"))
