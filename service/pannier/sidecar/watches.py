"""Saves that clients ask after and that this sidecar knows nothing of, because it was restarted.

In: what clients name when they connect, and what the coordinator says of it. Out: what to
ask the coordinator, and its answers to the clients' streams. Only the coordinator says how a
save ended: nothing is concluded here from not knowing it. Thread-safe.
"""

import threading
from collections.abc import Callable, Hashable, Iterable

from pannier.daemon.board import TERMINAL
from pannier.sidecar.saves import Saves
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.identity import save_text

Tell = Callable[[save_pb2.SaveStatus], None]


class Watches:
    """What the connected clients wait for. ``changed`` is called when there is more to ask."""

    def __init__(self, saves: Saves, changed: Callable[[], None]) -> None:
        self._saves = saves
        self._changed = changed
        self._lock = threading.Lock()
        self._watches: dict[Hashable, tuple[Tell, dict[str, sidecar_pb2.PendingSave]]] = {}

    def add(self, who: Hashable, pending: Iterable[sidecar_pb2.PendingSave], tell: Tell) -> None:
        """A client has connected; ``tell`` gets the status of the saves it waits for."""
        by_key = {save_text(each.context.save): each for each in pending}
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
        return [each for each in asked if not self._saves.holds(each.context)]

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
