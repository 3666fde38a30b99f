"""Host memory that a rank stages into, kept from save to save.

In: the sizes of a save's data files. Out: an :class:`Arena` with a :class:`FileBuffer` for each, and a
:class:`SpillBuffer` for data whose size the plan doesn't know. The pool owns the memory, and an arena uses it until
it is released. Touching fresh pages costs about ten times the copy itself, so memory is populated when it is mapped.
Files of the sidecar's spool that hold the newest committed save of a group are used again last: loads read them there.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from pannier.client import fork_hooks
from pannier.common.cgroup import memory_limit
from pannier.wire.errors import BusyError, PannierError

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


class ArenaPool:
    """Hands out arenas and keeps their memory for the next save. Thread-safe.

    Args:
        limit: arenas in use at the same time, at most; the pool keeps no more memory than that
            many of the largest.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """See the class."""
        self._lock = threading.Lock()
        self._free: list[MemoryMapping] = []
        self._free_spills: list[AnonymousMapping] = []
        self._in_use: WeakKeyDictionary[Arena, int] = WeakKeyDictionary()
        """Bytes by arena."""
        self._clock = 0
        self._closed = False

    def acquire(
        self,
        sizes: Sequence[int],
        source: MappingSource | None = None,
        *,
        streaming_reason: str = "",
    ) -> Arena:
        """An arena with a buffer of each size, bytes, which may be 0.

        Args:
            source: maps its memory; None: anonymous memory of this process.
            streaming_reason: why there is no ``source``, for the arena.

        Raises:
            BusyError: it would exceed this process's memory limit, or the spool's room.
            PannierError: there is no memory for it.
        """
        with self._lock:
            self._clock += 1
            number = self._clock
            dropped = self._take_unusable()
            needed = sum(rounded(size) for size in sizes if size)
            found: _Found = {}
            self._find(sizes, source, found)
            if self._copies_exceed(needed):
                self._find(sizes, source, found, copies=True)
            missing = _missing(sizes, found)
            dropped += self._make_room(needed, sum(map(rounded, missing)))
        _unmap(dropped)
        try:
            try:
                fresh = _map(missing, source)
            except BusyError:
                with self._lock:
                    self._find(sizes, source, found, copies=True)
                fewer = _missing(sizes, found)
                if len(fewer) == len(missing):
                    raise
                fresh = _map(fewer, source)
            rest = iter(fresh)
            mappings = [(found[i] or next(rest)) if size else None for i, size in enumerate(sizes)]
        except BaseException:
            with self._lock:
                self._free += [mapping for mapping in found.values() if mapping is not None]
            raise
        used = [mapping for mapping in mappings if mapping is not None]
        for mapping in used:
            mapping.copy_of = ""
            mapping.acquired = number
            mapping.begin_use()
        buffers = [FileBuffer(*pair) for pair in zip(mappings, sizes, strict=True)]
        arena = Arena(self.acquire_spill, buffers, used, streaming_reason)
        with self._lock:
            self._in_use[arena] = sum(mapping.capacity for mapping in used)
        return arena

    def release(self, arena: Arena, *, reuse: bool = True, copy_of: str = "") -> None:
        """Takes the memory back; nothing of ``arena`` may be used afterwards.

        Args:
            reuse: False: the sidecar may still read it, so that nothing else may be staged there.
            copy_of: group whose newest committed save it holds: its files are used again last.
        """
        dropped: list[MemoryMapping] = []
        with self._lock:
            if self._in_use.pop(arena, None) is None:
                return
            mappings, spill_mapping = arena.detach()
        if reuse:
            for mapping in mappings:
                mapping.unseal()
        with self._lock:
            if self._closed or not reuse:
                dropped, mappings, spill_mapping = mappings, [], None
            marked = [mapping for mapping in self._free if copy_of and mapping.copy_of == copy_of]
            own = max((mapping.acquired for mapping in mappings), default=0)
            if any(mapping.acquired > own for mapping in marked):
                copy_of = ""  # a later save has ended first
            for mapping in marked if copy_of else ():
                mapping.copy_of = ""
            for mapping in mappings:
                mapping.end_use(self._clock)
                mapping.copy_of = copy_of if mapping.source is not None else ""
            self._free += mappings
            if spill_mapping is not None:
                self._free_spills.append(spill_mapping)
        _unmap(dropped)

    def acquire_spill(self) -> AnonymousMapping:
        """Memory for an arena's growing buffer; given back with the arena."""
        with self._lock:
            if self._free_spills:
                return self._free_spills.pop()
        return AnonymousMapping(SPILL_BYTES)

    def unmap_unused(self, source: MappingSource) -> None:
        """Unmaps the files of ``source`` that are not in use."""
        with self._lock:
            dropped = [mapping for mapping in self._free if mapping.source is source]
            self._free = [mapping for mapping in self._free if mapping.source is not source]
        _unmap(dropped)

    def close(self) -> None:
        """Frees the memory that no arena uses; an arena's memory is freed when it is released."""
        with self._lock:
            self._closed = True
            dropped, self._free = self._free, []
            self._free_spills.clear()
        _unmap(dropped)

    def _find(
        self,
        sizes: Sequence[int],
        source: MappingSource | None,
        found: "_Found",
        *,
        copies: bool = False,
    ) -> None:
        """Takes a free mapping for each size that has none yet.

        Args:
            copies: take only mappings that hold a copy of a committed save, else only others.
        """
        for index, size in _largest_first(sizes):
            if not found.get(index):
                found[index] = self._take_free(size, source, copies)

    def _take_free(
        self, size: int, source: MappingSource | None, copies: bool
    ) -> MemoryMapping | None:
        """Takes the free mapping that fits best out of the pool; of copies the oldest one."""
        fits = [
            m
            for m in self._free
            if bool(m.copy_of) is copies
            and m.source is source
            and size <= m.capacity <= 2 * rounded(size)
        ]
        if not size or not fits:
            return None
        best = min(
            fits,
            key=lambda m: (m.last_used, m.capacity) if copies else (m.capacity, -m.last_used),
        )
        self._free.remove(best)
        return best

    def _take_unusable(self) -> list[MemoryMapping]:
        unusable = [mapping for mapping in self._free if not mapping.usable]
        self._free = [mapping for mapping in self._free if mapping.usable]
        return unusable

    def _copies(self) -> list[int]:
        """Bytes of each copy of a committed save; with the lock held."""
        sizes: dict[str, int] = {}
        for mapping in self._free:
            if mapping.copy_of:
                sizes[mapping.copy_of] = sizes.get(mapping.copy_of, 0) + mapping.capacity
        return list(sizes.values())

    def _copies_exceed(self, needed: int) -> bool:
        """Whether there is no room for the copies beside ``needed`` bytes; with the lock held."""
        in_use, copies = list(self._in_use.values()), self._copies()
        return sum(in_use) + sum(copies) + needed > self.limit * max([needed, *in_use, *copies])

    def _make_room(self, needed: int, missing: int) -> list[MemoryMapping]:
        """Removes the least recently used mappings, so that those of earlier sizes don't pile up."""
        dropped: list[MemoryMapping] = []
        if not missing:
            return dropped
        in_use = list(self._in_use.values())
        budget = self.limit * max([needed, *in_use, *self._copies()])
        # The copies of committed saves go last.
        self._free.sort(key=lambda mapping: (not mapping.copy_of, -mapping.last_used))
        kept = sum(mapping.capacity for mapping in self._free)
        while self._free and kept + sum(in_use) + needed > budget:
            dropped.append(self._free.pop())
            kept -= dropped[-1].capacity
        return dropped


_Found = dict[int, MemoryMapping | None]
"""The mapping of each size, by its index."""


def _missing(sizes: Sequence[int], found: _Found) -> list[int]:
    """Sizes that have no mapping yet."""
    return [size for index, size in enumerate(sizes) if size and not found[index]]


def _map(sizes: Sequence[int], source: MappingSource | None) -> Sequence[MemoryMapping]:
    if not sizes:
        return []
    return _map_anonymous(sizes) if source is None else source.map_files(sizes)


def _map_anonymous(sizes: Sequence[int]) -> list[MemoryMapping]:
    needed, limit = sum(map(rounded, sizes)), memory_limit()
    # The kernel would kill a process: populating memory doesn't fail.
    if limit is not None and needed > limit.free:
        raise BusyError(
            f"no room for staging: {needed} bytes needed, {max(0, limit.free)} free, since {limit}: save less "
            "often, name a spool on a disk (PANNIER_SPOOL; a sidecar's --spool), or raise the limit"
        )
    return [AnonymousMapping(rounded(size)) for size in sizes]


def _unmap(mappings: list[MemoryMapping]) -> None:
    """Frees mappings that are in no pool any more; those of a source are unmapped by it."""
    while mappings:
        source = mappings[0].source
        same = [mapping for mapping in mappings if mapping.source is source]
        mappings[:] = [mapping for mapping in mappings if mapping.source is not source]
        if source is not None:
            source.unmap_files(same)


def _largest_first(sizes: Sequence[int]) -> list[tuple[int, int]]:
    # A stable sort: files of the same size get the memory that they had in the save before.
    return sorted(enumerate(sizes), key=lambda pair: -rounded(pair[1]))
