"""The client: what a trainer calls.

In: state dicts. Out: handles of saves under way. It numbers the saves of each
group, plans and stages them on the caller's thread, and leaves the rest to
:mod:`pannier.client.saving`. Thread-safe; one per process is enough.
"""

import atexit
import copy
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final

from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from pannier.client import embedded, staging
from pannier.client.arena import ArenaPool
from pannier.client.config import Settings, load_settings
from pannier.client.handle import Resolver, SaveHandle, SaveResult, Verdict
from pannier.client.identity import Group, Identity, World, is_alone
from pannier.client.line import keep_in_children
from pannier.client.planning import Planning
from pannier.client.saving import Saving, fail_request
from pannier.client.session import Session
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import identity
from pannier.wire.errors import (
    BusyError,
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    UnavailableError,
)

_log = logging.getLogger(__name__)
_ON_BUSY: Final = ("wait", "skip", "raise")


class Client:
    """Saves and loads checkpoints of this process. A context manager: leaving it closes it.

    The sidecar is looked for (or started) by the first save, not here.

    Args:
        settings: default: from the environment.

    Raises:
        ConfigurationError: a variable is not valid.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings()
        self._lock = threading.Condition()
        self._places: dict[bool, _Place] = {}
        self._old_places: list[_Place] = []
        self._pool = ArenaPool(self.settings.max_in_flight)
        self._carried: set[_Slot] = set()
        self._pending: set[Saving] = set()
        self._failed: list[Verdict] = []
        self._closed = False
        self._pid = os.getpid()
        keep_in_children(self)
        _clients.add(self)

    # Saving.

    def async_save(
        self,
        state_dict: Mapping[str, Any],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: Any = None,
        planner: SavePlanner | None = None,
        process_group: Any = None,
        async_checkpointer_type: Any = None,
        async_stager: Any = None,
        no_dist: bool = False,
        use_collectives: bool = True,
        on_busy: str = "wait",
        timeout: float | None = None,
    ) -> SaveHandle:
        """Saves ``state_dict``; returns when it is staged, and may be changed.

        All ranks of the group call it, in the same order.

        Args:
            state_dict: what ``torch.distributed.checkpoint.async_save`` takes.
            checkpoint_id: directory: a path, or a URL such as ``gs://bucket/run/step-100``.
            storage_writer: a :class:`pannier.client.StorageWriter`, instead of
                ``checkpoint_id``.
            planner: ``DefaultSavePlanner`` or a subclass.
            process_group: the ranks that save together. Default: all.
            async_checkpointer_type, async_stager, use_collectives: as in torch;
                what Pannier can't honour is refused.
            no_dist: this process saves by itself.
            on_busy: when ``max_in_flight`` saves are not ingested yet, or the
                spool is full: ``"wait"``, ``"skip"`` this save (on all ranks;
                the handle raises SaveSkippedError), or ``"raise"`` BusyError.
            timeout: seconds until the save must be committed. Default: ``save_timeout``.

        Raises:
            InvalidRequestError: an argument or the state dict can't be accepted (a ValueError).
            SaveAbortedError: another rank can't take part; with failures by rank.
            UnavailableError: the sidecar can't be reached.
            PannierError: an earlier save failed and nobody asked for its result.
            Exception: whatever the planner or a ``state_dict()`` raised on this rank.

        Whatever is raised, this save is over on all ranks and the next is in step.
        """
        place = self._place(no_dist)
        place.check_process()
        group = place.world.group(process_group)
        number = place.world.next_number(group)
        entry = _Entry(group, number)
        try:
            self._check_open()
            self._raise_unasked()
            _check_on_busy(on_busy)
            _check_torch_only(async_checkpointer_type, async_stager, use_collectives)
            entry.checkpoint_id = _checkpoint_id(checkpoint_id, storage_writer)
            seconds = self.settings.save_timeout if timeout is None else _positive(timeout)
            entry.checked = True
            return self._save(place, entry, state_dict, planner, on_busy, seconds)
        except BaseException as error:
            self._report(place, entry, error)
            if isinstance(error, SaveSkippedError) and on_busy == "skip" and entry.checked:
                return _skipped(entry, error)
            raise

    def save(self, state_dict: Mapping[str, Any], **arguments: Any) -> SaveResult:
        """:meth:`async_save`, waiting until the checkpoint is committed."""
        return self.async_save(state_dict, **arguments).result()

    def wait_all(self, timeout: float | None = None) -> None:
        """Waits until every save has ended.

        Raises:
            DeadlineError: some have not after ``timeout`` seconds; names them.
            PannierError: one failed and nobody asked for its result.
        """
        self._await_ended(timeout)
        self._raise_unasked()

    # Reading.

    def load(self, state_dict: dict[str, Any], **arguments: Any) -> None:
        """Loads a checkpoint into ``state_dict``; see :func:`pannier.client.load.load`."""
        from pannier.client import load

        load.load(state_dict, **arguments)

    def latest(self, root: str | os.PathLike[str], **arguments: Any) -> Any:
        """The newest checkpoint below ``root``; see :mod:`pannier.client.checkpoints`."""
        from pannier.client import checkpoints

        return checkpoints.latest(root, **arguments)

    def list(self, root: str | os.PathLike[str], **arguments: Any) -> Any:
        """Checkpoints below ``root``; see :mod:`pannier.client.checkpoints`."""
        from pannier.client import checkpoints

        return checkpoints.list_checkpoints(root, **arguments)

    # For StorageWriter.

    @property
    def session(self) -> Session:
        """The session of all ranks' world, opened when there is none."""
        return self._place(no_dist=False).session(self.settings)

    def session_for(
        self, process_group: Any = None, no_dist: bool = False
    ) -> tuple[Session, Callable[[str], sidecar_pb2.SaveContext]]:
        """The session of a group, and what makes a context for its next save."""
        session = self._place(no_dist).session(self.settings)
        return session, lambda checkpoint_id: self.open_save(checkpoint_id, process_group, no_dist)

    def open_save(
        self, checkpoint_id: str, process_group: Any = None, no_dist: bool = False
    ) -> sidecar_pb2.SaveContext:
        """Takes the next number of a group, for a save whose calls the caller makes.

        Raises:
            InvalidRequestError: this rank is not in the group, or the id isn't one.
        """
        place = self._place(no_dist)
        group = place.world.group(process_group)
        entry = _Entry(group, place.world.next_number(group))
        self._check_open()
        entry.checkpoint_id = _checkpoint_id(checkpoint_id, None)
        return entry.context(place, place.session(self.settings))

    # Ending.

    def close(self) -> None:
        """Waits until the saves under way are ingested, then disconnects; handles still resolve.

        With embedded daemons that can't outlive the trainer (in a container or a
        Slurm step) it waits until they are committed.

        Raises:
            PannierError: a save failed and nobody asked for its result.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.wait_for(lambda: not self._carried)
        if self._must_wait():
            self._await_ended(None)
        self._pool.close()
        self._hang_up()
        self._raise_unasked()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except PannierError as later:
            # The block's own error goes first; this one is not lost.
            _log.error("while leaving after %s: %s", type(error).__name__, later)

    # Inside.

    def _save(
        self,
        place: "_Place",
        entry: "_Entry",
        state_dict: Mapping[str, Any],
        planner: SavePlanner | None,
        on_busy: str,
        timeout_s: float,
    ) -> SaveHandle:
        session = place.session(self.settings)
        context = entry.context(place, session)
        slot = self._take_slot(on_busy, timeout_s)
        saving = None
        try:
            saving = Saving(
                session, context, on_busy=on_busy, timeout_s=timeout_s, ended=self._ended
            )
            with self._lock:
                self._pending.add(saving)
            planning = Planning(
                state_dict,
                planner,
                is_coordinator=entry.group.is_coordinator,
                checkpoint_id=entry.checkpoint_id,
            )
            wait_s = min(self.settings.plan_timeout, saving.deadline.remaining())
            request = sidecar_pb2.PlanRequest(
                context=context,
                plan=planning.message,
                digest=planning.digest,
                timeout_s=wait_s,
                save_timeout_s=saving.deadline.remaining(),
            )
            entry.planned = True
            final = session.plan(request, wait_s).plan
            items = planning.finish(final)
            saving.planned(final.attempt, final.plan_id)
            arena = self._pool.acquire([file.size for file in final.files])
            slot.arena = arena
            staged = staging.stage(planning, items, final, arena)
            saving.staged(staged)
            carrier = threading.Thread(
                target=saving.carry,
                args=(functools.partial(self._free_slot, slot),),
                name=f"pannier-save-{entry.number}",
            )
            carrier.start()
        except BaseException:
            if saving is not None:
                saving.forget()
            self._free_slot(slot)
            raise
        return saving.handle

    def _take_slot(self, on_busy: str, timeout_s: float) -> "_Slot":
        slot = _Slot()
        with self._lock:
            if len(self._carried) >= self.settings.max_in_flight:
                what = (
                    f"{len(self._carried)} saves of this process are not ingested yet "
                    "(PANNIER_MAX_IN_FLIGHT)"
                )
                if on_busy == "skip":
                    raise SaveSkippedError(f"the save was skipped: {what}")
                if on_busy == "raise":
                    raise BusyError(f"{what}: save less often, or use on_busy='wait' or 'skip'")
                if not self._lock.wait_for(
                    lambda: len(self._carried) < self.settings.max_in_flight, timeout_s
                ):
                    raise DeadlineError(f"after {timeout_s:g} s still {what}")
            self._carried.add(slot)
        return slot

    def _free_slot(self, slot: "_Slot", unused: bool = True) -> None:
        if slot.arena is not None and unused:
            self._pool.release(slot.arena)
            slot.arena = None
        elif slot.arena is not None:
            _abandoned.append(slot.arena)
        with self._lock:
            self._carried.discard(slot)
            self._lock.notify_all()

    def _ended(self, saving: Saving) -> None:
        with self._lock:
            self._pending.discard(saving)
            if saving.resolver.verdict.error is not None and not saving.resolver.verdict.asked:
                self._failed.append(saving.resolver.verdict)
            self._lock.notify_all()
            hang_up = self._closed and not self._pending and not self._carried
        if hang_up:
            self._hang_up()

    def _raise_unasked(self) -> None:
        with self._lock:
            failed, self._failed = self._failed, []
        errors = [verdict.error for verdict in failed if not verdict.asked and verdict.error]
        if not errors:
            return
        for verdict in failed:
            verdict.asked = True
        first, *others = map(copy.copy, errors)
        if not others:
            raise first
        raise type(first)(
            "; and ".join(str(error) for error in errors),
            [failure for error in reversed(errors) for failure in error.failures.values()],
        ) from first

    def _report(self, place: "_Place", entry: "_Entry", error: BaseException) -> None:
        """Ends the save on the other ranks, unless it has ended there or there are none."""
        if isinstance(error, SaveAbortedError) and entry.planned:
            return
        if len(entry.group.ranks) == 1 and not entry.planned:
            return
        try:
            session = place.session(self.settings)
            session.fail(fail_request(entry.context(place, session), error))
        except PannierError as problem:
            _log.warning("the other ranks could not be told of %r: %s", error, problem)

    def _place(self, no_dist: bool) -> "_Place":
        alone = is_alone(no_dist)
        with self._lock:
            place = self._places.get(alone)
            if place is None or not place.world.is_current():
                if place is not None:
                    # torch.distributed was set up anew; saves under way still end.
                    self._old_places.append(place)
                place = self._places[alone] = _Place(World(alone=alone))
            return place

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the client is closed: make a new one")

    def _await_ended(self, timeout: float | None) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: not self._pending, timeout):
                waiting = "; ".join(str(saving.handle.status()) for saving in self._pending)
                raise DeadlineError(f"after {timeout:g} s not ended: {waiting}")

    def _must_wait(self) -> bool:
        return self.settings.embedded and not embedded.outlives_trainer()

    def _hang_up(self) -> None:
        with self._lock:
            places = [*self._old_places, *self._places.values()]
            busy = {id(saving.session) for saving in self._pending}
        for place in places:
            place.close(lambda session: id(session) not in busy)

    def _at_exit(self) -> None:
        # Threads of saves that are not ingested have been waited for: they are no daemons.
        if self._pid != os.getpid():
            return
        if self._must_wait() and self._pending:
            _log.info("waiting for %d saves to be committed", len(self._pending))
            self._await_ended(None)
        with self._lock:
            self._pending.clear()
        self._hang_up()
        try:
            self._raise_unasked()
        except PannierError as error:
            _log.error("%s", error)


_abandoned: list[Any] = []
"""Arenas that a thread of gRPC may still read: never freed, never used again."""


class _Slot:
    """The right to hold an arena."""

    arena: Any = None


class _Entry:
    """A save's number and what is known of it so far."""

    def __init__(self, group: Group, number: int) -> None:
        self.group = group
        self.number = number
        self.checkpoint_id = ""
        self.checked = False
        """What is raised from now on is about this save."""
        self.planned = False
        """The coordinator may know of it."""

    def context(self, place: "_Place", session: Session) -> sidecar_pb2.SaveContext:
        who = session.identity
        return sidecar_pb2.SaveContext(
            save=save_pb2.SaveId(
                job=who.job,
                incarnation=who.incarnation,
                group=self.group.name,
                number=self.number,
            ),
            checkpoint_id=self.checkpoint_id,
            ranks=self.group.ranks,
            world_size=place.world.size,
            rank=self.group.rank,
            host=session.welcome.host or who.host,
        )


class _Place:
    """A world and the session it speaks through, opened on demand. Thread-safe."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._session: Session | None = None

    def session(self, settings: Settings) -> Session:
        """The session; finds or starts the sidecar the first time."""
        with self._lock:
            if self._session is None:
                self._session = self._open(settings)
            return self._session

    def check_process(self) -> None:
        session = self._session
        if session is not None:
            session.check_process()

    def close(self, wanted: Callable[[Session], bool]) -> None:
        with self._lock:
            if self._session is not None and wanted(self._session):
                self._session.close()

    def _open(self, settings: Settings) -> Session:
        who = self.world.identity(settings)
        if not settings.embedded:
            return Session.connect(settings, who)
        try:
            session = self._embedded(settings, who)
        except UnavailableError:
            # They may have left, idle, while we found them.
            session = self._embedded(settings, who)
        if settings.coordinator not in (None, session.welcome.coordinator):
            session.close()
            raise ConfigurationError(
                f"PANNIER_COORDINATOR={settings.coordinator}, but the embedded sidecar in "
                f"{settings.runtime_dir} speaks to {session.welcome.coordinator}: run `pannier "
                "sidecar --coordinator ...` on this host and set PANNIER_SIDECAR"
            )
        return session

    @staticmethod
    def _embedded(settings: Settings, who: Identity) -> Session:
        def revive() -> None:
            embedded.ensure(settings)

        return Session.connect(settings, who, address=embedded.ensure(settings), revive=revive)


def _checkpoint_id(checkpoint_id: str | os.PathLike[str] | None, writer: Any) -> str:
    """An absolute path or a URL. Raises InvalidRequestError."""
    if writer is not None:
        from pannier.client.writer import StorageWriter

        if not isinstance(writer, StorageWriter):
            raise InvalidRequestError(
                f"storage_writer={type(writer).__name__}: Pannier's own writes the checkpoint; give "
                "checkpoint_id, or pannier.client.StorageWriter"
            )
        if checkpoint_id is None:
            checkpoint_id = writer.checkpoint_id
    if checkpoint_id is None:
        raise InvalidRequestError("checkpoint_id is missing: give a path or a URL")
    text = os.fspath(checkpoint_id)
    if not isinstance(text, str):
        raise InvalidRequestError(f"checkpoint_id={checkpoint_id!r} is not text")
    if "://" not in text and text and not text.startswith("/"):
        text = os.path.abspath(text)
    identity.split_checkpoint_id(text)
    return text.rstrip("/")


def _check_on_busy(on_busy: str) -> None:
    if on_busy not in _ON_BUSY:
        raise InvalidRequestError(f"on_busy={on_busy!r}: use 'wait', 'skip' or 'raise'")


def _check_torch_only(kind: Any, stager: Any, use_collectives: bool) -> None:
    if stager is not None:
        raise InvalidRequestError(
            "async_stager: Pannier stages by itself, into memory it reuses; leave it out"
        )
    if kind not in (None, AsyncCheckpointerType.THREAD):
        raise InvalidRequestError(
            f"async_checkpointer_type={kind}: the sidecar is the other process; leave it out"
        )
    if not use_collectives:
        raise InvalidRequestError(
            "use_collectives=False writes a checkpoint per rank; Pannier needs no collectives "
            "anyway: leave it out, or give no_dist=True and a checkpoint_id per rank"
        )


def _positive(timeout: float) -> float:
    if not timeout > 0:
        raise InvalidRequestError(f"timeout={timeout}: give seconds above 0, or None")
    return float(timeout)


def _skipped(entry: _Entry, error: SaveSkippedError) -> SaveHandle:
    """A handle of a save that the user's own ``on_busy="skip"`` ended."""
    handle = SaveHandle(f"{entry.group.name}/{entry.number}", entry.checkpoint_id)
    Resolver(handle).fail(error, quietly=True)
    return handle


# The process's own client.

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()
_default: Client | None = None
_default_lock = threading.Lock()
_overrides: dict[str, Any] = {}


def default_client() -> Client:
    """The client that the module's functions use; made when it is first asked for."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Client(load_settings(**_overrides))
        return _default


def configure(**settings: Any) -> None:
    """Sets what the environment doesn't say, for the default client; before its first use.

    Args:
        settings: fields of :class:`pannier.client.config.Settings`.

    Raises:
        ConfigurationError: a value is not valid, or the client is in use.
    """
    with _default_lock:
        if _default is not None:
            raise ConfigurationError(
                "configure() comes before the first use of the client; close() it first"
            )
        together = {**_overrides, **settings}
        load_settings(**together)
        _overrides.update(settings)


def close() -> None:
    """Closes the default client; the next use makes a new one. See :meth:`Client.close`."""
    global _default
    with _default_lock:
        client, _default = _default, None
    if client is not None:
        client.close()


@atexit.register
def _at_exit() -> None:
    for client in list(_clients):
        client._at_exit()
