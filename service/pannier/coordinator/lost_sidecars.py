"""Which ranks may have lost what they had handed over, because their sidecar was restarted.

In: sidecars that come and go, and what clients ask after. Out: suspects, which the conductor
acquits or fails once it has looked for their receipts in storage. A rank that was not ingested
is no suspect: its client streams everything again. Event loop only; no I/O.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from pannier.common import observer_clock
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Part, Presence, Save, State
from pannier.v1 import save_pb2

RETURN_S: Final = 3.0
"""A sidecar that lives attaches again within this time after its stream broke."""
PLAN_RETURN_S: Final = 10.0
"""The same, and a trainer beside it has called Plan again."""
_MOMENT_S: Final = 0.02
_KEPT_S: Final = 3600.0
"""How long a sidecar that went away is remembered."""


class _Later:
    """Calls ``look`` with hosts some time after they were added: those of one moment together.

    Each look goes through all ranks, and the sidecars of a large job come and go at once.
    """

    def __init__(self, after_s: float, look: Callable[[Collection[str]], None]) -> None:
        self._after_s = after_s
        self._look = look
        self._hosts: set[str] = set()
        self._until = 0.0

    def add(self, host: str) -> None:
        """It is looked at after that time, or a moment later."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until:
            self._hosts = set()
            self._until = loop.time() + _MOMENT_S
            observer_clock.call_later(_MOMENT_S + self._after_s, self._look, self._hosts)
        self._hosts.add(host)


class Losses:
    """All sidecars, by host and the id of their life."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._presences: dict[tuple[str, str], Presence] = {}
        self._returning = _Later(RETURN_S, self._look)
        self._planning = _Later(PLAN_RETURN_S, self._look_at_plans)

    def attached(self, host: str, sidecar: str) -> Presence:
        """A stream of the sidecar begins; its first request reports all that it holds."""
        now = observer_clock.now()
        self._presences = {
            name: presence
            for name, presence in self._presences.items()
            if presence.streams or now - presence.heard < _KEPT_S
        }
        # With its host: the id of another's life isn't one's own.
        presence = self._presences.setdefault((host, sidecar), Presence(host))
        presence.streams += 1
        self._look_later(host)
        return presence

    def detached(self, presence: Presence) -> None:
        """One of its streams has ended."""
        presence.streams -= 1
        self._look_later(presence.host)
        self._planning.add(presence.host)

    def asked(self, save: Save, rank: int) -> None:
        """The rank was handed over, and the sidecar of its client holds nothing of it."""
        observer_clock.call_later(RETURN_S, self._judge, save, save.parts[rank])

    def _look_later(self, host: str) -> None:
        self._returning.add(host)

    def present(self) -> list[Presence]:
        """Sidecars that are attached now."""
        return [presence for presence in self._presences.values() if presence.streams]

    def _look(self, hosts: Collection[str]) -> None:
        """Judges the ranks of sidecars that are gone, and after whom another one came.

        Of a sidecar that is gone without a successor nothing is known but what it left in
        storage, which is looked at.
        """
        newest: dict[str, float] = {}
        for presence in self.present():
            newest[presence.host] = max(presence.since, newest.get(presence.host, 0.0))
        for save in self._registry.undecided():
            if any(part.host in hosts and part.orphaned for part in save.parts.values()):
                save.ask_storage()
            for part in save.parts.values():
                old = part.sidecar
                if (
                    old is not None
                    and old.host in hosts
                    and old.since < newest.get(old.host, 0.0)
                    and part.phase == save_pb2.RANK_PHASE_INGESTED
                ):
                    self._judge(save, part)

    def _look_at_plans(self, hosts: Collection[str]) -> None:
        """Fails the ranks that wait for a plan to be agreed, and for whom nobody speaks any more.

        Of those that wait by a call of their own, its end tells.
        """
        for save in self._registry.undecided():
            if save.state is not State.PLANNING:
                continue
            for proposal in save.gathering.unread:
                part = save.parts[proposal.rank]
                if part.host in hosts and part.orphaned:
                    save.fail(
                        save_pb2.FAILURE_KIND_LOST,
                        f"the sidecar on host {part.host} is gone: it ended while the save was planned",
                        part.rank,
                        concluded=True,
                    )

    def _judge(self, save: Save, part: Part) -> None:
        if part.receipt is not None or part.spoken_for:
            return
        save.suspect(
            save_pb2.Failure(
                rank=part.rank,
                host=part.host,
                kind=save_pb2.FAILURE_KIND_LOST,
                message=f"the sidecar on host {part.host} was restarted and no longer holds this "
                "rank's data",
            )
        )
