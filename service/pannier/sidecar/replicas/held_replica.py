"""One replica: the data files of a rank of another host, in this host's spool.

In: the chunks of one stream at a time. Out: files with the receipt's checksums, and the rank's state as its
own sidecar has it, by which this sidecar can upload the rank. The rank isn't in the registry of this host's
saves unless it is taken over. On the event loop.
"""

import time
from collections.abc import Callable, Sequence

from pannier.sidecar.restore.local_copies import LocalFile
from pannier.sidecar.save_state import Phase, RankPlan, RankSave, Save, with_checksums
from pannier.sidecar.spool import boot_clock
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.rank_states import RankState
from pannier.sidecar.spool.spool import SpoolFile
from pannier.sidecar.upload.uploader import encoded
from pannier.v1 import coordinator_pb2, records_pb2, restore_pb2, save_pb2
from pannier.wire.chunk_codec import REPLICA_CHUNK_BYTES, ReceivedChunk
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, UnavailableError

Cancel = Callable[[PannierError], object]
"""Ends a stream with an error."""


class HeldReplica:
    """A replica, complete or on its way."""

    def __init__(self, rank: RankSave, receipt: records_pb2.Receipt | None) -> None:
        self.rank = rank
        self.receipt = receipt
        """None: it was restored from the journal, and its sender hasn't come back."""
        self.outcome: save_pb2.SaveStatus | None = None
        """How its save has ended."""
        self.seen = time.monotonic()
        """When bytes of it last arrived, or this process began to hold it."""
        self.status_at = 0.0
        """When the coordinator last reported its save."""
        self.asked_at = time.monotonic()
        """When storage was last asked how the save ended, or this process began to hold the replica."""
        self.problem: PannierError | None = None
        """Why it isn't held any more."""
        self._stream: object | None = None
        self._cancel: Cancel = lambda problem: None

    @staticmethod
    def begun(start: restore_pb2.ReplicaStart, spool_files: Sequence[SpoolFile]) -> "HeldReplica":
        """A new replica, of which nothing has arrived, in these spool files."""
        rank = Save(start.context, start.created_at).add_rank(start.context)
        rank.replica = True
        rank.join_attempt(start.receipt.attempt)
        rank.set_plan(start.receipt.plan_id, None)
        rank.deadlines.shorten(0, start.save_timeout_s)
        for each, spool_file in zip(start.receipt.files, spool_files, strict=True):
            label = f"{each.name} of the replica of {rank.label}"
            rank.add_file(
                start.receipt.attempt, DataFile(each.name, each.size, spool_file, label=label)
            )
        return HeldReplica(rank, start.receipt)

    @staticmethod
    def restored(state: RankState) -> "HeldReplica":
        """A replica as the journal has recorded it; the caller adds the files to its rank."""
        begun, receipt = state.begun, state.receipt
        rank = Save(begun.context, begun.created_at).add_rank(begun.context)
        rank.replica = True
        rank.restore(
            Phase.STREAMING if receipt is None else Phase.INGESTED,
            begun.attempt,
            RankPlan(begun.plan_id),
            save_timeout_s=boot_clock.remaining(begun),
            receipt=receipt,
        )
        return HeldReplica(rank, receipt)

    @property
    def key(self) -> tuple[str, int]:
        """Its save and rank."""
        return self.rank.save.key, self.rank.rank

    @property
    def label(self) -> str:
        """Save, rank and host, for errors and logs."""
        return f"the replica of {self.rank.label}"

    @property
    def complete(self) -> bool:
        """Whether this host can upload it."""
        return self.rank.phase is Phase.INGESTED

    @property
    def files(self) -> list[DataFile]:
        """Its files in the order of the receipt, which is that of the numbers in their names."""
        if self.receipt is None:
            return list(self.rank.files.values())
        return [self.rank.files[each.name] for each in self.receipt.files]

    @property
    def held(self) -> list[int]:
        """Per file: all bytes below this offset are here."""
        return [file.held for file in self.files]

    @property
    def arrived(self) -> bool:
        """Whether all bytes are here."""
        return self.receipt is not None and all(file.complete for file in self.files)

    @property
    def final_receipt(self) -> records_pb2.Receipt:
        """The receipt, with the checksums of the files that are here."""
        assert self.receipt is not None
        return with_checksums(self.receipt, self.rank.files)

    @property
    def room(self) -> int:
        """Bytes of its spool files."""
        return sum(file.spool_file.capacity for file in self.rank.files.values())

    def resume(self, start: restore_pb2.ReplicaStart) -> bool:
        """Whether a stream that begins so sends this replica; takes its receipt if there was none."""
        sizes = {file.name: file.size for file in start.receipt.files}
        known = {file.name: file.size for file in self.rank.files.values()}
        if self.rank.attempt != start.receipt.attempt or sizes != known:
            return False
        if self.rank.plan.id != start.receipt.plan_id:
            return False
        if self.receipt is None:
            self.receipt = start.receipt
        # Compared as bytes: a metric may be NaN, which doesn't equal itself.
        return encoded(_unchecked(self.receipt)) == encoded(_unchecked(start.receipt))

    # The stream that fills it.

    async def begin(self, stream: object, cancel: Cancel) -> None:
        """``stream`` fills it from now on; an earlier one, whose end may not have been noticed, is ended."""
        self._cancel(UnavailableError(f"another stream fills {self.label} now"))
        self._stream, self._cancel = stream, cancel
        self.seen = time.monotonic()
        for file in self.files:
            await file.begin(stream, lambda: None)

    def end(self, stream: object) -> None:
        """``stream`` has ended."""
        if self._stream is stream:
            self._stream, self._cancel = None, lambda problem: None
            for file in self.rank.files.values():
                file.end(stream)

    async def append(self, stream: object, chunk: restore_pb2.ReplicaChunk) -> DataFile:
        """Takes the next chunk of one of its files, which it returns.

        Raises:
            InvalidRequestError, IntegrityError: it isn't what was announced.
            UnavailableError: another stream fills it, or it isn't held any more.
        """
        files = self.files
        if chunk.file >= len(files):
            raise InvalidRequestError(
                f"a chunk of file {chunk.file} of {self.label}, which has {len(files)} files"
            )
        if len(chunk.data) > REPLICA_CHUNK_BYTES:
            raise InvalidRequestError(
                f"a chunk of {self.label} has {len(chunk.data)} bytes, at most {REPLICA_CHUNK_BYTES} are allowed"
            )
        file = files[chunk.file]
        received = ReceivedChunk(chunk.offset, chunk.crc32c, memoryview(chunk.data))
        await file.append(stream, received)
        self.seen = time.monotonic()
        if file.complete:
            self.check(file)
        return file

    def check(self, file: DataFile) -> None:
        """Raises IntegrityError when a complete file's checksum differs from the receipt's, if it has one."""
        assert self.receipt is not None
        found = file.checksums.whole
        expected = next(each for each in self.receipt.files if each.name == file.name)
        if expected.HasField("crc32c") and found != expected.crc32c:
            raise IntegrityError(
                f"{file.label} arrived with crc32c {found:08x}, the receipt has {expected.crc32c:08x}"
            )

    def finish(self) -> None:
        """Marks the replica complete: all of it is here, and journalled."""
        self.rank.hand_over(self.final_receipt)

    # Its end.

    async def release(self, problem: PannierError | None = None) -> dict[str, SpoolFile]:
        """Ends its stream with ``problem``, unless that is None. Returns its spool files, now the caller's, by
        data file."""
        if problem is not None:
            self.problem = problem
            self._cancel(problem)
        released = {file.name: await file.release() for file in self.rank.files.values()}
        return {name: found for name, found in released.items() if found is not None}

    def local_files(self, released: dict[str, SpoolFile]) -> list[LocalFile]:
        """Its files as those of a local copy."""
        return [LocalFile(each.name, each.size, released[each.name], b"") for each in self.files]

    def report(self, *, brief: bool) -> coordinator_pb2.HeldReplica:
        """For the coordinator; ``brief``: it knows the ranks of the save."""
        message = coordinator_pb2.HeldReplica(
            context=self.rank.context, attempt=self.rank.attempt, complete=self.complete
        )
        if brief:
            del message.context.ranks[:]
        return message


def _unchecked(receipt: records_pb2.Receipt) -> records_pb2.Receipt:
    """The receipt without checksums, which its sender may not have known at first."""
    found = records_pb2.Receipt()
    found.CopyFrom(receipt)
    for each in found.files:
        for name in ("crc32c", "block_bytes", "block_crc32c"):
            each.ClearField(name)
    return found
