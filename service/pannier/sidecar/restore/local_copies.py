"""Local copies: the data files of the newest committed save of each group, which stay in the spool.

In: ranks whose save was committed, or that the journal recorded so; requests of loads. Out: which files
are here, and descriptors opened read-only. Copies have no checksums: a replica, or a spool file that was
changed after its upload, may differ from what was committed, so readers compare the bytes with the committed
receipt. A copy ends when a newer save of its group is committed, when its room is needed, when its job has had no trainer for a
while, or when a trainer stages another save into its files, which their stamps show. On the event loop;
files are opened and read in threads.
"""

import asyncio
import logging
import posixpath
import secrets
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.common import timeouts
from pannier.common.message_json import timestamp
from pannier.common.units import size_text
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.spool.journal_state import JournalState, Recorded
from pannier.sidecar.spool.mapped_files import TOKEN_BYTES, MappedFiles, close_all, open_for_reading
from pannier.sidecar.spool.spool import SpoolFile
from pannier.storage.io_threads import reservation_threads, spool_threads
from pannier.v1 import coordinator_pb2, restore_pb2, save_pb2, status_pb2
from pannier.wire.object_names import Attempt, is_unnamed

_log = logging.getLogger(__name__)

_SETS: Final = 2.05
"""Sets of files that a job may have in the spool, its copies included; the rest is for whole pages and stamps."""
MOST_LOCATED: Final = 1024
"""Files of one response, each of which becomes a descriptor; a load reads more from storage."""
_EVICTIONS: Final = 4
"""Evictions that operators are shown."""
_RESTAGED: Final = "a trainer stages another save there"
_FULL: Final = "the spool is full"


@dataclass(frozen=True, eq=False)
class LocalFile:
    """A data file that is in storage, and still in its spool file."""

    name: str
    """Relative to the checkpoint id."""
    size: int
    """Bytes."""
    spool_file: SpoolFile
    stamp: bytes
    """Of the spool file while it has this content; empty: no trainer maps it."""

    def problem(self) -> str:
        """Why the file has lost its content; "": it hasn't. Blocking."""
        if not self.stamp:
            return ""
        try:
            found = self.spool_file.read_stamp()
        except OSError as error:
            # EBADF, among others: the copy has ended meanwhile.
            return f"it can't be read: {error}"
        if len(found) < len(self.stamp):
            return "it was truncated"
        return "" if found == self.stamp else _RESTAGED


@dataclass(eq=False)
class LocalCopy:
    """What this host's ranks wrote of one committed save."""

    save: save_pb2.SaveId
    checkpoint_id: str
    attempt: str
    ended_at: float
    """When this host learned of the commit, on the monotonic clock; below 0: before this process started."""
    files: dict[str, LocalFile] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)
    """The ranks whose records in the journal keep it across restarts."""
    active_at: float = field(default_factory=time.monotonic)
    """When a trainer of its job was last connected, or this process began to hold it."""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(each.size for each in self.files.values())

    @property
    def room(self) -> int:
        """Bytes of their spool files."""
        return sum(each.spool_file.capacity for each in self.files.values())

    @property
    def root(self) -> str:
        """The directory that the checkpoint lies in."""
        return posixpath.dirname(self.checkpoint_id)

    def replaces(self, other: "LocalCopy") -> bool:
        """Whether ``other`` is of the same job and group, and not newer.

        Below one root the attempts' numbers tell which is newer, between two roots the time of the commit.
        """
        same = self.is_of(other.save.job, {other.root}) and self.save.group == other.save.group
        if self.root != other.root:
            return same and self.ended_at >= other.ended_at
        return same and _order(self) >= _order(other)

    def is_of(self, job: str, roots: Collection[str]) -> bool:
        """Whether it is of a job, which saves to these roots.

        A job that the user hasn't named gets a new name with each start: its root shows that it is the same.
        """
        unnamed = is_unnamed(job) and is_unnamed(self.save.job)
        return self.save.job == job or (unnamed and self.root in roots)


@dataclass
class _Eviction:
    """A copy, or a part of it, that was dropped before a newer one replaced it."""

    copy: LocalCopy
    size: int
    why: str
    at: float
    """Unix time."""


def _order(copy: LocalCopy) -> tuple[int, int]:
    attempt = Attempt.parse(copy.attempt)
    return attempt.incarnation_number, attempt.number


class LocalCopies:
    """All local copies of one spool, oldest first."""

    def __init__(self, mapped: MappedFiles, journal: JournalState, saves: SaveRegistry) -> None:
        self._mapped = mapped
        self._journal = journal
        self._saves = saves
        self._copies: list[LocalCopy] = []
        self._offers: dict[bytes, tuple[float, Sequence[LocalFile]]] = {}
        """What loads may open, by token, and since when."""
        self.served = 0
        """Bytes of the files that loads have opened."""
        self.evicted = 0
        """Copies that ended for lack of room."""
        self._evictions: deque[_Eviction] = deque(maxlen=_EVICTIONS)
        """Newest first."""
        self._making_way = asyncio.Lock()
        mapped.set_copies(self)

    def statuses(self) -> list[status_pb2.LocalCopy]:
        """For operators, newest first."""
        return [
            status_pb2.LocalCopy(
                checkpoint_id=copy.checkpoint_id,
                save=copy.save,
                attempt=copy.attempt,
                files=len(copy.files),
                bytes=copy.size,
            )
            for copy in reversed(self._copies)
        ]

    def evictions(self) -> list[status_pb2.EvictedCopy]:
        """For operators, newest first."""
        return [
            status_pb2.EvictedCopy(
                checkpoint_id=each.copy.checkpoint_id,
                bytes=each.size,
                reason=each.why,
                evicted_at=timestamp(each.at),
            )
            for each in self._evictions
        ]

    def held(self, peer_address: str) -> coordinator_pb2.HeldCopies:
        """For the coordinator; ``peer_address`` is where other hosts read them."""
        return coordinator_pb2.HeldCopies(copies=self.statuses(), peer_address=peer_address)

    async def add(
        self,
        save: save_pb2.SaveId,
        checkpoint_id: str,
        attempt: str,
        files: Iterable[LocalFile],
        recorded: Recorded,
        *,
        ended_at: float,
    ) -> None:
        """Keeps a rank's files of a committed save, unless a newer copy of its group is here.

        Args:
            recorded: the rank, whose records in the journal are forgotten when the copy ends.
        """
        copy = next((each for each in self._copies if each.attempt == attempt), None)
        copy = copy or LocalCopy(save, checkpoint_id, attempt, ended_at)
        copy.recorded.append(recorded)
        added = {each.name: each for each in files}
        copy.files.update(added)
        for each in added.values():
            self._mapped.keep(each.spool_file)
        if copy in self._copies:
            return
        if any(each.replaces(copy) for each in self._copies):
            await self._end(copy)
            return
        older = [each for each in self._copies if copy.replaces(each)]
        for eviction in list(self._evictions):
            if copy.replaces(eviction.copy):
                self._evictions.remove(eviction)
        self._copies.append(copy)
        self._copies.sort(key=lambda each: each.ended_at)
        for old in older:
            await self._end(old)

    def has_recorded(self, recorded: Recorded) -> bool:
        """Whether a copy needs these records in the journal."""
        return any(recorded in copy.recorded for copy in self._copies)

    # Room.

    async def make_way(self, job: str, requested: int) -> None:
        """Before files are reserved for ``job``: evicts copies that would be its third set of files.

        Copies in files that its trainers have mapped stay: the trainers stage into these files again.

        Args:
            requested: bytes of the files, which :meth:`MappedFiles.used_by` counts, too.
        """
        # One call after the other: the files of an evicted copy are free before the next ones are taken.
        async with self._making_way:
            roots = {
                posixpath.dirname(save.checkpoint_id)
                for save in self._saves.undecided()
                if save.id.job == job
            }
            related = [
                each for each in self._copies if each.is_of(job, roots) and self._is_free(each)
            ]
            # Each group of one start has its own copy; a copy of an earlier start may have the same tensors.
            sets = Counter({"": requested})
            for copy in related:
                sets[copy.save.incarnation] += copy.room
            limit = _SETS * max(sets.values())
            for copy in related:
                if self._mapped.used_by(job) + sum(each.room for each in related) <= limit:
                    return
                if copy in self._copies:
                    await self._evict(copy, "another save of its job needs the room")

    async def evict_oldest(self) -> bool:
        """Evicts the files that no trainer has mapped, of the oldest copy with such files.

        Trainers return files that they have mapped when they are asked for room. False: there is none.
        """
        for copy in self._copies:
            if self._is_free(copy):
                await self._evict(copy, _FULL)
                return True
            free = [name for name, each in copy.files.items() if not self._is_mapped(each)]
            if free:
                self.evicted += 1
                await self._lose(copy, dict.fromkeys(free, _FULL))
                return True
        return False

    async def restaged(self, spool_file: SpoolFile) -> None:
        """A trainer stages another save into that file."""
        for copy in self._copies:
            for name, each in copy.files.items():
                if each.spool_file is spool_file:
                    await self._lose(copy, {name: _RESTAGED})
                    return

    async def tick(self, active: Collection[str]) -> None:
        """Finds files that trainers stage into, and drops offers that weren't used. Every second or so.

        Args:
            active: jobs with a connected trainer; copies of others end after a while.
        """
        now = time.monotonic()
        for copy in list(self._copies):
            if copy.save.job in active:
                copy.active_at = now
            elif now - copy.active_at > timeouts.LOCAL_COPY_KEPT_S:
                await self._give_up(copy, "no trainer of its job has been connected for long")
        for token, (since, _) in list(self._offers.items()):
            if now - since > timeouts.DESCRIPTORS_FETCH_S:
                del self._offers[token]
        for copy in list(self._copies):
            problems = await spool_threads.run(_problems, list(copy.files.values()))
            await self._lose(copy, {each.name: why for each, why in problems.items()})

    async def close(self) -> None:
        """Ends all copies."""
        while self._copies:
            await self._end(self._copies[0])

    # Loads.

    async def locate(self, request: restore_pb2.LocateRequest) -> restore_pb2.LocateResponse:
        """The requested files that are here, and a token for their descriptors."""
        copy = next((each for each in self._copies if each.attempt == request.attempt), None)
        names = dict.fromkeys(request.files)
        found = [copy.files[name] for name in names if name in copy.files] if copy else []
        found = found[:MOST_LOCATED]
        problems = await spool_threads.run(_problems, found)
        found = [each for each in found if each not in problems]
        if not found:
            return restore_pb2.LocateResponse()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = (time.monotonic(), found)
        return restore_pb2.LocateResponse(
            files=[
                restore_pb2.LocatedFile(
                    name=each.name,
                    size=each.size,
                    stamp=each.stamp,
                    stamp_offset=each.spool_file.stageable,
                )
                for each in found
            ],
            token=token,
        )

    def find(self, attempt: str, name: str) -> LocalFile | None:
        """A data file of an attempt that is here, perhaps with other content by now."""
        copy = next((each for each in self._copies if each.attempt == attempt), None)
        return None if copy is None else copy.files.get(name)

    async def lost(self, files: Sequence[LocalFile]) -> dict[LocalFile, str]:
        """Those of these files that are no longer here with their content, and why.

        A spool file that is kept may have the content of another save by now. Once its descriptor has a
        lock, a file that isn't lost stays.
        """
        problems = await spool_threads.run(_problems, files)
        return {
            each: problems.get(each, "it was evicted")
            for each in files
            if each in problems or not self._has(each)
        }

    async def open_descriptors(self, token: bytes) -> list[int]:
        """New descriptors of the located files, for reading, each with a shared lock; the caller closes them.

        Empty: the token isn't known any more, or one of the files isn't here any more.
        """
        _, files = self._offers.pop(token, (0.0, ()))
        spool_files = [each.spool_file for each in files]
        try:
            descriptors = await reservation_threads.run(
                open_for_reading, spool_files, undo=close_all
            )
        except OSError as error:
            # An eviction has closed or locked a file meanwhile, or no descriptors are left.
            _log.warning("a load reads %d files from storage: %s", len(files), error)
            return []
        try:
            # From here on their locks keep them from another owner, unless they got one just before.
            lost = await self.lost(files)
        except BaseException:
            close_all(descriptors)
            raise
        if lost:
            close_all(descriptors)
            return []
        self.served += sum(each.size for each in files)
        return descriptors

    def _has(self, file: LocalFile) -> bool:
        return any(copy.files.get(file.name) is file for copy in self._copies)

    def _is_free(self, copy: LocalCopy) -> bool:
        return not any(map(self._is_mapped, copy.files.values()))

    def _is_mapped(self, file: LocalFile) -> bool:
        return self._mapped.is_leased(file.spool_file)

    async def _evict(self, copy: LocalCopy, why: str) -> None:
        self.evicted += 1
        await self._give_up(copy, why)

    async def _give_up(self, copy: LocalCopy, why: str) -> None:
        _log.info(
            "the local copy of %s (%s) ends: %s; a load reads it from storage",
            *(copy.checkpoint_id, size_text(copy.size), why),
            extra={"job": copy.save.job, "checkpoint": copy.checkpoint_id},
        )
        self._note(copy, copy.size, why)
        await self._end(copy)

    async def _lose(self, copy: LocalCopy, problems: Mapping[str, str]) -> None:
        """Takes files out of a copy; ``problems`` has the reasons by name."""
        lost = [each for name in problems if (each := copy.files.pop(name, None)) is not None]
        if not lost:
            return
        reasons = Counter(problems[each.name] for each in lost)
        for why, count in reasons.items():
            _log.log(
                logging.INFO if why in (_RESTAGED, _FULL) else logging.WARNING,
                "the local copy of %s loses %d files: %s",
                *(copy.checkpoint_id, count, why),
                extra={"job": copy.save.job, "checkpoint": copy.checkpoint_id},
            )
            size = sum(each.size for each in lost if problems[each.name] == why)
            self._note(copy, size, why)
        for each in lost:
            await self._mapped.drop(each.spool_file)
        if not copy.files:
            self.evicted += _RESTAGED in reasons
            await self._end(copy)

    def _note(self, copy: LocalCopy, size: int, why: str) -> None:
        """Records for operators that ``size`` bytes of a copy were dropped."""
        last = self._evictions[0] if self._evictions else None
        if last is not None and last.copy is copy and last.why == why:
            # Adds to the last entry: a trainer stages into its files one after the other.
            self._evictions.popleft()
            size += last.size
        self._evictions.appendleft(_Eviction(copy, size, why, time.time()))

    async def _end(self, copy: LocalCopy) -> None:
        if copy in self._copies:
            self._copies.remove(copy)
        files, copy.files = list(copy.files.values()), {}
        # Before the files are used for something else.
        for recorded in copy.recorded:
            await self._journal.forget(recorded)
        for each in files:
            await self._mapped.drop(each.spool_file)


def _problems(files: Iterable[LocalFile]) -> dict[LocalFile, str]:
    """The files that have lost their content, and why."""
    return {each: why for each in files if (why := each.problem())}
