"""All saves that the coordinator knows, and where the ranks of each incarnation live.

In: contexts. Out: saves, one per identity. Ended ones are kept for those who ask how they
ended, for a bounded number and time. Event loop only; no I/O.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.coordinator.saves.participants import (
    DisagreementError,
    check_agreement,
    says_same,
    who,
)
from pannier.coordinator.saves.save import Save, State
from pannier.daemon.status_registry import StatusRegistry
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import UnavailableError
from pannier.wire.failures import ranks_text
from pannier.wire.limits import check_context, check_host, check_room

_log = logging.getLogger(__name__)

ENDED_KEPT: Final = 512
"""Ended saves remembered."""
ENDED_KEPT_S: Final = 3600.0
_INCARNATIONS_KEPT: Final = 64
SPLIT_S: Final = 2.0
"""Until ranks that take part in two incarnations count as divided."""
"""Ranks of a host that are spelled out in an error."""


@dataclass
class _Incarnation:
    first: sidecar_pb2.SaveContext
    hosts: dict[int, tuple[str, float]] = field(default_factory=dict)
    """By rank: host, and when the rank was last seen."""


class Registry:
    """Finds saves. ``begin`` is called with every new one, which it sets in motion."""

    def __init__(
        self,
        status_registry: StatusRegistry,
        *,
        begin: Callable[[Save], None],
        suspect_after_s: float,
    ) -> None:
        self.draining = False
        """New saves are refused."""
        self._status_registry = status_registry
        self._begin = begin
        self._suspect_after_s = suspect_after_s
        self._saves: dict[str, Save] = {}
        self._ended: OrderedDict[str, tuple[float, Save]] = OrderedDict()
        self._incarnations: OrderedDict[tuple[str, str], _Incarnation] = OrderedDict()
        self._listeners: list[Callable[[Save], None]] = []

    def listen(self, listener: Callable[[Save], None]) -> None:
        """Calls ``listener`` after every change of a save."""
        self._listeners.append(listener)

    def undecided(self) -> list[Save]:
        """Saves that haven't ended, oldest first."""
        return list(self._saves.values())

    def find(self, save: save_pb2.SaveId) -> Save | None:
        """The save of this identity, if it is known."""
        return self.find_key(object_names.save_text(save))

    def find_key(self, key: str) -> Save | None:
        """The save by its id as text, if it is known."""
        if key in self._ended:
            return self._ended[key][1]
        return self._saves.get(key)

    def enter(
        self,
        context: sidecar_pb2.SaveContext,
        *,
        known: bool = False,
        failing: bool = False,
        brief: bool = False,
    ) -> Save:
        """The save that a rank speaks of; it begins now when nobody spoke of it before.

        Args:
            known: the save is under way for a sidecar, so that it is taken in even while
                the coordinator drains.
            failing: the rank only says that it failed, perhaps over the very thing in which it
                contradicts the others: its own words go first.

            brief: of a known save the context may leave the group's ranks out.

        Raises:
            InvalidRequestError: the context contradicts itself.
            DisagreementError: it contradicts another rank's; the save is doomed.
            UnavailableError: a new save while draining, or one above the limits.
        """
        key = object_names.save_text(context.save)
        save = self.find_key(key)
        brief = brief and not context.ranks
        same = save is not None and says_same(save.context, context, brief=brief)
        if save is not None and same and context.rank in save.parts:
            # As most that is said: it was checked when the first rank said it.
            check_host(context.host)
            self._note(save, context)
            if not failing:
                self._check_world(save, context)
            return save
        if brief and save is not None:
            # What else it says is to be judged by the group that was told before.
            context = _with_ranks(context, save.context.ranks)
        check_context(context)
        if save is None:
            if self.draining and not known:
                raise UnavailableError(
                    f"the coordinator is draining and takes no new saves ({key})"
                )
            check_room([each.context.save for each in self._saves.values()], context.save)
            save = self._new(context, key)
        self._note(save, context)
        if failing and context.rank in save.parts:
            return save
        try:
            self._check(save, context)
        except DisagreementError as error:
            if not save.doomed.is_set():
                # Else that is why, not this: a rank that failed may contradict the others, too.
                save.doom(error.failures.values())
            raise
        return save

    async def current(self, context: sidecar_pb2.SaveContext, timeout_s: float) -> int:
        """Where a rank belongs that speaks of a save which ended without it; 0 if it is in step.

        A rank that left out a call is behind its group for good unless it is told: it
        names another checkpoint id than the save that it is counted to. It belongs to the newer
        save to that id, which is waited for if the other ranks haven't come so far.
        """
        past = self.find(context.save)
        if past is None or not past.ended or context.rank in past.joined:
            return 0
        if past.context.checkpoint_id == context.checkpoint_id:
            return 0  # the right save, too late
        # Only of a rank that was missed is it known that it left the call out: another may be right
        # and merely late, after a rank that failed with a checkpoint id of its own.
        cause = past.failures.get(context.rank)
        missed = cause is not None and cause.kind == save_pb2.FAILURE_KIND_DEADLINE
        deadline = time.monotonic() + (timeout_s if missed else 0)
        with self._status_registry.watch_aio() as watch:
            while True:
                newer = self._newer(context)
                remaining = deadline - time.monotonic()
                if newer or remaining <= 0:
                    return newer
                await watch.wait(remaining)

    def _newer(self, context: sidecar_pb2.SaveContext) -> int:
        """Number of the group's newest save to the same place that the rank isn't in; 0 for none."""
        known = [*self._saves.values(), *(save for _, save in self._ended.values())]
        return max(
            (
                save.context.save.number
                for save in known
                if _same_group(save.context.save, context.save)
                and save.context.save.number > context.save.number
                and save.context.checkpoint_id == context.checkpoint_id
                and context.rank not in save.joined
            ),
            default=0,
        )

    def _new(self, context: sidecar_pb2.SaveContext, key: str) -> Save:
        of = (context.save.job, context.save.incarnation)
        incarnation = self._incarnations.setdefault(of, _Incarnation(context))
        self._incarnations.move_to_end(of)
        while len(self._incarnations) > _INCARNATIONS_KEPT:
            self._incarnations.popitem(last=False)
        save = self._saves[key] = Save(
            context,
            changed=self._changed,
            recall=incarnation.hosts.get,
            suspect_after_s=self._suspect_after_s,
        )
        _log.info("%s begins, with %d ranks", save.label, len(context.ranks), extra=save.about)
        self._status_registry.put(context.save, context.checkpoint_id, save.status)
        self._begin(save)
        return save

    def _note(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        rank, host = context.rank, context.host
        incarnation = self._incarnations.get(save.life)
        if incarnation is not None:
            incarnation.hosts[rank] = (host, time.monotonic())
        part = save.parts.get(rank)
        if part is not None:
            part.host = host or part.host
            if rank not in save.joined:
                save.joined.add(rank)
                self._check_split(save)
        if context.HasField("seen_incarnation") and not save.context.HasField("seen_incarnation"):
            save.context.seen_incarnation = context.seen_incarnation

    def _check_split(self, save: Save) -> None:
        """Looks whether the group's other ranks take part as another incarnation."""
        for other in self._saves.values():
            if _is_split(save, other):
                # Not at once: ranks that were started again may follow those that have come.
                loop = asyncio.get_running_loop()
                loop.call_later(SPLIT_S, self._judge_split, save, other)

    def _judge_split(self, *halves: Save) -> None:
        if not _is_split(*halves):
            return
        saves = sorted(halves, key=lambda save: min(save.joined))
        told = " and ".join(
            f"{_joined(save)} as incarnation {save.context.save.incarnation}" for save in saves
        )
        context = saves[0].context
        message = (
            f"the group's ranks take part in two incarnations of job {context.save.job}, {told}: "
            "they did not agree on one through the process group's store, and would wait for each "
            "other. Start the job again; if it was, end the processes that are left of the former "
            "start"
        )
        error = DisagreementError(
            message,
            *((rank, save.parts[rank].host) for save in saves for rank in sorted(save.joined)),
        )
        for save in saves:
            save.doom(error.failures.values())

    def _check(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        check_agreement(save.context, context)
        self._check_world(save, context)

    def _check_world(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        of = save.life
        incarnation = self._incarnations.get(of)
        if incarnation is None:
            return
        first = incarnation.first
        if first.world_size != context.world_size:
            # Such ranks form different groups, and would wait for each other until the deadline.
            error = DisagreementError(
                f"{who(first)} has a world size of {first.world_size}, {who(context)} of "
                f"{context.world_size}, in one incarnation of job {context.save.job}",
                (first.rank, first.host),
                (context.rank, context.host),
            )
            for other in self.undecided():
                theirs = other.context.save
                if (theirs.job, theirs.incarnation) == of and other.state is State.PLANNING:
                    other.doom(error.failures.values())
            raise error
        self._check_groups(save, context)

    def _check_groups(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        """A rank that plans with one group won't join another that waits for it, to one place."""
        if save.state is not State.PLANNING:
            return
        for other in self.undecided():
            theirs = other.context
            if (
                other is not save
                and other.state is State.PLANNING
                and theirs.checkpoint_id == context.checkpoint_id
                and (theirs.save.job, theirs.save.incarnation)
                == (context.save.job, context.save.incarnation)
                and theirs.save.group != context.save.group
                and context.rank in other.gathering.missing
            ):
                error = DisagreementError(
                    f"{who(theirs)} saves to {theirs.checkpoint_id} together with "
                    f"{ranks_text(theirs.ranks)}, {who(context)} with "
                    f"{ranks_text(context.ranks)}: pass the same process_group on every rank",
                    (theirs.rank, theirs.host),
                    (context.rank, context.host),
                )
                other.doom(error.failures.values())
                raise error

    def _changed(self, save: Save) -> None:
        if save.ended and self._saves.pop(save.key, None) is not None:
            self._ended[save.key] = (time.monotonic(), save)
        while self._ended:
            since, oldest = next(iter(self._ended.values()))
            if len(self._ended) <= ENDED_KEPT and time.monotonic() - since < ENDED_KEPT_S:
                break
            del self._ended[oldest.key]
            self._status_registry.remove(oldest.key)
        self._status_registry.notify(save.key)
        for listener in self._listeners:
            listener(save)


def _is_split(one: Save, other: Save) -> bool:
    """Whether two saves are one, of which each has the ranks that the other lacks."""
    first, second = one.context, other.context
    return (
        first.save.incarnation != second.save.incarnation
        and (first.save.job, first.save.group) == (second.save.job, second.save.group)
        and (first.checkpoint_id, first.world_size) == (second.checkpoint_id, second.world_size)
        and all(
            save.state is State.PLANNING and not save.doomed.is_set() and not save.context.apart
            for save in (one, other)
        )
        and one.joined.isdisjoint(other.joined)
        and len(one.joined) + len(other.joined) == len(one.parts)
    )


def _joined(save: Save) -> str:
    """The ranks that take part, by host, for people."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(save.joined):
        hosts.setdefault(save.parts[rank].host, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} (host {host})" for host, ranks in hosts.items())


def _same_group(one: save_pb2.SaveId, other: save_pb2.SaveId) -> bool:
    return (one.job, one.incarnation, one.group) == (other.job, other.incarnation, other.group)


def _with_ranks(context: sidecar_pb2.SaveContext, ranks: Sequence[int]) -> sidecar_pb2.SaveContext:
    whole = sidecar_pb2.SaveContext()
    whole.CopyFrom(context)
    whole.ranks.extend(ranks)
    return whole
