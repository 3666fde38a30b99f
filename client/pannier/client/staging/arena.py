"""Host memory that a rank stages into, recycled from save to save.

In: the sizes of a save's data files. Out: an :class:`Arena` with a :class:`FileBuffer` for each,
and a :class:`SpillBuffer` for data whose size the plan doesn't know. The pool owns the memory; an
arena uses it until it is released. Touching fresh pages costs about ten times the copy itself, so
memory is populated when it is mapped, and kept by the pool (:mod:`pannier.client.staging.arena_pool`).
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from pannier.client import fork_hooks
from pannier.wire.errors import PannierError

_PAGE: Final = mmap.PAGESIZE
HUGE_PAGE: Final = 2 << 20
SPILL_BYTES: Final = 1 << 20
"""Initial size of a growing buffer."""
_MADV_POPULATE_WRITE: Final = 23

# Calls through ctypes release the GIL, mmap.madvise() doesn't.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryMapping:
    """The mapped memory behind one buffer. Populated; views of it keep it mapped."""

    memory: Any
    """The buffer, of ``capacity`` bytes."""
    address: int
    """Address of its first byte."""
    capacity: int
    source: "MappingSource | None" = None
    """What maps the spool file behind it; None: anonymous memory of this process."""

    def __init__(self) -> None:
        self.last_used = 0
        """The pool's counter when it was last given back."""
        self.acquired = 0
        """The pool's counter when it was last handed out; higher for a later save."""
        self.copy_of = ""
        """The group whose newest committed save it holds, which loads read in the sidecar's spool; "": none."""
        self.capacity = 0
        self.unpin: Callable[[], object] = lambda: None
        """Ends the registration of the memory with a device; called before it is unmapped."""

    @property
    def usable(self) -> bool:
        """Whether another save may be staged into it."""
        return True

    def unseal(self) -> None:
        """Makes it writable again, if it was sealed."""

    def begin_use(self) -> None:
        """Called before a save is staged into it."""

    def end_use(self, clock: int) -> None:
        """Called when it is given back; ``clock`` orders mappings by their last use."""
        self.last_used = clock


class MappingSource(Protocol):
    """Maps files of the sidecar's spool (``pannier.client.transport.shared_memory``)."""

    def map_files(self, sizes: Sequence[int]) -> "Sequence[MemoryMapping]":
        """Maps a file for each size, bytes. Raises PannierError."""

    def unmap_files(self, mappings: "list[MemoryMapping]") -> None:
        """Unmaps these and reports that. The list must hold the only references; it is emptied."""


class AnonymousMapping(MemoryMapping):
    """Anonymous memory; unmapped with its last reference (views of it are references)."""

    memory: mmap.mmap

    def __init__(self, capacity: int) -> None:
        super().__init__()
        try:
            self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise no_memory(capacity, error) from error
        # Otherwise a fork would share the pages, and the next save would copy each on write. The child may have
        # mapped something else at this address, which freeing the object would unmap.
        self.memory.madvise(mmap.MADV_DONTFORK)
        fork_hooks.keep(self.memory)
        self._populate_to(capacity)

    def grow(self, capacity: int) -> None:
        """Extends it. Keeps the content; the address may change. Fails while there are views."""
        try:
            self.memory.resize(capacity)
        except OSError as error:
            raise no_memory(capacity, error) from error
        self._populate_to(capacity)

    def _populate_to(self, capacity: int) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        advise_huge(self.address, capacity)
        populate(self.address + self.capacity, capacity - self.capacity)
        self.capacity = capacity


def advise_huge(address: int, size: int) -> None:
    """Asks the kernel for huge pages, where it offers them for such memory."""
    if size >= HUGE_PAGE and _libc.madvise(address, size, mmap.MADV_HUGEPAGE):
        code = ctypes.get_errno()
        # A kernel without huge pages: only slower.
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))


def populate(address: int, size: int) -> None:
    """Makes the kernel allocate the pages now. Releases the GIL."""
    if not size or _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise no_memory(size, OSError(code, os.strerror(code)))
    # Before Linux 5.14.
    ctypes.memset(address, 0, size)


def no_memory(size: int, error: OSError) -> PannierError:
    """The error for ``size`` bytes that can't be allocated."""
    return PannierError(
        f"the host has no {size} bytes of memory for staging ({error.strerror}): save less often, "
        "lower PANNIER_MAX_IN_FLIGHT, or give the trainer more memory"
    )


class FileBuffer:
    """The memory of one data file. It still holds what an earlier save left there."""

    def __init__(self, mapping: MemoryMapping | None, size: int) -> None:
        self.mapping = mapping
        """None when there are no bytes."""
        self.size = size
        """Bytes."""
        self.memory: Any = mapping.memory if mapping is not None else bytearray()
        """The memory whose first ``size`` bytes are the file."""
        self.address = mapping.address if mapping is not None else 0
        """Address of the first byte; 0 when ``size`` is 0."""

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        return memoryview(self.memory)[: self.size]

    def zero(self, start: int, stop: int) -> None:
        """Clears a range. Releases the GIL."""
        assert 0 <= start <= stop <= self.size
        if start < stop:
            ctypes.memset(self.address + start, 0, stop - start)


class SpillBuffer:
    """Memory that grows: the objects file, whose size is known only once it is written."""

    def __init__(self, mapping: AnonymousMapping) -> None:
        self._mapping = mapping
        self.size = 0
        """Bytes written so far."""

    @property
    def memory(self) -> mmap.mmap:
        """The memory whose first ``size`` bytes are written. No view may outlive a write."""
        return self._mapping.memory

    @property
    def address(self) -> int:
        """Address of the first byte; changes when the buffer grows."""
        return self._mapping.address

    def write(self, data: Any) -> int:
        """Appends a bytes-like object, as a file does; returns its length."""
        with memoryview(data) as view:
            start, length = self.size, view.nbytes
            self.reserve(length)
            self._mapping.memory[start : start + length] = view.cast("B") if length else b""
        return length

    def flush(self) -> None:
        """Nothing is buffered (torch.save calls it)."""

    def reserve(self, length: int) -> int:
        """Appends ``length`` bytes of any content; returns their offset."""
        start, end = self.size, self.size + length
        if end > self._mapping.capacity:
            self._mapping.grow(rounded(max(end, 2 * self._mapping.capacity)))
        self.size = end
        return start

    def align(self, position: int, alignment: int) -> None:
        """Appends zeros until ``size + position`` is a multiple of ``alignment``."""
        self.write(bytes(-(self.size + position) % alignment))


class Arena:
    """The memory of one save. Not thread-safe while it is written."""

    def __init__(
        self,
        acquire_spill: Callable[[], AnonymousMapping],
        buffers: Sequence[FileBuffer],
        mappings: list[MemoryMapping],
        streaming_reason: str,
    ) -> None:
        self._acquire_spill = acquire_spill
        self._mappings = mappings
        self._spill_mapping: AnonymousMapping | None = None
        self._spill: SpillBuffer | None = None
        self.files = list(buffers)
        """One buffer per requested size."""
        self.streaming_reason = streaming_reason
        """Why its memory is not the sidecar's, so that it must be streamed; human-readable."""

    @property
    def spill(self) -> SpillBuffer:
        """The growing buffer of this arena, empty at first."""
        if self._spill is None:
            self._spill_mapping = self._acquire_spill()
            self._spill = SpillBuffer(self._spill_mapping)
        return self._spill

    @property
    def spilled(self) -> SpillBuffer | None:
        """The growing buffer, if anything was written to it."""
        return self._spill

    def detach(self) -> tuple[list[MemoryMapping], AnonymousMapping | None]:
        """Gives up the memory: its mappings, and that of the growing buffer unless it is too large to keep.

        To be called by the pool alone. The arena can't be used afterwards.
        """
        mappings, self._mappings = self._mappings, []
        spill_mapping, self._spill_mapping = self._spill_mapping, None
        self.files = []
        used = self._spill.size if self._spill is not None else 0
        if spill_mapping is not None and spill_mapping.capacity > max(4 * used, 16 * SPILL_BYTES):
            spill_mapping = None
        return mappings, spill_mapping


def rounded(size: int) -> int:
    """Bytes of anonymous memory for a buffer of ``size``: whole pages, huge ones for large sizes."""
    unit = HUGE_PAGE if size >= HUGE_PAGE else _PAGE
    return -(-size // unit) * unit
