"""Alerts, dashboard and what brings them into a cluster: they ask for what daemons serve, and fire when they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pannier.cli.main import cli
from pannier.v1 import save_pb2
from support.actors.hand import Party
from support.actors.nodes import JobFiles
from support.kubernetes.manifests import (
    DEPLOY,
    WITH_DAEMONS,
    arguments,
    built,
    daemons,
    environment,
    named,
    namespace,
    of_kind,
)
from support.kubernetes.schemas import problems, releases
from support.markdown import anchors, links
from support.network.prometheus import DASHBOARD, MONITORING, filled, needs
from support.network.status_pages import Scrape
from support.processes.daemons import Daemons
from support.processes.ranks import free_port
from support.processes.watching import COMMITTED, await_save

ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
RUNBOOK = DEPLOY.parent / "docs/runbook.md"
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"\b(?:pannier|process)_[a-z_]+\b")


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [needs("promtool"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scrape]:
    """What a sidecar and a coordinator serve after a save, and a node's gateway to its jobs."""
    directory = tmp_path_factory.mktemp("monitoring")
    ports = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    checkpoint = f"{directory}/step-1"
    files = JobFiles(directory / "jobs")
    files.add("a", allow=[str(directory)])
    further = [["--metrics", ports[0]], ["--metrics", ports[2], "--jobs", str(files.directory)]]
    with Daemons(
        directory, sidecars=2, coordinator_arguments=["--metrics", ports[1]], start=False
    ) as running:
        for sidecar, arguments in zip(running.sidecars, further, strict=True):
            sidecar.arguments += arguments
        for daemon in (running.coordinator, *running.sidecars):
            daemon.start()
        with Party([running.sidecar.address]) as party:
            party.save(checkpoint, 1)
            await_save(running.sidecar.address, checkpoint, lambda each: each.state == COMMITTED)
            served_by = ("sidecar", "coordinator", "gateway")
            return {name: Scrape(port) for name, port in zip(served_by, ports, strict=True)}


@pytest.fixture(scope="module")
def served(scrapes: dict[str, Scrape]) -> set[str]:
    """Names of all series."""
    return {name for each in scrapes.values() for name in each.names}


def test_the_list_of_metrics_is_what_is_served(scrapes: dict[str, Scrape]) -> None:
    found: dict[str, list[str]] = {}
    for daemon, scrape in scrapes.items():
        for name, family in scrape.families.items():
            if not name.startswith("pannier_job_" if daemon == "gateway" else "pannier_"):
                continue
            labels = sorted({label for s in family.samples for label in s.labels} - {"le"})
            full = f"{name}_total" if family.type == "counter" else name
            row = (family.type, ", ".join(f"`{label}`" for label in labels), family.documentation)
            entry = found.setdefault(full, [*row, daemon])
            assert entry[:3] == list(row), "both mean the same by it"
            entry[3] = daemon if entry[3] == daemon else "both"
    text = (DEPLOY / "metrics.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\| (\w+) \| (.*) \|$", text, re.MULTILINE)
    assert {name: [kind, labels, text, of] for name, kind, labels, of, text in listed} == found


def test_every_metric_that_is_asked_for_is_served(served: set[str]) -> None:
    asked = {
        name
        for query in (*QUERIES, *(rule["expr"] for rule in RULES))
        for name in NAME.findall(query)
    }
    asked |= {
        name
        for each in DASHBOARD["templating"]["list"]
        for name in NAME.findall(str(each.get("definition", "")))
    }
    assert len(asked) > 20
    assert asked <= served, asked - served
    # And nothing that is served is left out of sight; alerts alone don't show how a counter grows.
    own = {name.removesuffix("_bucket") for name in served if name.startswith("pannier_")}
    families = {name for name in own if not name.endswith(("_count", "_sum"))}
    assert families <= {name.removesuffix("_bucket") for name in asked}
    shown = {name for query in QUERIES for name in NAME.findall(query)}
    assert {name for name in families if name.endswith("_total")} <= shown


def test_the_operators_form_has_the_same_rules() -> None:
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    assert rules["spec"] == ALERTS


def test_each_alert_has_its_paragraph_in_the_runbook() -> None:
    text = RUNBOOK.read_text()
    sections = dict(
        re.findall(r"^## (Pannier\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    assert list(sections) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert path == f"https://RUNBOOKS/{RUNBOOK.name}"
        assert anchor == rule["alert"].lower()
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "```console\n" in sections[rule["alert"]], "nothing to paste"
    for target, anchor in links(text):
        assert (RUNBOOK.parent / target).exists(), target
        assert target or anchor in anchors(text), anchor
    for metric in NAME.findall(text):
        assert any(metric in query for query in (*QUERIES, *(rule["expr"] for rule in RULES))), (
            metric
        )


def test_prometheus_takes_rules_and_queries(tmp_path: Path) -> None:
    promtool("check", "rules", str(MONITORING / "alerts.yaml"))
    plain = [filled(query) for query in QUERIES]
    recorded = [{"record": f"q{index}", "expr": query} for index, query in enumerate(plain)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", str(path))


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


JOB = {"namespace": "training", "training_job": "llama"}
AT = {"namespace": "training", "instance": "10.0.0.7:7072"}
FIRING: dict[str, tuple[list[dict[str, str]], dict[str, str]]] = {
    "PannierNoCommit": (
        [
            series("pannier_last_commit_age_seconds", "0+60x120", **JOB),
            series("pannier_trainers", "8x120", **JOB),
        ],
        JOB,
    ),
    "PannierOldestUploadGrowing": (
        [series("pannier_oldest_upload_age_seconds", "0+60x120", **AT)],
        AT,
    ),
    "PannierSpoolNearlyFull": (
        [
            series("pannier_spool_saves_bytes", "95x120", **AT),
            series("pannier_spool_held_bytes", "0x120", **AT),
            series("pannier_spool_capacity_bytes", "100x120", **AT),
        ],
        AT,
    ),
    "PannierTrainingWaits": (
        [
            series("pannier_ranks_waiting", "0x100 4x20", reason="room", **AT),
            series("pannier_ranks_waiting", "0x120", reason="commit", **AT),
        ],
        {"namespace": "training", "reason": "room"},
    ),
    "PannierRanksWaitForRoom": (
        [series("pannier_spool_refusals_total", "0+30x120", **AT)],
        AT,
    ),
    "PannierSavesAborted": (
        [series("pannier_saves_ended_total", "0x90 1 2 3 4 4x30", outcome="aborted", **AT)],
        {"namespace": "training"},
    ),
    "PannierSaveInDoubt": (
        [series("pannier_saves", "1x120", state="in_doubt", **AT)],
        {"namespace": "training"},
    ),
    "PannierCoordinatorUnresponsive": (
        [series("pannier_coordinator_connected", "0x120", **AT)],
        AT,
    ),
    "PannierJobDown": (
        [
            series("pannier_job_up", "0x120", **JOB),
            series("pannier_job_starts_total", "1x120", **JOB),
        ],
        JOB,
    ),
    "PannierUploadsRetried": (
        [series("pannier_upload_retries_total", "0+60x120", **JOB)],
        JOB,
    ),
    "PannierRetentionFails": (
        [series("pannier_retention_failures_total", "0x30 1x30 2x30 3x30", **AT)],
        AT,
    ),
}
NOT_FIRING: dict[str, list[dict[str, str]]] = {
    # No trainer any more; or the coordinator was restarted and the commit is older.
    "PannierNoCommit": [
        series("pannier_last_commit_age_seconds", "0+60x120", **JOB),
        series("pannier_trainers", "8x30 0x90", **JOB),
    ],
    # Each is done in time.
    "PannierOldestUploadGrowing": [
        series("pannier_oldest_upload_age_seconds", "0 300 700 0 300 700 0 300 700 0x110", **AT)
    ],
    # Leased by trainers, for the next save.
    "PannierSpoolNearlyFull": [
        series("pannier_spool_saves_bytes", "10x120", **AT),
        series("pannier_spool_held_bytes", "0x120", **AT),
        series("pannier_spool_leased_bytes", "90x120", **AT),
        series("pannier_spool_capacity_bytes", "100x120", **AT),
    ],
    # The first plan takes a moment; the loop itself waits for a commit.
    "PannierTrainingWaits": [
        series("pannier_ranks_waiting", "0x109 4x11", reason="plan", **AT),
        series("pannier_ranks_waiting", "4x120", reason="commit", **AT),
    ],
    # Once: the next request found room.
    "PannierRanksWaitForRoom": [series("pannier_spool_refusals_total", "0x105 7x15", **AT)],
    "PannierSavesAborted": [
        series("pannier_saves_ended_total", "0x100 1x20", outcome="aborted", **AT)
    ],
    "PannierSaveInDoubt": [series("pannier_saves", "0x100 1 0x20", state="in_doubt", **AT)],
    "PannierCoordinatorUnresponsive": [
        series("pannier_coordinator_connected", "1x100 0 1x20", **AT)
    ],
    # Restarted once, with other settings.
    "PannierJobDown": [
        series("pannier_job_up", "1x100 0 1x20", **JOB),
        series("pannier_job_starts_total", "1x100 2x20", **JOB),
    ],
    "PannierRetentionFails": [series("pannier_retention_failures_total", "0x60 1x60", **AT)],
    "PannierUploadsRetried": [series("pannier_upload_retries_total", "0+1x120", **JOB)],
}


def test_alerts_fire_when_they_should_and_not_else(tmp_path: Path) -> None:
    assert set(FIRING) == set(NOT_FIRING) == {rule["alert"] for rule in RULES}
    tests: list[dict[str, Any]] = []
    # Without annotations: their numbers aren't the point.
    bare = [{name: rule[name] for name in rule if name != "annotations"} for rule in RULES]
    for rule in bare:
        input_series, labels = FIRING[rule["alert"]]
        expected = {"exp_labels": {**rule["labels"], **labels}}
        for given, alerts in ((input_series, [expected]), (NOT_FIRING[rule["alert"]], [])):
            asked = {"eval_time": "110m", "alertname": rule["alert"], "exp_alerts": alerts}
            tests.append({"interval": "1m", "input_series": given, "alert_rule_test": [asked]})
    (tmp_path / "alerts.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "pannier", "rules": bare}]})
    )
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": tests}))
    promtool("test", "rules", str(path))


def test_the_commands_of_the_runbook_are_commands() -> None:
    text = RUNBOOK.read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.strip().splitlines() if line[:1] in "$p"]
    used = [re.match(r"(?:\$ kubectl .*-- |\$ )pannier (\w+)(.*)", line) for line in lines]
    found = [match for match in used if match is not None]
    assert len(found) >= len(RULES)
    for match in found:
        command = cli.get_command(click.Context(cli), match[1])
        assert command is not None, match[0]
        known = {option for each in command.params for option in each.opts}
        assert set(re.findall(r"--[a-z-]+", match[2])) <= known, match[0]
    # Each cause that a metric can name is in the table.
    causes = {
        name.removeprefix("FAILURE_KIND_").lower() for name, _ in save_pb2.FailureKind.items()
    }
    table = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert set(table) == causes - {"unspecified"}


@pytest.mark.parametrize("overlay", WITH_DAEMONS)
@pytest.mark.parametrize("component", ["monitoring", "monitoring-gke"])
def test_with_the_component_all_daemons_are_scraped(
    overlay: str, component: str, tmp_path: Path
) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    path = tmp_path / "deploy/overlays" / overlay / "kustomization.yaml"
    text = path.read_text()
    assert "  # - ../../components/monitoring" in text
    path.write_text(
        text.replace("# - ../../components/monitoring", f"- ../../components/{component}")
    )
    objects = built(path.parent)
    (release,) = releases(1)
    assert [problem for each in objects for problem in problems(each, release)] == []
    assert {each["metadata"].get("namespace") for each in objects} == {namespace(overlay)}
    kinds = {each["kind"] for each in objects}
    if component == "monitoring":
        (monitor,) = of_kind(objects, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (rules,) = of_kind(objects, "PrometheusRule")
        assert not kinds & {"PodMonitoring", "Rules"}
    else:
        (monitor,) = of_kind(objects, "PodMonitoring")
        (endpoint,) = monitor["spec"]["endpoints"]
        (rules,) = of_kind(objects, "Rules")
        assert not kinds & {"PodMonitor", "PrometheusRule"}
    assert rules["spec"] == ALERTS
    wanted = monitor["spec"]["selector"]["matchLabels"]
    policy = named(objects, "NetworkPolicy", "pannier-metrics")["spec"]
    assert policy["podSelector"]["matchLabels"] == wanted
    (opened,) = policy["ingress"][0]["ports"]
    seen = 0
    for where, template, daemon in daemons(objects):
        assert wanted.items() <= template["metadata"]["labels"].items(), where
        ports = {each["name"]: each["containerPort"] for each in daemon["ports"]}
        variables = environment(
            daemon, objects, {"spec.nodeName": "node-0", "status.podIP": "10.0.0.1"}
        )
        assert variables["PANNIER_METRICS"].rpartition(":")[2] == str(ports[endpoint["port"]]), (
            where
        )
        assert opened["port"] == ports[endpoint["port"]]
        assert arguments(daemon, variables)
        seen += 1
    assert seen == 2
    dashboard = named(objects, "ConfigMap", "pannier-dashboard")
    assert json.loads(dashboard["data"]["dashboard.json"]) == DASHBOARD


def test_the_dashboard_is_one_that_grafana_lays_out() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    taken: set[tuple[int, int]] = set()
    for x, y, width, height in places:
        cells = {(x + i, y + j) for i in range(width) for j in range(height)}
        assert not cells & taken
        assert x + width <= 24
        taken |= cells
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(titles)
