"""Who reads which block from where."""

import pickle
import sys
from array import array
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.client.restore.restore_plan import (
    Credentials,
    Host,
    RankNeeds,
    RankPlan,
    Span,
    merge,
    plan_restore,
    shared_candidates,
)
from pannier.v1 import records_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES

MIB = 1 << 20


def record(name: str, size: int, *, sums: bool = True) -> records_pb2.DataFile:
    column = bytes(4 * -(-size // BLOCK_BYTES)) if sums else b""
    return records_pb2.DataFile(
        name=name, size=size, block_crc32c=column, block_bytes=BLOCK_BYTES if sums else 0
    )


def host(number: int, *, address: bool = True, fetches: bool = True) -> Host:
    return Host(f"key-{number}", f"node-{number}", f"10.0.0.{number}:1" if address else "", fetches)


def whole(**sizes: int) -> dict[str, "array[int]"]:
    return {name: merge([Span(0, size)]) for name, size in sizes.items()}


def blocks(plan: RankPlan | None, name: str) -> list[int]:
    if plan is None or name not in plan.files:
        return []
    return [block for block, _ in plan.files[name].sources()]


def test_a_replicated_file_is_read_once_and_all_hosts_own_as_much_of_it() -> None:
    needs = [RankNeeds(rank, host(rank // 2), spans=whole(f=80 * MIB)) for rank in range(8)]
    plans = plan_restore(needs, {"f": record("f", 80 * MIB)})
    owned: Counter[str] = Counter()
    for plan in plans:
        assert plan is not None
        assert plan.own is not None
        for _, source in plan.files["f"].sources():
            if source.owner is None:
                owned[plan.hosts[plan.own].key] += 1
                # Its two ranks, and the three other hosts.
                assert source.readers == 5
            else:
                assert (source.readers, source.owner_readers) == (2, 5)
    # Two ranks of each.
    assert sorted(owned.values()) == [4, 4, 6, 6]


def test_what_one_rank_alone_needs_it_reads_itself() -> None:
    needs = [
        RankNeeds(0, host(0), spans={"f": merge([Span(0, 20 * MIB)])}),
        RankNeeds(1, host(1), spans={"f": merge([Span(20 * MIB, 64 * MIB)])}),
    ]
    # Both need parts of block 2, together no more than it has.
    assert plan_restore(needs, {"f": record("f", 64 * MIB)}) == [None, None]


def test_what_a_peer_holds_comes_from_its_spool_though_one_rank_needs_it() -> None:
    needs = [
        RankNeeds(0, host(0), frozenset({"f"})),
        RankNeeds(1, host(1), spans={"f": merge([Span(9 * MIB, 10 * MIB)])}),
    ]
    assert shared_candidates(needs) == {"f"}
    nothing, plan = plan_restore(needs, {"f": record("f", 64 * MIB)})
    assert nothing is None
    assert plan is not None
    ((block, source),) = plan.files["f"].sources()
    assert (block, source.holders, source.owner, source.readers) == (1, (0,), None, 1)
    # Nothing tells the bytes of a spool from other bytes.
    assert plan_restore(needs, {"f": record("f", 64 * MIB, sums=False)}) == [None, None]


def test_a_host_that_others_cannot_reach_holds_and_owns_nothing_for_them() -> None:
    hidden, seen = host(0, address=False), host(1)
    needs = [
        RankNeeds(0, hidden, frozenset({"g"}), whole(f=16 * MIB)),
        RankNeeds(1, seen, spans=whole(f=16 * MIB, g=16 * MIB)),
    ]
    records = {"f": record("f", 16 * MIB), "g": record("g", 16 * MIB)}
    first, second = plan_restore(needs, records)
    assert first is not None
    assert second is not None
    assert [source.owner for _, source in first.files["f"].sources()] == [1, 1]
    assert [source.owner for _, source in second.files["f"].sources()] == [None, None]
    assert "g" not in second.files


def test_without_any_address_each_host_reads_once_for_its_ranks() -> None:
    places = [host(0, address=False)] * 2 + [host(1, address=False)]
    needs = [RankNeeds(rank, at, spans=whole(f=16 * MIB)) for rank, at in enumerate(places)]
    *pair, alone = plan_restore(needs, {"f": record("f", 16 * MIB)})
    for plan in pair:
        assert plan is not None
        assert [source for _, source in plan.files["f"].sources()] == [((), None, 2, 0)] * 2
    assert alone is None


def test_a_rank_without_a_sidecar_asks_holders_and_owners_itself() -> None:
    visitor = RankNeeds(2, None, spans=whole(f=16 * MIB, g=8 * MIB), asks_peers=True)
    needs = [
        RankNeeds(0, host(0), frozenset({"g"}), whole(f=16 * MIB)),
        RankNeeds(1, None, spans=whole(f=16 * MIB)),
        visitor,
    ]
    records = {"f": record("f", 16 * MIB), "g": record("g", 8 * MIB)}
    owner, neither, plan = plan_restore(needs, records)
    assert neither is None
    assert plan is not None
    assert owner is not None
    assert plan.own is None
    assert [source for _, source in plan.files["f"].sources()] == [((), 0, 1, 2)] * 2
    assert [source for _, source in plan.files["g"].sources()] == [((0,), None, 1, 0)]
    assert [source.readers for _, source in owner.files["f"].sources()] == [2, 2]


def test_a_host_without_a_sidecar_reads_by_the_certificate_that_another_one_knows() -> None:
    known = Credentials(b"cert", b"key", b"ca")
    needs = [
        RankNeeds(0, host(0), frozenset({"f"}), credentials=known),
        RankNeeds(1, None, spans=whole(f=8 * MIB)),
    ]
    assert shared_candidates(needs) == {"f"}
    nothing, plan = plan_restore(needs, {"f": record("f", 8 * MIB)})
    assert nothing is None
    assert plan is not None
    assert (blocks(plan, "f"), plan.credentials) == ([0], known)
    # No text that is logged has the key.
    assert "key" not in repr(plan.credentials)
    assert not shared_candidates([replace(needs[0], credentials=None), needs[1]])


def test_spans_are_merged_across_small_gaps() -> None:
    spans = [Span(10, 20), Span(0, 5), Span(24, 30), Span(15, 18), Span(40, 40), Span(100, 110)]
    assert merge(spans, gap=4).tolist() == [0, 5, 10, 30, 100, 110]
    assert not merge([])


def test_a_plan_of_many_ranks_is_small_and_made_soon() -> None:
    sizes = {f"f{number}": 256 * MIB for number in range(64)}
    needs = [RankNeeds(rank, host(rank // 8), spans=whole(**sizes)) for rank in range(256)]
    plans = plan_restore(needs, {name: record(name, size) for name, size in sizes.items()})
    assert len(pickle.dumps(needs[0])) < 10_000
    assert len(pickle.dumps(plans[0])) < 100_000


def test_the_work_of_the_plan_grows_as_the_number_of_hosts_does() -> None:
    def calls(hosts: int) -> int:
        needs = [RankNeeds(rank, host(rank), spans=whole(f=64 * MIB)) for rank in range(hosts)]
        found = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal found
            found += 1

        usual = sys.getprofile()
        sys.setprofile(count)
        try:
            plan_restore(needs, {"f": record("f", 64 * MIB)})
        finally:
            sys.setprofile(usual)
        return found

    assert calls(200) < 5 * calls(50)


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[RankNeeds], dict[str, records_pb2.DataFile]]:
    count = draw(st.integers(1, 4))
    hosts = [
        host(n, address=draw(st.booleans()), fetches=draw(st.booleans())) for n in range(count)
    ]
    sizes = {f"f{n}": draw(st.integers(1, 5 * BLOCK_BYTES)) for n in range(draw(st.integers(1, 3)))}
    held = [frozenset(draw(st.sets(st.sampled_from(sorted(sizes))))) for _ in hosts]
    needs = []
    for rank in range(draw(st.integers(1, 6))):
        number = draw(st.integers(-1, count - 1))
        holds = held[number] if number >= 0 else frozenset()
        spans = {}
        for name, size in sizes.items():
            ends = draw(st.lists(st.integers(0, size), max_size=4))
            if name not in holds and ends:
                pairs = zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)
                spans[name] = merge([Span(start, end) for start, end in pairs])
        needs.append(
            RankNeeds(
                rank,
                hosts[number] if number >= 0 else None,
                holds,
                spans,
                asks_peers=draw(st.booleans()),
            )
        )
    records = {name: record(name, size, sums=draw(st.booleans())) for name, size in sizes.items()}
    return needs, {name: records[name] for name in shared_candidates(needs)}


@pytest.mark.timeout(120)
@given(loads())
def test_each_needed_byte_has_one_way_to_its_rank_and_each_block_one_owner(
    load: tuple[list[RankNeeds], dict[str, records_pb2.DataFile]],
) -> None:
    needs, records = load
    plans = plan_restore(needs, records)
    owners: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    at_host: Counter[tuple[str, str, int]] = Counter()
    promised: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    wanted: Counter[tuple[str, int]] = Counter()
    for each, plan in zip(needs, plans, strict=True):
        needed = {
            (name, block): bytes_of(spans, block)
            for name, spans in each.spans.items()
            if name in records
            for block in range(-(-records[name].size // BLOCK_BYTES))
            if bytes_of(spans, block)
        }
        if each.fetching_host or each.asks_peers:
            wanted.update(needed)
        taken = set()
        for name, file in (plan.files if plan else {}).items():
            assert plan is not None
            assert records_pb2.DataFile.FromString(file.record) == records[name]
            assert list(file.blocks) == sorted(set(file.blocks))
            for block, source in file.sources():
                taken.add((name, block))
                me = plan.hosts[plan.own].key if plan.own is not None else ""
                assert (me != "") == (each.host is not None and each.host.fetches)
                for holder in source.holders:
                    assert plan.hosts[holder].address
                    assert plan.hosts[holder].key != me
                    assert any(
                        other.host == plan.hosts[holder] and name in other.holds for other in needs
                    )
                if source.owner is not None:
                    assert plan.hosts[source.owner].address
                    assert plan.hosts[source.owner].fetches
                    owners[name, block].add(plan.hosts[source.owner].key)
                    promised[plan.hosts[source.owner].key, name, block].add(source.owner_readers)
                else:
                    assert me or source.holders
                if me:
                    at_host[me, name, block] += 1
                    promised[me, name, block].add(source.readers)
                # More than what one rank needs, or from a spool.
                assert source.holders or source.readers > 1 or source.owner is not None
        # Nothing is taken through sidecars that isn't needed; what isn't taken is read directly.
        assert taken <= set(needed)
    for (name, block), keys in owners.items():
        (owner,) = keys
        size = min(BLOCK_BYTES, records[name].size - block * BLOCK_BYTES)
        assert wanted[name, block] > size or any(name in each.holds for each in needs)
        # The owner is one of those that need it, and reads it for itself, too.
        assert at_host[owner, name, block]
    for (key, name, block), numbers in promised.items():
        others = {
            each.host.key if each.host and each.host.fetches else each.rank
            for each, plan in zip(needs, plans, strict=True)
            if owners[name, block] == {key} and block in blocks(plan, name)
        }
        expected = at_host[key, name, block] + max(0, len(others) - 1)
        assert numbers == {expected}


def bytes_of(spans: "array[int]", block: int) -> int:
    start, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
    return sum(
        max(0, min(end, stop) - max(start, begin))
        for begin, stop in zip(spans[::2], spans[1::2], strict=True)
    )
