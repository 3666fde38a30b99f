"""What the status page reads: limits, what is kept, and a daemon that doesn't answer."""

import asyncio
import html
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pannier.common import timeouts
from pannier.daemon.http_server import Request
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_page import StatusPage, read_on_loop
from pannier.daemon.status_registry import StatusRegistry
from pannier.daemon.status_service import Backlog, DaemonInfo
from pannier.v1 import save_pb2
from pannier.wire.errors import InvalidRequestError, PannierError, UnavailableError, kind_name
from support.processes.stretch import BOUND_S


class Site:
    """Pages of a registry whose saves count how often they are rendered."""

    def __init__(self) -> None:
        self.status_registry = StatusRegistry()
        self.rendered = 0
        daemon_info = DaemonInfo(
            "node-0", backlog=lambda: Backlog(bytes_queued=7, capacity_bytes=9)
        )
        self.routes = StatusPage(self.status_registry, daemon_info, lambda read: read()).routes(
            Metrics("sidecar", daemon_info)
        )

    def put(self, number: int, state: "save_pb2.SaveState") -> str:
        save = save_pb2.SaveId(job="job", incarnation="i", group="g", number=number)
        status = save_pb2.SaveStatus(save=save, id=f"job/i/g/{number}", state=state)
        status.ranks.add(rank=3, host="node-0")

        def render() -> save_pb2.SaveStatus:
            self.rendered += 1
            return status

        self.status_registry.put(save, f"/c/step-{number}", render)
        return status.id

    def get(self, path: str, **query: str) -> bytes:
        return self.routes[path](Request(query, "")).body


def test_lists_are_without_ranks_and_a_save_has_them() -> None:
    site = Site()
    key = site.put(1, save_pb2.SAVE_STATE_UPLOADING)
    listed = site.get("/status.json")
    assert b'"bytes_queued": 7,' in listed
    assert b'"ranks": []' in listed
    for name in (key, "/c/step-1"):
        assert b'"rank": 3' in site.get("/save.json", id=name)


def test_the_page_has_the_phases_of_the_protos_and_a_hint_for_each_kind_of_failure() -> None:
    text = Site().get("/").decode()
    phases = json.dumps(
        [
            each.name.removeprefix("RANK_PHASE_")
            for each in save_pb2.RankPhase.DESCRIPTOR.values
            if each.number
        ]
    )
    assert html.escape(f'"phases": {phases}') in text
    for kind in save_pb2.FailureKind.values():
        assert f"  {kind_name(kind)}: " in text or not kind


def test_many_viewers_cost_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STATUS_CACHED_S", 60.0)
    site = Site()
    for number in range(5):
        site.put(number, save_pb2.SAVE_STATE_COMMITTED)
    live = site.put(5, save_pb2.SAVE_STATE_STAGING)
    for _ in range(20):
        site.get("/status.json")
        site.get("/save.json", id=live)
    assert site.rendered == 6
    # One that has ended is never asked for again, what is under way is.
    monkeypatch.setattr(timeouts, "STATUS_CACHED_S", 0.0)
    site.put(6, save_pb2.SAVE_STATE_STAGING)
    before = site.rendered
    site.get("/status.json")
    assert site.rendered - before == 1


def test_what_was_forgotten_is_left_out() -> None:
    site = Site()
    key = site.put(1, save_pb2.SAVE_STATE_STAGING)
    site.put(2, save_pb2.SAVE_STATE_STAGING)
    site.status_registry.remove(key)
    assert site.get("/status.json").count(b'"attempt"') == 1
    with pytest.raises(PannierError, match="knows no save 'job/i/g/1'"):
        site.get("/save.json", id=key)


@pytest.mark.parametrize("limit", ["0", "-1", "501", "1e3", "٣", "9" * 5000, "x"])
def test_a_limit_is_a_number(limit: str) -> None:
    site = Site()
    with pytest.raises(InvalidRequestError, match="limit="):
        site.get("/status.json", limit=limit)
    site.put(1, save_pb2.SAVE_STATE_STAGING)
    site.put(2, save_pb2.SAVE_STATE_STAGING)
    assert site.get("/status.json", limit="1").count(b'"attempt"') == 1


@contextmanager
def turning(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_statuses_are_rendered_on_the_event_loop_and_a_loop_that_hangs_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.new_event_loop()
    read_state = read_on_loop(loop)
    go = threading.Event()
    with turning(loop):
        assert read_state(lambda: asyncio.get_running_loop() is loop)
        with pytest.raises(ZeroDivisionError):
            read_state(lambda: 1 // 0)
        monkeypatch.setattr(timeouts, "LOOP_S", 0.1)
        loop.call_soon_threadsafe(go.wait, BOUND_S)
        with pytest.raises(UnavailableError, match="did not respond within"):
            read_state(lambda: True)
        go.set()
        monkeypatch.setattr(timeouts, "LOOP_S", BOUND_S)
        assert read_state(lambda: True)
