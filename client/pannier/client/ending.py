"""How a client ends: by ``close()``, or with the interpreter.

In: its saves and memberships. Out: saves that the sidecar has, or their errors; closed connections. An exit waits
as ``close()`` does, and writes errors to stderr. Thread-safe.
"""

import os
import sys
from contextlib import suppress

from pannier.client import console, exit_hooks
from pannier.client.config import Settings
from pannier.client.interrupts import shielded
from pannier.client.saves.saves import Saves, check_may_wait
from pannier.client.transport.membership import Memberships
from pannier.common.deadline import Deadline
from pannier.wire.errors import DeadlineError, InvalidRequestError, PannierError


class Ending:
    """See the module.

    Args:
        settings: of the client.
        saves: those of the client.
        memberships: disconnected at the end.
    """

    def __init__(self, settings: Settings, saves: Saves, memberships: Memberships) -> None:
        self._settings = settings
        self._saves = saves
        self._memberships = memberships
        self._has_begun = False
        self.is_closed = False
        """Whether a :meth:`close` has waited for everything, without a time-out."""
        self._exit: console.Wait | None = None
        self._pid = os.getpid()
        exit_hooks.add(self)

    @property
    def is_own_process(self) -> bool:
        """False in a process forked from the one that made this."""
        return self._pid == os.getpid()

    def check_open(self) -> None:
        """Raises InvalidRequestError once :meth:`close` was called."""
        if self._has_begun:
            again = "" if self.is_closed else " after another close(), which has not ended"
            raise InvalidRequestError(f"the client is closed: make a new one{again}")

    def close(self, timeout: float | None) -> None:
        """Waits until the saves in progress are ingested, then disconnects; may be repeated after a time-out.

        Raises:
            PannierError: a save failed and its error was not retrieved.
            DeadlineError: some are not ingested after ``timeout`` seconds; names them.
            InvalidRequestError: this thread is needed to end the saves.
        """
        check_may_wait("close()")
        self._has_begun = True
        if self.is_closed:
            self._saves.errors.raise_all()
            return
        deadline = None if timeout is None else Deadline(timeout)
        with console.logged("close", lambda: str(self._saves) or "saves of other hosts"):
            if not self._saves.wait_until_sent(timeout):
                raise DeadlineError(
                    f"timed out after {timeout:g} s; not yet ingested: {self._saves}"
                )
            self._saves.pool.close()
            if not self._saves.wait_for_users(None if deadline is None else deadline.remaining()):
                raise DeadlineError(
                    f"timed out after {timeout:g} s: a dcp.save with this client has not ended"
                )
            if self._must_wait():
                self._saves.wait(None if deadline is None else deadline.remaining(), timeout)
                self._wait_for_others(None if deadline is None else deadline.remaining(), timeout)
        self.is_closed = True
        # Errors of saves that fail from now on are printed at the exit.
        exit_hooks.keep(self)
        self._disconnect(announce=True)
        try:
            self._saves.errors.raise_all()
        finally:
            self._let_go_if_done()

    def send_at_exit(self) -> None:
        """The interpreter is ending: waits until the sidecar has what was staged, and logs it when that takes long."""
        if not self.is_own_process or not self._saves:
            return
        self._exit = console.Wait("the exit", self._saves.unsent)
        # A second signal ends the wait; then `close_at_exit` names what isn't handed over.
        with suppress(BaseException):
            self._saves.wait_until_detached_are_sent()

    def close_at_exit(self) -> None:
        """The interpreter is ending: waits as :meth:`close` does, and writes errors to stderr."""
        if not self.is_own_process:
            return
        try:
            self._close_at_exit()
        finally:
            if self._exit is not None:
                self._exit.end()

    def _close_at_exit(self) -> None:
        self._saves.drop_interrupted()
        # Unless that was interrupted, `send_at_exit` has waited until all are sent.
        unsent = self._saves.abandon("not handed over to the sidecar", unsent_only=True)
        if not unsent and self._must_wait():
            self._wait_at_exit()
        self._saves.abandon()
        self._disconnect()
        try:
            self._saves.errors.raise_all()
        except PannierError as error:
            # Not logged as well: the hook may write to the log itself.
            sys.excepthook(type(error), error.with_traceback(None), None)

    def disconnect_unused(self) -> None:
        """A save has ended, or the world was replaced: closes connections that nothing needs any more."""
        is_done = self._has_begun and not self._saves
        self._disconnect(announce=True, old_only=not is_done)
        if is_done:
            self._let_go_if_done()

    def _let_go_if_done(self) -> None:
        if not (self._saves or self._saves.errors):
            exit_hooks.let_go(self)

    def _must_wait(self) -> bool:
        """Whether the embedded daemons may end with this process, so that it waits for their commits.

        Logs, once per host, what it waits for, or what it leaves to the daemons.
        """
        daemons = []
        if self._settings.embedded:
            daemons = [found for member in self._memberships.all() if (found := member.daemons())]
        ended_by = next((each.ended_by for each in daemons if each.ended_by is not None), None)
        saves, left = self._saves.names(), self._saves.uncommitted_size()
        if left and not self.is_closed and os.environ.get("LOCAL_RANK", "0") == "0":
            names = " and ".join(each.name for each in daemons)
            if ended_by is not None:
                console.info(
                    "waiting until %s are committed: %s may end with this process, by %s",
                    *(left, names, ended_by),
                )
            else:
                console.info(
                    "handed over %s; the daemons%s commit %s",
                    *(" and ".join(saves), f" ({names})" if names else ""),
                    "them" if len(saves) > 1 else "it",
                )
        return ended_by is not None

    @shielded
    def _wait_for_others(self, timeout: float | None, given: float | None = None) -> None:
        for member in self._memberships.all():
            if left := member.await_others(timeout):
                raise DeadlineError(
                    f"timed out after {given:g} s; still in progress on other hosts: {left}"
                )

    def _wait_at_exit(self) -> None:
        if self._exit is not None:
            self._exit.reason = lambda: self._saves.uncommitted() or "saves of other hosts"
        try:
            self._saves.wait(None)
            if not self._has_begun:
                self._wait_for_others(None)
        except (KeyboardInterrupt, SystemExit):
            self._saves.abandon("not committed, and the embedded daemons may end with it")

    @shielded
    def _disconnect(self, *, announce: bool = False, old_only: bool = False) -> None:
        self._memberships.close(
            lambda sidecar: not self._saves.need(sidecar), announce=announce, old_only=old_only
        )
