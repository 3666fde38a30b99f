"""Who is suspected when a sidecar is gone: only ranks that were ingested by one that was replaced."""

import asyncio
from collections.abc import Callable

import pytest

from pannier.coordinator import lost_sidecars
from pannier.coordinator.lost_sidecars import Losses
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Presence, Save
from pannier.daemon.status_registry import Board
from pannier.v1 import records_pb2, save_pb2
from support.actors.ranks_by_hand import context

STREAMING = save_pb2.RANK_PHASE_STREAMING
INGESTED = save_pb2.RANK_PHASE_INGESTED
WAIT_S = 0.02


class Host:
    """One host whose sidecars come and go, with a save of two ranks."""

    def __init__(self) -> None:
        registry = Registry(Board(), begin=lambda save: None, suspect_after_s=5)
        self.save: Save = registry.enter(context(0, "/root/step"))
        self.losses = Losses(registry)

    def start(self, sidecar: str) -> Presence:
        return self.losses.attached("node", sidecar)

    def hold(self, rank: int, sidecar: Presence, phase: "save_pb2.RankPhase" = INGESTED) -> None:
        part = self.save.parts[rank]
        part.host, part.sidecar = "node", sidecar
        part.advance(phase)


def suspects(monkeypatch: pytest.MonkeyPatch, happen: Callable[[Host], None]) -> dict[int, str]:
    monkeypatch.setattr(lost_sidecars, "RETURN_S", WAIT_S)

    async def main() -> dict[int, str]:
        host = Host()
        happen(host)
        await asyncio.sleep(3 * WAIT_S)
        return {rank: failure.message for rank, failure in host.save.suspects.items()}

    return asyncio.run(main())


def test_what_a_replaced_sidecar_held_is_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(host: Host) -> None:
        old = host.start("old")
        host.hold(0, old)
        host.hold(1, old, STREAMING)
        host.losses.detached(old)
        host.start("new")

    found = suspects(monkeypatch, happen)
    assert found == {
        0: "the sidecar on host node was restarted and no longer holds this rank's data"
    }


def test_a_durable_rank_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(host: Host) -> None:
        old = host.start("old")
        host.hold(0, old)
        host.save.parts[0].receipt = records_pb2.Receipt()
        host.losses.detached(old)
        host.start("new")

    assert not suspects(monkeypatch, happen)


def test_a_sidecar_that_is_away_for_a_moment_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def happen(host: Host) -> None:
        only = host.start("only")
        host.hold(0, only)
        host.losses.detached(only)
        assert host.start("only") is only

    assert not suspects(monkeypatch, happen)


def test_two_sidecars_of_one_host_do_not_replace_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def happen(host: Host) -> None:
        first, second = host.start("first"), host.start("second")
        host.hold(0, first)
        host.hold(1, second)
        # Both lose their streams, and only the older one has come back.
        host.losses.detached(first)
        host.losses.detached(second)
        host.start("first")

    assert not suspects(monkeypatch, happen)


def test_a_rank_that_its_client_asks_after_is_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator was restarted too, or the rank was ingested the moment before."""

    def happen(host: Host) -> None:
        alive = host.start("alive")
        host.hold(1, alive)
        for rank in (0, 1):
            host.losses.asked(host.save, rank)

    # Rank 1 was reported meanwhile.
    assert suspects(monkeypatch, happen).keys() == {0}


def test_hosts_whose_sidecars_are_replaced_at_once_are_all_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def happen(host: Host) -> None:
        hosts = ("node", "other")
        old = [host.losses.attached(name, f"old-{name}") for name in hosts]
        for rank, name in enumerate(hosts):
            host.hold(rank, old[rank])
            host.save.parts[rank].host = name
        for each in old:
            host.losses.detached(each)
        for name in hosts:
            host.losses.attached(name, f"new-{name}")

    assert suspects(monkeypatch, happen).keys() == {0, 1}
