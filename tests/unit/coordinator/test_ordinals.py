"""The order of an incarnation's attempts: one for all its groups, over restarts and two coordinators."""

import asyncio
import uuid
from itertools import pairwise

import pytest

from pannier.coordinator.incarnations import Claim, Incarnations, Ordinals
from pannier.storage import Store, open_store
from pannier.wire.object_names import Attempt

WORLD, LONE = "g00000001", "g00000002"


class Coordinator:
    """What one process of a coordinator knows."""

    def __init__(self, root: Store) -> None:
        self.root = root
        self.known, self.own = Incarnations(), Ordinals()

    async def begin(self, group: str, number: int, incarnation: str = "a") -> int:
        claim = Claim("job", incarnation, term=self.own.term)
        own = await self.known.number_of(self.root, claim)
        await self.known.check_newest(self.root, claim, own)
        return await self.known.ordinal(
            self.root, own, Attempt(own, number, group, incarnation), self.own
        )


def rises(ordinals: list[int]) -> bool:
    return all(one < other for one, other in pairwise(ordinals))


def test_a_group_that_saves_seldom_is_newer_than_all_that_began_before() -> None:
    own = Ordinals()
    given = [own.of(WORLD, number) for number in range(1, 100)]
    given += [own.of(LONE, 1), own.of(WORLD, 100), own.of(LONE, 2)]
    assert rises(given)


@pytest.mark.parametrize("first", [1, 5, 1000])
def test_saves_of_one_group_are_in_the_order_of_their_numbers_though_they_begin_in_another(
    first: int,
) -> None:
    own = Ordinals()
    begun = [first + 3, first, first + 2, first + 4, first + 1]
    given = {}
    for number in begun:
        given[number] = own.of(WORLD, number)
        own.of(LONE, number + 7)
    assert rises([given[number] for number in sorted(given)])
    assert [own.of(WORLD, number) for number in begun] == [given[number] for number in begun]


def test_ordinals_rise_over_restarts_and_where_two_coordinators_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where each next one's clock is behind."""
    clock = iter(range(10**9, 0, -1000))
    monkeypatch.setattr("pannier.coordinator.incarnations.time.time", lambda: next(clock))

    async def scenario() -> None:
        root = open_store(f"memory://{uuid.uuid4().hex}/run")
        first = Coordinator(root)
        given = [await first.begin(WORLD, 1), await first.begin(LONE, 1)]
        second = Coordinator(root)
        given += [await second.begin(WORLD, 2), await second.begin(WORLD, 3)]
        given += [await first.begin(WORLD, 4), await first.begin(LONE, 2)]
        given += [await second.begin(LONE, 3), await first.begin(WORLD, 5)]
        assert rises(given)
        # One that goes on alone writes no more records.
        before = len(await root.list(""))
        given += [await first.begin(WORLD, number) for number in range(6, 10)]
        assert rises(given)
        assert len(await root.list("")) == before

    asyncio.run(scenario())


def test_a_rank_that_saves_apart_is_ordered_among_the_saves_of_its_running_job() -> None:
    async def scenario() -> None:
        root = open_store(f"memory://{uuid.uuid4().hex}/run")
        known = Incarnations()
        assert await known.number_of(root, Claim("job", "a")) == 1
        aside = Claim("job", "b", apart=True)
        assert await known.number_of(root, aside) == 1
        assert known.owner(1, aside) == ("job", "a")
        # Another process of the coordinator finds the same number, also once the job was started again.
        again = Incarnations()
        assert await again.number_of(root, Claim("job", "c")) == 3
        assert await again.number_of(root, aside) == 1
        assert await again.number_of(root, Claim("job", "d", apart=True)) == 3
        # Without a running job, it has a number of its own.
        assert await again.number_of(root, Claim("other", "e", apart=True)) == 5

    asyncio.run(scenario())
