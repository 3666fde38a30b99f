"""This process's membership in one incarnation of a job: its world, and the client of its sidecar.

In: settings. Out: a connected sidecar client, opened on demand, or ahead of that. Owned by the save factory, which
has one for all ranks' world and one for saving alone. Thread-safe.
"""

import threading
from collections.abc import Callable

from pannier.client.config import Settings
from pannier.client.embedded import launcher
from pannier.client.embedded.daemon_spec import DaemonSpec
from pannier.client.embedded.daemon_status import await_others
from pannier.client.identity import Identity, World
from pannier.client.interrupts import Call, aside
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.wire.errors import ConfigurationError, UnavailableError


class Membership:
    """See the module."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self._settings = settings
        self._lock = threading.Lock()
        self._sidecar: SidecarClient | None = None
        self._opening: Call[SidecarClient] | None = None

    @property
    def identity(self) -> Identity:
        """This rank in its incarnation; needs no sidecar. Raises what :meth:`World.identity` raises."""
        return aside(lambda: self.world.identity(self._settings))

    def open_ahead(self) -> bool:
        """Begins to find or start the sidecar in another thread, unless it is known; returns whether it did.

        :meth:`sidecar` waits for it, and raises its error.
        """
        if self._sidecar is not None:
            return False
        self._opening = Call(self._opened)
        return True

    def sidecar(self) -> SidecarClient:
        """The sidecar's client; the first call finds or starts the sidecar."""
        if self._sidecar is not None:
            return self._sidecar
        opening, self._opening = self._opening, None
        return aside(self._opened) if opening is None else opening.result()

    def await_others(self, timeout_s: float | None) -> str:
        """Waits for other hosts' saves at this host's coordinator, if it serves other hosts.

        Returns those still in progress after ``timeout_s`` seconds; empty: none.
        """
        sidecar, daemons = self._sidecar, self.world.known_daemons
        if sidecar is None or daemons is None:
            return ""
        who = sidecar.identity
        return await_others(daemons, who.job, who.incarnation, timeout_s)

    def daemons(self) -> launcher.RunningDaemons | None:
        """The embedded daemons that this process uses; None: it has used none."""
        spec = self.world.known_daemons
        return None if spec is None else launcher.running_daemons(spec)

    def check_process(self) -> None:
        """Raises InvalidRequestError in a process forked from the one that connected."""
        sidecar = self._sidecar
        if sidecar is not None:
            sidecar.check_process()

    def close(self, is_unused: Callable[[SidecarClient], bool], *, announce: bool = False) -> None:
        """Disconnects, if connected and ``is_unused``; see :meth:`SidecarClient.close`."""
        # Without the lock: a thread that connects holds it for long.
        sidecar = self._sidecar
        if sidecar is not None and not sidecar.is_closed and is_unused(sidecar):
            sidecar.close(announce=announce)

    def _opened(self) -> SidecarClient:
        with self._lock:
            if self._sidecar is None:
                self._sidecar = self._open()
            return self._sidecar

    def _open(self) -> SidecarClient:
        settings = self._settings
        who = self.world.identity(settings)
        if not settings.embedded:
            sidecar = SidecarClient.connect(settings, who)
        else:
            daemons = self.world.daemons(settings)
            try:
                sidecar = self._open_embedded(who, daemons)
            except UnavailableError:
                # The daemons may have exited, idle, just after they were found.
                sidecar = self._open_embedded(who, daemons)
        coordinator = sidecar.welcome.coordinator
        if settings.coordinator not in (None, coordinator):
            sidecar.close()
            raise ConfigurationError(
                f"PANNIER_COORDINATOR={settings.coordinator}, but the {sidecar.peer} is connected to "
                f"{coordinator}: start it with that --coordinator, or leave PANNIER_COORDINATOR unset"
            )
        return sidecar

    def _open_embedded(self, who: Identity, daemons: DaemonSpec) -> SidecarClient:
        settings = self._settings

        def restart_daemons() -> None:
            launcher.ensure(settings, daemons)

        address = launcher.ensure(settings, daemons)
        return SidecarClient.connect(
            settings, who, address=address, restart_daemons=restart_daemons
        )
