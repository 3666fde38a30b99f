"""Copies from devices that complete after ``async_save`` has returned.

In: copies, of which only as many are queued at first as there are free bounce buffers. Out:
:meth:`DeferredCopies.make_stream_wait` for the training stream, and :meth:`DeferredCopies.finish`
for the thread that needs the bytes. Owned by the save; thread-safe.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from pannier.client import torch_compat
from pannier.client.interrupts import Event
from pannier.client.staging.bounce_buffers import (
    BouncedCopy,
    BounceQueue,
    DirectCopies,
    TensorCopy,
    start_direct_copies,
    streams_of,
)
from pannier.client.staging.device_stream import DeviceEvent, SideStream
from pannier.client.user_errors import add_note
from pannier.wire.errors import InvalidRequestError, PannierError


class DeferredCopies:
    """The deferred copies of one save. Thread-safe.

    Keeps the sources alive until they are copied. One thread must call :meth:`finish`.
    """

    def __init__(
        self,
        copies: Sequence[TensorCopy],
        direct: DirectCopies,
        bounced: Sequence[BouncedCopy],
        bounce_queue: BounceQueue,
        *,
        copy_description: str,
    ) -> None:
        self.copy_description = copy_description
        """See :attr:`DeviceCopies.copy_description`."""
        self._lock = threading.Lock()
        self._on_device = torch_compat.on_current_device()
        """For the thread that finishes: its own device may be one that this process doesn't use."""
        self._copies = list(copies)
        self._versions = [torch_compat.version(copy.tensor) for copy in copies]
        self._bounce_queue = bounce_queue
        self._side_streams = streams_of(direct, bounced)
        self._events: list[tuple[SideStream, DeviceEvent]] = []
        self._all_queued = Event()
        self._checked = False
        self._problem: PannierError | None = None
        self._done = False
        self._not_queued = deque(bounced)
        try:
            while self._not_queued and bounce_queue.put(self._not_queued[0], wait=False):
                self._not_queued.popleft()
            start_direct_copies(direct)
            if copy_description == "pinned":
                # No bounce buffer is free: many small copies now are better than one later.
                while self._not_queued:
                    pack = self._not_queued.popleft()
                    start_direct_copies({pack.stream: pack.copies})
            if not self._not_queued:
                self._record_events()
        except BaseException:
            self._not_queued.clear()
            self._release()
            raise

    @property
    def devices(self) -> str:
        """The devices that are copied from; human-readable."""
        return ", ".join(str(stream.device) for stream in self._side_streams)

    @property
    def done(self) -> bool:
        """Whether :meth:`finish` has returned."""
        return self._done

    def make_stream_wait(self) -> None:
        """Makes work queued on the caller's stream from now on wait until the sources are copied.

        The host waits only until the copies that go through bounce buffers are queued.
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
        """Returns when all bytes have arrived; releases the sources.

        Args:
            stop: True once the copies are no longer needed.

        Raises:
            InvalidRequestError: a source changed before it was copied.
            Exception: the error of a device that failed.
        """
        with self._on_device():
            self._finish(stop)
        if self._problem is not None:
            raise self._problem

    def _finish(self, stop: Callable[[], bool]) -> None:
        try:
            while self._not_queued and not stop():
                self._bounce_queue.put(self._not_queued.popleft())
            if not self._all_queued.is_set():
                self._record_events()
            self._bounce_queue.finish_all()
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
            self._release()

    def _release(self) -> None:
        """Ends the copies, complete or not: afterwards no device writes to the arena."""
        try:
            for stream in self._side_streams:
                stream.record_event().synchronize()
        except Exception:  # noqa: BLE001 - a device that failed copies nothing any more
            self._events.clear()
        finally:
            self._bounce_queue.abandon()
            with self._lock:
                self._done = True
                self._copies.clear()
                self._not_queued.clear()
                self._events.clear()
            self._all_queued.set()

    def _record_events(self) -> None:
        self._events = [(stream, stream.record_event()) for stream in self._side_streams]
        self._all_queued.set()

    def _check(self) -> None:
        """Records a source that was changed too early. Called before the sources may change."""
        for copy, version in zip(self._copies, self._versions, strict=True):
            if torch_compat.version(copy.tensor) != version:
                self._problem = InvalidRequestError(
                    f"{copy.name!r} was changed before it was copied: with staging='overlapped' "
                    "only a guarded optimizer's step (client.guard) may change it, or the loop "
                    "after handle.staging_completion"
                )
                return
