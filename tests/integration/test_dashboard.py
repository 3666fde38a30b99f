"""The Grafana dashboard beside a real Prometheus: during a save it shows what page, ``status`` and ``watch`` show."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pannier.common.message_json import seconds_of
from support.actors.hand import Party
from support.network.prometheus import scraping
from support.network.status_pages import get, until
from support.processes.cli import pannier
from support.processes.daemons import Daemons, clean_environment
from support.processes.processes import MARKER, SESSION, python
from support.processes.ranks import free_port
from support.processes.watching import COMMITTED, await_save

pytestmark = pytest.mark.extended
PHASES = ("staged", "ingested", "uploaded", "durable")
SPOOL = {
    "saves": "spool_saves_bytes",
    "held by stopped processes": "spool_held_bytes",
    "mapped by trainers": "spool_leased_bytes",
    "reserved": "spool_bytes",
    "free": "spool_free_bytes",
    "capacity": "spool_capacity_bytes",
}


def test_the_dashboard_shows_what_page_and_watch_show(tmp_path: Path) -> None:
    coordinator, sidecar = (f"127.0.0.1:{free_port()}" for _ in range(2))
    done, checkpoint = f"{tmp_path}/run/step-30", f"{tmp_path}/run/step-31"
    with (
        Daemons(
            tmp_path,
            sidecar_arguments=["--metrics", sidecar, "--spool-budget", "64MiB"],
            coordinator_arguments=["--metrics", coordinator],
        ) as daemons,
        scraping(tmp_path, [sidecar, coordinator]) as prometheus,
        Party([daemons.sidecar.address] * 2, words=[1 << 20, 1 << 19]) as party,
    ):
        party.save(done, 1)
        before = await_save(daemons.coordinator.address, done, lambda s: s.state == COMMITTED)
        # A counter's first value is no growth to Prometheus: it must have seen that one.
        first = {
            phase: sum(getattr(rank, f"bytes_{phase}") for rank in before.ranks) for phase in PHASES
        }
        until(lambda: prometheus.panel("Bytes by phase", totals=True), lambda shown: shown == first)

        agreed = party.agree(checkpoint, 2)
        party.ingest(checkpoint, 2, {0: agreed[0]})
        save = until(
            lambda: get(coordinator, f"/save.json?id={checkpoint}").json()["save"],
            lambda save: (
                [rank["phase"] for rank in save["ranks"]]
                == ["RANK_PHASE_DURABLE", "RANK_PHASE_PLANNED"]
            ),
        )
        assert first_line_of_watch(checkpoint, daemons.coordinator.address)["ranks"][0] == {
            **save["ranks"][0],
            "seconds_since_seen": pytest.approx(save["ranks"][0]["seconds_since_seen"], abs=30),
        }
        page = get(sidecar, "/status.json").json()
        listed = pannier("status", "--address", daemons.sidecar.address, "--json").json()

        # Nothing moves any more until the other rank goes on: soon it has been scraped.
        until(
            lambda: prometheus.panel("Saves under way"),
            lambda shown: shown["staging"] == 1 and sum(shown.values()) == 1,
        )
        until(
            lambda: prometheus.panel("Spool"),
            lambda shown: all(shown[name] == int(listed[field]) for name, field in SPOOL.items()),
        )
        assert all(int(page[field]) == int(listed[field]) for field in SPOOL.values())
        waiting = prometheus.panel("Waiting for storage, by host")
        assert waiting == {sidecar: int(listed["bytes_queued"])}
        assert prometheus.panel("Last committed step") == {"job": 30}
        age = time.time() - (seconds_of(before.created_at) + before.committed_s)
        assert prometheus.panel("Age of the last commit")["job"] == pytest.approx(age, abs=2)
        assert prometheus.panel("Connected ranks") == {"job": len(save["ranks"])}
        assert prometheus.panel("Sidecars attached") == {"": 1}
        assert prometheus.panel("Hosts without their coordinator, draining daemons") == {
            "without coordinator": 0,
            "draining": 0,
            "storage calls that hang": 0,
        }
        refused = "Requests for room in the spool that were refused, by host"
        assert prometheus.panel(refused) == {sidecar: 0}
        assert prometheus.panel("Checks for retention that failed, per hour") == {"": 0}
        moved = {
            phase: sum(int(rank[f"bytes_{phase}"]) for rank in save["ranks"]) for phase in PHASES
        }
        assert moved["staged"] > moved["durable"] > 0
        until(
            lambda: prometheus.panel("Bytes by phase", totals=True),
            lambda shown: all(shown[phase] - first[phase] == moved[phase] for phase in PHASES),
        )
        assert min(prometheus.panel("Bytes by phase").values()) > 0
        party.ingest(checkpoint, 2, {1: agreed[1]})
        await_save(daemons.coordinator.address, checkpoint, lambda s: s.state == COMMITTED)
        until(lambda: prometheus.panel("Last committed step"), lambda shown: shown == {"job": 31})


def first_line_of_watch(checkpoint: str, address: str) -> dict[str, Any]:
    """What ``pannier watch`` shows at first."""
    with subprocess.Popen(
        python("-m", "pannier.cli", "watch", checkpoint, "--address", address, "--json"),
        env=clean_environment({MARKER: SESSION}),
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        line = watching.stdout.readline()
        watching.kill()
    found: dict[str, Any] = json.loads(line)
    return found
