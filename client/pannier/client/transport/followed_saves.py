"""The saves of one sidecar client whose status is followed.

In: the statuses that a connection receives. Out: calls of each save's own functions, and what a restarted
sidecar, which may not know the saves, has to learn of them. Owned by a connection. Thread-safe.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pannier.common.deadline import Deadline
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names

_LEAST_S: Final = 0.001

OnStatus = Callable[[save_pb2.SaveStatus], None]
OnUnresponsive = Callable[[str], None]
"""Called with the sidecar's name and when it was last seen; "" once it answers again."""


@dataclass
class _FollowedSave:
    context: sidecar_pb2.SaveContext
    on_status: OnStatus
    on_unresponsive: OnUnresponsive
    deadline: Deadline | None
    handed_over: bool = False

    def pending(self) -> sidecar_pb2.PendingSave:
        """The message by which a restarted sidecar, which may not know the save, learns of it."""
        pending = sidecar_pb2.PendingSave(context=self.context, handed_over=self.handed_over)
        pending.save_timeout_s = seconds_left(self.deadline)
        return pending


class FollowedSaves:
    """The saves whose status the client follows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[str, _FollowedSave] = {}

    def follow(
        self,
        context: sidecar_pb2.SaveContext,
        on_status: OnStatus,
        on_unresponsive: OnUnresponsive = lambda text: None,
        deadline: Deadline | None = None,
    ) -> None:
        """Calls ``on_status`` with every status of a save until :meth:`unfollow`.

        Until then a restarted sidecar is asked for the save's outcome.

        Args:
            deadline: of the save; None: not known.
        """
        followed = _FollowedSave(context, on_status, on_unresponsive, deadline)
        with self._lock:
            self._saves[object_names.save_text(context.save)] = followed

    def unfollow(self, save: save_pb2.SaveId) -> None:
        """Drops the callbacks of ``save``."""
        with self._lock:
            self._saves.pop(object_names.save_text(save), None)

    def mark_handed_over(self, save: save_pb2.SaveId) -> None:
        """The sidecar has this rank's part of ``save``, and its plan is confirmed."""
        with self._lock:
            followed = self._saves.get(object_names.save_text(save))
            if followed is not None:
                followed.handed_over = True

    def pending(self) -> list[sidecar_pb2.PendingSave]:
        """All of them, for a sidecar that may not know them."""
        with self._lock:
            return [followed.pending() for followed in self._saves.values()]

    def deliver(self, status: save_pb2.SaveStatus) -> None:
        """Calls the save's ``on_status``."""
        with self._lock:
            followed = self._saves.get(object_names.save_text(status.save))
        if followed is not None:
            followed.on_status(status)

    def report_unresponsive(self, text: str) -> None:
        """Calls every ``on_unresponsive``."""
        with self._lock:
            followed = list(self._saves.values())
        for each in followed:
            each.on_unresponsive(text)

    def __len__(self) -> int:
        return len(self._saves)


def seconds_left(deadline: Deadline | None) -> float:
    """A deadline as messages carry it: seconds that remain, 0 for no deadline."""
    return 0.0 if deadline is None else max(_LEAST_S, deadline.remaining())
