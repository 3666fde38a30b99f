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
    overlaid,
    pod_templates,
    quantity,
    settings,
)
from support.kubernetes.schemas import problems, releases

DOWNWARD = {
    "spec.nodeName": "node-0",
    "status.podIP": "10.0.0.7",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "1",
    "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "1",
}
BY_HAND = {"pannier-jobs", "pannier-token.llama"}
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


def test_there_is_an_overlay_for_each_workload_and_component() -> None:
    used = " ".join(path.read_text() for path in DEPLOY.glob("*/*/kustomization.yaml"))
    # Those that replace others are for a user to take.
    used += "".join((DEPLOY / page).read_text() for page in ("README.md", "restarts.md"))
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
        if "spec" in each:
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
    certificate = named(objects, "Certificate", "pannier-coordinator-tls")["spec"]
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
            if "PANNIER_PEERS" in variables:
                name = variables["PANNIER_PEERS_NAME"]
                shared = named(objects, "Certificate", "pannier-sidecar-tls")["spec"]
                assert name in shared["dnsNames"], where
                peers = int(variables["PANNIER_PEERS"].rpartition(":")[2])
                assert peers in [p["containerPort"] for p in daemon["ports"]], where
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
    if command == "sh":
        assert words[-2:] == ["python", "train.py"]
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
        # A failed collective costs as many restarts as there are hosts.
        assert spec["backoffLimit"] == int(settings(objects)["RESTARTS"]) == 10 * hosts
        assert workload["spec"]["ttlSecondsAfterFinished"] > 0
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


@with_daemons
def test_a_coordinator_leaves_a_lost_node_long_before_kubernetes_default(
    objects: list[Object],
) -> None:
    """Saves wait for it meanwhile; the default is 300 s."""
    spec = pod_templates(objects)["Deployment/pannier-coordinator"]["spec"]
    assert {
        (each["key"], each["effect"]): each["tolerationSeconds"] for each in spec["tolerations"]
    } == {
        ("node.kubernetes.io/not-ready", "NoExecute"): 30,
        ("node.kubernetes.io/unreachable", "NoExecute"): 30,
    }


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
            assert "privileged" not in own
            if each["name"] != "trainer":
                assert own["readOnlyRootFilesystem"] is True, each["name"]
            added = set(own["capabilities"].get("add", []))
            if each["name"] == "directories":
                # Makes directories for another user, and ends.
                continue
            if each["name"] == "trainer" and "google.com/tpu" in str(each):
                assert (own["runAsUser"], added) == (0, {"SYS_RESOURCE", "DAC_OVERRIDE"})
                continue
            assert "runAsUser" not in own, each["name"]
            assert not added, each["name"]


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
            assert ("sizeLimit" in spool["emptyDir"]) == in_memory
        else:
            assert spool["hostPath"]["path"] == chosen["SPOOL_PATH"], where
        if in_memory:
            assert quantity(spool["emptyDir"]["sizeLimit"]) == size, where
        else:
            # A disk has room for others, too: the sidecar keeps to it, and the scheduler counts it.
            assert variables["PANNIER_SPOOL_BUDGET"] == f"{chosen['SPOOL_SIZE']}B", where
            if "emptyDir" in spool:
                asked = daemon["resources"]["requests"]["ephemeral-storage"]
                assert quantity(asked) == size, where
        # Twice the ranks' bytes, and a twentieth, is what two saves in flight take.
        said = re.search(
            r"that have (\d+) GiB together",
            (DEPLOY / "overlays" / overlay_of(objects) / "settings.env").read_text(),
        )
        assert said is not None
        assert size >= 2.05 * int(said[1]) * 2**30, where
        assert float(variables["PANNIER_GRACE"]) >= int(said[1]) / 0.2, where


@pytest.mark.parametrize("workload", ["jobset", "indexed-job", "leaderworkerset"])
@pytest.mark.parametrize(
    "place", ["sidecar", "sidecar spool-disk", "sidecar spool-nvme", "per-node"]
)
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
            assert medium == ("disk" if "spool" in place else "Memory")


@with_trainers
def test_two_jobs_in_a_namespace_have_nothing_in_common(overlay: str, tmp_path: Path) -> None:
    (release,) = releases(1)
    jobs = [overlaid(tmp_path, overlay, namePrefix=prefix) for prefix in ("a-", "b-")]
    for prefix, objects in zip(("a-", "b-"), jobs, strict=True):
        assert [problem for each in objects for problem in problems(each, release)] == []
        assert all(each["metadata"]["name"].startswith(prefix) for each in objects)
        # All that names something names what is there.
        certificates = of_kind(objects, "Certificate")
        secrets = {each["spec"]["secretName"] for each in certificates}
        assert all(secret.startswith(prefix) for secret in secrets)
        for issuer in of_kind(objects, "Issuer"):
            assert (
                issuer["spec"].get("ca", {"secretName": f"{prefix}pannier-ca"})["secretName"]
                in secrets
            )
        for certificate in certificates:
            named(objects, "Issuer", certificate["spec"]["issuerRef"]["name"])
        for template in pod_templates(objects).values():
            named(objects, "ServiceAccount", template["spec"]["serviceAccountName"])
            assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == f"{prefix}job"
            for volume in template["spec"]["volumes"]:
                if "secret" in volume:
                    made = secrets | {f"pannier-token.{prefix}job"}
                    assert volume["secret"]["secretName"] in made
            if "subdomain" in template["spec"]:
                named(objects, "Service", template["spec"]["subdomain"])
            for each in containers(template):
                variables = environment(each, objects, DOWNWARD)
                if "PANNIER_COORDINATOR" in variables:
                    host = variables["PANNIER_COORDINATOR"].partition(":")[0]
                    named(objects, "Service", host)
                    (tls,) = (
                        c for c in certificates if c["metadata"]["name"].endswith("coordinator-tls")
                    )
                    assert host in tls["spec"]["dnsNames"]
                if each["name"] == "trainer":
                    first, _, domain = variables["MASTER_ADDR"].partition(".")
                    assert (first.startswith(f"{prefix}train-"), domain) == (True, f"{prefix}train")
    for objects, others in (jobs, jobs[::-1]):
        labels = [t["metadata"]["labels"].items() for t in pod_templates(others).values()]
        for selector in selectors(objects):
            assert not any(selector.items() <= each for each in labels), selector


def selectors(objects: list[Object]) -> list[dict[str, str]]:
    """Labels that Services, policies and budgets look for."""
    found = []
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            found.append(spec["selector"])
        elif each["kind"] in ("PodDisruptionBudget", "Deployment"):
            found.append(spec["selector"]["matchLabels"])
        elif each["kind"] == "NetworkPolicy":
            found.append(spec["podSelector"]["matchLabels"])
            for source in (s for entry in spec["ingress"] for s in entry["from"]):
                found.append(source["podSelector"]["matchLabels"])
    assert found
    return found


def test_a_change_of_the_settings_restarts_what_reads_them(tmp_path: Path) -> None:
    before = overlaid(tmp_path, "gke-gpu")
    path = tmp_path / "deploy/overlays/own-0/settings.env"
    path.write_text(path.read_text().replace("PANNIER_GRACE=420", "PANNIER_GRACE=421"))
    after = built(path.parent)
    templates = pod_templates(before), pod_templates(after)
    assert all(templates[0][where] != templates[1][where] for where in templates[0])


@with_trainers
def test_images_are_pinned_and_trainers_ask_for_their_memory(objects: list[Object]) -> None:
    for template in pod_templates(objects).values():
        for each in containers(template):
            tag = each["image"].rpartition(":")[2]
            assert "/" not in tag, each["image"]
            assert tag != "latest"
            if each["name"] == "trainer":
                asked = each["resources"]["requests"]
                assert str(asked["cpu"]) == settings(objects)["TRAINER_CPU"]
                assert asked["memory"] == settings(objects)["TRAINER_MEMORY"]


def test_a_nodes_sidecar_comes_to_nodes_with_devices_and_no_overlay_wants_gke_by_accident() -> None:
    spec = pod_templates(built(DEPLOY / "overlays" / NODE))["DaemonSet/pannier-sidecar"]["spec"]
    tolerated = {each["key"] for each in spec["tolerations"]}
    assert tolerated == {"nvidia.com/gpu", "google.com/tpu"}
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {e["key"] for term in required["nodeSelectorTerms"] for e in term["matchExpressions"]}
    for device in ("gpu", "tpu"):
        objects = built(DEPLOY / "overlays" / f"gke-{device}")
        assert keys & pod_templates(objects)["JobSet/train"]["spec"]["nodeSelector"].keys()
    for overlay in ("indexed-job", "leaderworkerset", "per-node"):
        for template in pod_templates(built(DEPLOY / "overlays" / overlay)).values():
            assert "nodeSelector" not in template["spec"], overlay


@pytest.mark.parametrize("overlay", ["gke-gpu", "indexed-job", "per-node"])
@pytest.mark.parametrize("component", ["restart-in-place", "restart-all-containers"])
def test_restarts_in_place_count_for_no_limit_and_pods_per_host(
    overlay: str, component: str, tmp_path: Path
) -> None:
    objects = overlaid(tmp_path, overlay, component)
    (release,) = releases(1)
    assert [problem for each in objects for problem in problems(each, release)] == []
    (workload,) = (o for o in objects if o["kind"] in ("Job", "JobSet"))
    spec = workload["spec"]
    if workload["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    assert "backoffLimit" not in spec
    # Kubernetes takes these only together.
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert (spec["podReplacementPolicy"], spec["completionMode"]) == ("Failed", "Indexed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    trainer = container(spec["template"], "trainer")
    (rule,) = trainer["restartPolicyRules"]
    action = "RestartAllContainers" if component == "restart-all-containers" else "Restart"
    assert (trainer["restartPolicy"], rule["action"]) == ("Never", action)
    (ignored,) = spec["podFailurePolicy"]["rules"][0]["onPodConditions"]
    assert ignored == {"type": "DisruptionTarget", "status": "True"}


def test_jobsets_own_restart_in_place_has_its_agent_and_its_rights(tmp_path: Path) -> None:
    objects = overlaid(tmp_path, "gke-gpu", "restart-jobset-in-place", namePrefix="a-")
    (release,) = releases(1)
    assert [problem for each in objects for problem in problems(each, release)] == []
    (workload,) = of_kind(objects, "JobSet")
    template = pod_templates(objects)["JobSet/a-train"]
    agent = container(template, "agent")
    variables = environment(agent, objects, {"metadata.name": "x"})
    assert variables["JOBSET_NAME"] == workload["metadata"]["name"]
    (binding,) = of_kind(objects, "RoleBinding")
    named(objects, "Role", binding["roleRef"]["name"])
    (subject,) = binding["subjects"]
    assert subject["name"] == template["spec"]["serviceAccountName"]
    assert subject["namespace"] == workload["metadata"]["namespace"]


def overlay_of(objects: list[Object]) -> str:
    return next(name for name, each in _BUILT.items() if each is objects)
