"""Saves that don't fit into the spool together: the one that began first goes first."""

from collections.abc import Iterator

import pytest

from pannier.sidecar.reservations import Reservations
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.data_file import DataFile
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors
from support.actors.hosts import Host, await_true, running_host
from support.actors.ranks_by_hand import context
from support.actors.scripted import Trainer

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


class Story:
    """Ranks 0 and 1 of one host and their saves."""

    def __init__(self) -> None:
        self.saves = SaveRegistry()
        self.reservations = Reservations()

    def rank(self, number: int, rank: int, *, planned: int = 0, opened: int = 0) -> RankSave:
        made = self.saves.enter(context(rank, f"/root/{number}", number=number))
        if planned:
            files = [plan_pb2.PlannedFile(name="f", size=planned)]
            self.saves.set_plan(made, plan_pb2.FinalPlan(attempt="a", files=files))
        if opened:
            file = DataFile("f", opened, None, label="f")
            self.saves.add_file(made, "a", file)
        return made

    def ingest(self, rank: RankSave) -> None:
        self.saves.hand_over(rank, records_pb2.Receipt(attempt="a"))
        self.reservations.record_usage(rank)

    def owed(self, rank: RankSave) -> int:
        return self.reservations.reserved_before(rank.save, self.saves.undecided())


def test_what_earlier_saves_lack_is_what_they_planned() -> None:
    story = Story()
    first = story.rank(1, 0, planned=5, opened=5)
    story.rank(1, 1, planned=7)
    second = story.rank(2, 0, planned=5)
    assert (story.owed(first), story.owed(second)) == (0, 7)


def test_without_a_plan_it_is_what_the_last_save_took() -> None:
    story = Story()
    for rank in (0, 1):
        story.ingest(story.rank(1, rank, opened=5 + rank))
    second = story.rank(2, 0, opened=3)
    third = story.rank(3, 0)
    # Rank 1 has said nothing of the second one yet.
    assert story.owed(third) == 2 + 6
    assert story.owed(second) == 0
    story.ingest(second)
    assert story.owed(third) == 6


def test_a_save_that_fails_is_owed_nothing() -> None:
    story = Story()
    first = story.rank(1, 0, planned=5)
    second = story.rank(2, 0)
    assert story.owed(second) == 5
    story.saves.fail(first, save_pb2.FAILURE_KIND_CLIENT, "no")
    assert story.owed(second) == 0


def test_two_saves_in_a_spool_for_one_and_a_half_do_not_block_each_other(host: Host) -> None:
    host.start(spool_budget=3 * MIB)
    host.coordinator.files = {rank: {"0": MIB} for rank in (0, 1)}
    left, right = (host.trainer(rank, (0, 1), client=f"c{rank}") for rank in (0, 1))
    first, second = ([t.context(host.id(n), n) for t in (left, right)] for n in (1, 2))
    for contexts in (first, second):
        left.plan(contexts[0])
        right.plan(contexts[1])

    def save(trainer: Trainer, which: sidecar_pb2.SaveContext) -> None:
        trainer.hand_over(which, trainer.write(which, "0", b"x" * MIB))

    save(left, first[0])
    save(left, second[0])
    # A third of the room is left: the second save would be whole with it, the first never.
    with pytest.raises(errors.BusyError, match=f"{MIB} of them for saves that began earlier"):
        save(right, second[1])
    save(right, first[1])
    for which in first:
        host.coordinator.await_phase(which, save_pb2.RANK_PHASE_DURABLE)
    host.coordinator.decide(first[0], save_pb2.SAVE_STATE_COMMITTED)

    def goes_on() -> bool:
        try:
            save(right, second[1])
        except errors.BusyError:
            return False
        return True

    await_true(goes_on, "the first save's room is free")
    host.coordinator.await_phase(second[1], save_pb2.RANK_PHASE_DURABLE)
