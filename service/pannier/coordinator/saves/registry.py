"""All saves that the coordinator knows, and the hosts of each incarnation's ranks.

In: contexts. Out: saves, one per identity. A bounded number of ended saves is kept for some time, so
that late calls and status show how they ended. Event loop only; no I/O.
"""

import asyncio
import functools
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.common import timeouts
from pannier.common.units import counted
from pannier.coordinator.saves import save_view
from pannier.coordinator.saves.participants import RankPlace, SidecarPeer
from pannier.coordinator.saves.save import Save
from pannier.coordinator.saves.save_spec import (
    DisagreementError,
    check_agreement,
    describes_same_save,
    sender,
)
from pannier.coordinator.saves.states import State
from pannier.daemon.status_registry import StatusRegistry
from pannier.v1 import coordinator_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import UnavailableError, failure_messages
from pannier.wire.failures import ranks_text
from pannier.wire.limits import check_context, check_host, check_room

_log = logging.getLogger(__name__)

ENDED_KEPT: Final = 512
"""Ended saves remembered."""
_INCARNATIONS_KEPT: Final = 64


@dataclass
class _Incarnation:
    first: sidecar_pb2.SaveContext
    places: dict[int, RankPlace] = field(default_factory=lambda: defaultdict(RankPlace))
    """By rank."""


class Registry:
    """Finds saves.

    Args:
        begin: called with every new save, to start its task.
    """

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
        """The save of a rank's context; begins it at the first context.

        Args:
            known: the save is under way for a sidecar: it is accepted while the coordinator drains.
            failing: the rank only reports its failure, perhaps over the very thing in which it
                contradicts the others: that report takes precedence.
            brief: the context of a known save may leave out the group's ranks.

        Raises:
            InvalidRequestError: the context contradicts itself.
            DisagreementError: it contradicts another rank's; the save fails.
            UnavailableError: a new save while draining, or one above the limits.
        """
        key = object_names.save_text(context.save)
        save = self.find_key(key)
        brief = brief and not context.ranks
        same = save is not None and describes_same_save(save.context, context, brief=brief)
        if save is not None and same and context.rank in save.ranks:
            # The usual case: all fields but the sender were checked with the first rank's context.
            check_host(context.host)
            self._note(save, context)
            if not failing:
                self._check_world(save, context)
            return save
        if brief and save is not None:
            # The rest of the context is checked against the group that was sent before.
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
        if failing and context.rank in save.ranks:
            return save
        try:
            self._check(save, context)
        except DisagreementError as error:
            if not save.failing:
                # A save that is failing already has its cause: a failed rank may contradict others, too.
                save.fail_ranks(failure_messages(error))
            raise
        return save

    def note_trainers(
        self, sidecar: SidecarPeer, trainers: Iterable[coordinator_pb2.TrainerStatus]
    ) -> None:
        """Records which sidecar reports the trainers that live."""
        for trainer in trainers:
            incarnation = self._incarnations.get((trainer.job, trainer.incarnation))
            if incarnation is not None and trainer.rank in incarnation.places:
                incarnation.places[trainer.rank].sidecar = sidecar

    async def find_current(self, context: sidecar_pb2.SaveContext, timeout_s: float) -> int:
        """Number of the save that a rank belongs to after its own save ended without it; 0 if in step.

        A rank that missed a call stays behind its group: its save number is that of an earlier save
        to another checkpoint id. It belongs to the newer save to its checkpoint id. If the other ranks
        haven't called that save yet, this waits for it.
        """
        past = self.find(context.save)
        if past is None or not past.ended or context.rank in past.participants.joined:
            return 0
        if past.context.checkpoint_id == context.checkpoint_id:
            return 0  # the right save, too late
        # Only a rank that missed the deadline has certainly missed a call: another one may be in step
        # and merely late, after a rank failed with a different checkpoint id.
        cause = past.outcome.failures.get(context.rank)
        missed = cause is not None and cause.kind == save_pb2.FAILURE_KIND_DEADLINE
        deadline = time.monotonic() + (timeout_s if missed else 0)
        with self._status_registry.watch() as watch:
            while True:
                newer = self._newer(context)
                remaining = deadline - time.monotonic()
                if newer or remaining <= 0:
                    return newer
                await watch.wait(remaining)

    def _newer(self, context: sidecar_pb2.SaveContext) -> int:
        """Number of the group's newest save to the checkpoint id that the rank isn't in; 0 for none."""
        known = [*self._saves.values(), *(save for _, save in self._ended.values())]
        return max(
            (
                save.context.save.number
                for save in known
                if _same_group(save.context.save, context.save)
                and save.context.save.number > context.save.number
                and save.context.checkpoint_id == context.checkpoint_id
                and context.rank not in save.participants.joined
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
            places=incarnation.places,
            suspect_after_s=self._suspect_after_s,
        )
        _log.info(
            "%s begins, with %s",
            save.label,
            counted(len(context.ranks), "rank"),
            extra=save.log_fields,
        )
        self._status_registry.put(
            context.save,
            context.checkpoint_id,
            functools.partial(save_view.status, save),
        )
        self._begin(save)
        return save

    def _note(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        rank, host = context.rank, context.host
        incarnation = self._incarnations.get(save.spec.incarnation)
        if incarnation is not None:
            place = incarnation.places[rank]
            place.host, place.seen = host, time.monotonic()
        # A rank that missed an ended save takes part in a later one: see find_current.
        if not save.ended and save.note_context(context):
            self._check_split(save)

    def _check_split(self, save: Save) -> None:
        """Checks whether the group's other ranks take part as another incarnation."""
        for other in self._saves.values():
            if _is_split(save, other):
                # Not at once: the other restarted ranks may follow.
                loop = asyncio.get_running_loop()
                loop.call_later(timeouts.SPLIT_S, self._fail_split, save, other)

    def _fail_split(self, *halves: Save) -> None:
        if not _is_split(*halves):
            return
        saves = sorted(halves, key=lambda save: min(save.participants.joined))
        text = " and ".join(
            f"{_joined_text(save)} as incarnation {save.context.save.incarnation}" for save in saves
        )
        context = saves[0].context
        message = (
            f"the group's ranks take part in two incarnations of job {context.save.job}, {text}: "
            "they did not agree on one through the process group's store, and would wait for each "
            "other. Start the job again; if it was, end the processes that are left of the former "
            "start"
        )
        error = DisagreementError(
            message,
            *(
                (rank, save.ranks[rank].host)
                for save in saves
                for rank in sorted(save.participants.joined)
            ),
        )
        for save in saves:
            save.fail_ranks(failure_messages(error))

    def _check(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        check_agreement(save.context, context)
        self._check_world(save, context)

    def _check_world(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        incarnation_key = save.spec.incarnation
        incarnation = self._incarnations.get(incarnation_key)
        if incarnation is None:
            return
        first = incarnation.first
        if first.world_size != context.world_size:
            # Such ranks form different groups, and would wait for each other until the deadline.
            error = DisagreementError(
                f"{sender(first)} has a world size of {first.world_size}, {sender(context)} of "
                f"{context.world_size}, in one incarnation of job {context.save.job}",
                (first.rank, first.host),
                (context.rank, context.host),
            )
            for other in self.undecided():
                same = other.spec.incarnation == incarnation_key
                if same and other.state is State.PLANNING:
                    other.fail_ranks(failure_messages(error))
            raise error
        self._check_groups(save, context)

    def _check_groups(self, save: Save, context: sidecar_pb2.SaveContext) -> None:
        """Fails a save to the same checkpoint id that waits for this rank with another group."""
        if save.state is not State.PLANNING:
            return
        for other in self.undecided():
            theirs = other.context
            if (
                other is not save
                and other.state is State.PLANNING
                and theirs.checkpoint_id == context.checkpoint_id
                and other.spec.incarnation == save.spec.incarnation
                and theirs.save.group != context.save.group
                and context.rank in other.plans.missing
            ):
                others = "another process group of these"
                if theirs.ranks != context.ranks:
                    others = ranks_text(context.ranks)
                error = DisagreementError(
                    f"{sender(theirs)} saves to {theirs.checkpoint_id} together with "
                    f"{ranks_text(theirs.ranks)}, {sender(context)} with "
                    f"{others}: pass the same process_group on every rank",
                    (theirs.rank, theirs.host),
                    (context.rank, context.host),
                )
                other.fail_ranks(failure_messages(error))
                raise error

    def _changed(self, save: Save) -> None:
        if save.ended and self._saves.pop(save.key, None) is not None:
            self._ended[save.key] = (time.monotonic(), save)
        while self._ended:
            since, oldest = next(iter(self._ended.values()))
            if (
                len(self._ended) <= ENDED_KEPT
                and time.monotonic() - since < timeouts.ENDED_SAVE_KEPT_S
            ):
                break
            del self._ended[oldest.key]
            self._status_registry.remove(oldest.key)
        self._status_registry.notify(save.key)
        for listener in self._listeners:
            listener(save)


def _is_split(one: Save, other: Save) -> bool:
    """Whether two saves are halves of one: each has the ranks that the other lacks."""
    first, second = one.context, other.context
    return (
        first.save.incarnation != second.save.incarnation
        and (first.save.job, first.save.group) == (second.save.job, second.save.group)
        and (first.checkpoint_id, first.world_size) == (second.checkpoint_id, second.world_size)
        and all(
            save.state is State.PLANNING and not save.failing and not save.context.apart
            for save in (one, other)
        )
        and one.participants.joined.isdisjoint(other.participants.joined)
        and len(one.participants.joined) + len(other.participants.joined) == len(one.ranks)
    )


def _joined_text(save: Save) -> str:
    hosts: dict[str, list[int]] = {}
    for rank in sorted(save.participants.joined):
        hosts.setdefault(save.ranks[rank].host, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} (host {host})" for host, ranks in hosts.items())


def _same_group(one: save_pb2.SaveId, other: save_pb2.SaveId) -> bool:
    return (one.job, one.incarnation, one.group) == (other.job, other.incarnation, other.group)


def _with_ranks(context: sidecar_pb2.SaveContext, ranks: Sequence[int]) -> sidecar_pb2.SaveContext:
    whole = sidecar_pb2.SaveContext()
    whole.CopyFrom(context)
    whole.ranks.extend(ranks)
    return whole
