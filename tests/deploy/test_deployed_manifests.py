"""deploy/ builds, is what Kubernetes takes, and agrees with what the daemons take."""

import re
import shutil
from pathlib import Path

import click
import pytest
import yaml

from pannier.cli.main import cli
from pannier.daemon import health_server
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError
from support.kubernetes.manifests import (
    DEPLOY,
    NODE,
    OVERLAYS,
    WITH_DAEMONS,
    WITH_TRAINERS,
    Object,
    arguments,
    built,
    container,
    containers,
    daemons,
    environment,
    named,
    namespace,
    of_kind,
    pod_templates,
    quantity,
)
from support.kubernetes.schemas import problems, releases

DOWNWARD = {
    "spec.nodeName": "node-0",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "1",
    "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "1",
}
BY_HAND = {"pannier-jobs", "pannier-token"}
"""Secrets that the README says how to make: tokens are in no overlay."""
OWN_MEMORY = 250e6
"""What the README promises of a sidecar."""
_BUILT: dict[str, list[Object]] = {}
with_trainers = pytest.mark.parametrize("overlay", WITH_TRAINERS, indirect=True)
with_daemons = pytest.mark.parametrize("overlay", WITH_DAEMONS, indirect=True)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(overlay: str) -> list[Object]:
    if overlay not in _BUILT:
        _BUILT[overlay] = built(DEPLOY / "overlays" / overlay)
    return _BUILT[overlay]


def settings(objects: list[Object]) -> dict[str, str]:
    found: dict[str, str] = named(objects, "ConfigMap", "pannier")["data"]
    return found


def test_there_is_an_overlay_for_each_workload_and_component() -> None:
    used = " ".join(path.read_text() for path in DEPLOY.glob("*/*/kustomization.yaml"))
    for component in DEPLOY.glob("components/*/kustomization.yaml"):
        assert re.search(rf"/{component.parent.name}\b", used), component
    assert set(OVERLAYS) >= {
        "gke-gpu",
        "gke-tpu",
        "indexed-job",
        "leaderworkerset",
        "per-node",
        NODE,
    }


@pytest.mark.parametrize("release", releases())
def test_every_object_is_what_this_release_takes(objects: list[Object], release: str) -> None:
    assert [problem for each in objects for problem in problems(each, release)] == []


def test_a_misspelt_field_is_found(objects: list[Object]) -> None:
    (release,) = releases(1)
    for each in objects:
        if each["kind"] not in ("ConfigMap", "ServiceAccount"):
            assert problems({**each, "spec": {**each["spec"], "replica": 2}}, release), each["kind"]
    for where, template in pod_templates(objects).items():
        holder = next(o for o in objects if f"{o['kind']}/{o['metadata']['name']}" == where)
        template["spec"]["hostnetwork"] = True
        assert problems(holder, release), f"{where}: in the pod"
        del template["spec"]["hostnetwork"]


def test_all_is_in_one_namespace_and_nothing_is_named_that_is_not_there(
    overlay: str, objects: list[Object]
) -> None:
    assert {each["metadata"].get("namespace") for each in objects} == {namespace(overlay)}
    secrets = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    for issuer in of_kind(objects, "Issuer"):
        assert issuer["spec"].get("ca", {"secretName": "pannier-ca"})["secretName"] in secrets
    for certificate in of_kind(objects, "Certificate"):
        named(objects, "Issuer", certificate["spec"]["issuerRef"]["name"])
    for where, template in pod_templates(objects).items():
        named(objects, "ServiceAccount", template["spec"]["serviceAccountName"])
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets | BY_HAND, where
        mounted = {m["name"] for each in containers(template) for m in each.get("volumeMounts", [])}
        assert mounted == set(volumes), where
        for each in containers(template):
            environment(each, objects, DOWNWARD)


@with_daemons
def test_the_real_command_line_takes_the_daemons_arguments(
    objects: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for where, _, daemon in daemons(objects):
        variables = environment(daemon, objects, DOWNWARD)
        command, *words = arguments(daemon, variables)
        found = cli.get_command(click.Context(cli), command)
        assert found is not None
        known = {str(each.envvar) for each in found.params if each.envvar}
        # That one is for a `pannier status` in the container.
        unknown = {name for name in variables if name.startswith("PANNIER_")} - known
        assert unknown <= {"PANNIER_SIDECAR"}, f"{where}: {unknown}"
        assert "PANNIER_INSECURE_LISTEN" not in variables, where
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            # All that it may have against it: here there is no Secret.
            with pytest.raises(
                ConfigurationError, match=r"--tls-cert=/etc/pannier/tls/tls\.crt can't"
            ):
                found.main(list(words), standalone_mode=False)
        seen.add(command)
    assert seen == {"sidecar", "coordinator"}


@with_daemons
def test_addresses_ports_and_paths_agree(objects: list[Object]) -> None:
    coordinator = named(objects, "Deployment", "pannier-coordinator")["spec"]["template"]
    service = named(objects, "Service", "pannier-coordinator")["spec"]
    labels = coordinator["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    (port,) = service["ports"]
    listen = environment(container(coordinator, "coordinator"), objects)["PANNIER_LISTEN"]
    ports = {p["name"]: p["containerPort"] for p in container(coordinator, "coordinator")["ports"]}
    assert listen.rpartition(":")[2] == str(ports[port["targetPort"]]) == str(port["port"])
    certificate = named(objects, "Certificate", "pannier-coordinator")["spec"]
    policy = named(objects, "NetworkPolicy", "pannier-coordinator")["spec"]
    (entry,) = policy["ingress"]
    assert [each["port"] for each in entry["ports"]] == [port["port"]]
    for where, template, daemon in daemons(objects):
        variables = environment(daemon, objects, DOWNWARD)
        # Where it may be called and what shows it is what it is called.
        if daemon["args"][0] == "sidecar":
            host, _, number = variables["PANNIER_COORDINATOR"].rpartition(":")
            assert (host, number) == ("pannier-coordinator", str(port["port"])), where
            assert host in certificate["dnsNames"], where
        probes = [
            daemon[name]["grpc"] for name in ("startupProbe", "livenessProbe", "readinessProbe")
        ]
        names = [probe["service"] for probe in probes]
        assert names == [
            health_server.READINESS,
            health_server.LIVENESS,
            health_server.READINESS,
        ], where
        health = int(variables["PANNIER_HEALTH"].rpartition(":")[2])
        assert {probe["port"] for probe in probes} == {health}, where
        assert health in [p["containerPort"] for p in daemon["ports"]], where
        assert variables["PANNIER_SIDECAR"] == variables["PANNIER_ADDRESS"], where
        mounts = {m["mountPath"]: m for m in daemon["volumeMounts"]}
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        for variable in ("PANNIER_ADDRESS", "PANNIER_SPOOL"):
            if variable in variables:
                # The mount itself belongs to root, or to every user, unless a container changes that.
                path = Path(variables[variable].removeprefix("unix://"))
                directory = path if variable == "PANNIER_SPOOL" else path.parent
                made = [each for one in containers(template) for each in one.get("args", [])]
                if str(directory) not in made:
                    assert str(directory.parent) in mounts, f"{where}: {variable}"
        secret = volumes[mounts["/etc/pannier/tls"]["name"]]["secret"]
        # Readable for its own group, which fsGroup makes it, and for no other user.
        assert secret["defaultMode"] == 0o440, where


@with_trainers
def test_trainers_find_their_sidecar(objects: list[Object]) -> None:
    if overlay_of(objects) == "per-node":
        # Of other objects: the next test.
        assert not list(daemons(objects))
        return
    sidecars = [
        environment(each, objects, DOWNWARD)["PANNIER_ADDRESS"]
        for _, _, each in daemons(objects)
        if each["args"][0] == "sidecar"
    ]
    (where, template) = next(
        (where, each) for where, each in pod_templates(objects).items() if where.endswith("/train")
    )
    trainer = container(template, "trainer")
    variables = environment(trainer, objects, DOWNWARD)
    assert [variables["PANNIER_SIDECAR"]] == sidecars, where
    assert parse_address(variables["PANNIER_SIDECAR"], setting="PANNIER_SIDECAR")
    assert variables["PANNIER_JOB"] == settings(objects)["PANNIER_JOB"]
    assert variables["HOSTS"] == settings(objects)["HOSTS"]
    (mount,) = (m for m in trainer["volumeMounts"] if m["mountPath"] == "/run/pannier")
    assert mount["readOnly"], where
    # The spool itself isn't shared: descriptors come over the socket.
    assert "/spool" not in [m["mountPath"] for m in trainer["volumeMounts"]]


@with_trainers
def test_torchrun_takes_its_arguments(objects: list[Object]) -> None:
    from torch.distributed.run import parse_args

    template = next(t for where, t in pod_templates(objects).items() if where.endswith("/train"))
    trainer = container(template, "trainer")
    variables = environment(trainer, objects, DOWNWARD)
    command, *words = arguments(trainer, variables)
    if command == "python":
        assert (variables["RANK"], variables["WORLD_SIZE"]) == ("1", variables["HOSTS"])
        return
    assert command == "torchrun"
    parsed = parse_args(words)
    assert (parsed.nnodes, parsed.node_rank, parsed.training_script) == (
        *(settings(objects)["HOSTS"], 1),
        "train.py",
    )
    assert parsed.master_addr.startswith("train-")


@with_trainers
def test_as_many_pods_as_hosts_which_none_is_taken_from(objects: list[Object]) -> None:
    hosts = int(settings(objects)["HOSTS"])
    (workload,) = (
        o for o in objects if o["metadata"]["name"] == "train" and o["kind"] != "Service"
    )
    spec = workload["spec"]
    if workload["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if workload["kind"] == "LeaderWorkerSet":
        assert spec["leaderWorkerTemplate"]["size"] == hosts
        assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    else:
        assert (spec["parallelism"], spec["completions"]) == (hosts, hosts)
        # A trainer starts again where its spool is.
        assert spec["template"]["spec"]["restartPolicy"] == "OnFailure"
    budget = named(objects, "PodDisruptionBudget", "pannier-trainer")["spec"]
    assert budget["minAvailable"] == hosts
    (template,) = (t for where, t in pod_templates(objects).items() if where.endswith("/train"))
    labels = template["metadata"]["labels"].items()
    assert budget["selector"]["matchLabels"].items() <= labels
    trainers = named(objects, "NetworkPolicy", "pannier-trainer")["spec"]["podSelector"]
    assert trainers["matchLabels"].items() <= labels


@with_daemons
def test_one_coordinator_that_may_be_evicted(objects: list[Object]) -> None:
    spec = named(objects, "Deployment", "pannier-coordinator")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    budget = named(objects, "PodDisruptionBudget", "pannier-coordinator")["spec"]
    assert budget["maxUnavailable"] == 1
    assert (
        budget["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    )


def test_pods_are_confined(objects: list[Object]) -> None:
    for where, template in pod_templates(objects).items():
        pod = template["spec"]["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"], pod["fsGroup"]) == (True, 65532, 65532), (
            where
        )
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert template["spec"]["automountServiceAccountToken"] is False, where
        for each in containers(template):
            own = each["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, each["name"]
            assert own["capabilities"]["drop"] == ["ALL"], each["name"]
            if each["name"] != "trainer":
                assert own["readOnlyRootFilesystem"] is True, each["name"]
            # One container makes directories for another user, and ends.
            if each["name"] != "directories":
                assert "runAsUser" not in own, each["name"]
                assert "add" not in own["capabilities"], each["name"]


@with_trainers
def test_a_sidecar_starts_before_its_trainer_and_ends_after_it(objects: list[Object]) -> None:
    (template,) = (t for where, t in pod_templates(objects).items() if where.endswith("/train"))
    first = template["spec"]["initContainers"][0]
    if first["name"] == "sidecar-is-ready":
        assert "pannier health" in first["command"][-1]
        return
    assert (first["name"], first["restartPolicy"]) == ("pannier", "Always")
    assert first["startupProbe"]["grpc"]["service"] == health_server.READINESS


@with_daemons
def test_times_and_sizes_follow_the_formulas(objects: list[Object]) -> None:
    chosen = settings(objects)
    for where, template, daemon in daemons(objects):
        if daemon["args"][0] != "sidecar":
            continue
        variables = environment(daemon, objects, DOWNWARD)
        whole = template["spec"]["terminationGracePeriodSeconds"]
        # A trainer that shares the pod ends first; then the daemon, 10 s for its way out.
        assert whole >= float(variables["PANNIER_GRACE"]) + 10, where
        assert str(whole) == chosen["TERMINATION_GRACE"], where
        limit = quantity(daemon["resources"]["limits"]["memory"])
        assert limit == quantity(daemon["resources"]["requests"]["memory"]), where
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        spool = volumes["pannier-spool"]
        size = quantity(chosen["SPOOL_SIZE"])
        in_memory = spool.get("emptyDir", {}).get("medium") == "Memory"
        assert limit >= OWN_MEMORY + (size if in_memory else 0), where
        if "emptyDir" in spool:
            assert quantity(spool["emptyDir"]["sizeLimit"]) == size, where
        else:
            assert spool["hostPath"]["path"] == "/var/pannier", where
            assert variables["PANNIER_SPOOL_BUDGET"] == f"{chosen['SPOOL_SIZE']}B", where
        # Twice the ranks' bytes, and a twentieth, is what two saves in flight take.
        said = re.search(
            r"that have (\d+) GiB together",
            (DEPLOY / "overlays" / overlay_of(objects) / "settings.yaml").read_text(),
        )
        assert said is not None
        assert size >= 2.05 * int(said[1]) * 2**30, where
        assert float(variables["PANNIER_GRACE"]) >= int(said[1]) / 0.2, where


@pytest.mark.parametrize("workload", ["jobset", "indexed-job", "leaderworkerset"])
@pytest.mark.parametrize("place", ["sidecar", "sidecar spool-nvme", "per-node"])
def test_components_go_together(workload: str, place: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (release,) = releases(1)
    for device in ("", "gpu", "tpu"):
        folder = tmp_path / "deploy/overlays" / f"own-{device}"
        shutil.copytree(DEPLOY / "overlays/gke-gpu", folder)
        path = folder / "kustomization.yaml"
        kustomization = yaml.safe_load(path.read_text())
        chosen = ["cert-manager", *place.split(), *device.split(), workload]
        kustomization["components"] = [f"../../components/{name}" for name in chosen]
        path.write_text(yaml.safe_dump(kustomization))
        objects = built(folder)
        assert [problem for each in objects for problem in problems(each, release)] == []
        template = next(
            t for where, t in pod_templates(objects).items() if where.endswith("/train")
        )
        trainer = container(template, "trainer")
        variables = environment(trainer, objects, DOWNWARD)
        assert variables["HOST_RANK"] == "1"
        if device == "tpu":
            assert (variables["RANK"], variables["WORLD_SIZE"]) == ("1", variables["HOSTS"])
        assert ("limits" in trainer.get("resources", {})) == bool(device)
        selectors = " ".join(template["spec"].get("nodeSelector", {}))
        assert ("local-ssd" in selectors) == ("nvme" in place)
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        if "sidecar" in place:
            medium = volumes["pannier-spool"]["emptyDir"].get("medium") or "disk"
            assert medium == ("disk" if "nvme" in place else "Memory")


def overlay_of(objects: list[Object]) -> str:
    return next(name for name, each in _BUILT.items() if each is objects)
