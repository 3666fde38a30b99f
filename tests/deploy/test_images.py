"""The two images as ``make images`` builds them: what is in them, and both as containers of the manifests' pods."""

import re
import signal

import pytest

from support.actors.scripted_sidecar import wait_until
from support.kubernetes.cluster import await_ingested, cluster, confined, said
from support.kubernetes.dockerfiles import stages
from support.kubernetes.images import Image, check_built, image, of_checkout
from support.kubernetes.manifests import DEPLOY, REPOSITORY
from support.network.netns import Network
from support.storage.bucket import check_whole, hold_up, listed
from support.storage.gcs_server import GcsServer

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
TARGETS = ("sidecar", "coordinator")


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    check_built()
    found = {target: image(target) for target in TARGETS}
    if any(each.sources() != of_checkout() for each in found.values()):
        pytest.skip("the images are of other sources: `make images` builds them again")
    return found


def test_they_are_what_the_dockerfile_says(images: dict[str, Image]) -> None:
    written = stages(REPOSITORY / "Dockerfile")
    for target, found in images.items():
        stage = written[target]
        assert (found.user, found.entrypoint, found.command) == (
            *(stage.user, stage.entrypoint, stage.command),
        )
        assert found.healthcheck == ("CMD", *stage.healthcheck)
        revision = found.labels.get("org.opencontainers.image.revision", "")
        assert re.match(r"[0-9a-f]{7,}|v?\d", revision)
        labels = {**stage.labels, "org.opencontainers.image.revision": revision}
        assert labels.items() <= found.labels.items()
        names = {name for name in stage.environment if name != "PATH"}
        assert {name: found.environment[name] for name in names} == {
            name: stage.environment[name] for name in names
        }
    installed = {
        target: {path.name for path in each.root.glob("opt/pannier/lib/*/site-packages/*")}
        for target, each in images.items()
    }
    assert not installed["sidecar"] & {"torch", "numpy"}
    assert {"torch", "numpy"} <= installed["coordinator"]


def test_the_documented_sizes_are_theirs(images: dict[str, Image]) -> None:
    text = (DEPLOY / "README.md").read_text()
    said = dict(re.findall(r"^\| `(sidecar|coordinator)` \|.*\| (\d+) MB \|$", text, re.MULTILINE))
    below = image("base").size()
    for target, found in images.items():
        megabytes = (found.size() - below) / 1e6
        assert megabytes == pytest.approx(float(said[target]), rel=0.1), target


def test_pods_of_them_save_and_are_killed_and_restarted(
    images: dict[str, Image], network: Network, bucket: GcsServer
) -> None:
    with cluster("gke-gpu", network, bucket, images=images) as made:
        coordinator = made.coordinator["coordinator"]
        made.coordinator.start()
        coordinator.await_probe("startupProbe")
        host = made.pod("JobSet/train", "trainer")
        host.start()
        sidecar, trainer = host["pannier"], host["trainer"]
        made.save(1)
        said(host, "trainer", "step 1 committed")
        for each in (sidecar, coordinator):
            confined(each)
            assert [each.probe(f"{kind}Probe") for kind in ("liveness", "readiness")] == [
                "SERVING"
            ] * 2
            assert each.run("pannier", "health").out == "serving\n"
            assert each.run("pannier", "status").code == 0
        status = sidecar.run("pannier", "status", "--json").json()
        assert [rank["transport"] for save in status["saves"] for rank in save["ranks"]] == [
            "mapped"
        ]

        # Each daemon is killed with a save in the spool, and starts again in its pod.
        hold_up(bucket)
        made.save(2)
        said(host, "trainer", "step 2 staged")
        await_ingested(sidecar, 2)
        for each in (sidecar, coordinator):
            each.signal(signal.SIGKILL)
            each.wait(20)
            each.start()
            each.await_probe("startupProbe")
        bucket.clear()
        said(host, "trainer", "step 2 committed")

        # As `RestartAllContainers` does it: all of the pod, in order, on the same volumes.
        hold_up(bucket)
        made.save(3)
        said(host, "trainer", "step 3 staged")
        await_ingested(sidecar, 3)
        for each in (trainer, sidecar):
            each.signal(signal.SIGKILL)
            each.wait(20)
        for step in (1, 2, 3):
            (made.go / f"{step}-0").unlink()
        host.start()
        assert sidecar.process.log().count("recovered 1 ranks of earlier saves") == 2
        bucket.clear()
        wait_until(lambda: "run/step-3/.metadata" in listed(bucket, "run/step-3"), 60)
        for step in (1, 2, 3):
            check_whole(bucket, f"gs://bucket/run/step-{step}")
        # PID 1 has no signal handler of the system's.
        wait_until(lambda: trainer.process.log().count("ready\n") == 2, 60)
        assert host.terminate() == {"trainer": 143, "pannier": 0}
        assert made.coordinator.terminate() == {"coordinator": 0}
