"""Saves that clients ask after and that this sidecar knows nothing of, because it was restarted.

In: what clients name when they connect, and what the coordinator says of it. Out: what to
ask the coordinator, and its answers to the clients' streams. Only the coordinator says how a
save ended: nothing is concluded here from not knowing it. Thread-safe.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final

from pannier.daemon.status_registry import TERMINAL
from pannier.sidecar.save_state import Saves
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.object_names import save_text

_LEAST_S: Final = 0.001
"""Remaining time that is over; 0 stands for a deadline that isn't known."""

Tell = Callable[[save_pb2.SaveStatus], None]


class _Pending:
    """A save that a client has asked after, with its deadline on this host's clock."""

    def __init__(self, asked: sidecar_pb2.PendingSave) -> None:
        self.context = asked.context
        self._handed_over = asked.handed_over
        timeout_s = asked.save_timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s else None

    def now(self) -> sidecar_pb2.PendingSave:
        """The same with the time that remains."""
        pending = sidecar_pb2.PendingSave(context=self.context, handed_over=self._handed_over)
        if self._deadline is not None:
            pending.save_timeout_s = max(_LEAST_S, self._deadline - time.monotonic())
        return pending


class Watches:
    """What the connected clients wait for. ``changed`` is called when there is more to ask."""

    def __init__(self, saves: Saves, changed: Callable[[], None]) -> None:
        self._saves = saves
        self._changed = changed
        self._lock = threading.Lock()
        self._watches: dict[Hashable, tuple[Tell, dict[str, _Pending]]] = {}

    def add(self, who: Hashable, pending: Iterable[sidecar_pb2.PendingSave], tell: Tell) -> None:
        """A client has connected; ``tell`` gets the status of the saves it waits for."""
        by_key = {save_text(each.context.save): _Pending(each) for each in pending}
        if not by_key:
            return
        with self._lock:
            self._watches[who] = (tell, by_key)
        self._changed()

    def remove(self, who: Hashable) -> None:
        """The client's stream has ended."""
        with self._lock:
            self._watches.pop(who, None)

    def unknown(self) -> list[sidecar_pb2.PendingSave]:
        """What to ask the coordinator for: of these ranks nothing is held here."""
        with self._lock:
            asked = [each for _, pending in self._watches.values() for each in pending.values()]
        return [each.now() for each in asked if not self._saves.holds(each.context)]

    def heard(self, status: save_pb2.SaveStatus) -> None:
        """The coordinator told how a save is."""
        key = save_text(status.save)
        with self._lock:
            told = [(tell, pend[key]) for tell, pend in self._watches.values() if key in pend]
            if status.state in TERMINAL:
                for _, pending in self._watches.values():
                    pending.pop(key, None)
        for tell, each in told:
            # Otherwise it hears of it as of any save of this sidecar.
            if not self._saves.holds(each.context):
                tell(status)
