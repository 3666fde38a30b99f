"""Silence counts only while the observer itself could have received something."""

import asyncio
import ctypes
import logging
import threading
from types import SimpleNamespace

import pytest

from pannier.client.engine import engine
from pannier.client.transport.connection import Heartbeat
from pannier.common import observer_clock, timeouts
from pannier.common.observer_clock import ObserverClock
from pannier.coordinator.liveness import HeartbeatMonitor, SidecarPeers
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import State
from pannier.daemon.status_registry import StatusRegistry
from pannier.sidecar.liveness import TrainerLiveness
from pannier.sidecar.save_registry import SaveRegistry
from pannier.v1 import save_pb2
from pannier.wire import object_names
from pannier.wire.errors import DeadlineError
from support.actors.ranks_by_hand import context
from support.processes.stretch import BOUND_S, until


class Machine:
    """Its clock goes on when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(observer_clock, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(observer_clock, "clock", ObserverClock())
    return made


def test_the_clock_leaves_out_what_the_observer_missed(machine: Machine) -> None:
    clock = ObserverClock()
    start = clock.now()
    machine.seconds += 100
    assert clock.now() - start == 100, "nothing watches yet"
    with clock.watched():
        clock.tick(1.0)
        machine.seconds += 1.0 + timeouts.OBSERVER_SLACK_S
        assert clock.now() - start == 101 + timeouts.OBSERVER_SLACK_S
        assert clock.tick(1.0) == 0
        machine.seconds += 60
        assert clock.now() - start == 102 + 2 * timeouts.OBSERVER_SLACK_S
        assert clock.tick(1.0) == 59 - timeouts.OBSERVER_SLACK_S
        machine.seconds += 0.5
        assert clock.now() - start == 102.5 + 2 * timeouts.OBSERVER_SLACK_S
    # It doesn't stand still for ever when what watched has ended.
    before = clock.now()
    machine.seconds += 60
    assert clock.now() - before == 60


class Sidecar:
    """One that answers a ping only when the test says so."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.takes_s = 0.0
        self.answers = True
        self.said: list[str] = []
        self.heartbeat = Heartbeat(
            "sidecar", self.ping, connected=lambda: True, notify=self.said.append
        )

    async def ping(self, timeout: float) -> None:
        self.machine.seconds += self.takes_s
        if not self.answers:
            raise DeadlineError("no answer")

    def beat(self, takes_s: float) -> None:
        """One ping, which the trainer sees end after so long, and the pause after it."""
        self.takes_s = takes_s
        pause = engine().call(self.heartbeat._beat)
        self.heartbeat._clock.tick(pause)
        self.machine.seconds += pause


def test_a_trainer_that_keeps_the_interpreter_calls_no_sidecar_unresponsive(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = Sidecar(machine)
    sidecar.beat(0)
    # Pickles of three gigabytes: the answers' time is up before this thread can look at them.
    sidecar.answers = False
    for _ in range(5):
        sidecar.beat(6)
    assert not sidecar.said
    assert not caplog.records
    sidecar.answers = True
    sidecar.beat(0)
    assert not any(sidecar.said)


def test_a_stopped_or_suspended_trainer_calls_no_sidecar_unresponsive(machine: Machine) -> None:
    sidecar = Sidecar(machine)
    sidecar.beat(0)
    machine.seconds += 3600
    sidecar.answers = False
    sidecar.beat(timeouts.PING_TIMEOUT_S)
    assert not sidecar.said
    # It is unresponsive, and is reported as soon as without the pause.
    for _ in range(3):
        sidecar.beat(timeouts.PING_TIMEOUT_S)
    assert sidecar.said


def test_a_sidecar_that_answers_no_ping_is_unresponsive(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    sidecar = Sidecar(machine)
    sidecar.beat(0)
    sidecar.answers = False
    for _ in range(3):
        sidecar.beat(timeouts.PING_TIMEOUT_S)
    assert "last seen" in sidecar.said[-1]
    assert "does not respond" in caplog.text


def test_a_thread_that_keeps_the_interpreter_delays_no_time_out_but_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real one: a call of C that doesn't let go of the interpreter's lock."""
    monkeypatch.setattr(timeouts, "PING_S", 0.02)
    monkeypatch.setattr(timeouts, "PING_TIMEOUT_S", 0.02)
    monkeypatch.setattr(timeouts, "PING_AGAIN_S", 0.01)
    monkeypatch.setattr(timeouts, "UNRESPONSIVE_S", 1.5)
    usleep = ctypes.PyDLL(None).usleep
    said: list[str] = []
    beats = 0
    enough = threading.Event()

    async def ping(timeout: float) -> None:
        nonlocal beats
        beats += 1
        if beats > 3:
            enough.set()
        # The answer waits in the socket; this thread sees that the time was up.
        usleep(1_200_000)
        raise DeadlineError("no answer")

    made = Heartbeat("sidecar", ping, connected=lambda: True, notify=said.append)
    running = engine().start(made.run)
    assert enough.wait(BOUND_S)
    running.cancel()
    assert not any(said)


def registry_of() -> Registry:
    return Registry(StatusRegistry(), begin=lambda save: None, suspect_after_s=5.0)


def test_a_blocked_coordinator_calls_nothing_unresponsive_that_it_has_not_read(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of()
    sidecar = SidecarPeer("node-0")
    sidecar.streams = 1
    monitor = HeartbeatMonitor(registry, lambda: [sidecar], suspect_after_s=5.0)
    save = registry.enter(context(0, "/x/step"))
    registry.enter(context(1, "/x/step"))
    save.move(State.STAGING)
    for part in save.ranks.values():
        part.last_seen = observer_clock.now()
    caplog.clear()
    with observer_clock.clock.watched():
        observer_clock.clock.tick(1.0)
        # torch is imported, or 4096 ranks are planned.
        machine.seconds += 30
        monitor.check()
        observer_clock.clock.tick(1.0)
        assert save.ranks[0].seconds_since_seen(5.0) == 1.0 + timeouts.OBSERVER_SLACK_S
        assert [one.last_seen_s for one in save_view.awaited(save)] == [
            1.0 + timeouts.OBSERVER_SLACK_S
        ] * 2
        assert not [r for r in caplog.records if r.name == "pannier.coordinator.liveness"]
        for _ in range(5):
            machine.seconds += 1
            monitor.check()
            observer_clock.clock.tick(1.0)
    text = " ".join(r.message for r in caplog.records if r.name == "pannier.coordinator.liveness")
    assert "the sidecar on host node-0 is attached but unresponsive" in text
    assert "no heartbeat for more than 5 s" in text


def test_a_stopped_sidecar_calls_no_trainer_unresponsive_when_it_continues(
    machine: Machine,
) -> None:
    saves = SaveRegistry()
    trainers = TrainerLiveness(saves)
    rank = saves.enter(context(0, "/x/step"))
    with observer_clock.clock.watched():
        observer_clock.clock.tick(1.0)
        machine.seconds += 600
        trainers.log_unresponsive()
        assert not trainers._unresponsive
        assert observer_clock.now() - rank.last_seen == 1.0 + timeouts.OBSERVER_SLACK_S
        observer_clock.clock.tick(timeouts.UNRESPONSIVE_S)
        machine.seconds += timeouts.UNRESPONSIVE_S
        trainers.log_unresponsive()
        assert trainers._unresponsive


@pytest.mark.parametrize("back", [True, False])
def test_a_coordinator_that_was_blocked_waits_for_sidecars_to_come_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """That their streams are there again lies unread when its timers are due."""
    monkeypatch.setattr(timeouts, "OBSERVER_SLACK_S", 0.0)
    monkeypatch.setattr(timeouts, "SIDECAR_RETURN_S", 0.01)

    async def scenario() -> None:
        registry = registry_of()
        watch = SidecarPeers(registry)
        save = registry.enter(context(0, "/x/step"))
        registry.enter(context(1, "/x/step"))
        save.set_attempt(object_names.Attempt(1, 1, save.context.save.group, "aa"))
        save.move(State.STAGING)
        old = watch.open_stream("node-0", "old")
        part = save.ranks[0]
        part.sidecar, part.phase = old, save_pb2.RANK_PHASE_INGESTED
        with observer_clock.clock.watched():
            observer_clock.clock.tick(0.0)
            watch.close_stream(old)
            watch.check_handed_over(save, 0)
            machine.seconds += 30
            await asyncio.sleep(0.1)
            assert not save.outcome.possible_losses
            if back:
                watch.open_stream("node-0", "old")
            observer_clock.clock.tick(60.0)
            machine.seconds += 1
            if not back:
                await until(lambda: save.outcome.possible_losses)
            await asyncio.sleep(0.1)
        assert bool(save.outcome.possible_losses) is not back

    asyncio.run(scenario())
