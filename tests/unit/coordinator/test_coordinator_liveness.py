"""Unresponsive ranks and lost sidecars: logged in time, and failed only without a live sidecar."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.coordinator.liveness import HeartbeatMonitor, IncarnationWatch, SidecarPeers
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_view import status
from pannier.coordinator.saves.states import State
from pannier.daemon.status_registry import StatusRegistry
from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import context
from support.processes.stretch import until

STREAMING = save_pb2.RANK_PHASE_STREAMING
INGESTED = save_pb2.RANK_PHASE_INGESTED
SUSPECT_S = 5.0


class Watched:
    """A registry without save tasks, and a save of two ranks that are staging."""

    def __init__(self, place: str = "/x/step", incarnation: str = "aa") -> None:
        self.registry = Registry(
            StatusRegistry(), begin=lambda save: None, suspect_after_s=SUSPECT_S
        )
        self.sidecars: list[SidecarPeer] = []
        self.monitor = HeartbeatMonitor(
            self.registry, lambda: self.sidecars, suspect_after_s=SUSPECT_S
        )

    def save(self, place: str = "/x/step", incarnation: str = "aa", number: int = 1) -> Save:
        save = self.registry.enter(context(0, place, incarnation=incarnation))
        self.registry.enter(context(1, place, incarnation=incarnation))
        save.set_attempt(object_names.Attempt(number, 1, save.context.save.group, incarnation))
        save.move(State.STAGING)
        return save

    def set_age(self, save: Save, rank: int, seconds: float) -> None:
        save.ranks[rank].last_seen = time.monotonic() - seconds


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [r.message for r in caplog.records if r.name == "pannier.coordinator.liveness"]
    caplog.clear()
    return messages


def test_an_unresponsive_rank_is_logged_once_and_when_its_heartbeats_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    save = watched.save()
    watched.set_age(save, 0, 1)
    watched.set_age(save, 1, 6)
    watched.monitor.check()
    (text,) = logged(caplog)
    assert "(STAGING) waits for rank 1 (host node-1, last seen 6 s ago)" in text
    assert "no heartbeat for more than 5 s; it fails in 3600 s" in text
    watched.monitor.check()
    assert logged(caplog) == []
    watched.set_age(save, 0, 7)
    watched.monitor.check()
    (text,) = logged(caplog)
    assert "rank 0 (host node-0" in text
    assert "rank 1" not in text
    watched.set_age(save, 1, 0)
    watched.monitor.check()
    (text,) = logged(caplog)
    assert text.endswith("heartbeats of rank 1 have resumed")


def test_a_rank_that_never_called_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    save = watched.registry.enter(context(0, "/x/step"))
    watched.set_age(save, 0, 0)
    watched.monitor.check()
    assert logged(caplog) == []
    save.deadlines.first_seen -= 6
    watched.monitor.check()
    (text,) = logged(caplog)
    assert "rank 1 (not seen yet)" in text


def test_an_unresponsive_sidecar_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    sidecar = SidecarPeer("node-7")
    sidecar.streams = 1
    watched.sidecars.append(sidecar)
    watched.monitor.check()
    assert logged(caplog) == []
    sidecar.last_seen -= 6
    for expected in ([True], []):
        watched.monitor.check()
        assert ["the sidecar on host node-7 is attached" in t for t in logged(caplog)] == expected
    sidecar.last_seen = time.monotonic()
    watched.monitor.check()
    assert logged(caplog) == ["the sidecar on host node-7 responds again"]


def later(
    happen: Callable[[], Save],
    monkeypatch: pytest.MonkeyPatch,
    reached: Callable[[Save], object] | None = None,
) -> Save:
    """The save once it is as expected; None: as it is after a while, when nothing is."""
    monkeypatch.setattr(timeouts, "SUPERSEDED_RETURN_S", 0.02)
    monkeypatch.setattr(timeouts, "SIDECAR_RETURN_S", 0.02)

    async def main() -> Save:
        save = happen()
        if reached is None:
            await asyncio.sleep(0.1)
        else:
            await until(lambda: reached(save))
        return save

    return asyncio.run(main())


@pytest.mark.parametrize("old_is_last", [False, True])
def test_a_newer_incarnation_ends_what_has_no_live_sidecar(
    monkeypatch: pytest.MonkeyPatch, old_is_last: bool
) -> None:
    def happen() -> Save:
        watched = Watched()
        IncarnationWatch(watched.registry)
        saves = [("aa", 1), ("bb", 2)]
        made = {}
        for incarnation, number in reversed(saves) if old_is_last else saves:
            made[number] = watched.save(incarnation=incarnation, number=number)
            made[number].notify()
        made[1].ranks[0].advance(INGESTED)
        assert not made[2].outcome.possible_losses
        return made[1]

    save = later(happen, monkeypatch, lambda save: save.outcome.possible_losses)
    assert save.outcome.possible_losses.keys() == {1}
    assert "incarnation number 2" in save.outcome.possible_losses[1].message


@pytest.mark.parametrize("why", ["attached", "another root", "another job", "older"])
def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def happen() -> Save:
        watched = Watched()
        IncarnationWatch(watched.registry)
        save = watched.save()
        if why == "attached":
            sidecar = SidecarPeer("node")
            sidecar.streams = 1
            for part in save.ranks.values():
                part.sidecar = sidecar
        save.notify()
        place = "/other/step" if why == "another root" else "/x/step"
        who = context(0, place, incarnation="bb")
        if why == "another job":
            who.save.job = "other"
        other = watched.registry.enter(who)
        other.set_attempt(object_names.Attempt(0 if why == "older" else 2, 1, who.save.group, "bb"))
        other.notify()
        return save

    assert not later(happen, monkeypatch).outcome.possible_losses


def test_storage_is_checked_when_a_sidecar_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def happen() -> Save:
        watched = Watched()
        save = watched.save()
        gone = SidecarPeers(watched.registry)
        sidecar = gone.open_stream("node-0", "s1")
        save.ranks[0].sidecar = sidecar
        save.ranks[0].advance(INGESTED)
        gone.close_stream(sidecar)
        return save

    save = later(happen, monkeypatch, lambda save: save.records.check_requested)
    assert not save.outcome.possible_losses


def test_storage_is_not_checked_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen() -> Save:
        watched = Watched()
        save = watched.save()
        here = SidecarPeers(watched.registry)
        sidecar = here.open_stream("node-0", "s1")
        save.ranks[0].sidecar = sidecar
        here.close_stream(sidecar)
        here.open_stream("node-0", "s1")
        return save

    assert not later(happen, monkeypatch).records.check_requested


WAIT_S = 0.02


class Host:
    """One host whose sidecars come and go, with a save of two ranks."""

    def __init__(self) -> None:
        registry = Registry(StatusRegistry(), begin=lambda save: None, suspect_after_s=5)
        self.save: Save = registry.enter(context(0, "/x/step"))
        self.peers = SidecarPeers(registry)

    def start(self, sidecar: str, job: str = "") -> SidecarPeer:
        return self.peers.open_stream("node", sidecar, job)

    def hold(self, rank: int, sidecar: SidecarPeer, phase: "save_pb2.RankPhase" = INGESTED) -> None:
        part = self.save.ranks[rank]
        part.host, part.sidecar = "node", sidecar
        part.advance(phase)


def losses_after(
    monkeypatch: pytest.MonkeyPatch, happen: Callable[[Host], None], count: int = 0
) -> dict[int, str]:
    """The possible losses by rank once there are ``count``; 0: after a while."""
    monkeypatch.setattr(timeouts, "SIDECAR_RETURN_S", WAIT_S)

    async def main() -> dict[int, str]:
        host = Host()
        happen(host)
        if count:
            await until(lambda: len(host.save.outcome.possible_losses) >= count)
        await asyncio.sleep(3 * WAIT_S)
        return {
            rank: failure.message for rank, failure in host.save.outcome.possible_losses.items()
        }

    return asyncio.run(main())


def test_what_a_replaced_sidecar_held_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(host: Host) -> None:
        old = host.start("old")
        host.hold(0, old)
        host.hold(1, old, STREAMING)
        host.peers.close_stream(old)
        host.start("new")

    found = losses_after(monkeypatch, happen, 1)
    assert found == {
        0: "the sidecar on host node was restarted and no longer holds this rank's data"
    }


@pytest.mark.parametrize("job", ["mine", "other"])
def test_the_sidecar_of_another_job_replaces_none(
    monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    def happen(host: Host) -> None:
        old = host.start("old", "mine")
        host.hold(0, old)
        host.peers.close_stream(old)
        host.start("new", job)

    assert bool(losses_after(monkeypatch, happen)) == (job == "mine")


def test_a_durable_rank_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(host: Host) -> None:
        old = host.start("old")
        host.hold(0, old)
        host.save.ranks[0].receipt = records_pb2.Receipt()
        host.peers.close_stream(old)
        host.start("new")

    assert not losses_after(monkeypatch, happen)


def test_a_sidecar_that_reconnects_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(host: Host) -> None:
        only = host.start("only")
        host.hold(0, only)
        host.peers.close_stream(only)
        assert host.start("only") is only

    assert not losses_after(monkeypatch, happen)


def test_two_sidecars_of_one_host_do_not_replace_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def happen(host: Host) -> None:
        first, second = host.start("first"), host.start("second")
        host.hold(0, first)
        host.hold(1, second)
        # Both lose their streams, and only the older one has come back.
        host.peers.close_stream(first)
        host.peers.close_stream(second)
        host.start("first")

    assert not losses_after(monkeypatch, happen)


def test_a_rank_that_its_client_asks_after_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator was restarted too, or the rank was ingested the moment before."""

    def happen(host: Host) -> None:
        alive = host.start("alive")
        host.hold(1, alive)
        for rank in (0, 1):
            host.peers.check_handed_over(host.save, rank)

    # Rank 1 was reported meanwhile.
    assert losses_after(monkeypatch, happen, 1).keys() == {0}


def test_hosts_whose_sidecars_are_replaced_at_once_are_all_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def happen(host: Host) -> None:
        hosts = ("node", "other")
        old = [host.peers.open_stream(name, f"old-{name}") for name in hosts]
        for rank, name in enumerate(hosts):
            host.hold(rank, old[rank])
            host.save.ranks[rank].host = name
        for each in old:
            host.peers.close_stream(each)
        for name in hosts:
            host.peers.open_stream(name, f"new-{name}")

    assert losses_after(monkeypatch, happen, 2).keys() == {0, 1}


@pytest.mark.parametrize("external", [False, True])
def test_no_rank_is_logged_while_a_save_without_local_plans_waits_for_storage(
    external: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    save = watched.registry.enter(context(0, "/x/step"))
    if external:
        save.begin_external(save.context)
    else:
        save.resume()
    save.wait_for_storage("503")
    save.deadlines.first_seen -= 6
    watched.monitor.check()
    assert logged(caplog) == []
    assert status(save).waiting_on.text == "storage at /x/step (503)"
