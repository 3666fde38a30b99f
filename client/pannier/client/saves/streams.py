"""The streams of one save's files that aren't mapped.

In: staged files. Out: their records with checksums, once the sidecar holds them all. Of one try of a save, on the
engine's loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from pannier.client import exit_hooks
from pannier.client.engine import engine, side_by_side
from pannier.client.handle import Resolver
from pannier.client.saves.call import Options
from pannier.client.saves.plan_in_use import PlanInUse
from pannier.client.staging.stager import StagedFile
from pannier.common import timeouts
from pannier.wire.errors import BusyError, SaveSkippedError

_log = logging.getLogger(__name__)


class Streams:
    """See the module.

    Args:
        plan: of the save.
        options: of the save.
        resolver: shows how much the sidecar holds, and waits for room in its spool.
        reason: why the files aren't mapped, human-readable.
    """

    def __init__(self, plan: PlanInUse, options: Options, resolver: Resolver, reason: str) -> None:
        self._plan = plan
        self._options = options
        self._resolver = resolver
        self._reason = reason
        self._held: dict[str, int] = {}
        """Bytes of each file that the sidecar holds."""
        self._no_room: dict[str, BusyError] = {}
        """The files that wait for room in the spool."""
        self._last_progress = time.monotonic()
        self.lacked = 0
        """Bytes that the sidecar didn't hold before."""

    async def send(self, files: Sequence[StagedFile]) -> dict[str, int]:
        """Sends them; returns their crc32c by name.

        Raises:
            SaveSkippedError, caused by a BusyError: the spool is full, and ``on_busy`` is ``"skip"``.
            BusyError: it is full, with ``"raise"`` or until the deadline.
            PannierError: what :meth:`SidecarClient.send` raises.
        """
        crcs = await side_by_side(map(self._send_file, files))
        return dict(zip((file.name for file in files), crcs, strict=True))

    async def _send_file(self, file: StagedFile) -> int:
        deadline, plan = self._options.deadline, self._plan
        accepted: Callable[[int], None] = partial(engine().post, self._accepted, file)
        while True:
            try:
                return await plan.sidecar.send(
                    plan.context,
                    plan.attempt,
                    file,
                    reason=self._reason,
                    claim=plan.claim(),
                    timeout=deadline.remaining(),
                    progress=accepted,
                )
            except BusyError as error:
                if self._options.on_busy == "skip":
                    raise SaveSkippedError(str(error)) from error
                # Early enough for the other ranks to get this reason, not a passed deadline.
                is_late = deadline.remaining() <= 2 * timeouts.BUSY_AGAIN_S
                if self._options.on_busy == "raise" or is_late or self._is_stuck_at_exit(error):
                    self._has_room(file)
                    raise
                self._no_room[file.name] = error
                self._show_room()
                await asyncio.sleep(timeouts.BUSY_AGAIN_S)

    def _accepted(self, file: StagedFile, held: int) -> None:
        if file.name not in self._held:
            self.lacked += file.size - held
        self._held[file.name] = held
        self._last_progress = time.monotonic()
        self._has_room(file)
        self._resolver.show(bytes_ingested=sum(self._held.values()))

    def _has_room(self, file: StagedFile) -> None:
        if self._no_room.pop(file.name, None) is not None:
            self._show_room()

    def _show_room(self) -> None:
        error = next(iter(self._no_room.values()), None)
        self._resolver.wait_for("room", "" if error is None else f"room ({error})")

    def _is_stuck_at_exit(self, error: BusyError) -> bool:
        """Whether the ending interpreter has waited for this save too long without progress."""
        if not exit_hooks.is_ending():
            self._last_progress = time.monotonic()
        if time.monotonic() - self._last_progress < timeouts.EXIT_S:
            return False
        status = self._resolver.handle.status()
        _log.error(
            "save %s to %s is given up, because the process is ending: %s",
            *(status.id, status.checkpoint_id, error),
        )
        return True
