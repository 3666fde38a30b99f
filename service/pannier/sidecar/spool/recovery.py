"""A sidecar's start on a spool that an earlier one left: what was ingested goes on by itself.

In: the parts of the journal. Out: ranks as they were, with their files where the bytes that the
spool holds have the checksum that the journal tells, and uploads under way. A rank whose trainer
had not handed it over waits for that trainer. Blocking; done before anybody is answered.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import crc32c

from pannier.sidecar.save_state import BEFORE_INGESTION, Phase, RankSave, Saves
from pannier.sidecar.spool import boot_clock
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.journal_state import KeptFile, Ledger, Part
from pannier.sidecar.spool.spool import Slab, Spool
from pannier.sidecar.upload.uploader import Uploads
from pannier.v1 import save_pb2
from pannier.wire.errors import IntegrityError, PannierError
from pannier.wire.object_names import save_text

_log = logging.getLogger(__name__)

_READERS: Final = 4
"""Files that are read at a time."""
_PIECE: Final = 4 << 20


def restore(
    ledger: Ledger,
    spool: Spool,
    saves: Saves,
    uploads: Uploads,
    loop: asyncio.AbstractEventLoop,
) -> list[RankSave]:
    """Takes everything up again; what nobody needs is removed from the spool.

    Returns:
        the ranks whose trainers must send the rest.
    """
    parts = ledger.parts()
    began = time.monotonic()
    slabs = {
        (part.number, kept.name): _adopt(spool, part, kept)
        for part in parts
        for kept in part.needed
    }
    spool.sweep()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="pannier-verify") as readers:
        checks = {
            (part.number, kept.name): readers.submit(_check, kept, slabs[part.number, kept.name])
            for part in parts
            for kept in part.needed
        }
    ranks = [_restore(part, saves, ledger, _verdict(part, parts)) for part in parts]
    for part, rank in zip(parts, ranks, strict=True):
        problems = []
        for kept in part.files.values():
            key = (part.number, kept.name)
            slab = slabs.get(key)
            file = _file(kept, slab if isinstance(slab, Slab) else None, rank, loop)
            rank.files[file.name] = file
            problem = checks[key].result() if key in checks else None
            if problem is not None:
                problems.append((file, problem))
        _judge(rank, problems, saves)
        _go_on(rank, uploads)
    for save in {rank.save.key: rank.save for rank in ranks}.values():
        if save.verdict is not None:
            uploads.clear(save)
    if parts:
        _log.info(
            "took up %d ranks of earlier saves from the journal, in %.1f s: %s",
            *(len(parts), time.monotonic() - began, _summary(ranks)),
        )
    return [rank for rank in ranks if rank.save.verdict is None and rank.phase in BEFORE_INGESTION]


def _adopt(spool: Spool, part: Part, file: KeptFile) -> Slab | PannierError:
    try:
        if not file.slab:
            raise PannierError("another file lies where it was in the spool")
        return spool.adopt(file.slab, part.begun.context.save.job, file.size)
    except PannierError as error:
        return error


def _check(file: KeptFile, slab: Slab | PannierError) -> PannierError | None:
    """Reads all that the journal says is there."""
    if not isinstance(slab, Slab):
        return slab
    crc, at = 0, 0
    while at < file.held:
        try:
            piece = os.pread(slab.fd, min(_PIECE, file.held - at), at)
        except OSError as error:
            return PannierError(f"the spool file {slab.path} can't be read: {error}")
        if not piece:
            break
        crc = crc32c.crc32c(piece, crc)
        at += len(piece)
    if at < file.held or crc != file.crc32c:
        return IntegrityError(
            f"the first {file.held} bytes of the spool file {slab.path} have crc32c {crc:08x}, the "
            f"journal says {file.crc32c:08x}"
        )
    return None


def _verdict(part: Part, parts: Iterable[Part]) -> save_pb2.SaveStatus | None:
    """How the part's save had ended; one of its ranks may know it alone."""
    context = part.begun.context
    for each in parts:
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
    part: Part, saves: Saves, ledger: Ledger, verdict: save_pb2.SaveStatus | None
) -> RankSave:
    begun, receipt = part.begun, part.receipt
    rank = saves.restore(
        begun.context,
        _phase(part),
        created_at=begun.created_at,
        save_timeout_s=boot_clock.remaining(begun),
        attempt=begun.attempt or (receipt.attempt if receipt is not None else ""),
        plan_id=begun.plan_id or (receipt.plan_id if receipt is not None else ""),
        planned={file.name: file.size for file in begun.files} if begun.planned else None,
        receipt=receipt,
        failure=part.failure,
        verdict=verdict,
    )
    ledger.bind(rank, part)
    return rank


def _phase(part: Part) -> Phase:
    if part.failure is not None:
        return Phase.FAILED
    if part.stored:
        return Phase.DURABLE
    return Phase.INGESTED if part.receipt is not None else Phase.STREAMING


def _file(
    kept: KeptFile, slab: Slab | None, rank: RankSave, loop: asyncio.AbstractEventLoop
) -> DataFile:
    label = f"{kept.name} of {rank.label}"
    file = DataFile(kept.name, kept.size, slab, label=label, loop=loop, stamp=kept.stamp)
    file.restore(kept.held, kept.crc32c)
    if kept.durable:
        file.durable, file.uploaded = True, file.size
    return file


def _judge(rank: RankSave, problems: list[tuple[DataFile, PannierError]], saves: Saves) -> None:
    """What was handed over can't be had again; what wasn't, its trainer sends once more."""
    for file, problem in problems:
        damaged = isinstance(problem, IntegrityError)
        if rank.phase in BEFORE_INGESTION and damaged:
            _log.warning("%s is sent again: %s", file.label, problem, extra=rank.about)
            file.restore(0, 0)
            continue
        saves.fail(
            rank,
            save_pb2.FAILURE_KIND_INTEGRITY if damaged else save_pb2.FAILURE_KIND_SPOOL,
            f"{file.name} is lost after a restart of the sidecar: {problem}",
        )
        return


def _go_on(rank: RankSave, uploads: Uploads) -> None:
    if rank.save.verdict is not None or rank.phase not in (Phase.STREAMING, Phase.INGESTED):
        return
    for file in rank.files.values():
        if not file.durable:
            uploads.begin(rank, file)
    if rank.phase is Phase.INGESTED:
        uploads.finish(rank)


def _summary(ranks: Iterable[RankSave]) -> str:
    names = [f"{rank.label} ({rank.phase.name.lower()})" for rank in ranks]
    return "; ".join(names[:8]) + ("; …" if len(names) > 8 else "")
