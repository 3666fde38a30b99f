"""The states of ranks and saves: only possible moves, one outcome, and notifications of each."""

import pytest

from pannier.sidecar import save_registry
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import Phase, RankSave
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors, object_names


def rank_save(saves: SaveRegistry, number: int = 1) -> RankSave:
    ranks = [0]
    save = save_pb2.SaveId(
        job="job", incarnation="inc", group=object_names.group_name(ranks), number=number
    )
    return saves.enter(
        sidecar_pb2.SaveContext(
            save=save, checkpoint_id="/c/1", ranks=ranks, world_size=1, rank=0, host="node-0"
        )
    )


def test_a_rank_moves_forward_only() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.set_attempt(rank, "i1-a1-g00000000-s1")
    assert rank.phase is Phase.PLANNED
    receipt = records_pb2.Receipt(attempt="i1-a1-g00000000-s1")
    saves.hand_over(rank, receipt)
    with pytest.raises(errors.InvalidRequestError, match="INGESTED: it can't become INGESTED"):
        saves.hand_over(rank, receipt)
    saves.mark_durable(rank)
    assert not saves.fail(rank, save_pb2.FAILURE_KIND_STORAGE, "too late")
    assert rank.phase is Phase.DURABLE


def test_a_rank_stays_in_its_attempt() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.set_attempt(rank, "i1-a1-g00000000-s1")
    with pytest.raises(errors.InvalidRequestError, match="belongs to attempt i1-a1-g00000000-s1"):
        saves.set_attempt(rank, "i2-a1-g00000000-s1")


def test_an_ingested_rank_is_never_lost() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.hand_over(rank, records_pb2.Receipt())
    assert not saves.fail(rank, save_pb2.FAILURE_KIND_LOST, "gone")
    assert rank.phase is Phase.INGESTED
    assert saves.fail(rank, save_pb2.FAILURE_KIND_STORAGE, "403")
    assert rank.failure is not None
    assert rank.failure.message == "403"


def test_the_first_outcome_is_final() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    for state in (save_pb2.SAVE_STATE_ABORTED, save_pb2.SAVE_STATE_COMMITTED):
        saves.apply_status(save_pb2.SaveStatus(save=rank.save.id, state=state))
    assert rank.save.outcome is not None
    assert rank.save.outcome.state == save_pb2.SAVE_STATE_ABORTED
    assert not saves.fail(rank, save_pb2.FAILURE_KIND_CLIENT, "late")
    with pytest.raises(errors.SaveAbortedError):
        saves.check(rank)


def test_listeners_are_notified_of_every_change() -> None:
    saves = SaveRegistry()
    notified: list[tuple[str, bool]] = []

    def listener(save: object, rank: RankSave | None, urgent: bool) -> None:
        saves.undecided()
        notified.append((rank.phase.name if rank else "", urgent))

    saves.add_listener(listener)
    rank = rank_save(saves)
    saves.set_attempt(rank, "i1-a1-g00000000-s1")
    saves.record_progress(rank)
    saves.apply_status(save_pb2.SaveStatus(save=rank.save.id, state=save_pb2.SAVE_STATE_COMMITTED))
    assert notified == [("", True), ("PLANNED", True), ("PLANNED", False), ("", True)]


def test_only_so_many_ended_saves_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pannier.sidecar.save_registry._ENDED_KEPT", 2)
    saves = SaveRegistry()
    forgotten: list[int] = []
    saves.add_eviction_listener(lambda save: forgotten.append(save.id.number))
    for number in range(1, 5):
        rank = rank_save(saves, number)
        saves.apply_status(
            save_pb2.SaveStatus(save=rank.save.id, state=save_pb2.SAVE_STATE_COMMITTED)
        )
    assert forgotten == [1, 2]
    assert len(saves.of_rank("job", "inc", 0)) == 2


def test_fewer_large_ended_saves_are_remembered() -> None:
    saves = SaveRegistry()
    forgotten: list[int] = []
    saves.add_eviction_listener(lambda save: forgotten.append(save.id.number))
    # About 4 MiB each.
    ranks = [save_pb2.RankStatus(rank=rank) for rank in range(20_000)]
    for number in range(1, 31):
        rank = rank_save(saves, number)
        status = save_pb2.SaveStatus(save=rank.save.id, state=save_pb2.SAVE_STATE_COMMITTED)
        status.ranks.extend(ranks[: 20_000 if number < 21 else 1])
        saves.apply_status(status)
    # Sixteen stay in any case; then those stay that are small.
    assert forgotten == [*range(1, 14)]


def test_what_is_durable_needs_nothing_more_here_without_a_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(save_registry, "time", clock)
    saves = SaveRegistry()
    rank = rank_save(saves)
    saves.hand_over(rank, records_pb2.Receipt())
    clock.now += 10
    assert saves.idle_s(100) == 0
    saves.mark_durable(rank)
    clock.now += 10
    # Attached: the outcome comes. Detached for long: since the rank was durable.
    assert [saves.idle_s(seconds) for seconds in (0, 4, 100)] == [0, 4, 10]
    saves.apply_status(save_pb2.SaveStatus(save=rank.save.id, state=save_pb2.SAVE_STATE_COMMITTED))
    clock.now += 7
    assert saves.idle_s(0) == 7


def test_a_failed_rank_keeps_no_sidecar_without_a_coordinator() -> None:
    saves = SaveRegistry()
    rank = rank_save(saves)
    assert saves.idle_s(100) == 0
    saves.fail(rank, save_pb2.FAILURE_KIND_LOST, "gone")
    assert 0 < saves.idle_s(100) < 100
