"""The pods of deploy/ as they are: users, modes, volumes, probes, drain and grace, with real signals."""

import re
import signal

import psutil
import pytest

from support.actors.scripted_sidecar import wait_until
from support.kubernetes.cluster import await_ingested, cluster, confined, modes, said
from support.kubernetes.manifests import DEPLOY
from support.network.netns import Network
from support.storage.bucket import check_whole, hold_up, listed
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.extended
MIB = 48


def test_a_pod_trains_and_saves_as_the_manifests_have_it(
    network: Network, bucket: GcsServer
) -> None:
    with cluster("gke-gpu", network, bucket) as made:
        made.coordinator.start()
        made.coordinator["coordinator"].await_probe("startupProbe")
        host = made.pod("JobSet/train", "trainer")
        host.start()
        # As many at a time as the sizes are for.
        hold_up(bucket)
        made.save(1, MIB)
        made.save(2, MIB)
        said(host, "trainer", "step 1 staged", "step 2 staged")
        bucket.clear()
        said(host, "trainer", "step 1 committed", "step 2 committed")
        check_whole(bucket, "gs://bucket/run/step-2")
        sidecar, trainer = host["pannier"], host["trainer"]
        if sidecar.memory is not None:
            assert 2 * MIB << 20 < sidecar.memory.peak < 338 << 20
        status = sidecar.run("pannier", "status", "--json").json()
        assert [rank["transport"] for save in status["saves"] for rank in save["ranks"]] == [
            "mapped"
        ] * 2
        confined(sidecar)
        confined(made.coordinator["coordinator"])
        for each, name in ((sidecar, "sidecar"), (made.coordinator["coordinator"], "coordinator")):
            assert [
                each.probe(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")
            ] == ["SERVING"] * 3, name
            # What the image's HEALTHCHECK does, and an operator.
            assert each.run("pannier", "health").code == 0
            assert each.run("pannier", "status").code == 0
        # Nothing but the sidecar's own has been written, and that is its user's alone.
        volumes = host.volumes.paths
        assert modes(volumes["pannier-spool"]) == {(65532, 0o700), (65532, 0o600)}
        assert modes(volumes["pannier-socket"]) == {(65532, 0o700), (65532, 0o600)}
        assert not [path for path in volumes["pannier-tmp"].rglob("*") if not path.is_dir()]
        # A trainer may not write there, but connect.
        assert trainer.run("touch", "/run/pannier/sidecar/x").code != 0
        assert host.terminate() == {"trainer": 143, "pannier": 0}
        assert made.coordinator.terminate() == {"coordinator": 0}


def test_sigterm_in_the_middle_of_a_save(network: Network, bucket: GcsServer) -> None:
    """To the coordinator, which is moved, and to all of a pod, which is deleted.

    Its trainer is root, as the README says how.
    """
    (as_root,) = re.findall(
        r"```yaml\n(patches[^`]*runAsUser[^`]*)```", (DEPLOY / "README.md").read_text()
    )
    with cluster("gke-gpu", network, bucket, as_root) as made:
        coordinator = made.coordinator["coordinator"]
        made.coordinator.start()
        host = made.pod("JobSet/train", "trainer")
        host.start()
        sidecar, trainer = host["pannier"], host["trainer"]
        made.save(1)
        said(host, "trainer", "step 1 committed")
        hold_up(bucket)
        made.save(2)
        said(host, "trainer", "step 2 staged")
        await_ingested(sidecar, 2)
        assert psutil.Process(trainer.pid).uids().effective == 0
        # The Deployment's pod ends, and another one comes.
        assert made.coordinator.terminate() == {"coordinator": 0}
        assert coordinator.probe("livenessProbe") == "UNAVAILABLE"
        assert [sidecar.probe(f"{kind}Probe") for kind in ("liveness", "readiness")] == [
            "SERVING"
        ] * 2
        coordinator.start()
        coordinator.await_probe("startupProbe")
        bucket.clear()
        said(host, "trainer", "step 2 committed")

        hold_up(bucket)
        made.save(3)
        said(host, "trainer", "step 3 staged")
        # The pod is deleted: first the trainer, which leaves when it has handed over what it saves.
        trainer.signal(signal.SIGTERM)
        assert trainer.wait(30) == 143
        sidecar.signal(signal.SIGTERM)
        sidecar.await_probe("readinessProbe", "NOT_SERVING")
        assert sidecar.probe("livenessProbe") == "SERVING"
        draining = sidecar.run("pannier", "health")
        assert (draining.code, draining.out) == (1, "not_serving\n")
        assert sidecar.run("pannier", "status", "--json").json()["daemon_state"] == "draining"
        bucket.clear()
        # Long before PANNIER_GRACE is over: nothing is left to upload.
        assert sidecar.wait(60) == 0
        wait_until(lambda: "run/step-3/.metadata" in listed(bucket, "run/step-3"), 30)
        check_whole(bucket, "gs://bucket/run/step-3")


def test_what_the_grace_period_leaves_is_taken_up_before_the_next_start(
    network: Network, bucket: GcsServer
) -> None:
    """A sidecar alone starts again in its pod, on what is in the emptyDir."""
    with cluster("leaderworkerset", network, bucket, PANNIER_GRACE="1") as made:
        made.coordinator.start()
        host = made.pod("LeaderWorkerSet/train", "trainer")
        host.start()
        sidecar = host["pannier"]
        hold_up(bucket)
        made.save(1)
        said(host, "trainer", "step 1 staged")
        await_ingested(sidecar, 1)
        sidecar.signal(signal.SIGTERM)
        assert sidecar.wait(20) == 0
        assert "is left behind, ingested" in sidecar.process.log()
        assert sidecar.probe("startupProbe") == "UNAVAILABLE"
        sidecar.start()
        # Until it has recovered, no trainer that waits for it would start.
        sidecar.await_probe("startupProbe")
        assert "recovered 1 ranks of earlier saves" in sidecar.process.log()
        bucket.clear()
        said(host, "trainer", "step 1 committed")
        check_whole(bucket, "gs://bucket/run/step-1")
