"""Copies that go on when ``async_save`` has returned.

In: pieces, of which as many are queued at once as there is room for. Out: :meth:`DeferredCopies.make_stream_wait` for
the training stream, and :meth:`DeferredCopies.finish` for the thread that needs the bytes.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from pannier.client import torch_compat
from pannier.client.interrupts import Event
from pannier.client.staging.bounce_buffers import (
    BouncedCopy,
    BounceQueue,
    DirectCopy,
    TensorCopy,
    as_direct_copies,
    start_direct_copies,
    streams_of,
)
from pannier.client.staging.device_stream import DeviceEvent, SideStream
from pannier.client.user_errors import add_note
from pannier.wire.errors import InvalidRequestError, PannierError


class DeferredCopies:
    """Copies that go on when ``async_save`` has returned. Thread-safe.

    It holds the sources until they are copied. :meth:`finish` must be called, by one thread.
    """

    def __init__(
        self,
        copies: Sequence[TensorCopy],
        direct: Sequence[DirectCopy],
        bounces: Sequence[BouncedCopy],
        bouncing: BounceQueue,
        *,
        copy_description: str,
    ) -> None:
        self.copy_description = copy_description
        """See :attr:`DeviceCopies.copy_description`."""
        self._lock = threading.Lock()
        self._copies = list(copies)
        self._versions = [torch_compat.version(copy.tensor) for copy in copies]
        self._bouncing = bouncing
        self._side_streams = streams_of(direct, bounces)
        self._events: list[tuple[SideStream, DeviceEvent]] = []
        self._all_queued = Event()
        self._checked = False
        self._problem: PannierError | None = None
        self._done = False
        self._todo = deque(bounces)
        try:
            while self._todo and bouncing.put(self._todo[0], wait=False):
                self._todo.popleft()
            start_direct_copies(direct)
            if copy_description == "pinned":
                # No slot is free: better many copies than one that comes later.
                while self._todo:
                    start_direct_copies(as_direct_copies(self._todo.popleft()))
            if not self._todo:
                self._record_events()
        except BaseException:
            self._todo.clear()
            self._give_up()
            raise

    @property
    def devices(self) -> str:
        """Those that copy, for people."""
        return ", ".join(str(stream.device) for stream in self._side_streams)

    @property
    def done(self) -> bool:
        """Whether :meth:`finish` has returned."""
        return self._done

    def make_stream_wait(self) -> None:
        """What the caller's stream does from now on waits until the sources are copied.

        The host doesn't wait, but for copies by way of the ring to be queued.
        """
        self._all_queued.wait()
        with self._lock:
            if self._done:
                return
            self._check()
            self._checked = True
            for stream, event in self._events:
                stream.make_caller_wait(event)

    def finish(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Returns when all has arrived, and lets go of the sources.

        Args:
            stop: whether nobody needs the copies any more.

        Raises:
            InvalidRequestError: a source changed before it was copied.
            Exception: what a device that failed raised.
        """
        try:
            while self._todo and not stop():
                self._bouncing.put(self._todo.popleft())
            if not self._all_queued.is_set():
                self._record_events()
            self._bouncing.finish_all()
            for _, event in self._events:
                event.synchronize()
            with self._lock:
                if not self._checked:
                    self._check()
        except Exception as error:
            if not isinstance(error, PannierError):
                add_note(error, f"copying from {self.devices} failed after async_save had returned")
            raise
        finally:
            self._give_up()
        if self._problem is not None:
            raise self._problem

    def _give_up(self) -> None:
        """The end, a good one or not: no device writes here any more."""
        try:
            for stream in self._side_streams:
                stream.record_event().synchronize()
        except Exception:  # noqa: BLE001 - of a device that failed, which copies nothing any more
            self._events.clear()
        finally:
            self._bouncing.abandon()
            with self._lock:
                self._done = True
                self._copies.clear()
                self._todo.clear()
                self._events.clear()
            self._all_queued.set()

    def _record_events(self) -> None:
        self._events = [(stream, stream.record_event()) for stream in self._side_streams]
        self._all_queued.set()

    def _check(self) -> None:
        """Before the sources may change: whether they have not."""
        for copy, version in zip(self._copies, self._versions, strict=True):
            if torch_compat.version(copy.tensor) != version:
                self._problem = InvalidRequestError(
                    f"{copy.name!r} was changed before it was copied: with staging='overlapped' "
                    "only a guarded optimizer's step (client.guard) may change it, or the loop "
                    "after handle.staging_completion"
                )
                return
