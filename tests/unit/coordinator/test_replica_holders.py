"""Which host holds whose replicas, and when a holder is ordered to upload a lost host's rank."""

import logging
from collections import Counter
from types import SimpleNamespace

import pytest

from pannier.common import timeouts
from pannier.coordinator import liveness, replica_holders
from pannier.coordinator.liveness import SidecarPeers
from pannier.coordinator.replica_holders import ReplicaHolders, Sent, assign_holders
from pannier.coordinator.saves import participants, save_view
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.states import State
from pannier.daemon.status_registry import StatusRegistry
from pannier.v1 import coordinator_pb2, records_pb2, save_pb2
from pannier.wire import object_names
from support.actors.ranks_by_hand import context

INGESTED = save_pb2.RANK_PHASE_INGESTED


def domains(**hosts: int) -> dict[str, str]:
    """So many hosts in each failure domain, as ``zone0``, ``zone1``, …."""
    return {f"{zone}{number}": zone for zone, count in hosts.items() for number in range(count)}


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (domains(a=1, b=1), 1),
        (domains(a=1, b=1, c=1, d=1, e=1), 1),
        (domains(a=4, b=4), 1),
        (domains(a=2, b=3, c=1), 1),
        (domains(a=6, b=2), 3),
    ],
)
def test_each_host_has_a_holder_of_another_domain_and_holds_about_one(
    given: dict[str, str], most: int
) -> None:
    holders = assign_holders(given, {})
    assert holders.keys() == given.keys()
    assert all(given[host] != given[holder] for host, holder in holders.items())
    assert max(Counter(holders.values()).values()) == most


def test_without_another_domain_there_is_none() -> None:
    assert assign_holders(domains(a=3), {"a0": "a1"}) == {}
    assert assign_holders({}, {"a0": "b0"}) == {}


def test_a_host_that_comes_or_goes_changes_little() -> None:
    given: dict[str, str] = {}
    holders: dict[str, str] = {}
    for number in range(12):
        before = holders
        given[f"node-{number}"] = f"node-{number}"
        holders = assign_holders(given, before)
        assert sum(holders[host] != before[host] for host in before) <= 1
        assert number == 0 or sorted(holders.values()) == sorted(given)
    del given["node-5"]
    after = assign_holders(given, holders)
    kept = {host: holder for host, holder in holders.items() if "node-5" not in (host, holder)}
    assert after.items() >= kept.items()
    assert sorted(after.values()) == sorted(given)


class Hosts:
    """Sidecars at a coordinator, a save of two ranks, and a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(now=lambda: self.now, call_later=self.call_later)
        for module in (replica_holders, liveness, participants):
            monkeypatch.setattr(module, "observer_clock", clock)
        self.later: list[tuple[float, tuple[object, ...]]] = []
        self.registry = Registry(StatusRegistry(), begin=lambda save: None, suspect_after_s=5)
        self.peers = SidecarPeers(self.registry)
        monkeypatch.setattr(self.peers, "_return", SimpleNamespace(add=lambda host: None))
        self.holders = ReplicaHolders(self.registry, self.peers.attached)
        self.sent: dict[SidecarPeer, Sent] = {}

    def call_later(self, delay_s: float, *call: object) -> None:
        self.later.append((self.now + delay_s, call))

    def save(self) -> Save:
        save = self.registry.enter(context(0, "/x/step"))
        self.registry.enter(context(1, "/x/step"))
        save.set_attempt(object_names.Attempt(1, 1, save.context.save.group, "aa"))
        save.move(State.STAGING)
        return save

    def attach(self, host: str, domain: str = "") -> SidecarPeer:
        peer = self.peers.open_stream(host, f"s-{host}-{self.now}")
        peer.failure_domain = domain or host
        peer.copies.peer_address = f"{host}:7"
        peer.note_message(trainer=False)
        self.sent[peer] = Sent()
        return peer

    def response(self, peer: SidecarPeer) -> coordinator_pb2.AttachResponse:
        data = self.holders.response(peer, self.sent[peer])
        return coordinator_pb2.AttachResponse.FromString(data)

    def turn(self, seconds: float) -> None:
        """So much later; attached sidecars have sent heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            for peer in self.peers.attached():
                peer.note_message(trainer=False)
            due = [each for each in self.later if each[0] <= self.now]
            self.later = [each for each in self.later if each[0] > self.now]
            for _, (function, *arguments) in due:
                function(*arguments)  # type: ignore[operator]
            self.holders.check()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


def replicated(hosts: Hosts) -> tuple[Save, list[SidecarPeer]]:
    """A save whose ranks are ingested, each on its host, and node-2 has rank 1."""
    save = hosts.save()
    sidecars = [hosts.attach(f"node-{n}") for n in range(3)]
    for rank, sidecar in enumerate(sidecars[:2]):
        save.apply_report(rank, sidecar, save_pb2.RankStatus(rank=rank))
        save.ranks[rank].advance(INGESTED)
    hold(save, 1, sidecars[2])
    return save, sidecars


def hold(save: Save, rank: int, peer: SidecarPeer) -> None:
    save.note_replica(rank, peer, f"node-{rank}", held=True)
    peer.replicas = {(save.key, rank)}


def test_a_sidecar_gets_its_holder_and_then_only_changes(hosts: Hosts) -> None:
    a, b = hosts.attach("a"), hosts.attach("b")
    assert not hosts.response(a).HasField("replica_holder")
    hosts.holders.check()
    holder = hosts.response(a).replica_holder
    assert (holder.host, holder.peer_address) == ("b", "b:7")
    hosts.turn(1)
    assert not hosts.response(a).HasField("replica_holder")
    b.copies.peer_address = "b:8"
    hosts.turn(1)
    assert hosts.response(a).replica_holder.peer_address == "b:8"
    # Its stream breaks for a moment.
    hosts.peers.close_stream(b)
    hosts.turn(2)
    assert not hosts.response(a).HasField("replica_holder")
    hosts.turn(2)
    left = hosts.response(a)
    assert left.HasField("replica_holder")
    assert left.replica_holder.host == ""


def test_a_host_alone_in_its_domain_is_notified_once_others_had_time_to_attach(
    hosts: Hosts,
) -> None:
    a, _ = hosts.attach("a", "rack"), hosts.attach("b", "rack")
    hosts.turn(timeouts.NO_HOLDER_S - 1)
    assert not hosts.response(a).HasField("replica_holder")
    hosts.turn(2)
    assert hosts.response(a).HasField("replica_holder")
    assert not hosts.response(a).HasField("replica_holder")
    hosts.attach("c", "other rack")
    hosts.turn(1)
    assert hosts.response(a).replica_holder.host == "c"


def test_sidecars_that_take_no_part_get_and_hold_nothing(hosts: Hosts) -> None:
    a, b = hosts.attach("a"), hosts.attach("b")
    b.failure_domain = ""
    hosts.turn(timeouts.NO_HOLDER_S + 1)
    assert hosts.response(a).replica_holder.host == ""
    assert hosts.holders.response(b, hosts.sent[b]) == b""


def test_a_new_coordinator_assigns_what_the_hosts_report(hosts: Hosts) -> None:
    sidecars = [hosts.attach(f"node-{n}") for n in range(4)]
    for number, peer in enumerate(sidecars):
        peer.replica_host = f"node-{(number + 3) % 4}"
    hosts.turn(1)
    assert [hosts.response(each).replica_holder.host for each in sidecars] == [
        each.replica_host for each in sidecars
    ]


def test_the_holder_takes_over_what_a_lost_host_had_ingested(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    save, sidecars = replicated(hosts)
    hosts.turn(timeouts.TAKE_OVER_S + 2)
    assert not hosts.response(sidecars[2]).take_over
    hosts.peers.close_stream(sidecars[1])
    hosts.turn(timeouts.TAKE_OVER_S)
    assert not hosts.response(sidecars[2]).take_over
    status = save_view.status(save)
    assert status.replicated_ranks == 1
    assert "node-2 has its replica" in status.waiting_on.text
    with caplog.at_level(logging.WARNING):
        hosts.turn(1)
    assert "rank 1 of node-1 is uploaded by node-2, which has its replica" in caplog.text
    for _ in range(2):
        # Repeated until it reports the rank.
        (order,) = hosts.response(sidecars[2]).take_over
        assert (order.save, order.rank) == (save.context.save, 1)
        assert not hosts.response(sidecars[0]).take_over
        hosts.turn(1)
    assert hosts.holders.is_taken_over(save, 1)
    save.apply_report(1, sidecars[2], save_pb2.RankStatus(rank=1))
    hosts.turn(1)
    assert not hosts.response(sidecars[2]).take_over
    assert hosts.holders.is_taken_over(save, 1)


@pytest.mark.parametrize("why", ["it returns", "it is durable", "aborted", "the holder is lost"])
def test_nothing_is_taken_over_without_need(hosts: Hosts, why: str) -> None:
    save, sidecars = replicated(hosts)
    hosts.peers.close_stream(sidecars[1])
    hosts.turn(timeouts.TAKE_OVER_S - 2)
    if why == "it returns":
        save.apply_report(1, hosts.attach("node-1"), save_pb2.RankStatus(rank=1))
    elif why == "it is durable":
        save.add_receipt(records_pb2.Receipt(rank=1))
    elif why == "aborted":
        save.fail(save_pb2.FAILURE_KIND_CLIENT, "boom", 0)
    else:
        hosts.peers.close_stream(sidecars[2])
    hosts.turn(5)
    assert not hosts.response(sidecars[2]).take_over


def test_a_rank_that_no_sidecar_has_reported_to_this_coordinator_is_taken_over(
    hosts: Hosts,
) -> None:
    save = hosts.save()
    peer = hosts.attach("node-2")
    hold(save, 1, peer)
    # It had been ingested.
    assert save.ranks[1].phase == INGESTED
    hosts.turn(timeouts.TAKE_OVER_S + 2)
    assert [each.rank for each in hosts.response(peer).take_over] == [1]


def test_a_replica_keeps_a_restarted_host_from_losing_the_save_as_long_as_it_is_there(
    hosts: Hosts,
) -> None:
    save, sidecars = replicated(hosts)
    hosts.peers.close_stream(sidecars[1])
    hosts.turn(1)
    hosts.attach("node-1")
    hosts.peers.check_handed_over(save, 1)
    hosts.turn(8)
    assert not save.outcome.possible_losses
    save.note_replica(1, sidecars[2], "", held=False)
    sidecars[2].replicas = set()
    assert save_view.status(save).replicated_ranks == 0
    hosts.turn(8)
    assert save.outcome.possible_losses.keys() == {1}
