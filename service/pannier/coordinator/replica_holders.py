"""Replicas on a second host (``--replicas 1``): which host holds which host's, and which one uploads the
ingested data of a lost host.

In: attached sidecars, the failure domain of each, and the replicas that each one holds. Out: a holder in
another failure domain for each host; orders to take over ranks whose own sidecar is not attached. The orders
need no lock: both hosts would write the same objects. Owns nothing in storage. Event loop only; no I/O.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.common import observer_clock, timeouts
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save
from pannier.v1 import coordinator_pb2, restore_pb2

_log = logging.getLogger(__name__)

RankKey = tuple[str, int]
"""A save's key, and a rank."""

_CROWDED: Final = 2
"""A host that holds at least this many hosts' replicas gives those of one host to a host that holds none."""


@dataclass
class Sent:
    """What was sent to a sidecar on one stream."""

    holder: restore_pb2.FetchHost | None = None
    """The last holder that was sent; None: none yet."""
    ordered_at: float = field(default=float("-inf"))
    """When take-over orders were last sent, on the observer's clock."""


class ReplicaHolders:
    """Assigns the holders of all hosts' replicas, and decides take-overs.

    Args:
        attached: sidecars with an open stream.
    """

    def __init__(self, registry: Registry, attached: Callable[[], Sequence[SidecarPeer]]) -> None:
        self._registry = registry
        self._attached = attached
        self._members: dict[str, _Member] = {}
        """By host."""
        self._holders: dict[str, str] = {}
        """Holder by host."""
        self._assigned_for: dict[str, str] = {}
        """Failure domains by host, as they were when holders were assigned."""
        self._lost_since: dict[RankKey, float] = {}
        """Ranks without a live sidecar that another host could upload, and since when."""
        self._orders: dict[RankKey, SidecarPeer] = {}
        """Ranks to be taken over, and by which sidecar, until it reports them as its own."""
        self._taken: set[RankKey] = set()
        """All ranks of undecided saves for which there was an order."""

    async def run(self) -> None:
        """Checks until it is cancelled."""
        while True:
            await asyncio.sleep(timeouts.CHECK_S)
            self.check()

    def check(self) -> None:
        """Assigns holders, and decides which ranks are to be taken over."""
        self._assign()
        self._decide()

    def is_taken_over(self, save: Save, rank: int) -> bool:
        """Whether a host other than the rank's own may upload it, too."""
        return (save.key, rank) in self._taken

    def response(self, peer: SidecarPeer, sent: Sent) -> bytes:
        """Holder and orders to be sent to the sidecar now, as part of an ``AttachResponse``; may be empty.

        Args:
            sent: what its stream has sent; updated.
        """
        if not peer.failure_domain:
            return b""
        out = coordinator_pb2.AttachResponse()
        holder = self._holder_of(peer, sent)
        if holder is not None and holder != sent.holder:
            out.replica_holder.CopyFrom(holder)
            sent.holder = holder
        now = observer_clock.now()
        if now - sent.ordered_at >= timeouts.STATUS_DUE_S:
            out.take_over.extend(
                coordinator_pb2.TakeOver(save=save.context.save, rank=rank)
                for (key, rank), ordered in self._orders.items()
                if ordered is peer and (save := self._registry.find_key(key)) is not None
            )
            if out.take_over:
                sent.ordered_at = now
        return out.SerializeToString()

    # Holders.

    def _assign(self) -> None:
        now = observer_clock.now()
        for peer in self._attached():
            if peer.failure_domain:
                self._members[peer.host] = _Member(
                    peer.failure_domain, peer.copies.peer_address, peer.replica_host, now
                )
        # A stream that is interrupted briefly changes no holder.
        self._members = {
            host: member
            for host, member in self._members.items()
            if now - member.seen <= timeouts.SIDECAR_RETURN_S
        }
        reachable = {host: member for host, member in self._members.items() if member.address}
        domains = {host: member.domain for host, member in reachable.items()}
        if domains != self._assigned_for:
            # Hosts report the holders that an earlier coordinator assigned.
            reported = {host: each.holder for host, each in reachable.items() if each.holder}
            self._assigned_for = domains
            self._holders = assign_holders(domains, {**reported, **self._holders})

    def _holder_of(self, peer: SidecarPeer, sent: Sent) -> restore_pb2.FetchHost | None:
        """The holder of the host's replicas, with an empty name if there is none; None: not known yet."""
        name = self._holders.get(peer.host, "")
        member = self._members.get(name)
        if member is not None:
            return restore_pb2.FetchHost(host=name, peer_address=member.address)
        alone = observer_clock.now() - peer.attached_at >= timeouts.NO_HOLDER_S
        return restore_pb2.FetchHost() if alone or sent.holder is not None else None

    # Take-overs.

    def _decide(self) -> None:
        now, before = observer_clock.now(), self._orders
        held = self._without_origin()
        self._lost_since = {key: self._lost_since.get(key, now) for key in held}
        self._orders = {}
        for key, peers in held.items():
            if now - self._lost_since[key] >= timeouts.TAKE_OVER_S:
                former = before.get(key)
                self._orders[key] = former if former in peers else peers[0]
                if self._orders[key] is not former:
                    self._log_order(key, self._orders[key])
        undecided = {save.key for save in self._registry.undecided()}
        self._taken = {key for key in self._taken | self._orders.keys() if key[0] in undecided}

    def _without_origin(self) -> dict[RankKey, list[SidecarPeer]]:
        """Ranks that aren't durable and have no live sidecar, with the holders of all their files."""
        found: dict[RankKey, list[SidecarPeer]] = {}
        for peer in sorted(self._attached(), key=lambda peer: peer.host):
            for key, rank in peer.replicas:
                save = self._registry.find_key(key)
                if save is None or save.ended or save.failing or save.deciding:
                    continue
                state = save.ranks[rank]
                if state.receipt is None and not state.has_live_sidecar:
                    found.setdefault((key, rank), []).append(peer)
        return found

    def _log_order(self, key: RankKey, peer: SidecarPeer) -> None:
        save, rank = self._registry.find_key(key[0]), key[1]
        assert save is not None
        _log.warning(
            "%s: rank %d of %s is uploaded by %s, which has its replica",
            *(save.label, rank, save.ranks[rank].host, peer.host),
            extra={**save.log_fields, "rank": rank},
        )


@dataclass(frozen=True)
class _Member:
    """A host that takes part in the exchange of replicas."""

    domain: str
    address: str
    """Where peers reach it; empty: they can't."""
    holder: str
    """The holder of its replicas, as the host last reported it; empty: none."""
    seen: float
    """When it was last attached, on the observer's clock."""


def assign_holders(domains: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Assigns to each host a holder in another failure domain; to none where all are in one domain.

    All hold about the same number of hosts' replicas. A host keeps its holder while the holder is there,
    unless the holder has several hosts' replicas, and another host could hold one and holds none.

    Args:
        domains: failure domain by host.
        before: the former holders, by host.
    """
    ring = sorted(domains, key=lambda host: (domains[host], host))
    holders = {
        host: before[host]
        for host in ring
        if before.get(host) in domains and domains[before[host]] != domains[host]
    }
    held = Counter(holders.values())
    for place, host in enumerate(ring):
        if host not in holders:
            others = ring[place + 1 :] + ring[:place]
            holder = _least_used((each for each in others if domains[each] != domains[host]), held)
            if holder is not None:
                holders[host] = holder
                held[holder] += 1
    _spread(holders, held, domains, ring)
    return holders


def _least_used(hosts: Iterable[str], held: Mapping[str, int]) -> str | None:
    """The first of the hosts that hold the fewest hosts' replicas."""
    best = None
    for host in hosts:
        if best is None or held.get(host, 0) < held.get(best, 0):
            best = host
        if not held.get(host, 0):
            break
    return best


def _spread(
    holders: dict[str, str], held: "Counter[str]", domains: Mapping[str, str], ring: Sequence[str]
) -> None:
    """Moves replicas from hosts that hold several hosts' to hosts that hold none."""
    for idle in ring:
        if held[idle]:
            continue
        crowded = (
            host
            for host, holder in holders.items()
            if held[holder] >= _CROWDED and domains[host] != domains[idle]
        )
        host = next(crowded, None)
        if host is not None:
            held[holders[host]] -= 1
            holders[host] = idle
            held[idle] += 1
