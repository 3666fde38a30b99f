"""Copies that go on when ``async_save`` has returned.

In: pieces, of which as many are queued at once as there is room for. Out: :meth:`Rest.hold_back` for
the training stream, and :meth:`Rest.finish` for the thread that needs the bytes.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from pannier.client import torch_compat
from pannier.client.interrupts import Event
from pannier.client.staging.bounce_buffers import (
    Bounce,
    Bouncing,
    Copy,
    Direct,
    lanes_of,
    queue,
    unpacked,
)
from pannier.client.staging.device_stream import Lane, Mark
from pannier.client.user_errors import add_note
from pannier.wire.errors import InvalidRequestError, PannierError


class Rest:
    """Copies that go on when ``async_save`` has returned. Thread-safe.

    It holds the sources until they are copied. :meth:`finish` must be called, by one thread.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        direct: Sequence[Direct],
        bounces: Sequence[Bounce],
        bouncing: Bouncing,
        *,
        how: str,
    ) -> None:
        self.how = how
        """See :attr:`DeviceCopies.how`."""
        self._lock = threading.Lock()
        self._copies = list(copies)
        self._versions = [torch_compat.version(copy.tensor) for copy in copies]
        self._bouncing = bouncing
        self._lanes = lanes_of(direct, bounces)
        self._marks: list[tuple[Lane, Mark]] = []
        self._all_queued = Event()
        self._checked = False
        self._problem: PannierError | None = None
        self._done = False
        self._todo = deque(bounces)
        try:
            while self._todo and bouncing.put(self._todo[0], wait=False):
                self._todo.popleft()
            queue(direct)
            if how == "pinned":
                # No slot is free: better many copies than one that comes later.
                while self._todo:
                    queue(unpacked(self._todo.popleft()))
            if not self._todo:
                self._mark()
        except BaseException:
            self._todo.clear()
            self._give_up()
            raise

    @property
    def devices(self) -> str:
        """Those that copy, for people."""
        return ", ".join(str(lane.device) for lane in self._lanes)

    @property
    def done(self) -> bool:
        """Whether :meth:`finish` has returned."""
        return self._done

    def hold_back(self) -> None:
        """What the caller's stream does from now on waits until the sources are copied.

        The host doesn't wait, but for copies by way of the ring to be queued.
        """
        self._all_queued.wait()
        with self._lock:
            if self._done:
                return
            self._check()
            self._checked = True
            for lane, mark in self._marks:
                lane.hold_back(mark)

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
                self._mark()
            self._bouncing.land_all()
            for _, mark in self._marks:
                mark.synchronize()
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
            for lane in self._lanes:
                lane.mark().synchronize()
        except Exception:  # noqa: BLE001 - of a device that failed, which copies nothing any more
            self._marks.clear()
        finally:
            self._bouncing.abandon()
            with self._lock:
                self._done = True
                self._copies.clear()
                self._todo.clear()
                self._marks.clear()
            self._all_queued.set()

    def _mark(self) -> None:
        self._marks = [(lane, lane.mark()) for lane in self._lanes]
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
