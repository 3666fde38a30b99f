"""This process's membership in one incarnation of a job: its world, and the client of its sidecar.

In: settings. Out: a connected sidecar client, opened on demand, or ahead of that. Owned by the client, which has one
for all ranks' world and one for saving alone. Thread-safe.
"""

import threading
from collections.abc import Callable
from typing import Any

from pannier.client.config import Settings
from pannier.client.embedded import launcher, left_spools
from pannier.client.identity import Group, Identity, World
from pannier.client.interrupts import Call, aside
from pannier.client.process_group import check_single_process, is_alone
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
        """This rank in its incarnation; needs no sidecar.

        Raises:
            PannierError: what :meth:`World.identity` raises.
        """
        return aside(lambda: self.world.identity(self._settings))

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the sidecar that this client hasn't closed."""
        sidecar = self._sidecar
        return sidecar is not None and not sidecar.is_closed

    def open_ahead(self) -> bool:
        """Begins to find or start the sidecar in another thread, unless it has been opened; returns whether it did.

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

        Returns:
            Those still in progress after ``timeout_s`` seconds; empty: none.
        """
        sidecar, daemons = self._sidecar, self.world.known_daemons
        if sidecar is None or daemons is None:
            return ""
        who = sidecar.identity
        return launcher.await_others(daemons, who.job, who.incarnation, timeout_s)

    def daemons(self) -> launcher.RunningDaemons | None:
        """The embedded daemons that this process uses; None: it has used none."""
        spec = self.world.known_daemons
        return None if spec is None else launcher.running_daemons(spec)

    def check_process(self) -> None:
        """Checks that this process isn't forked from the one that connected.

        Raises:
            InvalidRequestError: it is.
        """
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
            sidecar = self._open_embedded(who)
        coordinator = sidecar.welcome.coordinator
        if settings.coordinator not in (None, coordinator):
            sidecar.close()
            raise ConfigurationError(
                f"PANNIER_COORDINATOR={settings.coordinator}, but the {sidecar.peer} is connected to "
                f"{coordinator}: start it with that --coordinator, or leave PANNIER_COORDINATOR unset"
            )
        return sidecar

    def _open_embedded(self, who: Identity) -> SidecarClient:
        settings = self._settings
        daemons = self.world.daemons(settings)

        def ensure_daemons() -> None:
            launcher.ensure(settings, daemons)

        def connect() -> SidecarClient:
            ensure_daemons()
            return SidecarClient.connect(
                settings, who, address=daemons.sidecar, restart_daemons=ensure_daemons
            )

        try:
            sidecar = connect()
        except UnavailableError:
            # The daemons may have exited, idle, just after they were seen.
            sidecar = connect()
        if settings.coordinator is None:
            left_spools.upload_aside(settings, daemons)
        return sidecar


class Memberships:
    """Those of one client: for all ranks' world, and for saves of this process alone. Thread-safe.

    Args:
        settings: of the client.
        on_replaced: called when torch.distributed was set up again, and so the world is another one.
    """

    def __init__(self, settings: Settings, on_replaced: Callable[[], object]) -> None:
        self._settings = settings
        self._on_replaced = on_replaced
        self._lock = threading.Lock()
        self._current: dict[bool, Membership] = {}
        self._old: list[Membership] = []
        """Saves in progress keep them."""

    def of_save(self, process_group: Any, no_dist: bool) -> tuple[Membership, Group]:
        """The membership and the group of ranks of a save.

        Raises:
            InvalidRequestError: this rank is not in the group; several processes were launched, and
                torch.distributed isn't set up; this process was forked from the one that connected.
        """
        member = self._running_job() if no_dist else None
        if member is not None:
            # By itself, it would be an incarnation of its own, which isn't ordered among the job's saves.
            group = member.world.lone_group()
        else:
            member = self.of(no_dist)
            group = member.world.group(process_group)
        member.check_process()
        return member, group

    def of(self, no_dist: bool) -> Membership:
        """That of this process alone, or of all ranks' world."""
        check_single_process(no_dist)
        alone = is_alone(no_dist)
        with self._lock:
            old = member = self._current.get(alone)
            if member is None or not member.world.is_current():
                if old is not None:
                    self._old.append(old)
                member = self._current[alone] = Membership(World(alone=alone), self._settings)
        if old not in (None, member):
            self._on_replaced()
        return member

    def all(self) -> list[Membership]:
        """Those of earlier worlds, too."""
        with self._lock:
            return [*self._old, *self._current.values()]

    def close(
        self,
        is_unused: Callable[[SidecarClient], bool],
        *,
        announce: bool = False,
        old_only: bool = False,
    ) -> None:
        """Disconnects where ``is_unused``; see :meth:`SidecarClient.close`."""
        for member in list(self._old) if old_only else self.all():
            member.close(is_unused, announce=announce)

    def _running_job(self) -> Membership | None:
        """The membership of all ranks' world, if it is connected; else a lone save would wait for other ranks."""
        with self._lock:
            member = self._current.get(False)
        is_running = member is not None and member.is_connected and member.world.is_current()
        return member if is_running else None
