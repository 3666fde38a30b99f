"""Large copies between host addresses.

In: addresses and sizes. Out: the bytes there, once :meth:`HostCopies.run` returns. The copies are gathered and
shared by several threads, since two cores copy about twice as fast as one, and torch's own threads belong to
the training loop.
"""

import _thread
import ctypes
import os
import queue
from collections import deque
from contextlib import suppress
from typing import Final

import torch

from pannier.common import timeouts
from pannier.wire.errors import InvalidRequestError

LARGE: Final = 256 << 10
"""Bytes; copies of at least this size are gathered and shared by threads."""
_PIECE: Final = 8 << 20
"""A copy up to this size is made by one thread. Larger ones are cut into pieces as large as the
balance between threads allows: above a threshold (glibc.cpu.x86_non_temporal_threshold) the C
library writes past the caches, which takes a quarter less time."""
_ROUNDS: Final = 4
"""Pieces per thread, when all copies are large."""
_SINGLE_THREAD: Final = 8 << 20
"""Bytes in total up to which a second thread costs more than it saves."""
_MOST_THREADS: Final = 4


def threads() -> int:
    """How many threads may copy: this process's share of the host's cores."""
    cores = len(os.sched_getaffinity(0))
    # Set by torchrun: the ranks that stage at the same time on this host.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(_MOST_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


class HostCopies:
    """Copies between host addresses, gathered and then made together. Not thread-safe."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, int, int]] = []
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._sources: list[object] = []
        self._helping: list[None] = []
        """One entry for each helper thread that may be copying."""
        self._helper_ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bytes = 0

    def add(self, target: int, source: int, size: int, owner: object) -> None:
        """Gathers a copy of ``size`` bytes between two addresses.

        ``owner`` keeps the source alive; the caller keeps the target.
        """
        self._sources.append(owner)
        self._bytes += size
        self._copies.append((size, target, source))

    @property
    def bytes(self) -> int:
        """Sum of the gathered copies."""
        return self._bytes

    def run(self) -> None:
        """Returns when every byte is copied, or, if interrupted, when no thread copies any more."""
        count = threads() if self._bytes > _SINGLE_THREAD else 1
        self._cut(max(_PIECE, self._bytes // (_ROUNDS * count if count > 1 else 1)))
        try:
            for _ in range(1, count):
                # Not Thread.start: a signal handler that raises in it leaves a thread that never
                # runs.
                _thread.start_new_thread(self._help, ())
            self._copy_pieces()
        finally:
            self._pieces.clear()
            try:
                self._await_helpers()
            finally:
                self._sources.clear()
                self._bytes = 0

    def _await_helpers(self) -> None:
        """Waits until no helper copies, despite any interrupts; then raises the last of them."""
        interrupt: BaseException | None = None
        while self._helping:
            try:
                with suppress(queue.Empty):
                    self._helper_ended.get(timeout=timeouts.COPY_POLL_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _cut(self, most: int) -> None:
        """Cuts the copies into pieces of at most ``most`` bytes; large ones come first."""
        for size, target, source in sorted(self._copies, reverse=True):
            for start in range(0, size, most):
                self._pieces.append((target + start, source + start, min(most, size - start)))
        self._copies.clear()

    def _help(self) -> None:
        # Before the first piece: once the caller has cleared the pieces, it sees every helper.
        self._helping.append(None)
        try:
            self._copy_pieces()
        finally:
            self._helping.pop()
            self._helper_ended.put(None)

    def _copy_pieces(self) -> None:
        while True:
            try:
                target, source, size = self._pieces.popleft()
            except IndexError:
                return
            # Releases the GIL.
            ctypes.memmove(target, source, size)


def check_storage(tensor: torch.Tensor, name: str) -> None:
    """Raises InvalidRequestError for a tensor with elements that its storage doesn't hold any more."""
    held = tensor.untyped_storage().nbytes()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if held >= needed:
        return
    was = f"cut to {held} bytes, of which it needs {needed}" if held else "freed (resized to 0)"
    raise InvalidRequestError(f"{name!r} can't be saved: its storage was {was}")
