"""The status page in a real browser, beside real daemons; and that it, status, watch and metrics agree."""

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from pannier.daemon.status_service import Backlog
from pannier.v1 import load_status_pb2, status_pb2
from support.actors.hand import Party
from support.actors.load_reporters import LOADED, READING, ReportingRank
from support.network.browser import Browser, browsing
from support.network.page_states import serving
from support.network.status_pages import Scrape, get, until
from support.processes.cli import pannier
from support.processes.daemons import Daemons, clean_environment
from support.processes.processes import MARKER, SESSION, python
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S

pytestmark = pytest.mark.extended
PHASES = ("staged", "ingested", "uploaded", "durable")
VARYING = ("seconds_since_seen", "deadline_s")
MARKUP = "<img src=x onerror=document.title=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as opened:
        yield opened


class Site:
    """Daemons with pages."""

    def __init__(self, directory: Path) -> None:
        self.coordinator, self.sidecar = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.daemons = Daemons(
            directory,
            sidecar_arguments=["--metrics", self.sidecar],
            coordinator_arguments=["--metrics", self.coordinator],
        )

    def save(self, checkpoint: str, where: str = "") -> dict[str, Any]:
        answer = get(where or self.coordinator, f"/save.json?id={checkpoint}")
        assert answer.status == 200, answer.text
        found: dict[str, Any] = answer.json()["save"]
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("page"))
    with made.daemons:
        yield made


def test_a_save_is_followed_live_the_slowest_rank_first(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    page = browser.page
    checkpoint = f"{tmp_path}/step-12"
    with Party([site.daemons.sidecar.address] * 3, incarnation="live") as party:
        agreed = party.agree(checkpoint, 1)
        party.ingest(checkpoint, 1, {0: agreed[0], 1: agreed[1]})
        page.goto(f"http://{site.coordinator}/")
        expect(page.locator("#ranks tr")).to_have_count(3)
        expect(page.locator("#ranks .PLANNED")).to_have_count(1)
        assert page.text_content("#place") == checkpoint
        assert page.text_content("#state") == "STAGING"
        assert page.text_content("#ranks tr:first-child td") == "2"
        assert "rank 2 (host node-2" in str(page.text_content("#waiting"))
        party.ingest(checkpoint, 1, {2: agreed[2]})
        expect(page.locator("#state")).to_have_text("COMMITTED")
        expect(page.locator("#ranks .DURABLE")).to_have_count(3)
    assert "step-12" in str(page.text_content("#tiles"))
    assert "/s until durable" in str(page.text_content("#rate"))
    assert _colours(browser) > 2
    assert browser.complaints == []


def test_a_failure_has_its_rank_cause_and_hint_and_no_text_becomes_markup(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    page = browser.page
    checkpoint = f"{tmp_path}/{MARKUP}"
    with Party([site.daemons.sidecar.address] * 2, incarnation="marked") as party:
        party.agree(checkpoint, 1)
        party.hands[1].fail(party.hands[1].context(checkpoint, 1), f"it can't: {MARKUP}")
        page.goto(f"http://{site.coordinator}/")
        expect(page.locator("#state")).to_have_text("ABORTED: client")
        expect(page.locator(".failure")).to_have_count(1)
        text = str(page.text_content(".failure"))
        assert f"rank 1 (node-1): CLIENT: it can't: {MARKUP}" in text
        assert "its log has the traceback" in text
        assert page.text_content("#place") == checkpoint
        page.click("#saves button:first-child")
        page.hover("#timeline")
    assert page.locator("img").count() == 0
    assert page.title() == "Pannier"
    assert browser.complaints == []


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing_else(site: Site) -> None:
    page = get(site.coordinator, "/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "innerHTML" not in page.text
    assert "src=" not in page.text
    assert "href=" not in page.text
    assert " style=" not in page.text
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"


def test_an_old_answer_is_marked_when_the_daemon_has_exited(browser: Browser) -> None:
    with serving() as pages:
        browser.page.goto(pages.url())
        expect(browser.page.locator("#saves")).to_have_text("none so far")
        assert not browser.page.is_visible("#lost")
    expect(browser.page.locator("#lost")).to_be_visible()
    assert "has not responded for" in str(browser.page.text_content("#lost"))
    browser.page.goto("about:blank")
    browser.complaints.clear()


def test_page_status_watch_and_metrics_say_the_same_during_a_save(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    checkpoint = f"{tmp_path}/step-31"
    address = site.daemons.coordinator.address
    before = _moved(Scrape(site.sidecar))
    with Party(
        [site.daemons.sidecar.address] * 2, incarnation="same", words=[1 << 20, 1 << 19]
    ) as party:
        agreed = party.agree(checkpoint, 1)
        party.ingest(checkpoint, 1, {0: agreed[0]})
        # Nothing moves any more until the other rank goes on.
        half = until(
            lambda: site.save(checkpoint),
            lambda save: (
                [r["phase"] for r in save["ranks"]] == ["RANK_PHASE_DURABLE", "RANK_PHASE_PLANNED"]
                and int(save["ranks"][1]["bytes_staged"]) > 0
            ),
        )
        watching = subprocess.Popen(
            python("-m", "pannier.cli", "watch", checkpoint, "--address", address, "--json"),
            env=clean_environment({MARKER: SESSION}),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        assert _steady(json.loads(watching.stdout.readline())) == _steady(half)
        status = pannier("status", checkpoint, "--address", address, "--json").json()["save"]
        assert _steady(status) == _steady(half)
        here = pannier(
            "status", checkpoint, "--address", site.daemons.sidecar.address, "--json"
        ).json()["save"]
        scrape = Scrape(site.sidecar)
        for phase in PHASES:
            total = sum(int(rank[f"bytes_{phase}"]) for rank in half["ranks"])
            assert _moved(scrape)[phase] - before[phase] == total, phase
            assert sum(int(rank[f"bytes_{phase}"]) for rank in here["ranks"]) == total, phase
        listed = pannier("status", "--address", site.daemons.sidecar.address, "--json").json()
        page = get(site.sidecar, "/status.json").json()
        for name, field in (
            ("pannier_queue_bytes", "bytes_queued"),
            ("pannier_spool_reserved_bytes", "spool_bytes"),
            ("pannier_spool_leased_bytes", "spool_leased_bytes"),
            ("pannier_spool_saves_bytes", "spool_saves_bytes"),
            ("pannier_spool_capacity_bytes", "spool_capacity_bytes"),
        ):
            assert scrape.value(name) == int(listed[field]) == int(page[field]), name
        assert Scrape(site.coordinator).value("pannier_saves", state="staging") == 1
        browser.page.goto(f"http://{site.coordinator}/")
        expect(browser.page.locator("#ranks tr")).to_have_count(2)
        cells = browser.page.locator("#ranks tr").last.locator("td").all_text_contents()
        assert cells[:7] == ["0", "node-0", "DURABLE", "4.0 MiB", "4.0 MiB", "4.0 MiB", "4.0 MiB"]
        party.ingest(checkpoint, 1, {1: agreed[1]})
        output, _ = watching.communicate(timeout=2 * BOUND_S)
        assert watching.returncode == 0
    ended = until(
        lambda: site.save(checkpoint), lambda save: save["state"] == "SAVE_STATE_COMMITTED"
    )
    assert _steady(json.loads(output.splitlines()[-1])) == _steady(ended)
    coordinator = Scrape(site.coordinator)
    assert coordinator.value("pannier_last_committed_step", training_job="job") == 31
    committed = coordinator.value("pannier_last_commit_timestamp_seconds", training_job="job")
    began = datetime.fromisoformat(ended["created_at"])
    assert committed == pytest.approx(began.timestamp() + ended["committed_s"], abs=0.01)
    total = sum(int(rank["bytes_durable"]) for rank in ended["ranks"])
    assert total == int(ended["bytes_total"])
    assert _moved(Scrape(site.sidecar))["durable"] - before["durable"] == total
    browser.complaints.clear()


def _moved(scrape: Scrape) -> dict[str, float]:
    known = scrape.labels("pannier_bytes_total")
    return {
        phase: scrape.value("pannier_bytes_total", training_job="job", phase=phase) if known else 0
        for phase in PHASES
    }


def _steady(save: dict[str, Any]) -> dict[str, Any]:
    """Without what changes with time alone."""
    kept = {
        name: value
        for name, value in save.items()
        if name not in ("ranks", "waiting_on", "summary")
    }
    kept["waiting_for"] = save["waiting_on"]["ranks"]
    kept["ranks"] = [
        {name: value for name, value in rank.items() if name not in VARYING}
        for rank in save["ranks"]
    ]
    return kept


def _colours(browser: Browser) -> int:
    """How many different pixels the timeline has, coarsely."""
    found = browser.page.evaluate(
        """() => {
            const canvas = document.querySelector('#timeline'), seen = new Set();
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            for (let i = 0; i < data.length; i += 4)
                if (data[i + 3] === 255) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
            return seen.size;
        }"""
    )
    return int(found)


def test_what_is_here_for_loads_has_a_tile(browser: Browser) -> None:
    copies = [
        status_pb2.LocalCopy(checkpoint_id=f"gs://bucket/{root}/step-{MARKUP}{root}", bytes=1 << 30)
        for root in ("a", "b")
    ]
    with serving([], Backlog(capacity_bytes=8 << 30, local_copies=copies)) as pages:
        browser.page.goto(pages.url())
        tile = browser.page.locator("#tiles .tile").last
        expect(tile.locator("b")).to_have_text("2.0 GiB")
        shown = tile.locator("span").all_text_contents()
        assert shown == ["here for loads", f"step-{MARKUP}a, step-{MARKUP}b"]
        assert browser.page.title() != "1"
        browser.page.goto("about:blank")


def test_a_load_is_listed_and_followed_and_its_failure_named(browser: Browser) -> None:
    page = browser.page
    with serving([]) as pages:
        ranks = [
            ReportingRank(rank, f"c{rank}", of=3, place=f"gs://bucket/{MARKUP}/step-7")
            for rank in range(3)
        ]
        for rank in ranks:
            pages.report(
                rank(
                    load="0123456789abcdef",
                    phase=READING,
                    bytes_total=4 << 30,
                    bytes={"own spool": 1 << 30, "node-7": 1 << 20},
                    waiting_for="node-7 (4 of 812 files, 1.2 GiB left)",
                )
            )
        page.goto(pages.url())
        expect(page.locator("#loadState")).to_have_text("LOADING")
        expect(page.locator("#loadRanks tr")).to_have_count(6)
        assert "step-7" in str(page.text_content("#tiles"))
        assert page.text_content("#loadRate") == "25 % of 12.0 GiB read"
        assert "3.0 GiB own spool, 3.0 MiB node-7" in str(page.text_content("#loadSources"))
        assert (
            page.text_content("#loadWaiting") == "waiting for node-7 (4 of 812 files, 1.2 GiB left)"
        )
        assert page.locator("#save").is_hidden()
        page.click("#loads button")
        assert page.url.endswith("#load-0123456789ab")
        pages.report(ranks[0](phase=LOADED, waiting_for=""))
        expect(page.locator("#loadRanks .LOADED")).to_have_count(1)
        failed = "process 101 of rank 1 on host node-1 died while it loaded"
        pages.report(ranks[1](phase=load_status_pb2.LOAD_PHASE_FAILED, last_error=failed))
        expect(page.locator("#loadState")).to_have_text("FAILED")
        assert f"rank 1 (node-1): {failed}" in str(page.text_content("#loadFailures"))
        assert page.text_content("#loadRanks tr:first-child td:nth-child(3)") == "FAILED"
        page.set_viewport_size({"width": 390, "height": 844})
        wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide
        page.goto(pages.url("load-unknown"))
        page.reload()
        expect(page.locator("#unknown")).to_contain_text("knows no load 'load-unknown'")
        page.goto("about:blank")
    assert [each for each in browser.complaints if "404" not in each] == []
