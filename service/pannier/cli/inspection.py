"""What storage says of checkpoints, without a pickle: objects in, verdicts out. Async.

Which attempt a checkpoint's ``.metadata`` belongs to is found by comparing its
size and checksum with the COMMIT decisions beside it.
"""

import asyncio
import enum
import hashlib
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import crc32c
from google.protobuf import json_format, message

from pannier.storage import NotFoundError, ObjectInfo, Store
from pannier.v1 import records_pb2
from pannier.wire import identity
from pannier.wire.errors import InvalidRequestError, SaveAbortedError

_PARALLEL = 8
"""Objects read at the same time."""
_PIECE = 8 << 20
"""Bytes read at once of a data file."""


class Standing(enum.Enum):
    """What a directory is, as a checkpoint."""

    COMMITTED = "committed"
    FOREIGN = "foreign"
    """Has a ``.metadata`` that no decision knows: not Pannier's."""
    ABORTED = "aborted"
    """Every attempt ended without a checkpoint."""
    UNDECIDED = "undecided"
    """Under way, or its processes are gone."""


@dataclass(frozen=True)
class Checkpoint:
    """One directory below a root."""

    name: str
    """Relative to the root."""
    standing: Standing
    attempt: str | None
    """Of the checkpoint, or the newest one that isn't."""
    size: int
    """Bytes of data files of ``attempt``; of all that no attempt names, when it is foreign."""
    time: float
    """When it was decided, or else last written; Unix time, seconds."""


@dataclass
class _Directory:
    metadata: ObjectInfo | None = None
    data: list[ObjectInfo] = field(default_factory=list)
    records: dict[str, list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))
    """By attempt."""


async def list_checkpoints(store: Store) -> list[Checkpoint]:
    """All checkpoints at any depth below the root ``store``, oldest first. Raises StorageError."""
    directories = _directories(await store.list())
    limit = asyncio.Semaphore(_PARALLEL)
    found = await asyncio.gather(
        *(_judge(store, name, directory, limit) for name, directory in directories.items())
    )
    return sorted(found, key=lambda checkpoint: (checkpoint.time, checkpoint.name))


def _directories(objects: Iterable[ObjectInfo]) -> dict[str, _Directory]:
    found: dict[str, _Directory] = defaultdict(_Directory)
    for item in objects:
        directory, separator, rest = f"/{item.key}".rpartition(f"/{identity.attempts_prefix()}")
        if separator:
            attempt = rest.partition("/")[0]
            if _is_attempt(attempt):
                found[directory[1:]].records[attempt].append(item)
            continue
        parent, name = posixpath.split(item.key)
        if name == identity.METADATA:
            found[parent].metadata = item
        elif name.endswith(".distcp"):
            found[parent].data.append(item)
    return {
        name: directory
        for name, directory in found.items()
        if directory.metadata is not None or directory.records
    }


def _is_attempt(name: str) -> bool:
    try:
        identity.Attempt.parse(name)
    except InvalidRequestError:
        return False
    return True


async def _judge(
    store: Store, name: str, directory: _Directory, limit: asyncio.Semaphore
) -> Checkpoint:
    async with limit:
        decisions, _ = await _read_decisions(
            store, (item.key for items in directory.records.values() for item in items)
        )
        if directory.metadata is not None:
            return await _judge_readable(store, name, directory, directory.metadata, decisions)
    newest = max(directory.records, key=identity.Attempt.parse)
    aborted = all(
        attempt in decisions and decisions[attempt].outcome == records_pb2.OUTCOME_ABORT
        for attempt in directory.records
    )
    return Checkpoint(
        name,
        Standing.ABORTED if aborted else Standing.UNDECIDED,
        newest,
        sum(item.size for item in directory.data if f"__{newest}_" in item.key),
        max(item.modified for item in directory.records[newest]),
    )


async def _judge_readable(
    store: Store,
    name: str,
    directory: _Directory,
    metadata: ObjectInfo,
    decisions: dict[str, records_pb2.Decision],
) -> Checkpoint:
    checksum = metadata.crc32c
    if checksum is None and decisions:
        checksum = crc32c.crc32c(await store.read(metadata.key))
    committed = _match(decisions, metadata.size, checksum or 0)
    if committed is None:
        own = [
            item.size
            for item in directory.data
            if not any(f"__{attempt}_" in item.key for attempt in directory.records)
        ]
        return Checkpoint(name, Standing.FOREIGN, None, sum(own), metadata.modified)
    prefix = posixpath.join(name, f"__{committed.attempt}_")
    return Checkpoint(
        name,
        Standing.COMMITTED,
        committed.attempt,
        sum(item.size for item in directory.data if item.key.startswith(prefix)),
        committed.decided_at or metadata.modified,
    )


async def _read_decisions(
    store: Store, keys: Iterable[str]
) -> tuple[dict[str, records_pb2.Decision], list[str]]:
    """Decisions among the objects ``keys`` by attempt, and the keys of those that aren't readable."""
    decisions, damaged = {}, []
    for key in keys:
        attempt = posixpath.basename(posixpath.dirname(key))
        if not (_is_attempt(attempt) and key.endswith(identity.decision(attempt))):
            continue
        try:
            decisions[attempt] = json_format.Parse(
                await store.read(key), records_pb2.Decision(), ignore_unknown_fields=True
            )
        except NotFoundError:
            continue  # removed since it was listed
        except (json_format.ParseError, UnicodeDecodeError):
            damaged.append(key)
    return decisions, damaged


def _match(
    decisions: dict[str, records_pb2.Decision], size: int, checksum: int
) -> records_pb2.Decision | None:
    """The newest COMMIT whose ``.metadata`` has this size and checksum."""
    fitting = [
        attempt
        for attempt, decision in decisions.items()
        if decision.outcome == records_pb2.OUTCOME_COMMIT
        and (decision.metadata_size, decision.metadata_crc32c) == (size, checksum)
    ]
    return decisions[max(fitting, key=identity.Attempt.parse)] if fitting else None


@dataclass(frozen=True)
class Finding:
    """What was found where one object should be."""

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
class Verdict:
    """The whole of a verified checkpoint."""

    attempt: str
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was committed."""
        return all(finding.status == "ok" for finding in self.findings)


async def verify(store: Store, *, progress: Callable[[int, int], None]) -> Verdict:
    """Reads all bytes of the checkpoint ``store`` and compares them with its records.

    Args:
        progress: called with the bytes read since the last call and with the
            total.

    Raises:
        SaveAbortedError: there is no committed checkpoint to compare, or it was
            replaced meanwhile.
        StorageError: storage can't be read.
    """
    before = await store.stat(identity.METADATA)
    if before is None:
        raise SaveAbortedError(
            f"{store.url} has no {identity.METADATA}: it is not a committed checkpoint"
        )
    content = await store.read(identity.METADATA)
    keys = [item.key for item in await store.list(identity.attempts_prefix())]
    decisions, damaged = await _read_decisions(store, keys)
    commits = {a: d for a, d in decisions.items() if d.outcome == records_pb2.OUTCOME_COMMIT}
    checksum = crc32c.crc32c(content)
    committed = _match(commits, len(content), checksum)
    if committed is None and not commits:
        why = (
            f"the decision {damaged[0]} is damaged" if damaged else "no attempt was committed here"
        )
        raise SaveAbortedError(
            f"{store.url} can't be compared with anything: {why}; was it written by Pannier?"
        )
    # Damaged metadata matches nothing: the newest commit is what it should be.
    committed = committed or commits[max(commits, key=identity.Attempt.parse)]
    findings = [
        _compare(
            Finding(
                name=identity.METADATA,
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
    limit = asyncio.Semaphore(_PARALLEL)

    async def check(rank: int, file: records_pb2.DataFile) -> Finding:
        async with limit:
            return await _check_file(
                store, committed.attempt, rank, file, lambda count: progress(count, total)
            )

    findings += problems
    findings += [Finding(key, None, "malformed") for key in damaged]
    findings += await asyncio.gather(*(check(rank, file) for rank, file in files))
    after = await store.stat(identity.METADATA)
    if after is None or after.generation != before.generation:
        raise SaveAbortedError(f"{store.url} was replaced while it was read; verify it again")
    return Verdict(committed.attempt, findings)


async def _read_receipts(
    store: Store, committed: records_pb2.Decision
) -> tuple[list[records_pb2.Receipt], list[Finding]]:
    """Receipts of all ranks that the manifest names, and what is wrong with these records."""
    manifest = records_pb2.PlanManifest()
    key = identity.manifest(committed.attempt)
    status, data = await _read_record(store, key, manifest)
    # The plan id is the manifest's hash.
    if status == "ok" and hashlib.sha256(data).hexdigest() != committed.plan_id:
        status = "checksum"
    if status != "ok":
        return [], [Finding(key, None, status)]
    receipts, problems = [], []
    for member in manifest.members:
        receipt = records_pb2.Receipt()
        key = identity.receipt(committed.attempt, member.rank)
        status, _ = await _read_record(store, key, receipt)
        expected = (committed.attempt, member.rank)
        if status == "ok" and (receipt.attempt, receipt.rank) != expected:
            status = "malformed"
        if status == "ok":
            receipts.append(receipt)
        else:
            problems.append(Finding(key, member.rank, status))
    return receipts, problems


async def _read_record(store: Store, key: str, into: message.Message) -> tuple[str, bytes]:
    """Status, as of a :class:`Finding`, and content."""
    try:
        data = await store.read(key)
        into.ParseFromString(data)
    except NotFoundError:
        return "missing", b""
    except message.DecodeError:
        return "malformed", data
    return "ok", data


async def _check_file(
    store: Store,
    attempt: str,
    rank: int,
    file: records_pb2.DataFile,
    progress: Callable[[int], None],
) -> Finding:
    try:
        # A name from storage must not lead elsewhere.
        identity.check_data_file(file.name, attempt, rank)
    except InvalidRequestError:
        return Finding(file.name, rank, "malformed")
    found = Finding(file.name, rank, "missing", file.size, file.crc32c)
    info = await store.stat(file.name)
    if info is None:
        return found
    checksum = 0
    try:
        for offset in range(0, info.size, _PIECE):
            piece = await store.read(file.name, offset, min(_PIECE, info.size - offset))
            checksum = crc32c.crc32c(piece, checksum)
            progress(len(piece))
    except NotFoundError:
        return found
    return _compare(Finding(file.name, rank, "ok", file.size, file.crc32c, info.size, checksum))


def _compare(finding: Finding) -> Finding:
    status = "ok"
    if finding.size != finding.expected_size:
        status = "size"
    elif finding.crc32c != finding.expected_crc32c:
        status = "checksum"
    return replace(finding, status=status)
