"""Numbers of incarnations: which restart of a job under one root is newer.

In: a root's store, a job and an incarnation's id. Out: its number, the same for every coordinator,
from a create-if-absent object per number; and whether the job has a newer one. Where these
records were lost, the names of the attempts below the root still show which numbers were taken.
Async.
"""

import asyncio
import bisect
import json
import os
import socket
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from google.protobuf import json_format

from pannier.attempts.commit import SupersededError
from pannier.common.fault_points import point
from pannier.storage import ConflictError, Store
from pannier.storage.many import for_each
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError
from pannier.wire.records import MOST_NOTE

_TERM_SHIFT: Final = 22
"""Bits of an ordinal below its term."""
_LEFT_FREE: Final = 64
"""Ordinals that a save leaves free, at most, for earlier saves of its group that begin later."""
_GROUPS_KEPT: Final = 4096


@dataclass(frozen=True)
class Claim:
    """An incarnation that needs a number."""

    job: str
    incarnation: str
    host: str = ""
    """Host of the rank whose save needs the number."""
    seen: int | None = None
    """The highest number below the root when this incarnation began; None: not known."""
    apart: bool = False
    """It saves beside the ranks of its job, and is not ordered among the job's incarnations."""
    launch: str = ""
    """Hash that is equal for all starts of the job by its launcher; empty: not known."""
    term: int = 0
    """The coordinator's, see :class:`Ordinals`."""

    def holds(self, record: records_pb2.IncarnationRecord) -> bool:
        """Whether the record is this incarnation's."""
        return (record.job, record.incarnation) == (self.job, self.incarnation)

    def concerns(self, record: records_pb2.IncarnationRecord) -> bool:
        """Whether the record is another incarnation's that supersedes this one or is superseded by it."""
        return record.job == self.job and not (self.apart or record.apart or self.holds(record))

    def follows(self, record: records_pb2.IncarnationRecord) -> bool:
        """Whether the record is of another start of the job, which may have had another name."""
        same = self.job == record.job or (bool(self.launch) and self.launch == record.launch)
        return same and not (self.apart or record.apart or self.holds(record))


class Incarnations:
    """The incarnations below one root, as far as they are known. For one event loop."""

    def __init__(self) -> None:
        self._records: dict[int, records_pb2.IncarnationRecord] = {}
        self._terms: dict[int, int] = {}
        """The last term that was read, by incarnation number."""
        self._recorded: dict[int, int] = {}
        """The last term of this process that is in storage, by incarnation number."""
        self._terms_lock = asyncio.Lock()

    async def number_of(self, root: Store, claim: Claim) -> int:
        """The incarnation's number under this root; the next free one when it has none yet.

        Two coordinators that need a number at the same time create the same object: the loser reads
        it, and takes the next number unless the record is its own incarnation's.

        Raises:
            SupersededError: another incarnation of the job has taken a number since this one began.
            StorageError, IntegrityError
        """
        await self._read_new(root)
        shown: Mapping[str, int] = {}
        if not self._find(claim):
            # Once per incarnation. The attempts are listed before the records are listed again: another
            # coordinator creates this incarnation's record before any attempt that the first listing has.
            shown = await _shown(root)
            await self._read_new(root)
        if known := self._find(claim):
            return known
        own = shown.get(claim.incarnation)
        number = own or max((*self._records, *shown.values()), default=0) + 1
        while True:
            # For an incarnation that has saved before, only its lost record is restored.
            if claim.seen is not None and own is None:
                self._check(claim, claim.seen, root)
            if number > object_names.LARGEST_NUMBER:
                raise IntegrityError(
                    f"{root.url} has used all numbers of incarnations up to "
                    f"{object_names.LARGEST_NUMBER}; save below another root"
                )
            beside = (
                self._running(claim) if own is None else own if claim.apart and own != number else 0
            )
            record, created = await _create(root, number, claim, beside)
            self._keep(number, record)
            if created and not beside:
                self._recorded[number] = claim.term
            if claim.holds(record):
                return record.beside or number
            number += 1

    async def find(self, root: Store, claim: Claim) -> int:
        """The incarnation's number under this root, also if its record was lost; 0 when it has none.

        Raises StorageError, IntegrityError.
        """
        await self._read_new(root)
        return self._find(claim) or (await _shown(root)).get(claim.incarnation, 0)

    async def check_newest(
        self, root: Store, claim: Claim, number: int, *, superseded: bool = False
    ) -> None:
        """Raises SupersededError when the job has a newer incarnation than ``number``.

        Costs one listing. Raises StorageError, IntegrityError.

        Args:
            superseded: it may have a newer one.
        """
        await self._read_new(root)
        if not (claim.apart or superseded):
            self._check(claim, number, root)

    async def ordinal(
        self, root: Store, number: int, attempt: object_names.Attempt, own: "Ordinals"
    ) -> int:
        """The ordinal of an attempt of the incarnation ``number``, by the last listing.

        Each coordinator orders attempts in a term of its own, of which each root has a record, and takes a
        higher one once it sees that another has begun: so ordinals also rise over restarts, and where two
        coordinators take turns.

        Raises StorageError.
        """
        async with self._terms_lock:
            last = self._terms.get(number, 0)
            if (self._recorded.get(number), last) != (own.term, own.term):
                if last >= own.term:
                    own.begin_term(last + 1)
                while not await _create_term(root, number, own.term):
                    own.begin_term(own.term + 1)
                self._terms[number] = self._recorded[number] = own.term
        return own.of(attempt.group, attempt.number)

    def earlier(self, claim: Claim, number: int) -> dict[str, str]:
        """The job's incarnations before ``number``, by id: the job name of each. No I/O."""
        return {
            record.incarnation: record.job
            for other, record in self._records.items()
            if other < number and claim.follows(record)
        }

    def _check(self, claim: Claim, number: int, root: Store) -> None:
        newer = [
            record
            for other, record in self._records.items()
            if other > number and claim.concerns(record)
        ]
        if not newer:
            return
        newest = max(newer, key=lambda record: record.number)
        began = datetime.fromtimestamp(newest.created_at, timezone.utc)
        raise SupersededError(
            f"incarnation {claim.incarnation} of job {claim.job} is not its newest: incarnation "
            f"{newest.incarnation} (number {newest.number}) has been saving below {root.url} since "
            f"{began:%Y-%m-%d %H:%M:%S} UTC"
            + (f", from host {newest.host}" if newest.host else "")
            + ". Stop the older processes; to continue with them, stop the newer ones and start these "
            "again. Trainings that are to run at the same time need a PANNIER_JOB each"
        )

    def _find(self, claim: Claim) -> int:
        """The incarnation's number; 0 when it has no record."""
        own = (number for number, each in self._records.items() if claim.holds(each))
        number = max(own, default=0)
        return number and (self._records[number].beside or number)

    def _running(self, claim: Claim) -> int:
        """The number of the job's last incarnation, beside which a claim to save apart is made; 0: none."""
        found = (
            number
            for number, each in self._records.items()
            if claim.apart and each.job == claim.job and not each.apart
        )
        return max(found, default=0)

    def owner(self, number: int, claim: Claim) -> tuple[str, str]:
        """Job and id of the incarnation with this number, which may not be that of ``claim``."""
        record = self._records.get(number, claim)
        return record.job, record.incarnation

    async def _read_new(self, root: Store) -> None:
        listed = await root.list(object_names.incarnations_prefix())
        numbers = {object_names.incarnation_number(info.key) for info in listed}
        for number, term in (object_names.term_of(info.key) for info in listed):
            self._terms[number] = max(term, self._terms.get(number, 0))
        new = sorted(numbers - self._records.keys() - {0})
        read = await for_each(lambda number: _read(root, number), new)
        for number, record in zip(new, read, strict=True):
            self._keep(number, record)

    def _keep(self, number: int, record: records_pb2.IncarnationRecord) -> None:
        self._records[number] = record
        self._terms[number] = max(record.term, self._terms.get(number, 0))


class Ordinals:
    """The ordinals of one incarnation's attempts that this process gives, below all roots.

    Within a group they rise with the save's number, whatever the order in which the attempts begin.
    The first term is the time, in milliseconds: so it is mostly above those of earlier processes, also below
    a root that these didn't know, or whose records were lost.
    """

    def __init__(self) -> None:
        self._given: OrderedDict[str, list[tuple[int, int]]] = OrderedDict()
        """By group: numbers of its last attempts, ascending, with their ordinals."""
        self.begin_term(int(1000 * time.time()))

    def begin_term(self, term: int) -> None:
        """All ordinals from now on are above those of lower terms."""
        self.term, self._last = term, term << _TERM_SHIFT

    def of(self, group: str, number: int) -> int:
        """The ordinal of the group's ``number``-th save; the same each time."""
        given = self._given.setdefault(group, [])
        self._given.move_to_end(group)
        if len(self._given) > _GROUPS_KEPT:
            self._given.popitem(last=False)
        later = bisect.bisect_left(given, (number, 0))
        if later < len(given):
            # A later save of the group has begun before: some ordinals below its own were left free.
            end, ordinal = given[later]
            return ordinal - min(end - number, _LEFT_FREE - 1)
        before = given[-1][0] if given else 0
        self._last += min(number - before, _LEFT_FREE)
        given.append((number, self._last))
        del given[:-_LEFT_FREE]
        return self._last


async def _create_term(root: Store, number: int, term: int) -> bool:
    """Creates the record of a term; False: there is one."""
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex})
    key = object_names.term_record(number, term)
    try:
        await root.create(key, content.encode())
    except ConflictError:
        # Its own, if the answer to its creation was lost.
        return await root.read(key) == content.encode()
    return True


async def _create(
    root: Store, number: int, claim: Claim, beside: int
) -> tuple[records_pb2.IncarnationRecord, bool]:
    """Creates the record of the number unless there is one.

    Returns the record in storage, and whether this call has created it.
    """
    record = records_pb2.IncarnationRecord(
        number=number,
        job=claim.job,
        incarnation=claim.incarnation,
        created_at=time.time(),
        host=claim.host,
        apart=claim.apart,
        launch=claim.launch,
        term=claim.term,
        beside=beside,
    )
    point("coordinator.incarnation.before")
    try:
        await root.create(
            object_names.incarnation_record(number), json_format.MessageToJson(record).encode()
        )
    except ConflictError:
        return await _read(root, number), False
    point("coordinator.incarnation.after")
    return record, True


async def _shown(root: Store) -> dict[str, int]:
    """Numbers of incarnations by id, from the names of the attempts below the root."""
    names = [f"{name}/" for name in await root.list_directories()]
    prefixes = [
        name + object_names.attempts_prefix()
        for name in names
        if name != object_names.attempts_prefix()
    ]
    found: dict[str, int] = {}
    for listed in await for_each(root.list_directories, prefixes):
        for name in listed:
            if object_names.is_attempt(name):
                attempt = object_names.Attempt.parse(name)
                known = found.get(attempt.incarnation, 0)
                found[attempt.incarnation] = max(known, attempt.incarnation_number)
    return found


async def _read(root: Store, number: int) -> records_pb2.IncarnationRecord:
    data = await root.read_whole(object_names.incarnation_record(number), MOST_NOTE)
    try:
        record = json_format.Parse(
            data, records_pb2.IncarnationRecord(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise IntegrityError(
            f"{root.url}/{object_names.incarnation_record(number)} is no incarnation record ({error}); it orders the attempts "
            "below this root: restore it, or save below another root"
        ) from error
    record.number = number
    return record
