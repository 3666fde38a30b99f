"""What the journal says of each rank's part in a save: kept up to date, and found again at start.

In: what happens to ranks and their files. Out: records in the journal, each before anybody builds
upon it, and at start the parts that the former life left. A part is gone once nothing of it is
left to do. Thread-safe; short writes, but for the methods that say otherwise.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pannier.common import fault_points
from pannier.sidecar.save_state import RankSave, Save
from pannier.sidecar.spool import boot_clock
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.journal import Contents, Journal
from pannier.v1 import journal_pb2, plan_pb2, records_pb2, save_pb2
from pannier.wire.errors import ConfigurationError, PannierError
from pannier.wire.object_names import save_text

_log = logging.getLogger(__name__)

_GROWTH: Final = 1 << 20
"""Bytes that a journal may grow by at least, before it is written anew."""

Record = journal_pb2.JournalRecord


@dataclass
class KeptFile:
    """A data file, as the journal tells."""

    name: str
    size: int
    slab: str
    """Name of its spool file; empty when another data file lies there now."""
    stamp: bytes = b""
    held: int = 0
    crc32c: int = 0
    durable: bool = False


@dataclass
class Part:
    """A rank's part in a save, as the journal tells."""

    number: int
    begun: journal_pb2.PartBegun
    files: dict[str, KeptFile] = field(default_factory=dict)
    receipt: records_pb2.Receipt | None = None
    stored: bool = False
    failure: save_pb2.Failure | None = None
    ended: journal_pb2.PartEnded | None = None

    @property
    def needed(self) -> list[KeptFile]:
        """Files whose content in the spool is still to be carried to storage."""
        if self.stored or self.failure is not None or self.ended is not None:
            return []
        return [file for file in self.files.values() if not file.durable]

    @property
    def label(self) -> str:
        """Save, rank and host, for errors and logs."""
        context = self.begun.context
        return (
            f"save {save_text(context.save)} to {context.checkpoint_id}, rank {context.rank} on "
            f"{context.host}"
        )

    def records(self) -> Iterator[Record]:
        """As few as tell the same."""
        yield Record(part=self.number, begun=self.begun)
        for file in self.files.values():
            opened = journal_pb2.FileOpened(
                name=file.name, size=file.size, slab=file.slab, stamp=file.stamp
            )
            yield Record(part=self.number, opened=opened)
            if file.held:
                held = journal_pb2.FileHeld(name=file.name, held=file.held, crc32c=file.crc32c)
                yield Record(part=self.number, held=held)
            if file.durable:
                durable = journal_pb2.FileDurable(name=file.name)
                yield Record(part=self.number, durable=durable)
        if self.receipt is not None:
            yield Record(part=self.number, ingested=self.receipt)
        if self.stored:
            yield Record(part=self.number, stored=journal_pb2.ReceiptStored())
        if self.failure is not None:
            yield Record(part=self.number, failed=self.failure)
        if self.ended is not None:
            yield Record(part=self.number, ended=self.ended)


class Parts:
    """All parts, changed by records. Takes them in any order; what makes no sense changes nothing."""

    def __init__(self) -> None:
        self.by_number: dict[int, Part] = {}
        """Oldest first."""
        self.highest = 0
        """Number that was given last."""
        self._slabs: dict[str, KeptFile] = {}

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self.by_number.values()))

    def apply(self, record: Record) -> None:
        """One change."""
        self.highest = max(self.highest, record.part)
        change = record.WhichOneof("change")
        if change == "begun":
            known = self.by_number.setdefault(record.part, Part(record.part, record.begun))
            boot_clock.copy(record.begun, known.begun)
            return
        part = self.by_number.get(record.part)
        if part is None or change is None:
            return
        if change == "opened":
            self._open(part, record.opened)
        elif change == "held":
            self._hold(part, record.held)
        elif change == "durable":
            if record.durable.name in part.files:
                part.files[record.durable.name].durable = True
        elif change == "ingested":
            self._ingest(part, record.ingested)
        elif change == "stored":
            part.stored = part.receipt is not None
        elif change == "failed":
            part.failure = part.failure or record.failed
        elif change == "ended" and record.ended.state == save_pb2.SAVE_STATE_ABORTED:
            part.ended = part.ended or record.ended
        else:
            # Committed, or cleaned up after an abort.
            del self.by_number[record.part]

    def _open(self, part: Part, opened: journal_pb2.FileOpened) -> None:
        if opened.name in part.files:
            return
        file = KeptFile(opened.name, opened.size, opened.slab, opened.stamp)
        part.files[file.name] = file
        if file.slab:
            former = self._slabs.get(file.slab)
            if former is not None:
                former.slab = ""
            self._slabs[file.slab] = file

    @staticmethod
    def _hold(part: Part, held: journal_pb2.FileHeld) -> None:
        file = part.files.get(held.name)
        if file is not None and file.held < held.held <= file.size:
            file.held, file.crc32c = held.held, held.crc32c

    @staticmethod
    def _ingest(part: Part, receipt: records_pb2.Receipt) -> None:
        if part.failure is not None or part.ended is not None:
            return
        part.receipt = part.receipt or receipt
        for said in receipt.files:
            file = part.files.get(said.name)
            if file is not None and file.size == said.size:
                file.held, file.crc32c = said.size, said.crc32c


class Ledger:
    """The journal of one spool and what it says.

    Raises ConfigurationError when the journal that is there can't be read, or none can be written.
    """

    def __init__(self, directory: Path) -> None:
        self._journal = Journal(directory)
        self._parts = Parts()
        self._lock = threading.Lock()
        self._numbers: dict[RankSave, int] = {}
        self._full = 0
        """Bytes that it had grown by when there was no room to write it anew."""
        contents = self._read()
        for part in self._parts:
            boot_clock.adopt(part.begun)
        try:
            self._journal.rewrite(self._records())
        except PannierError as error:
            if not contents.end or contents.damaged_at is not None:
                raise ConfigurationError(f"{error}: name another --spool") from error
            self._journal.reopen(contents)

    @property
    def space(self) -> int:
        """Bytes that the journal takes on its file system."""
        return self._journal.space

    def parts(self) -> list[Part]:
        """What the former life left, oldest first; before the first change."""
        return list(self._parts)

    def bind(self, rank: RankSave, part: Part) -> None:
        """``rank`` goes on with what the journal calls ``part``."""
        with self._lock:
            self._numbers[rank] = part.number

    # What happens to ranks. Each raises PannierError when it can't be recorded.

    def opened(self, rank: RankSave, file: DataFile) -> None:
        """The spool file of ``file`` belongs to it from now on; before its first byte."""
        opened = journal_pb2.FileOpened(
            name=file.name, size=file.size, slab=file.slab.path.name, stamp=file.stamp
        )
        self._record(rank, "opened", Record(opened=opened), begin=True)

    def held(self, rank: RankSave, file: DataFile) -> None:
        """More bytes of ``file`` are in the spool."""
        count, crc = file.mark()
        held = journal_pb2.FileHeld(name=file.name, held=count, crc32c=crc)
        self._record(rank, "held", Record(held=held))

    def ingested(self, rank: RankSave, receipt: records_pb2.Receipt) -> None:
        """The trainer may die once this returns: it is on disk then. May take long."""
        self._record(rank, "ingested", Record(ingested=receipt), begin=True)
        self._journal.sync()
        fault_points.point("sidecar.ingested.synced")

    # The same, but an error is only logged: the next life would do more than it must.

    def durable(self, rank: RankSave, file: DataFile) -> None:
        """The store has confirmed ``file``."""
        self._try(rank, "durable", Record(durable=journal_pb2.FileDurable(name=file.name)))

    def stored(self, rank: RankSave) -> None:
        """The receipt is in storage."""
        self._try(rank, "stored", Record(stored=journal_pb2.ReceiptStored()))

    def changed(self, save: Save, rank: RankSave | None, urgent: bool) -> None:
        """Listener of the saves, called before the one that frees spool files."""
        if rank is not None and rank.failure is not None:
            part = self._part(rank)
            if part is not None and part.failure is None:
                self._try(rank, "failed", Record(failed=rank.failure))
        if rank is None and save.verdict is not None:
            verdict = save.verdict
            ended = journal_pb2.PartEnded(state=verdict.state, failures=verdict.failures)
            for each in list(save.ranks.values()):
                self._try(each, "ended", Record(ended=ended))

    def forget(self, rank: RankSave) -> None:
        """Nothing of it is left to do."""
        self._try(rank, "forgotten", Record(forgotten=journal_pb2.PartForgotten()))

    # The file.

    def tidy(self) -> None:
        """Writes the journal anew when it has grown; to be called now and then. May take long."""
        if self._journal.growth < max(_GROWTH, self._journal.compact, 2 * self._full):
            return
        with self._lock:
            try:
                self._journal.rewrite(self._records())
                self._full = 0
            except PannierError as error:
                _log.warning("%s", error)
                self._full = self._journal.growth

    def close(self) -> set[str]:
        """Ends it: without a trace when nothing is pending. Names of spool files that must stay."""
        with self._lock:
            needed = {file.slab for part in self._parts for file in part.needed if file.slab}
            pending = bool(self._parts.by_number)
            if pending:
                try:
                    self._journal.sync()
                except PannierError as error:
                    _log.error("%s", error)
            self._journal.close(remove=not pending)
            return needed

    def _read(self) -> Contents:
        contents = self._journal.read()
        for record in contents.records:
            self._parts.apply(record)
        if contents.torn:
            _log.warning(
                "%s: its last %d bytes are no whole record and are cut off: what they said had not "
                "been confirmed to anybody",
                *(self._journal.path, contents.torn),
            )
        if contents.damaged_at is not None:
            self._survive(contents.damaged_at, contents.beyond)
        return contents

    def _survive(self, damaged_at: int, beyond: Iterable[Record]) -> None:
        """Goes on with what was ingested before the damage; what may lack something fails."""
        problem = (
            f"the journal {self._journal.path} is damaged at byte {damaged_at}: what followed of "
            "this rank is lost"
        )
        _log.error("%s", problem)
        later = Parts()
        for record in beyond:
            later.apply(record)
        for part in later:
            if part.number not in self._parts.by_number:
                self._parts.by_number[part.number] = part
                part.receipt, part.stored = None, False
        self._parts.highest = max(self._parts.highest, later.highest)
        for part in self._parts:
            if part.receipt is None and part.failure is None and part.ended is None:
                context = part.begun.context
                part.failure = save_pb2.Failure(
                    rank=context.rank,
                    host=context.host,
                    kind=save_pb2.FAILURE_KIND_SPOOL,
                    message=problem,
                )

    def _records(self) -> Iterator[Record]:
        return (record for part in self._parts for record in part.records())

    def _part(self, rank: RankSave) -> Part | None:
        with self._lock:
            return self._parts.by_number.get(self._numbers.get(rank, 0))

    def _try(self, rank: RankSave, what: str, record: Record) -> None:
        try:
            self._record(rank, what, record)
        except PannierError as error:
            _log.error("%s: %s is not recorded: %s", rank.label, what, error, extra=rank.about)

    def _record(self, rank: RankSave, what: str, record: Record, *, begin: bool = False) -> None:
        """Adds it to the journal; of a rank that has no part, only with ``begin``."""
        with self._lock:
            number = self._numbers.get(rank)
            records = [record]
            if number is None:
                # Else whoever ended it would not find the part.
                over = rank.save.verdict is not None or rank.failure is not None
                if over or not begin:
                    return
                number = self._parts.highest + 1
                records.insert(0, Record(begun=_begun(rank)))
            elif begin and rank.deadline and not self._knows_deadline(number):
                records.insert(0, Record(begun=_begun(rank)))
            for each in records:
                each.part = number
            fault_points.point(f"sidecar.{what}.before")
            self._journal.append(*records)
            for each in records:
                self._parts.apply(each)
            if number in self._parts.by_number:
                self._numbers[rank] = number
            else:
                self._numbers.pop(rank, None)
            fault_points.point(f"sidecar.{what}.after")

    def _knows_deadline(self, number: int) -> bool:
        part = self._parts.by_number.get(number)
        return part is None or bool(part.begun.save_timeout_s)


def _begun(rank: RankSave) -> journal_pb2.PartBegun:
    begun = journal_pb2.PartBegun(
        context=rank.context,
        attempt=rank.attempt,
        plan_id=rank.plan_id,
        planned=rank.planned is not None,
        created_at=rank.save.created_at,
    )
    for name, size in (rank.planned or {}).items():
        begun.files.append(plan_pb2.PlannedFile(name=name, size=size))
    boot_clock.note(begun, rank.deadline)
    return begun
