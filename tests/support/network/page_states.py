"""Status pages of saves that were never made: as large as any, running or ended; and screenshots of them.

``python -m support.network.page_states docs`` makes those of the documentation again.
"""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Page

from pannier.common.message_json import duration, timestamp
from pannier.common.wait_text import Awaited, waiting_on
from pannier.daemon.http_server import serve_http
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_page import StatusPage
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import Backlog, DaemonInfo
from pannier.v1 import load_status_pb2, save_pb2
from support.network.browser import browsing
from support.processes.ranks import free_port

RANKS_PER_HOST = 8
_GIB = 1 << 30
_WIDTHS = (390, 1280, 1920)
_SCHEMES = ("light", "dark")
_PHONE = 500
"""A narrower page is a phone's."""


def _status(number: int, state: "save_pb2.SaveState", seconds_ago: float) -> save_pb2.SaveStatus:
    save = save_pb2.SaveId(job="llama-70b", incarnation="a1b2c3", group="g5f", number=number)
    return save_pb2.SaveStatus(
        save=save,
        id=f"llama-70b/a1b2c3/g5f/{number}",
        checkpoint_id=f"gs://bucket/llama-70b/run-3/step-{number}000",
        state=state,
        created_at=timestamp(time.time() - seconds_ago),
    )


def _add_rank(
    status: save_pb2.SaveStatus, number: int, phase: "save_pb2.RankPhase", uploaded: float
) -> save_pb2.RankStatus:
    """A rank of 10 GiB, and how much of it is in storage, from 0 to 1."""
    status.group_size += 1
    status.durable_ranks += phase == save_pb2.RANK_PHASE_DURABLE
    chance = random.Random(number)
    spread, slowness = chance.random(), chance.betavariate(2, 5)
    durable = phase == save_pb2.RANK_PHASE_DURABLE
    status.bytes_total += 10 * _GIB
    return status.ranks.add(
        rank=number,
        host=f"gpu-node-{number // RANKS_PER_HOST}",
        phase=phase,
        bytes_staged=10 * _GIB,
        bytes_ingested=10 * _GIB,
        bytes_uploaded=int(uploaded * 10 * _GIB),
        bytes_durable=10 * _GIB if durable else 0,
        seconds_since_seen=0.4,
        transport="mapped",
        stalled_s=0.31 + spread / 10,
        planned_s=0.1 + spread / 20,
        staged_s=0.5 + spread / 5,
        ingested_s=1.4 + spread / 2,
        durable_s=6 + 6 * slowness if durable else 0,
    )


def running(ranks: int, number: int = 40, *, uploaded: float = 0.1) -> save_pb2.SaveStatus:
    """UPLOADING: most ranks are durable, half of the last host's have ``uploaded`` at least."""
    status = _status(number, save_pb2.SAVE_STATE_UPLOADING, 15)
    status.planned_s, status.ingested_s = 0.2, 1.9
    slow = range(ranks - RANKS_PER_HOST // 2, ranks)
    for rank in range(ranks):
        if rank not in slow:
            _add_rank(status, rank, save_pb2.RANK_PHASE_DURABLE, 1.0)
            continue
        late = _add_rank(status, rank, save_pb2.RANK_PHASE_INGESTED, uploaded + rank % 4 / 5)
        late.retries, late.last_error = 3, "503 Slow Down"
    status.waiting_on.ranks.extend(slow)
    status.waiting_on.text = f"ranks {list(slow)} (host {status.ranks[-1].host}, last seen 0 s ago)"
    status.waiting_on.deadline_s = 3580
    return status


def aborted(ranks: int, number: int = 39) -> save_pb2.SaveStatus:
    """ABORTED: the trainers of half of the hosts were lost, and storage refused one other rank."""
    status = _status(number, save_pb2.SAVE_STATE_ABORTED, 120)
    status.planned_s = 0.2
    lost = range(min(ranks // 2, 500))
    for rank in range(ranks):
        state = _add_rank(status, rank, save_pb2.RANK_PHASE_INGESTED, 0.4)
        if rank in lost:
            message = (
                f"the process {4100 + rank} of rank {rank} on host {state.host} is gone: its connection "
                "ended before the rank was ingested (streaming)"
            )
            _fail(status, state, save_pb2.FAILURE_KIND_LOST, message)
            state.ingested_s = state.bytes_uploaded = state.bytes_ingested = 0
    refused = status.ranks[-1]
    message = f"403 Forbidden: {refused.host} may not create objects in bucket: `pannier doctor`"
    _fail(status, refused, save_pb2.FAILURE_KIND_STORAGE, message)
    return status


def _fail(
    status: save_pb2.SaveStatus,
    rank: save_pb2.RankStatus,
    kind: "save_pb2.FailureKind",
    message: str,
) -> None:
    rank.phase, rank.last_error = save_pb2.RANK_PHASE_FAILED, message
    status.failures.add(rank=rank.rank, host=rank.host, kind=kind, message=message)


def committed(ranks: int, number: int = 38) -> save_pb2.SaveStatus:
    """COMMITTED."""
    status = _status(number, save_pb2.SAVE_STATE_COMMITTED, 240)
    for rank in range(ranks):
        _add_rank(status, rank, save_pb2.RANK_PHASE_DURABLE, 1.0)
    status.planned_s, status.ingested_s, status.durable_s = 0.2, 1.9, 12.0
    status.committed_s = 12.3
    return status


def outage(ranks: int, number: int = 40) -> save_pb2.SaveStatus:
    """UPLOADING: storage has answered nothing but errors for a while."""
    status = _status(number, save_pb2.SAVE_STATE_UPLOADING, 95)
    status.planned_s, status.ingested_s = 0.2, 1.9
    for rank in range(ranks):
        late = _add_rank(status, rank, save_pb2.RANK_PHASE_INGESTED, 0.1)
        late.retries, late.last_error = 14, "503 Service Unavailable (gs://bucket/llama-70b)"
    _wait_for(status, range(ranks), 0)
    return status


def rank_stopped(ranks: int, number: int = 40) -> save_pb2.SaveStatus:
    """STAGING: one rank has not called save; the others have handed over."""
    status = _status(number, save_pb2.SAVE_STATE_STAGING, 70)
    for rank in range(ranks):
        if rank == 5:
            host = f"gpu-node-{rank // RANKS_PER_HOST}"
            missing = status.ranks.add(rank=rank, host=host, phase=save_pb2.RANK_PHASE_MISSING)
            missing.seconds_since_seen = 64
            status.group_size += 1
            continue
        waiting = _add_rank(status, rank, save_pb2.RANK_PHASE_HANDED_OVER, 0)
        waiting.ingested_s = 0
    _wait_for(status, [5], 64)
    return status


def sidecar_stopped(ranks: int, number: int = 40) -> save_pb2.SaveStatus:
    """UPLOADING: the sidecar of the last host is stopped; its ranks are fine."""
    status = running(ranks, number)
    late = range(ranks - RANKS_PER_HOST, ranks)
    for rank in late:
        state = status.ranks[rank]
        state.phase, state.seconds_since_seen = save_pb2.RANK_PHASE_INGESTED, 42
        state.retries, state.last_error, state.durable_s = 0, "", 0
    _wait_for(status, late, 42, no_sidecar=True)
    return status


def _wait_for(
    status: save_pb2.SaveStatus, ranks: Sequence[int], seen_s: float, *, no_sidecar: bool = False
) -> None:
    awaited = [
        Awaited(rank, status.ranks[rank].host, seen_s, no_sidecar=no_sidecar) for rank in ranks
    ]
    status.waiting_on.CopyFrom(waiting_on(awaited, deadline_s=3505))


def _training_wait(ranks: int) -> save_pb2.TrainingWait:
    return save_pb2.TrainingWait(
        call="async_save",
        checkpoint_id="gs://bucket/llama-70b/run-3/step-42000",
        reason=save_pb2.WAIT_REASON_ROOM,
        duration=duration(32),
        ranks=ranks,
    )


class Pages:
    """The pages of one daemon."""

    def __init__(self, address: str, registry: StatusRegistry, loads: LoadRegistry) -> None:
        self.address = address
        self._registry = registry
        self._loads = loads

    def put(self, status: save_pb2.SaveStatus) -> None:
        """Shows the save, or its next status."""
        self._registry.put(status.save, status.checkpoint_id, lambda: status)

    def report(self, report: load_status_pb2.LoadReport) -> None:
        """Shows what a rank reports of its load."""
        self._loads.apply(report)

    def url(self, shown: str = "") -> str:
        """The page, with this save shown."""
        return f"http://{self.address}/" + (f"#{shown}" if shown else "")


@contextmanager
def serving(
    statuses: Sequence[save_pb2.SaveStatus] = (),
    backlog: Backlog | None = None,
    waits: Sequence[save_pb2.TrainingWait] = (),
) -> Iterator[Pages]:
    """The pages of a coordinator with these saves, the newest last; with a backlog, of a sidecar."""
    registry, daemon_info = StatusRegistry(), DaemonInfo("coordinator-0")
    daemon_info.waits = lambda job: waits
    if backlog is not None:
        daemon_info.backlog = lambda: backlog
    pages = Pages(f"127.0.0.1:{free_port()}", registry, daemon_info.loads)
    for status in statuses:
        pages.put(status)
    routes = StatusPage(registry, daemon_info, lambda read: read()).routes(
        Metrics("coordinator", daemon_info)
    )
    with serve_http(pages.address, routes, setting="--metrics"):
        yield pages


@dataclass(frozen=True)
class View:
    """What is looked at, and how."""

    state: str
    """A key of :data:`STATES`."""
    ranks: int
    width: int
    scheme: str
    """``light`` or ``dark``."""

    @property
    def name(self) -> str:
        """For a file."""
        return f"status-page-{self.state}-{self.ranks}-{self.width}-{self.scheme}.png"


STATES: dict[str, Callable[[int], save_pb2.SaveStatus]] = {
    "running": running,
    "aborted": aborted,
    "outage": outage,
    "rank-stopped": rank_stopped,
    "sidecar-stopped": sidecar_stopped,
}
VIEWS = [
    View(state, ranks, width, scheme)
    for state, ranks, width, scheme in itertools.product(
        ("running", "aborted"), (8, 1000), _WIDTHS, _SCHEMES
    )
] + [
    View(state, 16, width, scheme)
    for state, width, scheme in itertools.product(
        ("outage", "rank-stopped", "sidecar-stopped"), (1280, 1920), _SCHEMES
    )
]
DOCUMENTED = (
    View("running", 1000, 1280, "light"),
    View("aborted", 1000, 1280, "dark"),
    View("outage", 16, 1280, "light"),
    View("sidecar-stopped", 16, 1280, "dark"),
)


@contextmanager
def viewing(page: Page, view: View) -> Iterator[None]:
    """Opens the page of three saves, the one in the view's state shown; at the end it is blank again."""
    ranks = view.ranks
    newest = running(ranks, 40) if view.state == "aborted" else STATES[view.state](ranks)
    saves = [committed(ranks, 38), aborted(ranks, 39), newest]
    shown = saves[1] if view.state == "aborted" else newest
    waits = [_training_wait(ranks)] if view.state == "outage" else []
    page.set_viewport_size({"width": view.width, "height": 844 if view.width < _PHONE else 900})
    page.emulate_media(color_scheme="dark" if view.scheme == "dark" else "light")
    with serving(saves, waits=waits) as pages:
        page.goto(pages.url(shown.id))
        page.locator("#saves button[aria-current=true]").wait_for()
        if view.state == "running":
            pages.put(running(ranks, uploaded=0.2))
            page.locator("#rate", has_text="left").wait_for()
        yield
        page.goto("about:blank")


def screenshot(page: Page, view: View, directory: Path) -> Path:
    """What is seen without scrolling; of a phone's page all."""
    path = directory / view.name
    page.screenshot(path=path, full_page=view.width < _PHONE)
    return path


if __name__ == "__main__":
    with browsing() as browser:
        for each in DOCUMENTED:
            with viewing(browser.page, each):
                print(screenshot(browser.page, each, Path(sys.argv[1])))
