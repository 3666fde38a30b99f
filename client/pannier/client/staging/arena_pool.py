"""The memory of arenas, kept from save to save.

In: the sizes of a save's data files. Out: an :class:`~pannier.client.staging.arena.Arena` with memory that an
earlier save used, or with fresh memory. Files of the sidecar's spool that hold the newest committed save
of a group are used again last: loads read them there. The pool owns the memory, and an arena uses it
until it is released. Thread-safe.
"""

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from pannier.client.staging.arena import (
    SPILL_BYTES,
    AnonymousMapping,
    Arena,
    FileBuffer,
    MappingSource,
    MemoryMapping,
    rounded,
)
from pannier.common.cgroup import memory_limit
from pannier.wire.errors import BusyError


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
