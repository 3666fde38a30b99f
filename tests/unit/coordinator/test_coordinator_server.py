"""When the coordinator of several hosts leaves: on a clock that the test turns."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.coordinator import server
from pannier.coordinator.saves.participants import SidecarPeer

AFTER_S = 10.0


class Scene:
    """A coordinator's view of its sidecars, second by second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.began = self.now
        self.trainer_seen: float | None = None
        self.sidecars: list[SidecarPeer] = []
        self.saves: list[object] = []

    def attached(self) -> list[SidecarPeer]:
        return self.sidecars

    def undecided(self) -> list[object]:
        return self.saves

    def attach(self) -> SidecarPeer:
        self.sidecars.append(SidecarPeer("node"))
        return self.sidecars[-1]

    def report(self, sidecar: SidecarPeer, *, trainer: bool) -> None:
        """The sidecar's stream brings a message."""
        sidecar.last_seen = self.now
        if trainer:
            sidecar.trainer_seen = self.trainer_seen = self.now

    @property
    def second(self) -> float:
        return self.now - self.began


def leaves_at(
    monkeypatch: pytest.MonkeyPatch, happen: Callable[[Scene], None], *, until: float = 300
) -> float | None:
    """The second at which it leaves; None: not before ``until``. ``happen`` runs every second."""
    scene, left = Scene(), []

    async def tick(seconds: float) -> None:
        scene.now += seconds
        happen(scene)
        if scene.second > until:
            raise TimeoutError

    monkeypatch.setattr(server, "observer_clock", SimpleNamespace(now=lambda: scene.now))
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=tick))
    attachments: Any = scene
    leaving = server.await_idle(
        lambda: bool(scene.undecided()), attachments, AFTER_S, lambda: left.append(scene.second)
    )
    try:
        asyncio.run(leaving)
    except TimeoutError:
        return None
    return left[0]


def test_the_first_trainer_may_take_longer_than_the_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def happen(scene: Scene) -> None:
        if scene.second == 30:
            scene.attach()
        if 50 <= scene.second <= 60:
            scene.report(scene.sidecars[0], trainer=True)
        elif scene.second > 60:
            scene.report(scene.sidecars[0], trainer=False)

    # The last report counts for 5 s; then the idle time begins.
    assert leaves_at(monkeypatch, happen) == 60 + 4 + AFTER_S


def test_without_any_trainer_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaves_at(monkeypatch, lambda scene: None) == timeouts.FIRST_TRAINER_S


def test_a_sidecar_that_is_late_keeps_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(scene: Scene) -> None:
        if not scene.sidecars:
            scene.report(scene.attach(), trainer=True)

    assert leaves_at(monkeypatch, happen) is None


def test_a_sidecar_whose_stream_is_gone_keeps_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(scene: Scene) -> None:
        if not scene.second > 1:
            scene.report(scene.attach(), trainer=True)
        if scene.second == 100:
            scene.sidecars.clear()

    assert leaves_at(monkeypatch, happen) == 99 + AFTER_S


def test_an_undecided_save_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(scene: Scene) -> None:
        if scene.second == 1:
            scene.report(SidecarPeer("gone"), trainer=True)
            scene.saves = ["a save"]
        if scene.second == 200:
            scene.saves = []

    assert leaves_at(monkeypatch, happen) == 199 + AFTER_S
