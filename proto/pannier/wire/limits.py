"""Limits of messages: well above any real message, well below what would harm a daemon.

In: received messages. Out: InvalidRequestError naming the limit and the value. The checks read lengths and
single numbers only, so that they cost almost nothing. Pure; any thread.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Final

from pannier.v1 import (
    load_status_pb2,
    plan_pb2,
    records_pb2,
    restore_pb2,
    save_pb2,
    sidecar_pb2,
)
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError, OverloadedError
from pannier.wire.failures import cut_text, rank_list
from pannier.wire.plan_columns import column_length

MAX_CHECKPOINT_ID: Final = 1024
"""Bytes of a checkpoint id: object stores limit names to that length, data files' names included."""
MAX_HOST: Final = 255
"""Characters of a host's name."""
MAX_WORD: Final = 128
"""Characters of digests, plan ids, attempts, versions and the like."""
MAX_TEXT: Final = 16 << 10
"""Characters of a failure's message, which is cut there."""
MAX_NAME: Final = 4096
"""Characters of a key of the state dict."""
MAX_RANKS: Final = 1 << 16
"""Ranks of a group."""
MAX_WORLD: Final = 1 << 20
"""Processes of a job."""
MAX_ITEMS: Final = 1 << 20
"""Items of one rank's plan."""
MAX_ALL_ITEMS: Final = 1 << 24
"""Items of a global plan that torch made."""
MAX_FILES: Final = 1024
"""Data files of one rank in one save."""
MAX_EXTRA_FILES: Final = 256
"""Extra files of one rank in one save."""
MAX_EXTRA_BYTES: Final = 32 << 20
"""Bytes of one rank's extra files together."""
MAX_INLINED_BYTES: Final = 1 << 20
"""Bytes of one rank's files that come with its hand-over, together."""
MAX_METRICS: Final = 64
"""Metrics of one save."""
MAX_SPOOL_FILES: Final = 1 << 14
"""Spool files that one rank may hold to stage into."""
MAX_LOCATED: Final = 1 << 20
"""Files that a load asks for at a time."""
MAX_SOURCES: Final = 4096
"""Places that one rank's load reads from."""
MAX_PENDING: Final = 1024
"""Unfinished saves that one client reports when it connects."""
MAX_TIMEOUT_S: Final = 7 * 86400.0
"""Seconds that a save may take."""
MAX_SAVES: Final = 128
"""Undecided saves of one group; a client has at most 16 that aren't ingested."""
MAX_ALL_SAVES: Final = 1 << 14
"""Undecided saves of one daemon."""


def check_context(context: sidecar_pb2.SaveContext) -> None:
    """Raises InvalidRequestError when a save's context contradicts itself or is above a limit."""
    _at_most(len(context.ranks), MAX_RANKS, "ranks of a group")
    _at_most(context.world_size, MAX_WORLD, "processes of a job")
    _at_most(len(context.checkpoint_id.encode()), MAX_CHECKPOINT_ID, "bytes of a checkpoint id")
    _at_most(len(context.launch), MAX_WORD, "characters of the launch")
    check_host(context.host)
    save, ranks = context.save, list(context.ranks)
    object_names.check_save_id(save)
    problem = ""
    if context.overwrite not in save_pb2.Overwrite.values():
        problem = f"overwrite={context.overwrite} is unknown"
    elif sorted(set(ranks)) != ranks or context.rank not in ranks:
        problem = f"{rank_list(ranks)} is not a sorted list of ranks that includes {context.rank}"
    elif context.world_size <= ranks[-1]:
        problem = f"rank {ranks[-1]} is not in a world of {context.world_size} processes"
    if problem:
        raise InvalidRequestError(f"save {object_names.save_text(save)}: {problem}")


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Checks the number of metrics, and their names, which appear in decisions and tables."""
    _at_most(len(metrics), MAX_METRICS, "metrics")
    for name in metrics:
        if not (isinstance(name, str) and 0 < len(name) <= MAX_WORD and name.isprintable()):
            raise InvalidRequestError(
                f"{str(name)[:MAX_WORD]!r} is not a valid name of a metric: 1 to {MAX_WORD} characters are "
                "allowed, all of them printable"
            )


def check_extra_names(names: Collection[str]) -> None:
    """Checks the number of extra files, and their names, of which none may be the directory of another."""
    _at_most(len(names), MAX_EXTRA_FILES, "extra files of a rank")
    for name in names:
        object_names.check_extra_name(name)
    if clash := object_names.find_clash(names):
        raise InvalidRequestError(f"the extra files {clash[0]!r} and {clash[1]!r} can't be both")


def check_extra_files(receipt: records_pb2.Receipt) -> None:
    """Checks the extra files in a rank's receipt, whose bytes lie in one of its data files."""
    extra, own = receipt.extra_files, object_names.extra_file(receipt.attempt, receipt.rank)
    check_extra_names([each.name for each in extra])
    sizes = {file.name: file.size for file in receipt.files if file.name == own}
    _at_most(sizes.get(own, 0), MAX_EXTRA_BYTES, "bytes of a rank's extra files")
    places = [(each.file, each.offset, each.size) for each in extra if each.size]
    # They follow one another and fill the file.
    ends = itertools.accumulate((size for *_, size in places), initial=0)
    expected = [(own, end, size) for end, (*_, size) in zip(ends, places, strict=False)]
    if places != expected or sum(size for *_, size in places) != sizes.get(own, 0):
        raise InvalidRequestError(
            f"rank {receipt.rank} has extra files at {places}, which are not all of {sizes or own}"
        )


def check_room(undecided: Collection[save_pb2.SaveId], new: save_pb2.SaveId) -> None:
    """Raises OverloadedError when a daemon with these saves can't accept another."""
    if len(undecided) >= MAX_ALL_SAVES:
        raise OverloadedError(
            f"{len(undecided)} saves are in progress here, which is the limit: try again later"
        )
    if len(undecided) < MAX_SAVES:
        return
    group = (new.job, new.incarnation, new.group)
    count = sum((each.job, each.incarnation, each.group) == group for each in undecided)
    if count >= MAX_SAVES:
        raise OverloadedError(
            f"{count} saves of group {new.group} of job {new.job} are in progress, which is the limit: "
            "try again when some of them have ended"
        )


def check_host(host: str) -> None:
    """Checks a host's name, which appears in logs and errors."""
    if len(host) > MAX_HOST or not host.isprintable():
        raise InvalidRequestError(
            f"the host name {host[:MAX_HOST]!r} has {len(host)} characters: at most {MAX_HOST} are "
            "allowed, all of them printable"
        )


def check_words(**words: str) -> None:
    """Checks short texts, by field name."""
    for name, word in words.items():
        if len(word) > MAX_WORD:
            raise InvalidRequestError(
                f"{name} {word[:MAX_WORD]!r}… has {len(word)} characters, at most {MAX_WORD} are "
                "allowed"
            )


def check_plan(request: sidecar_pb2.PlanRequest) -> None:
    """Checks the sizes in a local plan, its digest and its deadlines."""
    plan = request.plan
    _check_items(plan.items, MAX_ITEMS, "items of a rank's plan")
    for column in (plan.head, plan.body, plan.tail, request.staged_positions):
        _at_most(column_length(column), MAX_ITEMS, "items of a rank's plan")
    check_words(digest=request.digest)
    check_seconds(
        timeout_s=request.timeout_s,
        save_timeout_s=request.save_timeout_s,
        storage_wait_s=request.storage_wait_s,
    )


def check_claim(claim: sidecar_pb2.CachedPlanClaim) -> None:
    """Checks the sizes in a claim, which names at least a part and a digest."""
    if not (claim.part and claim.digest):
        raise InvalidRequestError("a cached-plan claim has no part or no digest")
    check_words(part=claim.part, digest=claim.digest, attempt=claim.attempt)
    _at_most(len(claim.checkpoint_id), MAX_TEXT, "characters of a checkpoint id")
    check_seconds(timeout_s=claim.timeout_s)


def check_metadata(metadata: plan_pb2.GlobalMetadata) -> None:
    """Checks the sizes in a global plan that torch made."""
    _check_items(metadata.items, MAX_ALL_ITEMS, "items of a global plan")
    place = metadata.placement
    for column in (place.file, place.offset, place.length):
        _at_most(column_length(column), MAX_ALL_ITEMS, "items of a global plan")
    _at_most(len(metadata.files), MAX_ALL_ITEMS, "files of a global plan")


def check_hand_over(request: sidecar_pb2.HandOverRequest) -> None:
    """Checks the sizes in a hand-over."""
    _at_most(len(request.files), MAX_FILES, "data files of a rank")
    _at_most(len(request.varying), MAX_ITEMS, "items of a rank's plan")
    _at_most(len(request.mapped), MAX_FILES, "mapped files of a rank")
    _at_most(len(request.inlined), MAX_FILES, "inlined files of a rank")
    size = sum(len(file.data) for file in request.inlined)
    _at_most(size, MAX_INLINED_BYTES, "bytes of inlined files of a rank")
    check_metrics(request.metrics)
    check_words(attempt=request.attempt, plan_id=request.plan_id)
    check_seconds(save_timeout_s=request.save_timeout_s)
    if request.HasField("claim"):
        check_claim(request.claim)


def check_reserve(request: sidecar_pb2.ReserveRequest) -> None:
    """Checks the sizes in a request for spool files."""
    check_words(client=request.client)
    _at_most(len(request.sizes), MAX_FILES, "spool files in one request")
    if not request.sizes or min(request.sizes) < 1:
        raise InvalidRequestError(
            "a request for spool files names at least one, of at least one byte"
        )


def check_release(request: sidecar_pb2.ReleaseRequest) -> None:
    """Checks the sizes in a return of spool files."""
    check_words(client=request.client)
    _at_most(len(request.spool_files), MAX_SPOOL_FILES, "returned spool files in one request")


def check_locate(request: restore_pb2.LocateRequest) -> None:
    """Checks the sizes in a load's question for data files."""
    check_words(attempt=request.attempt)
    _at_most(len(request.files), MAX_LOCATED, "files of one checkpoint")
    check_words(load=request.load)
    _at_most(len(request.checkpoint_id.encode()), MAX_CHECKPOINT_ID, "bytes of a checkpoint id")


def check_fetch_start(start: restore_pb2.FetchStart) -> None:
    """Checks the sizes in the first message of a load's stream, which names its load.

    A checkpoint that Pannier didn't write has no attempt.
    """
    if not start.load:
        raise InvalidRequestError("a load that fetches blocks has no id")
    check_words(load=start.load, attempt=start.attempt)
    _at_most(len(start.checkpoint_id.encode()), MAX_CHECKPOINT_ID, "bytes of a checkpoint id")
    _at_most(len(start.hosts), MAX_WORLD, "hosts of a load")
    for each in start.hosts:
        check_host(each.host)
        check_host(each.peer_address)
    check_fetch_files(start.files, 0)


def check_fetch_files(files: restore_pb2.FetchFiles, known: int) -> None:
    """Checks the number of files of a load's stream; ``known``: those of earlier messages."""
    _at_most(known + len(files.files), MAX_LOCATED, "files of one checkpoint")


def check_read_block(request: restore_pb2.ReadBlockRequest) -> None:
    """Checks the sizes in a peer's request for a block."""
    if not (request.load and request.file):
        raise InvalidRequestError("a request for a block names no load, or no file")
    check_words(load=request.load, attempt=request.attempt)
    check_host(request.host)
    for text, what in ((request.checkpoint_id, "a checkpoint id"), (request.file, "a file's name")):
        _at_most(len(text.encode()), MAX_CHECKPOINT_ID, f"bytes of {what}")


def check_replica(start: restore_pb2.ReplicaStart) -> None:
    """Checks the save, attempt and files of a rank that another host sends, which this host uploads if it takes over."""
    check_context(start.context)
    check_host(start.host)
    check_words(attempt=start.receipt.attempt, plan_id=start.receipt.plan_id)
    check_seconds(save_timeout_s=start.save_timeout_s)
    receipt, rank = start.receipt, start.context.rank
    where = f"the replica of rank {rank} from {start.host}"
    if not math.isfinite(start.created_at):
        raise InvalidRequestError(f"{where} was created at {start.created_at}")
    if not object_names.Attempt.parse(receipt.attempt).is_of(start.context.save):
        raise InvalidRequestError(f"{where}: {receipt.attempt} is an attempt of another save")
    if receipt.rank != rank or not receipt.plan_id:
        raise InvalidRequestError(
            f"{where} comes with a receipt of rank {receipt.rank} under plan {receipt.plan_id!r}"
        )
    check_host(receipt.host)
    check_metrics(receipt.metrics)
    _at_most(len(receipt.files), MAX_FILES, "data files of a rank")
    _at_most(len(receipt.varying), MAX_ITEMS, "items of a rank's plan")
    sizes = {file.name: file.size for file in receipt.files}
    if len(sizes) != len(receipt.files):
        raise InvalidRequestError(f"{where} names a file twice")
    for name in sizes:
        object_names.check_data_file(name, receipt.attempt, rank)
    check_extra_files(receipt)
    for item in receipt.varying:
        if item.offset + item.length > sizes.get(item.file, 0):
            raise InvalidRequestError(
                f"{where}: item {item.position} is announced at offset {item.offset} of {item.file!r}, "
                "which is not in it"
            )


def check_load_report(report: load_status_pb2.LoadReport) -> None:
    """Checks the sizes in a report of a load, and its names, which appear in tables and logs."""
    status = report.status
    if not (report.call and report.group):
        raise InvalidRequestError("a load's report names no call or no group")
    check_words(call=report.call, load=report.load, group=report.group, attempt=report.attempt)
    check_words(job=report.job)
    check_host(status.host)
    _at_most(len(report.checkpoint_id), MAX_TEXT, "characters of a checkpoint id")
    _at_most(len(report.ranks), MAX_RANKS, "ranks of a group")
    _at_most(len(status.sources), MAX_SOURCES, "sources of a load")
    for source in status.sources:
        check_host(source.source)
    status.waiting_for = cut_text(status.waiting_for, MAX_TEXT)
    status.last_error = cut_text(status.last_error, MAX_TEXT)
    status.seconds_since_seen = age(status.seconds_since_seen)
    status.seconds = age(status.seconds)


def check_connect(request: sidecar_pb2.ConnectRequest) -> None:
    """Checks the sizes in a client's first call."""
    check_host(request.host)
    check_words(client=request.client, client_version=request.client_version)
    _at_most(len(request.pending), MAX_PENDING, "unfinished saves of a client")
    for pending in request.pending:
        check_context(pending.context)
        check_seconds(save_timeout_s=pending.save_timeout_s)


def check_seconds(**timeouts: float) -> None:
    """Checks remaining times, by field name; 0: unknown."""
    for name, seconds in timeouts.items():
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_TIMEOUT_S):
            raise InvalidRequestError(
                f"{name} is {seconds}: give seconds from 0 to {MAX_TIMEOUT_S:.0f} (7 days)"
            )


def shortened(failure: save_pb2.Failure) -> save_pb2.Failure:
    """A reported failure, with its host and message cut to their limits."""
    short = save_pb2.Failure()
    short.CopyFrom(failure)
    short.host = failure.host[:MAX_HOST]
    short.message = cut_text(failure.message, MAX_TEXT)
    return short


def shortened_status(status: save_pb2.RankStatus) -> save_pb2.RankStatus:
    """A reported status of a rank, with its texts cut to their limits and valid ages."""
    short = save_pb2.RankStatus()
    short.CopyFrom(status)
    short.host = status.host[:MAX_HOST]
    short.last_error = status.last_error[:MAX_TEXT]
    short.seconds_since_seen = age(status.seconds_since_seen)
    short.stalled_s = age(status.stalled_s)
    return short


def is_short(status: save_pb2.RankStatus) -> bool:
    """Whether :func:`shortened_status` would leave it unchanged."""
    return (
        len(status.host) <= MAX_HOST
        and len(status.last_error) <= MAX_TEXT
        and 0 <= status.seconds_since_seen < math.inf
    )


def age(seconds: float) -> float:
    """A reported age in seconds: never in the future."""
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _check_items(items: plan_pb2.Items, most: int, what: str) -> None:
    for column in (items.fqn, items.kind, items.hint, items.ndim, items.property):
        _at_most(column_length(column), most, what)


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequestError(f"{count} {what}: at most {most} are allowed")
