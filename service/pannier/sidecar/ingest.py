"""Takes a rank's data files into the spool, streamed or mapped, and then the hand-over of all of them.

In: checked messages. Out: files in the spool, uploads under way, ranks that are handed over. On the event
loop. The caller protects coroutines that change more than one file or rank from cancellation.
"""

import time
from collections.abc import Container, Sequence

from pannier.sidecar.reservations import Reservations
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import BEFORE_HAND_OVER, FAILED, RankSave, with_checksums
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.sidecar.upload.uploader import Uploader
from pannier.storage import check_allowed_in_time, check_shared
from pannier.storage.io_threads import reservation_threads
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.chunk_codec import ReceivedChunk
from pannier.wire.errors import (
    BusyError,
    ConfigurationError,
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    UnavailableError,
)
from pannier.wire.failures import failure_kind
from pannier.wire.file_layout import STAMP_BYTES


class Ingest:
    """Puts what trainers send into the spool.

    Args:
        allow: roots that checkpoints must lie below; empty: anywhere.
    """

    def __init__(
        self,
        saves: SaveRegistry,
        spool: Spool,
        uploads: Uploader,
        journal: JournalState,
        mapped: MappedFiles,
        *,
        allow: Sequence[str],
    ) -> None:
        self._saves = saves
        self._spool = spool
        self._mapped = mapped
        self._uploads = uploads
        self._journal = journal
        self._reservations = Reservations(mapped.leased_to)
        self._allow = allow

    async def check(self, context: sidecar_pb2.SaveContext) -> None:
        """Checks that ``context`` is consistent and that its checkpoint may be written.

        Raises:
            InvalidRequestError: it isn't, or may not.
            UnavailableError: the checkpoint's file system doesn't respond.
        """
        limits.check_context(context)
        object_names.split_checkpoint_id(context.checkpoint_id)
        check_shared(context.checkpoint_id)
        await check_allowed_in_time(context.checkpoint_id, self._allow)

    async def check_room(
        self, rank: RankSave, header: sidecar_pb2.FileHeader | None = None
    ) -> None:
        """Fails the rank when the save's data files of this host never fit into the spool.

        All of them stay there until the save ends, so waiting for room wouldn't help.

        Args:
            header: a file of the rank that is about to be opened.

        Raises:
            SaveAbortedError: the rank has failed.
        """
        sizes: list[int] = []
        for each in rank.save.ranks.values():
            files = dict(each.plan.sizes or {})
            files.update((file.name, file.size) for file in each.files.values())
            if each is rank and header is not None:
                files[header.name] = header.size
            sizes += files.values()
        try:
            await reservation_threads.run(self._spool.check_fits, sizes)
        except ConfigurationError as error:
            self._saves.fail(rank, save_pb2.FAILURE_KIND_SPOOL, str(error))
            self._saves.check(rank)
            raise

    async def open(self, header: sidecar_pb2.FileHeader, rank: RankSave) -> DataFile:
        """The data file that ``header`` announces, with all its space reserved.

        Raises:
            InvalidRequestError: the file isn't one of the rank's, or has another size than before.
            BusyError: the spool has no room now.
            SaveAbortedError: the save has ended, or can never fit into the spool.
        """
        check_attempt(header.attempt, rank)
        limits.check_seconds(save_timeout_s=header.save_timeout_s)
        object_names.check_data_file(header.name, header.attempt, rank.rank)
        label = f"{header.name} of {rank.label}"
        async with rank.opening:
            self._saves.check(rank)
            file = rank.files.get(header.name)
            self._check_size(header, rank, file, label)
            self._saves.limit_time(rank, 0, header.save_timeout_s)
            if header.HasField("claim"):
                limits.check_claim(header.claim)
                self._saves.claim_plan(rank, header.claim, header.attempt)
            if file is not None:
                return file
            if rank.phase not in BEFORE_HAND_OVER:
                raise InvalidRequestError(f"{label}: the rank was already handed over without it")
            await self._check_new(rank, header, label)
            reason = header.reason[: limits.MAX_TEXT]
            self._saves.set_transport(rank, f"streamed: {reason}" if reason else "streamed")
            file = await self._add_file(rank, header, await self._take(rank, header.size))
            self._uploads.start(rank, file)
            return file

    async def _check_new(self, rank: RankSave, header: sidecar_pb2.FileHeader, label: str) -> None:
        """What a file must meet for which the spool's space is taken now; see :meth:`check_room`."""
        _check_file_count(rank, label)
        await self.check_room(rank, header)

    async def reserve(self, request: sidecar_pb2.ReserveRequest) -> sidecar_pb2.ReserveResponse:
        """Leases files of the spool to a client that will map them.

        Raises:
            BusyError: the spool has no room now.
            InvalidRequestError: the files can never fit into the spool, or the request is malformed.
        """
        limits.check_reserve(request)
        object_names.check_job(request.job)
        object_names.check_incarnation(request.incarnation)
        try:
            sizes = [size + STAMP_BYTES for size in request.sizes]
            await reservation_threads.run(self._spool.check_fits, sizes)
        except ConfigurationError as error:
            raise InvalidRequestError(str(error)) from error
        owner = (request.job, request.incarnation, request.rank)
        response = await self._mapped.reserve(owner, request.client, request.sizes)
        response.second_set = self._mapped.problem_of_another_set(request.job)
        return response

    async def release(self, request: sidecar_pb2.ReleaseRequest) -> None:
        """Ends the leases of files that a client has unmapped."""
        limits.check_release(request)
        await self._mapped.release(
            (request.job, request.incarnation, request.rank), request.spool_files
        )

    async def record_progress(self, rank: RankSave, file: DataFile) -> None:
        """Records how much of ``file`` is here: a restarted sidecar resumes there.

        Raises PannierError: it can't be recorded; the rank has failed.
        """
        try:
            await self._journal.record_held(rank, file)
        except PannierError as error:
            self._saves.fail(rank, save_pb2.FAILURE_KIND_SPOOL, str(error))
            raise
        self._saves.record_arrival(rank)

    async def hand_over(self, request: sidecar_pb2.HandOverRequest, rank: RankSave) -> None:
        """Hands the rank over, once all its files are here and match the request; idempotent.

        Mapped files aren't read: their uploads compute the checksums. The rank is ingested unless its claim
        isn't confirmed; a later request with the plan's id confirms it.

        Raises:
            InvalidRequestError: files are missing, incomplete or of other sizes.
            BusyError: the spool has no room now for files that come with it.
            IntegrityError: a checksum differs; the save has failed.
            SaveAbortedError: the save has ended, or can never fit into the spool.
            PannierError: it can't be recorded; the save has failed.
        """
        limits.check_hand_over(request)
        async with rank.opening:
            known = rank.receipt is not None and rank.phase not in FAILED
            if not known:
                self._saves.check(rank)
            check_attempt(request.attempt, rank)
            await self._take_plan(request, rank)
            if known:
                if rank.complete_receipt() != _receipt(request, rank):
                    raise InvalidRequestError(f"{rank.label} was handed over differently before")
                return
            self._check_in_time(rank)
            self._saves.set_stall(rank, limits.age(request.stalled_s))
            self._saves.limit_time(rank, 0, request.save_timeout_s)
            await self._take_mapped(request, rank)
            await self._take_inlined(request, rank)
            receipt = _receipt(request, rank)
            limits.check_extra_files(receipt)
            self._check_files(rank, receipt)
            try:
                await self._journal.record_ingested(rank, receipt)
            except PannierError as error:
                self._saves.fail(rank, save_pb2.FAILURE_KIND_SPOOL, str(error))
                raise
            # Not earlier: the uploads would take the processor from the hand-over.
            # All, since an earlier call may have added some and failed before it came here.
            for file in rank.files.values():
                if not file.upload.durable:
                    self._uploads.start(rank, file)
            self._saves.hand_over(rank, receipt)
            self._reservations.record_usage(rank)

    async def confirm(self, rank: RankSave, plan: plan_pb2.FinalPlan) -> None:
        """Confirms the claim of a rank whose local plan was requested, if ``plan``, the answer, has its part."""
        async with rank.opening:
            claim = rank.unconfirmed
            if claim is not None and (plan.part, plan.attempt) == (claim.part, rank.attempt):
                await self._confirm(rank, plan.plan_id)

    async def _confirm(self, rank: RankSave, plan_id: str) -> None:
        if rank.save.outcome is None and rank.phase not in FAILED:
            await self._journal.record_confirmed(rank, plan_id)
            self._saves.confirm_plan(rank, plan_id)

    async def _take_plan(self, request: sidecar_pb2.HandOverRequest, rank: RankSave) -> None:
        """Takes the claim, or the id of the plan that has the part of a rank with a claim."""
        if request.HasField("claim"):
            self._saves.claim_plan(rank, request.claim, request.attempt)
        elif request.plan_id and rank.unconfirmed is not None:
            await self._confirm(rank, request.plan_id)

    async def _take(self, rank: RankSave, size: int) -> SpoolFile:
        spare = self._reservations.reserved_before(rank.save, self._saves.undecided())
        try:
            return await self._mapped.take(rank.context.save.job, size, spare)
        except BusyError:
            self._mapped.request_room()
            raise

    def _check_in_time(self, rank: RankSave) -> None:
        """Fails a rank that is handed over after its save's deadline: its trainer has given the save up."""
        late_s = time.monotonic() - rank.deadlines.save
        if not rank.deadlines.save or late_s < 0:
            return
        problem = (
            f"{rank.label} was handed over {late_s:.1f} s after the save's deadline: was the "
            "sidecar stopped?"
        )
        self._saves.fail(rank, save_pb2.FAILURE_KIND_DEADLINE, problem)
        raise DeadlineError(problem)

    async def _add_file(
        self,
        rank: RankSave,
        header: sidecar_pb2.FileHeader,
        spool_file: SpoolFile,
        stamp: bytes = b"",
    ) -> DataFile:
        """A new data file of the rank, whose content is or will be in ``spool_file``."""
        label = f"{header.name} of {rank.label}"
        file = DataFile(header.name, header.size, spool_file, label=label, stamp=stamp)
        try:
            self._saves.add_file(rank, header.attempt, file)
        except BaseException:
            await self._mapped.give_back(spool_file)
            raise
        try:
            await self._journal.record_opened(rank, file)
        except PannierError as error:
            self._saves.fail(rank, save_pb2.FAILURE_KIND_SPOOL, str(error))
            raise
        return file

    async def _take_mapped(self, request: sidecar_pb2.HandOverRequest, rank: RankSave) -> None:
        """Adds the files that the trainer has staged into the spool itself."""
        sizes = {file.name: file.size for file in request.files}
        files = []
        for mapped in request.mapped:
            label = _check_named(mapped.name, sizes, request.attempt, rank, "mapped")
            header = sidecar_pb2.FileHeader(
                attempt=request.attempt, name=mapped.name, size=sizes[mapped.name]
            )
            file = rank.files.get(mapped.name)
            self._check_size(header, rank, file, label)
            if len(mapped.stamp) != STAMP_BYTES or (file and file.stamp != mapped.stamp):
                known = file.stamp.hex() if file else f"{STAMP_BYTES} bytes"
                raise InvalidRequestError(
                    f"{label} is mapped with the stamp {mapped.stamp.hex()!r}, expected was {known!r}"
                )
            if file is None:
                _check_file_count(rank, label)
                spool_file = await self._mapped.claim(rank, mapped.spool_file, header.size)
                file = await self._add_file(rank, header, spool_file, mapped.stamp)
            files.append(file)
        if files:
            self._saves.set_transport(rank, "mapped")
        for file in files:
            try:
                await file.take_staged()
            except UnavailableError:
                raise
            except PannierError as error:
                damaged = isinstance(error, IntegrityError)
                kind = save_pb2.FAILURE_KIND_INTEGRITY if damaged else save_pb2.FAILURE_KIND_SPOOL
                self._saves.fail(rank, kind, str(error))
                raise
            self._saves.record_arrival(rank)

    async def _take_inlined(self, request: sidecar_pb2.HandOverRequest, rank: RankSave) -> None:
        """Puts the files that come with the request into the spool, unless an earlier request did.

        Raises:
            BusyError: the spool has no room now.
            SaveAbortedError: the save has ended, or can never fit into the spool.
            InvalidRequestError: a file isn't what was announced.
            IntegrityError: a checksum differs; the save has failed.
        """
        crcs = {file.name: file.crc32c for file in request.files}
        for inlined in request.inlined:
            label = _check_named(inlined.name, crcs, request.attempt, rank, "inlined")
            header = sidecar_pb2.FileHeader(
                attempt=request.attempt, name=inlined.name, size=len(inlined.data)
            )
            file = rank.files.get(inlined.name)
            self._check_size(header, rank, file, label)
            if file is None:
                await self._check_new(rank, header, label)
                file = await self._add_file(rank, header, await self._take(rank, header.size))
            if file.complete:
                continue
            if file.held:
                raise InvalidRequestError(
                    f"{label} is inlined, but {file.held} bytes of it were streamed"
                )
            writer = object()
            await file.begin(writer, lambda: None)
            chunk = ReceivedChunk(0, crcs[inlined.name], memoryview(inlined.data))
            try:
                await file.append(writer, chunk)
            except (InvalidRequestError, IntegrityError) as error:
                self._saves.fail(rank, failure_kind(error), str(error))
                raise
            finally:
                file.end(writer)
            await self.record_progress(rank, file)

    def _check_size(
        self,
        header: sidecar_pb2.FileHeader,
        rank: RankSave,
        file: DataFile | None,
        label: str,
    ) -> None:
        known = file.size if file is not None else None
        if known is None and rank.plan.sizes is not None:
            extra = object_names.extra_file(header.attempt, rank.rank)
            if header.name not in (*rank.plan.sizes, extra):
                raise InvalidRequestError(f"{label} isn't in the rank's final plan")
            # 0 stands for a file of objects, whose size the plan can't know. An extra file isn't planned.
            known = rank.plan.sizes.get(header.name) or None
        if known is not None and known != header.size:
            raise InvalidRequestError(
                f"{label} is announced with {header.size} bytes, before it was {known}"
            )

    def _check_files(self, rank: RankSave, receipt: records_pb2.Receipt) -> None:
        handed_over = {file.name: file for file in receipt.files}
        if len(handed_over) != len(receipt.files):
            raise InvalidRequestError(f"{rank.label} hands a file over twice")
        planned = {name for name, size in (rank.plan.sizes or {}).items() if size}
        for names, problem in (
            (
                handed_over.keys() - rank.files.keys(),
                "is handed over but was never streamed since the sidecar was started",
            ),
            (rank.files.keys() - handed_over.keys(), "was streamed but isn't handed over"),
            (planned - handed_over.keys(), "was planned but isn't handed over"),
        ):
            if names:
                raise InvalidRequestError(f"{rank.label}: {min(names)} {problem}")
        if rank.plan.id and receipt.plan_id != rank.plan.id:
            raise InvalidRequestError(
                f"{rank.label}: handed over under plan {receipt.plan_id!r}, planned was {rank.plan.id}"
            )
        for name, data_file in handed_over.items():
            self._check_file(rank, data_file, rank.files[name])
        for item in receipt.varying:
            if (
                item.file not in handed_over
                or item.offset + item.length > handed_over[item.file].size
            ):
                raise InvalidRequestError(
                    f"{rank.label}: item {item.position} is announced at offset {item.offset} of "
                    f"{item.file}, where nothing was handed over"
                )

    def _check_file(self, rank: RankSave, announced: records_pb2.DataFile, file: DataFile) -> None:
        if announced.size != file.size or not file.complete:
            raise InvalidRequestError(
                f"{file.label}: {announced.size} bytes are handed over, {file.held} of {file.size} are "
                "here"
            )
        # A mapped file has no checksum yet: its upload computes it, and the trainer computes none.
        if not file.stamp and announced.crc32c != file.checksums.whole:
            problem = (
                f"{file.label} arrived with crc32c {file.checksums.whole:08x}, the trainer's is "
                f"{announced.crc32c:08x}"
            )
            self._saves.fail(rank, save_pb2.FAILURE_KIND_INTEGRITY, problem)
            raise IntegrityError(problem)


def _check_named(
    name: str, handed_over: Container[str], attempt: str, rank: RankSave, how: str
) -> str:
    """Checks that a file that comes with a hand-over is one of those handed over; its name in messages."""
    object_names.check_data_file(name, attempt, rank.rank)
    label = f"{name} of {rank.label}"
    if name not in handed_over:
        raise InvalidRequestError(f"{label} is {how} but isn't handed over")
    return label


def _check_file_count(rank: RankSave, label: str) -> None:
    """Raises InvalidRequestError when the rank can't have one more data file."""
    if len(rank.files) >= limits.MAX_FILES:
        raise InvalidRequestError(
            f"{label}: the rank has {len(rank.files)} data files, at most {limits.MAX_FILES} are "
            "allowed"
        )


def _receipt(request: sidecar_pb2.HandOverRequest, rank: RankSave) -> records_pb2.Receipt:
    """The rank's receipt, with this sidecar's checksums of mapped files and of blocks, once it has them."""
    receipt = records_pb2.Receipt(
        attempt=request.attempt,
        plan_id=request.plan_id or rank.plan.id,
        rank=rank.rank,
        host=rank.host,
        files=request.files,
        varying=request.varying,
        metrics=request.metrics,
        extra_files=request.extra_files,
        part=rank.claim.part if rank.claim is not None else "",
    )
    mapped = {file.name for file in request.mapped}
    for each in receipt.files:
        if each.name in mapped:
            each.ClearField("crc32c")
        else:
            # Sets the field's presence, also of a checksum that the sender left at 0.
            each.crc32c = each.crc32c
    return with_checksums(receipt, rank.files)


def check_attempt(attempt: str, rank: RankSave) -> None:
    """Raises InvalidRequestError unless ``attempt`` is one of the rank's save."""
    limits.check_words(attempt=attempt)
    parsed = object_names.Attempt.parse(attempt)
    save = rank.save.id
    if not parsed.is_of(save):
        raise InvalidRequestError(
            f"{rank.label}: {attempt} is an attempt of another save, number {parsed.number} of group "
            f"{parsed.group} in incarnation {parsed.incarnation}"
        )
