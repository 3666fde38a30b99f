"""A real Prometheus that scrapes daemons, and the dashboard's panels as Grafana asks it for them."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from support.network.status_pages import get, until
from support.processes.daemons import clean_environment
from support.processes.processes import Process
from support.processes.ranks import free_port

MONITORING = Path(__file__).parents[3] / "deploy/components/monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
NAMESPACE = "training"
_SCRAPE = "250ms"


def needs(tool: str) -> str:
    """Path of one of Prometheus' programs. Skips a test on a machine without; fails it in CI."""
    found = shutil.which(tool)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{tool} is missing: alerts and dashboard can't be checked")
        pytest.skip(f"{tool} isn't installed: `make tools`")
    return found


def filled(query: str, *, interval: str = "1m") -> str:
    """A panel's query with Grafana's variables replaced: all namespaces and jobs."""
    return (
        query.replace("$__rate_interval", interval)
        .replace("$namespace", ".*")
        .replace("$training_job", ".*")
    )


class Prometheus:
    """One that runs at ``host:port``."""

    def __init__(self, address: str) -> None:
        self._address = address

    def panel(self, title: str, *, totals: bool = False) -> dict[str, float]:
        """What a panel shows now, by its legend; a query without one goes by an empty text.

        Args:
            totals: not how fast counters grow but what they have come to: rates are extrapolated.
        """
        (panel,) = (each for each in DASHBOARD["panels"] if each.get("title") == title)
        shown: dict[str, float] = {}
        for target in panel["targets"]:
            query = filled(target["expr"])
            if totals:
                query = re.sub(r"\b(?:rate|increase)\((.*?)\[\w+\]\)", r"\1", query)
            for labels, value in self._query(query):
                legend = target.get("legendFormat", "")
                for name in re.findall(r"\{\{(\w+)\}\}", legend):
                    legend = legend.replace("{{" + name + "}}", labels[name])
                shown[legend] = value
        return shown

    def _query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        answer = get(self._address, f"/api/v1/query?query={quote(expression)}")
        assert answer.status == 200, answer.text
        return [
            (each["metric"], float(each["value"][1])) for each in answer.json()["data"]["result"]
        ]


@contextmanager
def scraping(directory: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Runs one that has scraped each ``host:port`` of ``targets`` and goes on four times a second."""
    binary = needs("prometheus")
    job = {
        "job_name": "pannier",
        "static_configs": [{"targets": list(targets), "labels": {"namespace": NAMESPACE}}],
    }
    settings = {
        "global": {"scrape_interval": _SCRAPE, "scrape_timeout": _SCRAPE},
        "scrape_configs": [job],
    }
    config = directory / "prometheus.yaml"
    config.write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    process = Process(
        "prometheus",
        [
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'prometheus'}",
            f"--web.listen-address={address}",
        ],
        environment=clean_environment({}),
        log=directory / "prometheus.log",
    )
    try:
        server = Prometheus(address)

        def scraped() -> int:
            try:
                if get(address, "/-/ready").status != 200:
                    return 0
            except OSError:
                return 0
            return len(server._query("up == 1"))

        until(scraped, lambda count: count == len(targets))
        yield server
    finally:
        process.close()
