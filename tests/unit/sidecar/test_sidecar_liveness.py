"""What a sidecar reports of trainers: seen, unresponsive, dead, or merely disconnected."""

from collections.abc import Iterator

import pytest

from pannier.common import timeouts
from pannier.v1 import coordinator_pb2, save_pb2, sidecar_pb2
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import Trainer


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(timeouts, "TRAINER_RETURN_S", 0.3)
    with running_host() as made:
        made.coordinator.files = {0: {"0": 1 << 20}}
        made.start()
        yield made


def ping(trainer: Trainer, *, client: str = "c1", closing: bool = False) -> None:
    request = sidecar_pb2.PingRequest(
        job="job", incarnation="inc1", rank=trainer.rank, client=client, closing=closing
    )
    trainer.call("Ping", request)


def reported(host: Host) -> list[coordinator_pb2.TrainerStatus]:
    """The trainers of the latest report to the coordinator, one each second."""
    requests = host.coordinator.requests
    return list(requests[-1].trainers) if requests else []


def test_a_trainer_without_a_save_is_reported_with_when_it_was_last_seen(host: Host) -> None:
    trainer = host.trainer()
    await_true(lambda: bool(reported(host)), "a report of the trainer")
    await_true(
        lambda: reported(host)[0].seconds_since_seen > 1.5, "the missing pings in the report"
    )

    def pinged() -> bool:
        ping(trainer)
        return reported(host)[0].seconds_since_seen < 1.4

    await_true(pinged, "a ping in the report")
    # Only the one that is connected speaks for it.
    trainers = host.sidecar.trainers
    before = trainers._last_seen[("job", "inc1", 0)]
    ping(trainer, client="stranger")
    assert trainers._last_seen[("job", "inc1", 0)] == before


def test_a_trainer_whose_connection_ends_is_dead_until_it_is_back(host: Host) -> None:
    host.trainer().die()
    await_true(
        lambda: (
            [each.death for each in reported(host)] == ["the process 4242 of rank 0 on host node-0"]
        ),
        "the trainer is dead",
    )
    host.trainer()
    await_true(lambda: [each.death for each in reported(host)] == [""], "the trainer is back")


def test_a_client_that_said_goodbye_is_not_dead(host: Host) -> None:
    trainer = host.trainer()
    await_true(lambda: bool(reported(host)), "a report of the trainer")
    ping(trainer, closing=True)
    trainer.die()
    await_true(lambda: not reported(host), "the trainer is no longer reported")
    seen = len(host.coordinator.requests)
    await_true(lambda: len(host.coordinator.requests) > seen + 1, "two more reports")
    assert not any(request.trainers for request in host.coordinator.requests[seen:])


def test_a_ping_counts_for_the_saves_of_its_trainer(host: Host) -> None:
    trainer = host.trainer()
    trainer.plan(trainer.context(host.id()))
    (rank,) = host.sidecar.saves.of_rank("job", "inc1", 0)
    assert rank.phase.wire == save_pb2.RANK_PHASE_PLANNED
    before = rank.last_seen
    ping(trainer)
    assert rank.last_seen > before
