"""Saves that go by the plan of an earlier one, through real daemons: no call, and nothing less safe."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from pannier.v1 import save_pb2
from pannier.wire.errors import SaveAbortedError
from support.actors.hand import Party, plan_for_save
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


def check(place: str) -> None:
    """The checkpoint is whole."""
    assert set(FileSystemReader(place).read_metadata().state_dict_metadata) == {"w0", "w1"}
    verified = pannier("verify", place)
    assert verified.code == 0, verified


def test_later_saves_go_by_the_first_plan(daemons: Daemons, party: Party, tmp_path: Path) -> None:
    places = [str(tmp_path / "root" / f"step-{number}") for number in range(4)]
    given = party.agree(places[1], 1)
    party.ingest(places[1], 1, given)
    for number in (2, 3):
        agreed = party.reuse_plan(places[number], number, given)
        assert agreed == {rank: plan_for_save(given[rank], number) for rank in given}
        party.ingest(places[number], number, agreed)
    for place in places[1:]:
        assert await_save(daemons.coordinator_address, place, lambda s: s.state == COMMITTED)
        check(place)


@pytest.mark.parametrize("point", ["manifest.before", "manifest.after"])
def test_a_coordinator_that_dies_while_a_plan_is_agreed_again(
    daemons: Daemons, party: Party, tmp_path: Path, point: str
) -> None:
    first, second = (str(tmp_path / "root" / f"step-{number}") for number in (1, 2))
    given = party.agree(first, 1)
    party.ingest(first, 1, given)
    await_save(daemons.coordinator_address, first, lambda s: s.state == COMMITTED)
    # Not its first plan: that life wouldn't know it.
    daemons.coordinator.kill()
    daemons.coordinator.environment["PANNIER_CRASH_AT"] = f"coordinator.{point}"
    daemons.coordinator.start()
    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(party.reuse_plan, second, 2, given)
        assert daemons.coordinator.process.wait(BOUND_S) == -signal.SIGKILL
        daemons.coordinator.environment["PANNIER_CRASH_AT"] = ""
        daemons.coordinator.start()
        agreed = going.result(BOUND_S)
    assert agreed == {rank: plan_for_save(given[rank], 2) for rank in given}
    party.ingest(second, 2, agreed)
    await_save(daemons.coordinator_address, second, lambda s: s.state == COMMITTED)
    check(second)


def test_a_sidecar_that_dies_while_a_plan_is_agreed_again(
    daemons: Daemons, party: Party, tmp_path: Path
) -> None:
    first, second = (str(tmp_path / "root" / f"step-{number}") for number in (1, 2))
    given = party.agree(first, 1)
    party.ingest(first, 1, given)
    # By then both sidecars are attached.
    await_save(daemons.coordinator_address, first, lambda s: s.state == COMMITTED)
    one, other = party.hands
    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(one.reuse_plan, one.context(second, 2), given[0])
        await_save(daemons.coordinator_address, second, lambda s: list(s.waiting_on.ranks) == [1])
        daemons.sidecar.restart()
        one.connect()
        agreed = {1: other.reuse_plan(other.context(second, 2), given[1]), 0: going.result(BOUND_S)}
    party.ingest(second, 2, agreed)
    await_save(daemons.coordinator_address, second, lambda s: s.state == COMMITTED)
    check(second)


def test_a_trainer_that_dies_while_a_plan_is_agreed_again_is_named(
    daemons: Daemons, party: Party, tmp_path: Path
) -> None:
    first, second = (str(tmp_path / "root" / f"step-{number}") for number in (1, 2))
    given = party.agree(first, 1)
    party.ingest(first, 1, given)
    # By then both sidecars are attached.
    await_save(daemons.coordinator_address, first, lambda s: s.state == COMMITTED)
    one, other = party.hands

    def die() -> None:
        with suppress(SaveAbortedError):
            other.reuse_plan(other.context(second, 2), given[1])

    dying = threading.Thread(target=die)
    dying.start()
    await_save(daemons.coordinator_address, second, lambda s: list(s.waiting_on.ranks) == [0])
    other.disconnect()
    status = await_save(daemons.coordinator_address, second, lambda s: s.state == ABORTED)
    assert [(f.rank, f.kind) for f in status.failures] == [(1, save_pb2.FAILURE_KIND_LOST)]
    with pytest.raises(SaveAbortedError, match="rank 1"):
        one.reuse_plan(one.context(second, 2), given[0])
    dying.join()
    # The next one is as any other.
    other.connect()


def test_a_rank_that_does_not_come_is_named_at_the_deadline(
    daemons: Daemons, party: Party, tmp_path: Path
) -> None:
    first, second = (str(tmp_path / "root" / f"step-{number}") for number in (1, 2))
    given = party.agree(first, 1)
    party.ingest(first, 1, given)
    await_save(daemons.coordinator_address, first, lambda s: s.state == COMMITTED)
    one = party.hands[0]
    with pytest.raises(SaveAbortedError, match="waiting for rank 1"):
        one.reuse_plan(one.context(second, 2), given[0], timeout_s=1)
