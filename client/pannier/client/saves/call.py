"""One numbered call of this rank for a save of its group.

In: a group's next number, and arguments as they are checked. Out: the save's context, or a report to the other
ranks that the save failed here. Whatever the call raises, its number is consumed on all ranks, so that their
numbers stay in step. Used by the caller's thread, except where noted.
"""

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from pannier.client.engine import engine
from pannier.client.identity import Group
from pannier.client.transport.membership import Membership
from pannier.client.transport.save_errors import fail_request
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import PannierError, SaveAbortedError

_log = logging.getLogger(__name__)

_OVERWRITE: Final = {
    None: save_pb2.OVERWRITE_UNSPECIFIED,
    False: save_pb2.OVERWRITE_NEVER,
    True: save_pb2.OVERWRITE_ANY,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller chose."""

    deadline: Deadline
    on_busy: str = "wait"
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    overwrite: bool | None = None
    plan_timeout_s: float = timeouts.DEFAULT_SAVE_S
    counts: bool = True
    """Whether waits for all saves wait for this one, and later calls raise its error."""


class SaveCall:
    """See the module. Takes the group's next number.

    Args:
        member: connects to the sidecar.
        group: the ranks that save together.
        checkpoint_id: as the caller gave it, not checked yet.
    """

    def __init__(self, member: Membership, group: Group, checkpoint_id: str) -> None:
        self.member = member
        self.group = group
        self.number = member.world.next_number(group)
        self.checkpoint_id = checkpoint_id
        self.options = Options(Deadline())
        self.is_accepted = False
        """The arguments are valid."""
        self.is_requested = False
        """The coordinator may know the save, and then reports its end to the other ranks."""
        self.text = ""
        """The save's id; empty until its context was made."""

    def accept(self, checkpoint_id: str, options: Options) -> None:
        """The arguments are valid: what is raised from now on concerns this save."""
        self.checkpoint_id = checkpoint_id
        self.options = options
        self.is_accepted = True

    def context(self, sidecar: SidecarClient | None = None) -> sidecar_pb2.SaveContext:
        """What every message of this save carries.

        Args:
            sidecar: knows the host's name; None: it isn't connected yet, and this process's hostname is used.
        """
        who = self.member.identity if sidecar is None else sidecar.identity
        world = self.member.world
        context = sidecar_pb2.SaveContext(
            save=save_pb2.SaveId(
                job=who.job,
                incarnation=who.incarnation,
                group=self.group.name,
                number=self.number,
            ),
            checkpoint_id=self.checkpoint_id,
            ranks=self.group.ranks,
            world_size=world.size,
            rank=self.group.rank,
            host=(sidecar and sidecar.welcome.host) or who.host,
            overwrite=_OVERWRITE[self.options.overwrite],
            apart=world.apart,
            launch=who.launch,
        )
        seen = world.seen_incarnation(self.checkpoint_id)
        if seen is not None:
            context.seen_incarnation = seen
        self.text = object_names.save_text(context.save)
        return context

    async def report(self, error: BaseException) -> None:
        """The call raises ``error``: lets the other ranks know it, unless they do. On the loop."""
        has_others = len(self.group.ranks) > 1
        if isinstance(error, SaveAbortedError) and self.is_requested:
            return
        if not has_others and not self.is_requested:
            return
        try:
            sidecar = await engine().in_thread(self.member.sidecar)
            context = await engine().in_thread(partial(self.context, sidecar))
            await sidecar.fail(fail_request(context, error))
        except PannierError as problem:
            if has_others:
                _log.warning("%r could not be reported to the other ranks: %s", error, problem)
