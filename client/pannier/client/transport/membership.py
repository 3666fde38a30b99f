"""This process's part in one incarnation of a job: who it is, and the session it speaks through.

Owned by the client, which has one for all ranks' world and one for saving alone.
"""

import threading
from collections.abc import Callable
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import DaemonSpec
from pannier.client.embedded.launcher import await_others
from pannier.client.identity import Group, Identity, World
from pannier.client.interrupts import aside
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import ConfigurationError, UnavailableError

_OVERWRITE: Final = {
    None: save_pb2.OVERWRITE_UNSPECIFIED,
    False: save_pb2.OVERWRITE_NEVER,
    True: save_pb2.OVERWRITE_ANY,
}


class Entry:
    """A save's number and what is known of it so far."""

    def __init__(self, group: Group, number: int, checkpoint_id: str) -> None:
        self.group = group
        self.number = number
        self.checkpoint_id = checkpoint_id
        self.metrics: dict[str, float] = {}
        self.overwrite: bool | None = None
        self.saving: SaveTask | None = None
        """Since it began."""
        self.text = ""
        """The save's id, once the session is known."""
        self.checked = False
        """What is raised from now on is about this save."""
        self._lock = threading.Lock()
        self._dropped = False
        self.planned = False
        """The coordinator may know of it."""

    def carry(self, start: Callable[[], None]) -> None:
        """Runs ``start``, by which the save no longer depends on the call, unless that has ended."""
        with self._lock:
            if self._dropped:
                return
            assert self.saving is not None
            self.saving.detach()
            start()

    def drop(self) -> bool:
        """The call ends without a handle; False: the save no longer depends on it."""
        with self._lock:
            self._dropped = True
            return self.saving is None or not self.saving.is_detached

    @property
    def dropped(self) -> bool:
        """Whether the call has ended without a handle."""
        return self._dropped

    def context(self, member: "Membership", session: SidecarClient) -> sidecar_pb2.SaveContext:
        """What every message of this save carries."""
        who = session.identity
        context = sidecar_pb2.SaveContext(
            save=save_pb2.SaveId(
                job=who.job,
                incarnation=who.incarnation,
                group=self.group.name,
                number=self.number,
            ),
            checkpoint_id=self.checkpoint_id,
            ranks=self.group.ranks,
            world_size=member.world.size,
            rank=self.group.rank,
            host=session.welcome.host or who.host,
            overwrite=_OVERWRITE[self.overwrite],
            apart=member.world.apart,
        )
        seen = member.world.seen_incarnation(self.checkpoint_id)
        if seen is not None:
            context.seen_incarnation = seen
        return context


class Membership:
    """A world and the session it speaks through, opened on demand. Thread-safe."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._session: SidecarClient | None = None

    def session(self, settings: Settings) -> SidecarClient:
        """The session; finds or starts the sidecar the first time."""
        return self._session or aside(lambda: self._opened(settings))

    def await_others(self, timeout_s: float | None) -> str:
        """Waits for other hosts' saves at this host's coordinator, if it has theirs.

        Which are still under way after ``timeout_s`` seconds, or empty.
        """
        session, pair = self._session, self.world.known_pair
        if session is None or pair is None:
            return ""
        return await_others(pair, session.identity.job, timeout_s)

    def check_process(self) -> None:
        """Raises InvalidRequestError in a process forked from the session's."""
        session = self._session
        if session is not None:
            session.check_process()

    def close(self, wanted: Callable[[SidecarClient], bool], *, announce: bool = False) -> None:
        """Ends the session, if there is one and it is ``wanted``; see :meth:`SidecarClient.close`."""
        # Without the lock: a thread that opens a session holds it for long.
        session = self._session
        if session is not None and wanted(session):
            session.close(announce=announce)

    def _opened(self, settings: Settings) -> SidecarClient:
        with self._lock:
            if self._session is None:
                self._session = self._open(settings)
            return self._session

    def _open(self, settings: Settings) -> SidecarClient:
        who = self.world.identity(settings)
        if not settings.embedded:
            session = SidecarClient.connect(settings, who)
        else:
            pair = self.world.pair(settings)
            try:
                session = self._embedded(settings, who, pair)
            except UnavailableError:
                # They may have left, idle, while we found them.
                session = self._embedded(settings, who, pair)
        spoken_to = session.welcome.coordinator
        if settings.coordinator not in (None, spoken_to):
            session.close()
            raise ConfigurationError(
                f"PANNIER_COORDINATOR={settings.coordinator}, but the {session.peer} speaks to "
                f"{spoken_to}: start it with that --coordinator, or leave PANNIER_COORDINATOR unset"
            )
        return session

    @staticmethod
    def _embedded(settings: Settings, who: Identity, pair: DaemonSpec) -> SidecarClient:
        def restart_daemons() -> None:
            launcher.ensure(settings, pair)

        address = launcher.ensure(settings, pair)
        return SidecarClient.connect(
            settings, who, address=address, restart_daemons=restart_daemons
        )
