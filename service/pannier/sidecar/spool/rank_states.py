"""The state of each rank in each save, by the records of the journal.

In: records. Out: states, and the fewest records that restore them. A state is dropped once nothing is left
to do for its rank, and its files aren't a local copy. Pure; not thread-safe.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pannier.sidecar.spool import boot_clock
from pannier.v1 import journal_pb2, records_pb2, save_pb2
from pannier.wire.object_names import save_text
from pannier.wire.records import parse_blocks

Record = journal_pb2.JournalRecord


@dataclass
class FileState:
    """The recorded state of a data file."""

    name: str
    size: int
    spool_file: str
    """Name of its spool file; empty when another data file lies there now."""
    stamp: bytes = b""
    boot_id: str = ""
    """Of the boot in which a trainer staged it; empty: it was streamed."""
    held: int = 0
    crc32c: int | None = 0
    """Of the bytes that are held; None: they were staged, and not read yet."""
    durable: journal_pb2.FileDurable | None = None
    """Its record; None: it isn't durable."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Checksums of its blocks; known once it is durable, else read again with the file."""
        durable = self.durable or journal_pb2.FileDurable()
        return parse_blocks(
            records_pb2.DataFile(
                size=self.size,
                block_crc32c=durable.block_crc32c,
                block_bytes=durable.block_bytes,
            )
        )


@dataclass
class RankState:
    """The recorded state of a rank in a save."""

    number: int
    begun: journal_pb2.PartBegun
    files: dict[str, FileState] = field(default_factory=dict)
    receipt: records_pb2.Receipt | None = None
    stored: bool = False
    failure: save_pb2.Failure | None = None
    ended: journal_pb2.PartEnded | None = None

    @property
    def needed(self) -> list[FileState]:
        """Files that still have to be uploaded from the spool."""
        if not self.awaits_upload:
            return []
        return [file for file in self.files.values() if not file.durable]

    @property
    def awaits_upload(self) -> bool:
        """Whether the rank may still become durable."""
        return not self.stored and self.failure is None and self.ended is None

    @property
    def committed(self) -> bool:
        """Whether its save is known to be committed: its files are a local copy."""
        return self.ended is not None and self.ended.state == save_pb2.SAVE_STATE_COMMITTED

    @property
    def in_spool(self) -> list[FileState]:
        """Files whose content stays in the spool until its save has ended, or as a local copy."""
        if self.failure is not None or (self.ended is not None and not self.committed):
            return []
        return [file for file in self.files.values() if file.spool_file]

    @property
    def is_replica(self) -> bool:
        """Whether it is a replica that wasn't taken over: nothing of it was uploaded here."""
        uploaded = self.stored or any(file.durable for file in self.files.values())
        return self.begun.replica and (self.failure is not None or not uploaded)

    @property
    def label(self) -> str:
        """Save, rank and host, for errors and logs."""
        context = self.begun.context
        return (
            f"save {save_text(context.save)} to {context.checkpoint_id}, rank {context.rank} on "
            f"{context.host}"
        )

    def records(self) -> Iterator[Record]:
        """The fewest records that restore this state."""
        yield Record(part=self.number, begun=self.begun)
        for file in self.files.values():
            opened = journal_pb2.FileOpened(
                name=file.name,
                size=file.size,
                spool_file=file.spool_file,
                stamp=file.stamp,
                boot_id=file.boot_id,
            )
            yield Record(part=self.number, opened=opened)
            if file.held and file.crc32c is not None:
                held = journal_pb2.FileHeld(name=file.name, held=file.held, crc32c=file.crc32c)
                yield Record(part=self.number, held=held)
            if file.durable:
                yield Record(part=self.number, durable=file.durable)
        if self.receipt is not None:
            yield Record(part=self.number, ingested=self.receipt)
        if self.stored:
            yield Record(part=self.number, stored=journal_pb2.ReceiptStored())
        if self.failure is not None:
            yield Record(part=self.number, failed=self.failure)
        if self.ended is not None:
            yield Record(part=self.number, ended=self.ended)


class RankStates:
    """All states, changed by records. Takes records in any order; inconsistent ones change nothing."""

    def __init__(self) -> None:
        self.by_number: dict[int, RankState] = {}
        """Oldest first, but those that have ended last, in the order of their ends."""
        self.highest = 0
        """The number assigned last."""
        self._by_spool_file: dict[str, FileState] = {}

    def __iter__(self) -> Iterator[RankState]:
        return iter(list(self.by_number.values()))

    def apply(self, record: Record) -> None:
        """Applies one record."""
        self.highest = max(self.highest, record.part)
        change = record.WhichOneof("change")
        if change == "begun":
            known = self.by_number.setdefault(record.part, RankState(record.part, record.begun))
            boot_clock.copy(record.begun, known.begun)
            return
        state = self.by_number.get(record.part)
        if state is None or change is None:
            return
        if change == "opened":
            self._open(state, record.opened)
        elif change == "held":
            self._hold(state, record.held)
        elif change == "durable":
            self._confirm(state, record.durable)
        elif change == "ingested":
            self._ingest(state, record.ingested)
        elif change == "confirmed":
            state.begun.plan_id = record.confirmed.plan_id
        elif change == "stored":
            state.stored = state.receipt is not None
        elif change == "failed":
            state.failure = state.failure or record.failed
        elif change == "ended":
            if state.ended is None:
                state.ended = record.ended
                # A compaction writes the states in this order, and so keeps it.
                self.by_number[record.part] = self.by_number.pop(record.part)
        else:
            # Cleaned up after an abort, or no longer a local copy.
            for file in self.by_number.pop(record.part).files.values():
                if self._by_spool_file.get(file.spool_file) is file:
                    del self._by_spool_file[file.spool_file]

    def salvage(self, beyond: Iterable[Record], problem: str) -> None:
        """Adds what can be read behind damage, and fails the ranks that may have lost records there.

        Ranks that were ingested before the damage are complete.
        """
        later = RankStates()
        for record in beyond:
            later.apply(record)
            known = self.by_number.get(record.part)
            if known is None or record.opened.name not in known.files:
                # Also if the new owner's first record is lost: the earlier content is gone.
                self._take(record.opened.spool_file)
        for state in later:
            if state.number not in self.by_number:
                self.by_number[state.number] = state
                state.receipt, state.stored = None, False
                for file in state.files.values():
                    self._take(file.spool_file, file)
        self.highest = max(self.highest, later.highest)
        for state in self:
            if state.receipt is None and state.failure is None and state.ended is None:
                context = state.begun.context
                state.failure = save_pb2.Failure(
                    rank=context.rank,
                    host=context.host,
                    kind=save_pb2.FAILURE_KIND_SPOOL,
                    message=problem,
                )

    def _open(self, state: RankState, opened: journal_pb2.FileOpened) -> None:
        if opened.name in state.files:
            return
        file = FileState(opened.name, opened.size, opened.spool_file, opened.stamp, opened.boot_id)
        state.files[file.name] = file
        self._take(file.spool_file, file)

    def _take(self, spool_file: str, owner: FileState | None = None) -> None:
        """From now on, ``spool_file`` belongs to no earlier data file, but to ``owner`` if it is known."""
        previous = self._by_spool_file.pop(spool_file, None)
        if previous is not None:
            previous.spool_file = ""
        if owner is not None and spool_file:
            self._by_spool_file[spool_file] = owner

    @staticmethod
    def _hold(state: RankState, held: journal_pb2.FileHeld) -> None:
        file = state.files.get(held.name)
        if file is not None and file.held < held.held <= file.size:
            file.held, file.crc32c = held.held, held.crc32c

    def _ingest(self, state: RankState, receipt: records_pb2.Receipt) -> None:
        if state.failure is not None or state.ended is not None:
            return
        state.receipt = state.receipt or receipt
        for final in receipt.files:
            file = state.files.get(final.name)
            if file is not None and file.size == final.size:
                file.held = final.size
                file.crc32c = final.crc32c if final.HasField("crc32c") else None
                if file.durable is not None:
                    self._confirm(state, file.durable)

    @staticmethod
    def _confirm(state: RankState, durable: journal_pb2.FileDurable) -> None:
        """The checksums that its upload took go into the receipt, too."""
        file = state.files.get(durable.name)
        if file is None:
            return
        file.durable = durable
        if not durable.HasField("crc32c") or file.held < file.size:
            return
        file.crc32c = durable.crc32c
        for final in state.receipt.files if state.receipt is not None else ():
            if final.name == file.name:
                final.crc32c = durable.crc32c
                final.block_bytes, final.block_crc32c = durable.block_bytes, durable.block_crc32c
