"""Host memory that a rank stages into, recycled from save to save.

In: the sizes of a save's data files. Out: an :class:`Arena` with a
:class:`FileBuffer` for each, and a :class:`SpillBuffer` for what turns out to need
another place. The pool owns the memory; an arena borrows it until it is
released. Touching fresh pages costs about ten times the copy itself, so memory
is populated when it is mapped and kept.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

from pannier.wire.errors import PannierError

_PAGE: Final = mmap.PAGESIZE
_HUGE_PAGE: Final = 2 << 20
_SPILL_BYTES: Final = 1 << 20
_MADV_POPULATE_WRITE: Final = 23

# Calls through ctypes release the GIL, mmap.madvise() doesn't.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryMapping:
    """Memory of one buffer, as the pool keeps it. Populated; views of it keep it mapped."""

    memory: Any
    """The buffer, of ``capacity`` bytes."""
    address: int
    """Of its first byte."""
    capacity: int
    source: "MappingSource | None" = None
    """Whose file it is; None: this process's own memory."""

    def __init__(self) -> None:
        self.used_at = 0
        self.capacity = 0

    @property
    def usable(self) -> bool:
        """Whether it is good for another save."""
        return True

    def unseal(self) -> None:
        """Makes it writable, if it isn't."""

    def begin_use(self) -> None:
        """It is about to be staged into."""


class MappingSource(Protocol):
    """Where mappings come from that aren't this process's own (``pannier.client.transport.shared_memory``)."""

    def map_files(self, sizes: Sequence[int]) -> "Sequence[MemoryMapping]":
        """A mapping for each size, bytes. Raises PannierError."""

    def unmap_files(self, mappings: "list[MemoryMapping]") -> None:
        """Unmaps these, which the list holds alone, and tells whose they are."""


class _AnonymousMapping(MemoryMapping):
    """Anonymous memory; unmapped with its last reference (views of it are references)."""

    memory: mmap.mmap

    def __init__(self, capacity: int) -> None:
        super().__init__()
        try:
            self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise no_memory(capacity, error) from error
        # Else a fork would share the pages, and the next save copy each of them.
        self.memory.madvise(mmap.MADV_DONTFORK)
        _mapped.add(self.memory)
        self._grown(capacity)

    def grow(self, capacity: int) -> None:
        """Keeps the content; the address may change. Fails while there are views."""
        try:
            self.memory.resize(capacity)
        except OSError as error:
            raise no_memory(capacity, error) from error
        self._grown(capacity)

    def _grown(self, capacity: int) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        advise_huge(self.address, capacity)
        populate(self.address + self.capacity, capacity - self.capacity)
        self.capacity = capacity


def advise_huge(address: int, size: int) -> None:
    """Asks for huge pages, where the system offers them for such memory."""
    if size >= _HUGE_PAGE and _libc.madvise(address, size, mmap.MADV_HUGEPAGE):
        code = ctypes.get_errno()
        # A kernel without huge pages: only slower.
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))


def populate(address: int, size: int) -> None:
    """Makes the kernel provide the pages now. Other Python threads go on meanwhile."""
    if not size or _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise no_memory(size, OSError(code, os.strerror(code)))
    # Before Linux 5.14.
    ctypes.memset(address, 0, size)


def no_memory(size: int, error: OSError) -> PannierError:
    """What to raise when ``size`` bytes can't be had."""
    return PannierError(
        f"the host has no {size} bytes of memory for staging ({error.strerror}): save less often, "
        "lower PANNIER_MAX_IN_FLIGHT, or give the trainer more memory"
    )


_mapped: "WeakSet[mmap.mmap]" = WeakSet()


def _after_fork() -> None:
    # The child has no pages there and may map something else: it must never unmap them.
    for memory in list(_mapped):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_after_fork)


class FileBuffer:
    """Memory of one data file. Its content is whatever an earlier save left there."""

    def __init__(self, mapping: MemoryMapping | None, size: int) -> None:
        self.mapping = mapping
        """None when there are no bytes."""
        self.size = size
        """Bytes."""
        self.memory: Any = mapping.memory if mapping is not None else bytearray()
        """The buffer whose first ``size`` bytes are the buffer."""
        self.address = mapping.address if mapping is not None else 0
        """Of the first byte; 0 when ``size`` is."""

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        return memoryview(self.memory)[: self.size]

    def zero(self, start: int, stop: int) -> None:
        """Clears a range. Large ranges don't hold the GIL."""
        assert 0 <= start <= stop <= self.size
        if start < stop:
            ctypes.memset(self.address + start, 0, stop - start)


class SpillBuffer:
    """Memory that grows: a data file whose size is known when it is written."""

    def __init__(self, mapping: _AnonymousMapping) -> None:
        self._mapping = mapping
        self.size = 0
        """Bytes written so far."""

    @property
    def memory(self) -> mmap.mmap:
        """The buffer whose first ``size`` bytes are the spill. No view may outlive a write."""
        return self._mapping.memory

    @property
    def address(self) -> int:
        """Of the first byte; changes when the spill grows."""
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
            self._mapping.grow(_rounded(max(end, 2 * self._mapping.capacity)))
        self.size = end
        return start

    def align(self, position: int, alignment: int) -> None:
        """Appends zeros until ``size + position`` is a multiple of ``alignment``."""
        self.write(bytes(-(self.size + position) % alignment))


class Arena:
    """The memory of one save. Not thread-safe while it is written."""

    def __init__(
        self, pool: "ArenaPool", buffers: Sequence[FileBuffer], taken: list[MemoryMapping]
    ) -> None:
        self._pool = pool
        self._taken = taken
        self._spilled: _AnonymousMapping | None = None
        self._spill: SpillBuffer | None = None
        self.files = list(buffers)
        """One buffer per size asked for."""
        self.streaming_reason = ""
        """Why it isn't the sidecar's memory, for people."""

    @property
    def spill(self) -> SpillBuffer:
        """The growing file of this arena, empty at first."""
        if self._spill is None:
            self._spilled = self._pool._take_spill()
            self._spill = SpillBuffer(self._spilled)
        return self._spill

    @property
    def spilled(self) -> SpillBuffer | None:
        """The growing file, if it was asked for."""
        return self._spill


class ArenaPool:
    """Lends arenas and keeps their memory. Thread-safe.

    Args:
        limit: arenas that may be lent at the same time; the pool keeps no more
            memory than that many of the largest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._free: list[MemoryMapping] = []
        self._free_spills: list[_AnonymousMapping] = []
        self._lent: WeakKeyDictionary[Arena, int] = WeakKeyDictionary()
        self._clock = 0
        self._closed = False

    def acquire(self, sizes: Sequence[int], source: MappingSource | None = None) -> Arena:
        """An arena with a buffer of each size, bytes; 0 is a size.

        Args:
            source: where its memory comes from; None: this process's own.

        Raises PannierError when there is no memory for it.
        """
        with self._lock:
            self._clock += 1
            dropped = self._take_unusable()
            wanted = sum(_rounded(size) for size in sizes if size)
            found = {i: self._find(size, source) for i, size in _largest_first(sizes)}
            lacking = [size for i, size in enumerate(sizes) if size and not found[i]]
            dropped += self._make_room(wanted, sum(map(_rounded, lacking)))
        _drop(dropped)
        try:
            fresh = iter(
                _map_anonymous(lacking)
                if source is None or not lacking
                else source.map_files(lacking)
            )
            mappings = [(found[i] or next(fresh)) if size else None for i, size in enumerate(sizes)]
        except BaseException:
            with self._lock:
                self._free += [mapping for mapping in found.values() if mapping is not None]
            raise
        taken = [mapping for mapping in mappings if mapping is not None]
        for mapping in taken:
            mapping.begin_use()
        buffers = [FileBuffer(*pair) for pair in zip(mappings, sizes, strict=True)]
        arena = Arena(self, buffers, taken)
        with self._lock:
            self._lent[arena] = sum(mapping.capacity for mapping in taken)
        return arena

    def prepare(self, sizes: Sequence[int], source: MappingSource | None = None) -> None:
        """Makes sure that as many arenas as may be lent are there for such sizes.

        Raises PannierError when there is no memory for them.
        """
        with self._lock:
            count = self._limit - len(self._lent)
        arenas: list[Arena] = []
        try:
            for _ in range(count):
                arenas.append(self.acquire(sizes, source))
        finally:
            for arena in arenas:
                self.release(arena)

    def release(self, arena: Arena, *, reuse: bool = True) -> None:
        """Takes the memory back; nothing of ``arena`` may be used afterwards.

        Args:
            reuse: False: somebody may still read it, so that nothing else is staged there.
        """
        dropped: list[MemoryMapping] = []
        with self._lock:
            if self._lent.pop(arena, None) is None:
                return
            taken, arena._taken = arena._taken, []
            spilled, arena._spilled = arena._spilled, None
            arena.files = []
        if reuse:
            for mapping in taken:
                mapping.unseal()
        with self._lock:
            if self._closed or not reuse:
                dropped, taken, spilled = taken, [], None
            for mapping in taken:
                mapping.used_at = self._clock
            self._free += taken
            used = arena._spill.size if arena._spill is not None else 0
            if spilled is not None and spilled.capacity <= max(4 * used, 16 * _SPILL_BYTES):
                self._free_spills.append(spilled)
        _drop(dropped)

    def unmap_unused(self, source: MappingSource) -> None:
        """Gives back what is borrowed from ``source`` and not in use."""
        with self._lock:
            dropped = [mapping for mapping in self._free if mapping.source is source]
            self._free = [mapping for mapping in self._free if mapping.source is not source]
        _drop(dropped)

    def close(self) -> None:
        """Frees what isn't lent; the rest is freed when it is released."""
        with self._lock:
            self._closed = True
            dropped, self._free = self._free, []
            self._free_spills.clear()
        _drop(dropped)

    def _find(self, size: int, source: MappingSource | None) -> MemoryMapping | None:
        """The free mapping that fits best, taken out of the pool."""
        fits = [
            m for m in self._free if m.source is source and size <= m.capacity <= 2 * _rounded(size)
        ]
        if not size or not fits:
            return None
        best = min(fits, key=lambda mapping: (mapping.capacity, -mapping.used_at))
        self._free.remove(best)
        return best

    def _take_unusable(self) -> list[MemoryMapping]:
        unusable = [mapping for mapping in self._free if not mapping.usable]
        self._free = [mapping for mapping in self._free if mapping.usable]
        return unusable

    def _make_room(self, wanted: int, missing: int) -> list[MemoryMapping]:
        """Takes out what was used longest ago, so that changing sizes don't pile up."""
        dropped: list[MemoryMapping] = []
        if not missing:
            return dropped
        lent = list(self._lent.values())
        budget = self._limit * max([wanted, *lent])
        self._free.sort(key=lambda mapping: -mapping.used_at)
        kept = sum(mapping.capacity for mapping in self._free)
        while self._free and kept + sum(lent) + wanted > budget:
            dropped.append(self._free.pop())
            kept -= dropped[-1].capacity
        return dropped

    def _take_spill(self) -> _AnonymousMapping:
        with self._lock:
            if self._free_spills:
                return self._free_spills.pop()
        return _AnonymousMapping(_SPILL_BYTES)


def _map_anonymous(sizes: Sequence[int]) -> list[MemoryMapping]:
    return [_AnonymousMapping(_rounded(size)) for size in sizes]


def _drop(mappings: list[MemoryMapping]) -> None:
    """Frees mappings that are in no pool any more, and gives back those that were borrowed."""
    while mappings:
        source = mappings[0].source
        same = [mapping for mapping in mappings if mapping.source is source]
        mappings[:] = [mapping for mapping in mappings if mapping.source is not source]
        if source is not None:
            source.unmap_files(same)


def _largest_first(sizes: Sequence[int]) -> list[tuple[int, int]]:
    # Those that take as much in order: so each file gets the memory it had the last time.
    return sorted(enumerate(sizes), key=lambda pair: -_rounded(pair[1]))


def _rounded(size: int) -> int:
    unit = _HUGE_PAGE if size >= _HUGE_PAGE else _PAGE
    return -(-size // unit) * unit
