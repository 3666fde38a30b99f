"""Jobs of several users on one node, their pods and its sidecar as deploy/ has them."""

import os
import stat
from pathlib import Path

import psutil
import pytest

from support.actors.scripted_sidecar import wait_until
from support.kubernetes.cluster import Job, cluster, confined, modes, said
from support.kubernetes.manifests import environment
from support.kubernetes.pods import Container
from support.network.netns import Network
from support.storage.bucket import check_whole, hold_up
from support.storage.gcs_server import GcsServer

# Each command in a pod starts an interpreter that imports torch.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
SOCKET = "unix:///run/pannier/sidecar.sock"
SAVE = """
import torch
from pannier import client
try:
    client.save({"w": torch.ones(4)}, checkpoint_id="gs://bucket/%s/stolen", timeout=20)
except client.PannierError as error:
    print(type(error).__name__, error)
"""


def test_one_sidecar_for_all_pods_of_a_node(network: Network, bucket: GcsServer) -> None:
    with cluster(
        "node", network, bucket, PANNIER_ALLOW="gs://bucket", SPOOL_PATH="/var/pannier"
    ) as made:
        made.coordinator.start()
        node = made.pod("DaemonSet/pannier-sidecar", "trainer")
        one, two = Job(made, "one", 1001), Job(made, "two", 1002)
        made.serve(node, one)
        node.start()
        sidecar = node["pannier"]
        sidecar.await_probe("startupProbe")
        top = made.directory / "node"
        wait_until(lambda: (top / "run/pannier/jobs/one").is_dir(), 30)
        first = one.pod()
        first.start()
        one.save(1)
        said(first, "trainer", "step 1 committed")

        # Another job comes to the node while the first one saves.
        hold_up(bucket)
        one.save(2)
        said(first, "trainer", "step 2 staged")
        life = sidecar.pid
        made.serve(node, one, two)
        wait_until(lambda: (top / "run/pannier/jobs/two").is_dir(), 30)
        second = two.pod()
        second.start()
        two.save(1)
        said(second, "trainer", "step 1 staged")
        bucket.clear()
        said(first, "trainer", "step 2 committed")
        said(second, "trainer", "step 1 committed")
        assert sidecar.pid == life
        for job, pod, step in ((one, first, 2), (two, second, 1)):
            check_whole(bucket, f"gs://bucket/{job.name}/step-{step}")
            assert psutil.Process(pod["trainer"].pid).uids().effective == job.uid
        hands_over_by_descriptors(sidecar, first["trainer"], second["trainer"])
        sees_its_own_alone(sidecar, first["trainer"], second["trainer"])
        is_refused_what_is_the_others(one, first["trainer"])
        lies_apart(top)
        confined(sidecar)
        shows_no_token([sidecar, first["trainer"], second["trainer"]], [one, two])

        # It is updated while trainers go on; they save with the next one.
        assert node.terminate() == {"pannier": 0}
        made_before = os.stat(top / "run/pannier/jobs/one").st_ino
        node.start()
        assert os.stat(top / "run/pannier/jobs/one").st_ino == made_before, "pods have it mounted"
        one.save(3)
        two.save(2)
        said(first, "trainer", "step 3 committed")
        said(second, "trainer", "step 2 committed")


def hands_over_by_descriptors(sidecar: Container, *trainers: Container) -> None:
    """Both map files of the spool, which is mounted in no pod but the sidecar's."""
    status = sidecar.run("pannier", "status", "--json").json()
    ways = {rank["transport"] for save in status["saves"] for rank in save["ranks"]}
    assert (ways, status["host"]) == ({"mapped"}, "node-0")
    for trainer, job in zip(trainers, ("one", "two"), strict=True):
        maps = Path(f"/proc/{trainer.pid}/maps").read_text()
        assert f"/{job}/0" in maps
        assert trainer.run("ls", "/spool").code != 0


def sees_its_own_alone(sidecar: Container, first: Container, second: Container) -> None:
    """Operators see both, by the sidecar's own socket; a job's pods see the job."""
    everything = sidecar.run("pannier", "status", "--json").json()
    assert {save["save"]["job"] for save in everything["saves"]} == {"one", "two"}
    for container, job in ((first, "one"), (second, "two")):
        shown = container.run("pannier", "status", "--json").json()
        assert {save["save"]["job"] for save in shown["saves"]} == {job}
        assert container.run("pannier", "watch", f"gs://bucket/{job}/step-1").code == 0
        doctor = container.run("pannier", "doctor", f"gs://bucket/{job}")
        assert doctor.code == 0, doctor.out
        assert "mapped" in doctor.out
    # No pod reaches the operators' socket, nor another job's.
    assert first.run("ls", "/run/pannier").out.split() == []
    assert first.run("pannier", "status", "gs://bucket/two/step-1").code == 1


def is_refused_what_is_the_others(one: Job, trainer: Container) -> None:
    """By another name, at another place, without a token; and with one's own at the other's socket."""
    other_name = trainer.run("env", "PANNIER_JOB=two", "python", "-c", SAVE % "two")
    assert "ForbiddenError" in other_name.out, other_name
    other_place = trainer.run("python", "-c", SAVE % "two")
    assert "not below an allowed root (gs://bucket/one)" in other_place.out, other_place
    nameless = trainer.run("env", "-u", "PANNIER_TOKEN_FILE", "python", "-c", SAVE % "one")
    assert "UnauthenticatedError" in nameless.out, nameless
    assert "carries no token" in nameless.out
    doctor = trainer.run("pannier", "doctor", "gs://bucket/two")
    assert doctor.code == 1
    assert "not below an allowed root" in doctor.out
    # A pod that mounts the other's directory, which an admission policy should not let it.
    thief = one.pod()
    socket = thief.volumes.paths["pannier-socket"]
    thief.volumes.paths["pannier-socket"] = socket.with_name("two")
    thief.main[0].command = ["sh", "-c", "echo there; exec sleep 120"]
    thief.start()
    intruder = thief["trainer"]
    said(thief, "trainer", "there")
    assert intruder.run("pannier", "health", "--address", SOCKET).code == 0
    status = intruder.run("pannier", "status")
    assert status.code == 2
    assert "not one of that job's" in status.err
    for name, place in (("two", "two"), ("one", "one")):
        saved = intruder.run("env", f"PANNIER_JOB={name}", "python", "-c", SAVE % place)
        assert "UnauthenticatedError" in saved.out, saved
    thief.main[0].close()


def lies_apart(top: Path) -> None:
    """On the node: no other user may enter, and the jobs have nothing in common."""
    for path, mode in (
        ("run/pannier", 0o700),
        ("run/pannier/jobs", 0o700),
        ("run/pannier/jobs/one", 0o711),
        ("run/pannier/jobs/two", 0o711),
        ("run/pannier/jobs/two/sidecar.sock", 0o666),
        ("run/pannier/sidecar.sock", 0o600),
        ("var/pannier", 0o700),
    ):
        found = os.stat(top / path)
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (65532, mode), path
    for job in ("one", "two"):
        assert modes(top / "var/pannier" / job) <= {(65532, 0o600)}
        assert list((top / "var/pannier" / job).glob("*.data"))


def shows_no_token(containers: list[Container], jobs: list[Job]) -> None:
    """Neither in logs nor in what others may see of a process."""
    for container in containers:
        seen = [container.process.log()]
        for each in ("cmdline", "environ"):
            seen.append(Path(f"/proc/{container.pid}/{each}").read_text())
        seen.append(
            str(environment(container.spec, container._pod.objects, container._pod.downward))
        )
        for job in jobs:
            assert job.token not in "".join(seen), container.name
