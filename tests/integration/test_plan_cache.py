"""Saves that go by the plan of an earlier one, through real daemons: no call, and nothing less safe."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from pannier.v1 import plan_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import SaveAbortedError, UnavailableError
from support.actors.hand import Party, plan_for_save
from support.actors.scripted_sidecar import wait_until
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.processes.watching import ABORTED, COMMITTED, await_save


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path, sidecars=2) as running:
        yield running


@pytest.fixture
def party(daemons: Daemons) -> Iterator[Party]:
    """One rank on each host."""
    with Party([sidecar.address for sidecar in daemons.sidecars]) as ranks:
        yield ranks


class Saves:
    """A first save that is committed, and later ones by its plan."""

    def __init__(self, daemons: Daemons, party: Party, root: Path) -> None:
        self._coordinator = daemons.coordinator_address
        self._party = party
        self._root = root
        self._given = party.agree(self.place(1), 1)
        party.ingest(self.place(1), 1, self._given)
        # By then both sidecars are attached.
        self.reached(1, lambda status: status.state == COMMITTED)

    def place(self, number: int) -> str:
        return str(self._root / f"step-{number}")

    def plan(self, rank: int, number: int) -> plan_pb2.FinalPlan:
        return plan_for_save(self._given[rank], number)

    def hand_over(self, rank: int, number: int, timeout_s: float = BOUND_S) -> None:
        """The rank's bytes, with its claim."""
        hand = self._party.hands[rank]
        claim = hand.claim(self._given[rank], source=self.place(1))
        claim.timeout_s = timeout_s
        hand.ingest(hand.context(self.place(number), number), self.plan(rank, number), claim)

    def is_refused(self, rank: int, number: int, why: str) -> bool:
        """Whether the rank's sidecar knows that the save has failed; it may learn that while the bytes flow, or later."""
        try:
            self.hand_over(rank, number)
        except UnavailableError:
            return False
        except SaveAbortedError as error:
            return why in str(error)
        return False

    def reached(
        self, number: int, condition: Callable[[save_pb2.SaveStatus], bool]
    ) -> save_pb2.SaveStatus:
        return await_save(self._coordinator, self.place(number), condition)

    def check(self, number: int) -> None:
        """The save is committed, and its checkpoint whole."""
        self.reached(number, lambda status: status.state == COMMITTED)
        metadata = FileSystemReader(self.place(number)).read_metadata()
        assert set(metadata.state_dict_metadata) == {"w0", "w1"}
        verified = pannier("verify", self.place(number))
        assert verified.code == 0, verified


@pytest.fixture
def saves(daemons: Daemons, party: Party, tmp_path: Path) -> Saves:
    return Saves(daemons, party, tmp_path / "root")


def phase(rank: int, expected: "save_pb2.RankPhase") -> Callable[[save_pb2.SaveStatus], bool]:
    """Whether the rank is in that phase."""
    return lambda status: any((each.rank, each.phase) == (rank, expected) for each in status.ranks)


HANDED_OVER = save_pb2.RANK_PHASE_HANDED_OVER


def test_later_saves_go_by_the_first_plan_without_a_call(saves: Saves) -> None:
    for number in (2, 3):
        for rank in (0, 1):
            saves.hand_over(rank, number)
    for number in (2, 3):
        saves.check(number)


def test_a_trainer_that_dies_after_its_hand_over_costs_no_save(saves: Saves, party: Party) -> None:
    saves.hand_over(0, 2)
    saves.reached(2, phase(0, HANDED_OVER))
    party.hands[0].die()
    saves.hand_over(1, 2)
    saves.check(2)


def test_nor_does_its_sidecar_that_dies_with_it(
    saves: Saves, party: Party, daemons: Daemons
) -> None:
    saves.hand_over(0, 2)
    saves.reached(2, phase(0, HANDED_OVER))
    party.hands[0].die()
    daemons.sidecar.restart()
    saves.hand_over(1, 2)
    saves.check(2)


def test_nor_does_a_coordinator_that_dies_with_it(
    saves: Saves, party: Party, daemons: Daemons
) -> None:
    """The next one reads the plan from the first save: no trainer is left to send it."""
    saves.hand_over(0, 2)
    saves.reached(2, phase(0, HANDED_OVER))
    party.hands[0].die()
    daemons.coordinator.restart()
    saves.hand_over(1, 2)
    saves.check(2)


@pytest.mark.parametrize("point", ["manifest.before", "manifest.after"])
def test_a_coordinator_that_dies_while_it_confirms_a_plan(
    saves: Saves, party: Party, daemons: Daemons, point: str
) -> None:
    # Not its first plan: that process wouldn't know it.
    daemons.coordinator.kill()
    daemons.coordinator.environment["PANNIER_CRASH_AT"] = f"coordinator.{point}"
    daemons.coordinator.start()
    for rank in (0, 1):
        saves.hand_over(rank, 2)
        party.hands[rank].die()
    assert daemons.coordinator.process.wait(BOUND_S) == -signal.SIGKILL
    daemons.coordinator.environment["PANNIER_CRASH_AT"] = ""
    daemons.coordinator.start()
    saves.check(2)


def test_a_sidecar_that_dies_while_a_claimed_file_arrives(
    saves: Saves, party: Party, daemons: Daemons
) -> None:
    hand = party.hands[0]
    claim = hand.claim(saves.plan(0, 1), source=saves.place(1))
    hand.stream_all(hand.context(saves.place(2), 2), saves.plan(0, 2), claim)
    saves.reached(2, lambda status: list(status.waiting_on.ranks) == [1])
    daemons.sidecar.restart()
    hand.connect()
    for rank in (0, 1):
        saves.hand_over(rank, 2)
    saves.check(2)


def test_a_trainer_that_dies_before_its_hand_over_is_named(saves: Saves, party: Party) -> None:
    other = party.hands[1]
    claim = other.claim(saves.plan(1, 1), source=saves.place(1))
    other.stream_all(other.context(saves.place(2), 2), saves.plan(1, 2), claim)
    saves.reached(2, lambda status: list(status.waiting_on.ranks) == [0])
    other.disconnect()
    status = saves.reached(2, lambda status: status.state == ABORTED)
    assert [(f.rank, f.kind) for f in status.failures] == [(1, save_pb2.FAILURE_KIND_LOST)]
    wait_until(lambda: saves.is_refused(0, 2, "rank 1"))
    # The next one is as any other.
    other.connect()
    for rank in (0, 1):
        saves.hand_over(rank, 3)
    saves.check(3)


def test_a_dead_trainer_whose_plan_can_not_be_read_is_named(
    saves: Saves, party: Party, daemons: Daemons
) -> None:
    manifest = object_names.manifest(saves.plan(0, 1).attempt)
    Path(saves.place(1), manifest).unlink()
    saves.hand_over(0, 2)
    saves.reached(2, phase(0, HANDED_OVER))
    party.hands[0].die()
    daemons.coordinator.restart()
    saves.hand_over(1, 2)
    status = saves.reached(2, lambda status: status.state == ABORTED)
    assert [(f.rank, f.kind) for f in status.failures] == [(0, save_pb2.FAILURE_KIND_LOST)]


def test_a_rank_that_does_not_come_is_named_at_the_deadline(saves: Saves) -> None:
    saves.hand_over(0, 2, timeout_s=8)
    status = saves.reached(2, lambda status: status.state == ABORTED)
    assert "waiting for rank 1" in status.failures[0].message
