"""Comparison of every byte of a checkpoint with its records: ``pannier verify``. Async."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import crc32c

from pannier.attempts.decisions import read_decisions
from pannier.attempts.manifests import ManifestRecord, read_manifest
from pannier.maintenance.inspect import describe_root
from pannier.storage import NotFoundError, Store
from pannier.storage.many import for_each
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError, SaveAbortedError
from pannier.wire.records import (
    MOST_METADATA,
    MOST_RECORD,
    describe_safetensors,
    match,
    parse_receipt,
)

_PARALLEL = 8
"""Data files read at the same time."""
_READ_BYTES = 8 << 20
"""Bytes of one read of a data file."""


@dataclass(frozen=True)
class Finding:
    """Result for one object."""

    name: str
    """Relative to the checkpoint id."""
    rank: int | None
    status: str
    """``ok``, ``missing``, ``size``, ``checksum``, or ``malformed``."""
    expected_size: int | None = None
    expected_crc32c: int | None = None
    size: int | None = None
    crc32c: int | None = None


@dataclass(frozen=True)
class VerifyResult:
    """Result for a checkpoint."""

    attempt: str
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether every byte is as committed."""
        return all(finding.status == "ok" for finding in self.findings)


async def verify(store: Store, *, progress: Callable[[int, int], None]) -> VerifyResult:
    """Reads all bytes of the checkpoint ``store`` and compares them with its records.

    Args:
        progress: called with the bytes read since the last call and with the
            total.

    Raises:
        SaveAbortedError: there is no committed checkpoint, or it was replaced meanwhile.
        StorageError: storage can't be read.
    """
    before = await store.stat(object_names.METADATA)
    if before is None:
        raise SaveAbortedError(
            f"{store.url} has no {object_names.METADATA}: "
            + (
                await _other_format(store)
                or await describe_root(store)
                or "it is not a committed checkpoint"
            )
        )
    content = await store.read_whole(object_names.METADATA, MOST_METADATA)
    decisions = await read_decisions(store, await store.list(object_names.attempts_prefix()))
    damaged = list(decisions.damaged)
    commits = {a: d for a, d in decisions.known.items() if d.outcome == records_pb2.OUTCOME_COMMIT}
    checksum = crc32c.crc32c(content)
    committed = match(commits, len(content), checksum)
    if committed is None and not commits:
        why = (
            f"the decision {damaged[0]} is damaged" if damaged else "no attempt was committed here"
        )
        raise SaveAbortedError(
            f"{store.url} can't be compared with anything: {why}; was it written by Pannier?"
        )
    # Damaged metadata matches no decision: it is compared with the newest commit.
    committed = committed or max(commits.values(), key=object_names.Attempt.of)
    findings = [
        _compare(
            Finding(
                name=object_names.METADATA,
                rank=None,
                status="ok",
                expected_size=committed.metadata_size,
                expected_crc32c=committed.metadata_crc32c,
                size=len(content),
                crc32c=checksum,
            )
        )
    ]
    receipts, problems = await _read_receipts(store, committed)
    files = [(receipt.rank, file) for receipt in receipts for file in receipt.files]
    total = sum(file.size for _, file in files)

    async def check(item: tuple[int, records_pb2.DataFile]) -> Finding:
        return await _check_file(
            store, committed.attempt, *item, lambda count: progress(count, total)
        )

    findings += problems
    findings += [Finding(key, None, "malformed") for key in damaged]
    findings += await for_each(check, files, parallel=_PARALLEL)
    findings += await for_each(
        lambda file: _check_copy(store, file), committed.extra_files, parallel=_PARALLEL
    )
    after = await store.stat(object_names.METADATA)
    if after is None or after.generation != before.generation:
        raise SaveAbortedError(f"{store.url} was replaced while it was read; verify it again")
    return VerifyResult(committed.attempt, findings)


async def _other_format(store: Store) -> str | None:
    """A description of a directory in another format, unless Pannier has records there."""
    if await store.list(object_names.attempts_prefix()):
        return None
    # Prefixes of torch's HuggingFaceStorageWriter: a full listing may be long.
    found = [item.key for prefix in ("model", "shard-") for item in await store.list(prefix)]
    return describe_safetensors(key for key in found if "/" not in key)


async def _read_receipts(
    store: Store, committed: records_pb2.Decision
) -> tuple[list[records_pb2.Receipt], list[Finding]]:
    """Receipts of the manifest's ranks, and findings on missing or damaged ones."""
    key = object_names.manifest(committed.attempt)
    try:
        manifest = await read_manifest(store, committed.attempt, ManifestRecord, committed.save)
    except IntegrityError:
        return [], [Finding(key, None, "malformed")]
    if manifest is None:
        return [], [Finding(key, None, "missing")]
    if manifest.plan_id != committed.plan_id:
        return [], [Finding(key, None, "checksum")]
    receipts, problems = [], []
    for rank in manifest.ranks:
        key = object_names.receipt(committed.attempt, rank)
        try:
            receipts.append(
                parse_receipt(
                    await store.read_whole(key, MOST_RECORD), committed.attempt, rank, key
                )
            )
        except NotFoundError:
            problems.append(Finding(key, rank, "missing"))
        except IntegrityError:
            problems.append(Finding(key, rank, "malformed"))
    return receipts, problems


async def _check_file(
    store: Store,
    attempt: str,
    rank: int,
    file: records_pb2.DataFile,
    progress: Callable[[int], None],
) -> Finding:
    try:
        # A name from storage must not lead out of the checkpoint.
        object_names.check_data_file(file.name, attempt, rank)
    except InvalidRequestError:
        return Finding(file.name, rank, "malformed")
    found = Finding(file.name, rank, "missing", file.size, file.crc32c)
    info = await store.stat(file.name)
    if info is None:
        return found
    checksum = 0
    try:
        for offset in range(0, info.size, _READ_BYTES):
            piece = await store.read(file.name, offset, min(_READ_BYTES, info.size - offset))
            checksum = crc32c.crc32c(piece, checksum)
            progress(len(piece))
    except NotFoundError:
        return found
    return _compare(Finding(file.name, rank, "ok", file.size, file.crc32c, info.size, checksum))


async def _check_copy(store: Store, file: records_pb2.ExtraFile) -> Finding:
    """The copy of an extra file; its bytes in the data file are compared as any other's."""
    found = Finding(file.name, None, "missing", file.size, file.crc32c)
    try:
        content = await store.read(file.name)
    except NotFoundError:
        return found
    return _compare(replace(found, status="ok", size=len(content), crc32c=crc32c.crc32c(content)))


def _compare(finding: Finding) -> Finding:
    status = "ok"
    if finding.size != finding.expected_size:
        status = "size"
    elif finding.crc32c != finding.expected_crc32c:
        status = "checksum"
    return replace(finding, status=status)
