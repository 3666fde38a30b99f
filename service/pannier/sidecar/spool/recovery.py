"""A sidecar's start on a spool that an earlier process left: what was handed over is uploaded without trainers.

In: the states that the journal records. Out: ranks as they were, their files verified against the recorded
checksums, and uploads under way; the files of committed saves are local copies, which their readers
verify. A rank that wasn't handed over waits for its trainer. Replicas of other hosts' ranks stay replicas. On
the event loop, before any call is served; files are opened and read in threads.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from enum import Enum, auto
from typing import Final

from pannier.sidecar.replicas.held_replicas import HeldReplicas
from pannier.sidecar.restore.local_copies import LocalCopies, LocalFile
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import BEFORE_HAND_OVER, FAILED, Phase, RankPlan, RankSave
from pannier.sidecar.spool import boot_clock
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.rank_states import FileState, RankState
from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.sidecar.upload.uploader import Uploader
from pannier.storage.io_threads import Threads
from pannier.v1 import save_pb2
from pannier.wire.chunk_codec import Checksums, RunningChecksums
from pannier.wire.errors import IntegrityError, PannierError
from pannier.wire.object_names import save_text

_log = logging.getLogger(__name__)

_READERS: Final = 4
"""Files that are verified at a time."""
_READ_BYTES: Final = 256 << 10


class _Staged(Enum):
    """In place of checksums: a trainer has staged the content, and it wasn't read yet."""

    STAGED = auto()


_STAGED: Final = _Staged.STAGED


async def recover(
    journal: JournalState,
    spool: Spool,
    saves: SaveRegistry,
    uploads: Uploader,
    local_copies: LocalCopies,
    mapped: MappedFiles,
    replicas: HeldReplicas,
) -> list[RankSave]:
    """Restores all ranks and resumes their uploads; removes spool files that no rank needs.

    Args:
        local_copies: gets the files of committed saves.
        mapped: gets spool files that nothing needs; a process may still map them.
        replicas: gets the files of other hosts' ranks.

    Returns:
        the ranks whose trainers must send the rest.
    """
    found_states = journal.states()
    foreign = [each for each in found_states if journal.other_storage(each)]
    everything = [each for each in found_states if each not in foreign]
    committed = {save_text(each.begun.context.save) for each in everything if each.committed}
    copies = [each for each in everything if save_text(each.begun.context.save) in committed]
    others = [each for each in everything if each not in copies and each.is_replica]
    states = [each for each in everything if each not in copies and not each.is_replica]
    start = time.monotonic()
    threads = Threads("the spool", patience_s=math.inf, threads=_READERS)
    in_spool = [(state, file) for state in everything for file in state.in_spool]
    needed = [(state, file) for state in states for file in state.needed]
    in_spool += [each for each in needed if not each[1].spool_file]
    adopted = await asyncio.gather(
        *(threads.run(_adopt, spool, state, file) for state, file in in_spool)
    )
    spool_files = {
        (state.number, file.name): spool_file
        for (state, file), spool_file in zip(in_spool, adopted, strict=True)
    }
    for state in foreign:
        await _leave_alone(state, journal, spool)
    await threads.run(spool.sweep)
    ends = {save_text(state.begun.context.save): end for end, state in enumerate(copies)}
    for state in copies:
        adopted_here = {name: spool_files.pop((state.number, name), None) for name in state.files}
        files = {
            name: found for name, found in adopted_here.items() if isinstance(found, SpoolFile)
        }
        end = ends[save_text(state.begun.context.save)] - len(copies)
        taken = await _add_copy(state, files, journal, local_copies, end)
        for name in files.keys() - taken:
            await mapped.give_back(files[name])
    needed += [(state, file) for state in others for file in state.in_spool]
    keys = [(state.number, file.name) for state, file in needed]
    found = await asyncio.gather(
        *(
            threads.run(_verify, file, spool_files[key])
            for (_, file), key in zip(needed, keys, strict=True)
        )
    )
    checks = dict(zip(keys, found, strict=True))
    for state in others:
        here = {file.name: spool_files.pop((state.number, file.name)) for file in state.in_spool}
        verified = {name: checks[(state.number, name)] for name in here}
        await _restore_replica(state, here, verified, journal, mapped, replicas)
    ranks = [_restore(state, saves, journal, _outcome(state, states)) for state in states]
    for state, rank in zip(states, ranks, strict=True):
        problems = []
        for recorded in state.files.values():
            key = (state.number, recorded.name)
            spool_file = spool_files.get(key)
            file = _data_file(
                recorded, spool_file if isinstance(spool_file, SpoolFile) else None, rank
            )
            rank.restore_file(file)
            checked = checks.get(key)
            if isinstance(checked, Checksums):
                file.restore(checked)
            elif checked is _STAGED:
                file.restore_staged()
            elif checked is not None:
                problems.append((file, checked))
        _handle_problems(rank, problems, saves)
        _check_claim(rank, saves)
        _resume_uploads(rank, uploads)
    for save in {rank.save.key: rank.save for rank in ranks}.values():
        if save.outcome is not None:
            uploads.clean_up(save)
    if states:
        _log.info(
            "recovered %d ranks of earlier saves from the journal, in %.1f s: %s",
            *(len(states), time.monotonic() - start, _summary(ranks)),
        )
    return [rank for rank in ranks if rank.save.outcome is None and rank.phase in BEFORE_HAND_OVER]


async def _leave_alone(state: RankState, journal: JournalState, spool: Spool) -> None:
    """Keeps a rank that was to be stored elsewhere, for a sidecar that stores there; names it.

    If it was not handed over, or nothing is left to upload, it is dropped.
    """
    names = ", ".join(journal.other_storage(state))
    if not state.awaits_upload or state.receipt is None:
        await journal.forget(state)
        return
    for file in state.in_spool:
        adopted = _adopt(spool, state, file)
        if isinstance(adopted, PannierError):
            _log.warning("%s of %s: %s", file.name, state.label, adopted)
    _log.warning(
        "%s was ingested by a sidecar with another value of %s, and isn't uploaded: start one with that value "
        "on the spool %s (`pannier sidecar` or a trainer of that job), or remove the spool",
        *(state.label, names, spool.directory),
    )


async def _add_copy(
    state: RankState,
    spool_files: Mapping[str, SpoolFile],
    journal: JournalState,
    local_copies: LocalCopies,
    ended_at: float,
) -> Collection[str]:
    """Makes the files that are still here of a committed save's rank a local copy; returns their names."""
    files = {
        file.name: LocalFile(
            file.name, file.size, spool_files[file.name], state.files[file.name].stamp
        )
        for file in (state.receipt.files if state.receipt is not None else ())
        if file.name in spool_files
    }
    if not files:
        await journal.forget(state)
        return ()
    assert state.receipt is not None
    context = state.begun.context
    await local_copies.add(
        context.save,
        context.checkpoint_id,
        state.receipt.attempt,
        files.values(),
        state,
        ended_at=ended_at,
    )
    return files.keys()


async def _restore_replica(
    state: RankState,
    spool_files: Mapping[str, SpoolFile | PannierError],
    checks: Mapping[str, "Checksums | PannierError | _Staged"],
    journal: JournalState,
    mapped: MappedFiles,
    replicas: HeldReplicas,
) -> None:
    """Keeps a replica as far as it has arrived; gives it up if something of it is missing or damaged."""
    files = []
    for name, recorded in state.files.items():
        spool_file, checked = spool_files.get(name), checks.get(name)
        if isinstance(spool_file, SpoolFile) and isinstance(checked, Checksums):
            label = f"{name} of the replica of {state.label}"
            file = DataFile(name, recorded.size, spool_file, label=label)
            file.restore(checked)
            files.append(file)
    kept = len(files) == len(state.files) and state.failure is None and state.ended is None
    if kept:
        replicas.restore(state, files)
        return
    if state.failure is None and state.ended is None:
        problem = next((each for each in checks.values() if isinstance(each, PannierError)), None)
        _log.warning("the replica of %s is given up: %s", state.label, problem)
    await journal.forget(state)
    for each in spool_files.values():
        if isinstance(each, SpoolFile):
            await mapped.give_back(each)


def _adopt(spool: Spool, state: RankState, file: FileState) -> SpoolFile | PannierError:
    try:
        if not file.spool_file:
            raise PannierError("its spool file has been reused for another data file")
        return spool.adopt(file.spool_file, state.begun.context.save.job, file.size)
    except PannierError as error:
        return error


def _verify(
    file: FileState, spool_file: SpoolFile | PannierError
) -> Checksums | PannierError | _Staged:
    """Reads all bytes that the journal records; returns their checksums, or what is wrong.

    Content that a trainer has staged isn't read here, but by its upload. After another boot it is refused: a
    part of it may be lost.
    """
    if not isinstance(spool_file, SpoolFile):
        return spool_file
    if file.crc32c is None:
        if file.boot_id == boot_clock.boot_id():
            return _STAGED
        return IntegrityError(
            f"the spool file {spool_file.path} was staged before this host was started again, and not "
            "uploaded: no checksum tells whether all of it was on disk by then"
        )
    taken = RunningChecksums()
    buffer = memoryview(bytearray(_READ_BYTES))
    while taken.size < file.held:
        try:
            piece = buffer[: file.held - taken.size]
            count = os.preadv(spool_file.fd, [piece], taken.size)
        except OSError as error:
            return PannierError(f"the spool file {spool_file.path} can't be read: {error}")
        if not count:
            break
        taken.add(piece[:count])
    found = taken.result()
    if found.size < file.held or found.whole != file.crc32c:
        return IntegrityError(
            f"the first {file.held} bytes of the spool file {spool_file.path} have crc32c "
            f"{found.whole:08x}, the journal says {file.crc32c:08x}"
        )
    return found


def _outcome(state: RankState, states: Iterable[RankState]) -> save_pb2.SaveStatus | None:
    """How the rank's save had ended, which may be recorded for only one of its ranks."""
    context = state.begun.context
    for each in states:
        if each.ended is not None and each.begun.context.save == context.save:
            return save_pb2.SaveStatus(
                save=context.save,
                id=save_text(context.save),
                checkpoint_id=context.checkpoint_id,
                state=each.ended.state,
                failures=each.ended.failures,
            )
    return None


def _restore(
    state: RankState,
    saves: SaveRegistry,
    journal: JournalState,
    outcome: save_pb2.SaveStatus | None,
) -> RankSave:
    begun, receipt = state.begun, state.receipt
    if receipt is not None and begun.HasField("claim"):
        receipt.plan_id = begun.plan_id
    rank = saves.restore(
        begun.context,
        _phase(state),
        created_at=begun.created_at,
        save_timeout_s=boot_clock.remaining(begun),
        attempt=begun.attempt or (receipt.attempt if receipt is not None else ""),
        plan=RankPlan(
            begun.plan_id or (receipt.plan_id if receipt is not None else ""),
            {file.name: file.size for file in begun.files} if begun.planned else None,
        ),
        claim=begun.claim if begun.claim.part else None,
        receipt=receipt,
        failure=state.failure,
        outcome=outcome,
        replica=begun.replica,
    )
    journal.bind(rank, state)
    return rank


def _check_claim(rank: RankSave, saves: SaveRegistry) -> None:
    """Fails a rank whose plan was not confirmed and is described as only other versions of Pannier do."""
    if rank.phase is Phase.HANDED_OVER and rank.claim is None:
        saves.fail(
            rank,
            save_pb2.FAILURE_KIND_SPOOL,
            "it was handed over by trainers of another version of Pannier, while no coordinator was there to "
            "confirm the plan that they used, which this version can't. A spool goes from one version to another "
            'without a loss when `pannier status` lists no save that is under way: docs/operations.md, "Upgrade '
            'and rollback"',
        )


def _phase(state: RankState) -> Phase:
    if state.failure is not None:
        return Phase.FAILED
    if state.receipt is None:
        return Phase.STREAMING
    if state.begun.HasField("claim") and not state.begun.plan_id:
        return Phase.HANDED_OVER
    return Phase.DURABLE if state.stored else Phase.INGESTED


def _data_file(
    recorded: FileState,
    spool_file: SpoolFile | None,
    rank: RankSave,
) -> DataFile:
    file = DataFile(
        recorded.name,
        recorded.size,
        spool_file,
        label=f"{recorded.name} of {rank.label}",
        stamp=recorded.stamp,
    )
    if recorded.crc32c is None:
        file.restore_staged()
    else:
        file.restore(Checksums(recorded.held, recorded.crc32c, recorded.blocks))
    if recorded.durable:
        file.upload.restore_durable(file.size)
    return file


def _handle_problems(
    rank: RankSave, problems: list[tuple[DataFile, PannierError]], saves: SaveRegistry
) -> None:
    """Before the hand-over the trainer sends damaged files again; afterwards the rank fails."""
    for file, problem in problems:
        damaged = isinstance(problem, IntegrityError)
        if rank.phase in BEFORE_HAND_OVER and damaged:
            _log.warning("%s is sent again: %s", file.label, problem, extra=rank.log_fields)
            file.restore(Checksums())
            continue
        saves.fail(
            rank,
            save_pb2.FAILURE_KIND_INTEGRITY if damaged else save_pb2.FAILURE_KIND_SPOOL,
            f"{file.name} is lost after a restart of the sidecar: {problem}",
        )
        return


def _resume_uploads(rank: RankSave, uploads: Uploader) -> None:
    if rank.save.outcome is not None or rank.phase in (Phase.DURABLE, *FAILED):
        return
    for file in rank.files.values():
        if not file.upload.durable:
            uploads.start(rank, file)
    uploads.finish(rank)


def _summary(ranks: Iterable[RankSave]) -> str:
    names = [f"{rank.label} ({rank.phase.name.lower()})" for rank in ranks]
    return "; ".join(names[:8]) + ("; …" if len(names) > 8 else "")
