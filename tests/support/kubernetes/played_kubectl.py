"""Stands for ``kubectl`` and ``grpcurl`` in front of a cluster that isn't there, for tests/cluster/run.sh.

What a call does to the cluster is kept in ``$PLAYED/state.json``, the calls in ``$PLAYED/calls``. Manifests are built by the
real kubectl (``$REAL_KUBECTL``), and what a pod reaches is what their NetworkPolicies say. ``$FAULT``: what this
cluster doesn't do. Each ``pannier ls`` finds the job 20 steps further.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PLAYED = Path(os.environ["PLAYED"])
FAULT = os.environ.get("FAULT", "")
State = dict[str, Any]
Object = dict[str, Any]


def main() -> int:
    program, words = Path(sys.argv[1]).name, sys.argv[2:]
    with (PLAYED / "calls").open("a") as calls:
        calls.write(f"{program} {' '.join(words)}\n")
    path = PLAYED / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {"namespaces": [], "step": 0}
    if program == "grpcurl":
        for name in ("-cert", "-key", "-cacert"):
            assert (
                Path(words[words.index(name) + 1]).read_text().startswith("of pannier-sidecar-tls")
            )
        print(json.dumps({"saves": [{"id": f"{state['root']}/step-20"}]}))
        return 0
    if words[0] == "kustomize":
        return subprocess.run([os.environ["REAL_KUBECTL"], *words], check=False).returncode
    if words[0] == "--namespace":
        assert words[1] in state["namespaces"], f"there is no namespace {words[1]}"
        words = words[2:]
    code = kubectl(state, words)
    new = PLAYED / f"state-{os.getpid()}"
    new.write_text(json.dumps(state))
    new.rename(path)
    return code


def kubectl(state: State, words: list[str]) -> int:
    """One call. Returns its exit status."""
    match words:
        case ["version"] | ["rollout", "status", *_] | ["wait", *_]:
            pass
        case ["create", "namespace", name]:
            state["namespaces"].append(name)
        case ["delete", "namespace", name, *_]:
            state["namespaces"].remove(name)
        case ["create", "secret", "generic", _, *files]:
            assert all(Path(each.partition("=")[2]).stat().st_size for each in files)
            state["secrets"] = state.get("secrets", 0) + 1
        case ["get", "crd", "certificates.cert-manager.io"]:
            return 0 if FAULT != "no cert-manager" else 1
        case ["apply", "-k", folder]:
            apply(state, folder)
        case ["exec", "deploy/pannier-coordinator", "--", "pannier", "ls", "--json", root]:
            if FAULT == "nothing is committed":
                return 1
            assert root == state["root"]
            state["step"] += 20
            print(json.dumps({"checkpoint": f"{root}/step-{state['step']}", "state": "committed"}))
        case ["exec", _, "--container", "trainer", "--", "sh", "-c", _]:
            start_again(state, [*state["pods"]])
        case ["get", "pods", "--selector", selector, "--output", _]:
            print(
                next(n for n, pod in state["pods"].items() if selector in pod["selector"]), end=""
            )
        case ["get", "pod", name, "--output", field]:
            key = re.findall(r"uid|restartCount|podIP", field)[0]
            print(state["pods"][name][key], end="")
        case ["get", "pods", "--output", "name"]:
            print("\n".join(f"pod/{name}" for name in state["pods"]))
        case ["get", "pods,events", *_]:
            print("EVENTS")
        case ["get", "secret", name, "--output", template]:
            assert re.fullmatch(
                r'go-template=\{\{index \.data "[a-z.]+" \| base64decode}}', template
            )
            print("of", name)
        case ["logs", name, *options]:
            pod = state["pods"][name.removeprefix("pod/")]
            print("\n".join(pod["previous" if "--previous" in options else "log"]))
        case ["delete", "pod", "--selector", "app.kubernetes.io/component=coordinator"]:
            pass
        case ["delete", "pod", name]:
            delete(state, name)
        case ["port-forward", "deploy/pannier-coordinator", ":7070"]:
            (PLAYED / "forwards").write_text(str(os.getpid()))
            print("Forwarding from 127.0.0.1:40404 -> 7070", flush=True)
            signal.pause()
        case ["run", name, *options]:
            visit(state, name, options[options.index("--labels") + 1], options[-4:])
        case _:
            raise AssertionError(f"kubectl {words}")
    return 0


def apply(state: State, folder: str) -> None:
    command = [os.environ["REAL_KUBECTL"], "kustomize", folder]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    (PLAYED / "objects.yaml").write_text(text)
    from support.kubernetes.manifests import pod_templates

    configuration = next(o for o in objects() if o["kind"] == "ConfigMap" and "HOSTS" in o["data"])
    state["root"] = configuration["data"]["PANNIER_ALLOW"]
    lws = "LeaderWorkerSet/train" in pod_templates(objects())
    state["index"] = (
        "leaderworkerset.sigs.k8s.io/worker-index"
        if lws
        else "batch.kubernetes.io/job-completion-index"
    )
    state["pods"] = {}
    for index in range(int(configuration["data"]["HOSTS"])):
        create(state, index, "a")


def objects() -> list[Object]:
    # Most calls do without it, and there are many.
    import yaml

    return list(yaml.safe_load_all((PLAYED / "objects.yaml").read_text()))


def create(state: State, index: int, called: str) -> None:
    state["pods"][f"train-{index}-{called}"] = {
        "selector": f"app.kubernetes.io/component=trainer,{state['index']}={index}",
        "uid": f"{index}-{called}",
        "podIP": f"10.0.0.{index + 1}",
        "restartCount": 0,
        "log": [f"resumes after step {state['step']}"],
        "previous": [],
    }


def start_again(state: State, pods: list[str]) -> None:
    for pod in (state["pods"][name] for name in pods):
        if FAULT == "trainers stay down":
            continue
        pod["restartCount"] += 1
        pod["previous"] = pod["log"]
        pod["log"] = [f"resumes after step {state['step']}"]


def delete(state: State, name: str) -> None:
    (index,) = re.findall(r"^train-(\d+)-", name)
    del state["pods"][name]
    for pod in state["pods"].values():
        pod["log"].append(f"leaves at step {state['step']}")
    if FAULT == "no pod is replaced":
        return
    start_again(state, [*state["pods"]])
    create(state, int(index), "b")


def visit(state: State, name: str, labels: str, targets: list[str]) -> None:
    """A pod that connects to what it is given: the coordinator, and the first trainer."""
    from support.kubernetes.manifests import admits, named

    own = dict(each.partition("=")[::2] for each in labels.split(","))
    log = []
    for policy, port in (("pannier-coordinator", targets[1]), ("pannier-trainer", targets[3])):
        (entry,) = named(objects(), "NetworkPolicy", policy)["spec"]["ingress"]
        admitted = any(admits(source["podSelector"], own) for source in entry["from"])
        reached = admitted or FAULT == "policies aren't enforced"
        log.append(f"reached {port}" if reached else f"kept out of {port} timed out")
    state["pods"][name] = {"selector": "", "log": log, "previous": []}


if __name__ == "__main__":
    sys.exit(main())
