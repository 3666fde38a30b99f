"""The two overlays of the per-node form agree: what a job's pods look for is what their node's sidecar makes."""

from pathlib import Path

from pannier.sidecar.multi_job.sockets import job_address, jobs_directory
from support.kubernetes.manifests import (
    DEPLOY,
    NODE,
    Object,
    built,
    container,
    containers,
    environment,
    pod_templates,
    settings,
)

DOWNWARD = {
    "status.podIP": "10.0.0.7",
    "spec.nodeName": "node-0",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "1",
}


def test_a_jobs_trainers_find_the_sidecar_of_their_node() -> None:
    job, node = (built(DEPLOY / "overlays" / name) for name in ("per-node", NODE))
    template = pod_templates(job)["Job/train"]
    daemon = pod_templates(node)["DaemonSet/pannier-sidecar"]
    theirs = environment(container(daemon, "pannier"), node, DOWNWARD)
    trainer = container(template, "trainer")
    variables = environment(trainer, job, DOWNWARD)
    name = settings(job)["PANNIER_JOB"]
    assert variables["PANNIER_JOB"] == name
    # What the daemon makes for the job below its own hostPath is what the pod mounts, not to be written.
    socket = job_address(jobs_directory(theirs["PANNIER_ADDRESS"]), name).removeprefix("unix://")
    assert on_node(daemon, "pannier", socket) == on_node(
        template, "trainer", variables["PANNIER_SIDECAR"].removeprefix("unix://")
    )
    for each in containers(template):
        (mount,) = (m for m in each["volumeMounts"] if m["name"] == "pannier-socket")
        assert mount["readOnly"], each["name"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    # Made by the daemon alone: the kubelet would make it root's.
    assert volumes["pannier-socket"]["hostPath"]["type"] == "Directory"
    assert all("/var" not in str(volume) for volume in volumes.values()), "no pod sees the spool"
    # The token is a file, readable for the pod's group, and in no variable.
    path = Path(variables["PANNIER_TOKEN_FILE"])
    (mount,) = (m for m in trainer["volumeMounts"] if m["mountPath"] == str(path.parent))
    assert volumes[mount["name"]]["secret"] == {
        "secretName": f"pannier-token.{name}",
        "defaultMode": 0o440,
    }
    assert theirs["PANNIER_JOBS"] in [
        m["mountPath"] for m in container(daemon, "pannier")["volumeMounts"]
    ]


def on_node(template: Object, name: str, path: str) -> str:
    """Where a path in a container lies on the node."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for mount in container(template, name)["volumeMounts"]:
        if path.startswith(mount["mountPath"] + "/"):
            top: str = volumes[mount["name"]]["hostPath"]["path"]
            return top + path.removeprefix(mount["mountPath"])
    raise AssertionError(f"{path} is in no mount of {name}")


def test_a_nodes_sidecar_has_the_settings_of_a_pods() -> None:
    pods, node = (built(DEPLOY / "overlays" / name) for name in ("indexed-job", NODE))
    one = container(pod_templates(pods)["Job/train"], "pannier")
    other = container(pod_templates(node)["DaemonSet/pannier-sidecar"], "pannier")
    mine, theirs = environment(one, pods, DOWNWARD), environment(other, node, DOWNWARD)
    of_a_node = {"PANNIER_HOST", "PANNIER_JOBS", "PANNIER_RESTORE_BUDGET"}
    # Blocks of one job are not for the peers of another.
    of_a_pod = {"POD_IP", "PANNIER_PEERS", "PANNIER_PEERS_NAME", "PANNIER_FAILURE_DOMAIN"}
    # A job's roots are in its file.
    assert mine.keys() - {"PANNIER_ALLOW"} - of_a_pod == theirs.keys() - of_a_node
    different = {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
    sizes = {"SPOOL_SIZE", "PANNIER_SPOOL_BUDGET", "PANNIER_GRACE"}
    assert different == {"PANNIER_ADDRESS", "PANNIER_SIDECAR", "PANNIER_SPOOL"} | sizes
    # A native sidecar says of itself that it is one; the rest is the same, but for the jobs' files
    # and the memory of their processes.
    one["ports"] = [port for port in one["ports"] if port["name"] != "pannier-peers"]
    assert {k: v for k, v in one.items() if k not in ("env", "resources", "restartPolicy")} == {
        k: [m for m in v if m["name"] != "pannier-jobs"] if k == "volumeMounts" else v
        for k, v in other.items()
        if k not in ("env", "resources")
    }
