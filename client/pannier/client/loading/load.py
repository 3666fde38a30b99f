"""``client.load``: DCP's load, from one ``.metadata`` that one rank reads for all.

In: a state dict to fill. Out: the same, filled in place, with DCP's resharding. Collective, as
``dcp.load`` is; a failure on one rank is raised on all, with the rank. Blocking.
"""

import collections
import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from traceback import StackSummary
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner

from pannier.client.loading import filesystem, highest_incarnation
from pannier.client.loading.load_error import LoadError
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.messages import load_line, wait_log
from pannier.client.messages.call_errors import at_call
from pannier.client.process_group import is_alone, process_rank
from pannier.client.restore import load_progress
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import LoadResult, ReadCounts, combine
from pannier.client.restore.sources import Sharing
from pannier.client.xla import planners, runtime
from pannier.common.save_interval import RECENT
from pannier.v1 import save_pb2
from pannier.wire.errors import InvalidRequestError, PannierError
from pannier.wire.failures import ranks_text, shorten

T = TypeVar("T")

Reporting = Callable[[LoadProgress], contextlib.AbstractContextManager[None]]
"""Reports a load to operators as long as the context lasts."""

_recent_s: Final[collections.deque[float]] = collections.deque(maxlen=RECENT)


def recent_seconds() -> list[float]:
    """What the last loads of this process took that succeeded on all ranks, for advice on how often to save."""
    return list(_recent_s)


@at_call
def load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    verify: bool = False,
    before: Callable[[], None] = lambda: None,
    sharing: Sharing | None = None,
    reporting: Reporting = lambda _: contextlib.nullcontext(),
) -> LoadResult:
    """See :func:`pannier.client.load`.

    Args:
        before: called first; what it raises is raised on all ranks.
        sharing: reads through this host's sidecars what they have; None: all is read from storage.
        reporting: shows operators how far it is.
    """
    began = time.monotonic()
    alone = is_alone(no_dist)
    if not alone and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidRequestError(
            f"rank {dist.get_rank()} is not in this process group: only its ranks may load with it"
        )
    group = None if alone else _Group(process_group)
    progress = _make_progress(group, checkpoint_id)

    def make() -> StorageReader:
        before()
        reader = _reader(checkpoint_id, storage_reader)
        if verify:
            reader.verify_once()
        reader.use_sidecars(sharing, together=group is not None and group.size > 1)
        reader.use_progress(progress)
        return reader

    with _tracked(progress, reporting), _as_load_error(group):
        with _waiting(progress, f"load of {checkpoint_id or 'a checkpoint'}", _describe_others):
            reader = _make_readers(group, make)
        progress.begin(load_progress.RESOLVING)
        try:
            with _waiting(
                progress, f"load of {reader.checkpoint_id}", lambda: _describe_first(group)
            ):
                (content, incarnation), load_id = _from_first(
                    group, lambda: (_resolve(reader), reader.load_id)
                )
            progress.describe(load=load_id)
            highest_incarnation.remember(
                highest_incarnation.root_of(reader.checkpoint_id), incarnation
            )
            reader.share_metadata(content, load_id)
            with _without_warning_of_one_process() if alone else contextlib.nullcontext():
                dcp.load(
                    state_dict,
                    storage_reader=reader,
                    planner=_wrap_for_xla(planner),
                    process_group=process_group,
                    no_dist=no_dist,
                )
        finally:
            # All ranks are done, or all have failed: dcp.load ends with a collective.
            reader.release()
    counts = progress.counts()
    counts.seconds = time.monotonic() - began
    return _result(group, reader.checkpoint_id, counts)


def _make_progress(
    group: "_Group | None", checkpoint_id: str | os.PathLike[str] | None
) -> LoadProgress:
    named = str(checkpoint_id or "")
    if group is None:
        return LoadProgress(process_rank(), (process_rank(),), checkpoint_id=named)
    return LoadProgress(group.rank, sorted(group.ranks), checkpoint_id=named)


@contextlib.contextmanager
def _tracked(progress: LoadProgress, reporting: Reporting) -> Iterator[None]:
    """Reports this block, and how it ends."""
    with reporting(progress):
        try:
            yield
        except BaseException as error:
            progress.end(error)
            raise
        progress.end()


@contextlib.contextmanager
def _waiting(progress: LoadProgress, call: str, reason: Callable[[], str]) -> Iterator[None]:
    """Logs and reports the wait in this block."""
    with wait_log.logged(call, reason), progress.waiting(reason):
        yield


def _result(group: "_Group | None", checkpoint_id: str, counts: ReadCounts) -> LoadResult:
    """What all ranks have read; the first one logs it. Collective."""
    by_rank = (
        {0: counts} if group is None else dict(zip(group.ranks, group.gather(counts), strict=True))
    )
    result = combine(checkpoint_id, by_rank)
    if group is None or group.rank == group.ranks[0]:
        load_line.log_loaded(checkpoint_id, result.total_bytes, result.seconds, result.files_text)
    _recent_s.append(result.seconds)
    return result


@contextlib.contextmanager
def _without_warning_of_one_process() -> Iterator[None]:
    """torch warns that it assumes what was asked for, even with ``no_dist=True``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        yield


def _describe_others() -> str:
    return "all ranks of the group to call load"


def _describe_first(group: "_Group | None") -> str:
    reader = "this rank" if group is None else f"rank {group.ranks[0]}"
    return f"{reader} to read .metadata from storage"


def _wrap_for_xla(planner: LoadPlanner | None) -> LoadPlanner | None:
    """The planner, wrapped for XLA tensors where there may be some."""
    if not runtime.is_loaded():
        return planner
    if planners.is_load_planner(planner):
        return planners.UpstreamLoadPlanner(planner)
    if planner is None or isinstance(planner, DefaultLoadPlanner):
        return planners.LoadPlanner(planner)
    return planner


def _reader(
    checkpoint_id: str | os.PathLike[str] | None, storage_reader: StorageReader | None
) -> StorageReader:
    if storage_reader is None:
        if checkpoint_id is None:
            raise InvalidRequestError("checkpoint_id is missing: give a path or a URL")
        return StorageReader(checkpoint_id)
    filesystem.refuse_path("storage_reader", storage_reader)
    if not isinstance(storage_reader, StorageReader):
        raise InvalidRequestError(
            f"storage_reader={type(storage_reader).__name__} can't be used: give checkpoint_id or a "
            "pannier.client.StorageReader, or call torch's dcp.load"
        )
    storage_reader.reset(checkpoint_id)
    return storage_reader


class _Group:
    """The ranks that load together."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.ranks = dist.get_process_group_ranks(
            dist.group.WORLD if process_group is None else process_group
        )
        self.rank = dist.get_rank()
        self.size = len(self.ranks)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on all ranks. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast(self, value: T) -> T:
        """The first rank's value, on all ranks. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[0], group=self.process_group)
        return values[0]


def _make_readers(group: _Group | None, make: Callable[[], StorageReader]) -> StorageReader:
    """This rank's reader; raises on all ranks when one fails or has another checkpoint. Collective."""
    if group is None:
        return make()
    reader: StorageReader | None = None
    problem: PannierError | None = None
    try:
        reader = make()
    except PannierError as error:
        problem = error
    answers = group.gather((reader.checkpoint_id if reader else None, problem))
    failures = {rank: error for rank, (_, error) in zip(group.ranks, answers, strict=True) if error}
    if failures:
        raise _combined({rank: (error, StackSummary()) for rank, error in failures.items()})
    ids = [checkpoint_id for checkpoint_id, _ in answers]
    if len(set(ids)) > 1:
        by_rank = ", ".join(f"rank {rank}: {i}" for rank, i in zip(group.ranks, ids, strict=True))
        raise InvalidRequestError(f"ranks load different checkpoints: {by_rank}")
    return cast("StorageReader", reader)


def _resolve(reader: StorageReader) -> tuple[bytes, int | None]:
    """``.metadata``, and the highest incarnation number at its root, read before it."""
    root = highest_incarnation.root_of(reader.checkpoint_id)
    incarnation = highest_incarnation.look(root, reader.storage_options)
    return reader.resolve(), incarnation


def _from_first(group: _Group | None, read: Callable[[], T]) -> T:
    """What the group's first rank reads, or its error, on all ranks. Collective."""
    if group is None:
        return read()
    answer: T | PannierError | None = None
    if group.rank == group.ranks[0]:
        try:
            answer = read()
        except PannierError as error:
            answer = error
    answer = group.broadcast(answer)
    if isinstance(answer, PannierError):
        raise answer
    return cast("T", answer)


@contextlib.contextmanager
def _as_load_error(group: _Group | None) -> Iterator[None]:
    """Raises torch's CheckpointException, which ``except Exception`` doesn't catch, as LoadError."""
    try:
        yield
    except PannierError:
        # Including LoadError, which is a CheckpointException.
        raise
    except CheckpointException as error:
        causes = {
            group.ranks[rank] if group else rank: cause for rank, cause in error.failures.items()
        }
        first, _ = next(iter(causes.values()))
        raise _combined(causes) from first


def _combined(causes: Mapping[int, tuple[BaseException, StackSummary]]) -> PannierError:
    """One error for those of several ranks, of their type if they have the same."""
    texts = {
        rank: str(cause) if isinstance(cause, PannierError) else f"{type(cause).__name__}: {cause}"
        for rank, (cause, _) in causes.items()
    }
    host = socket.gethostname()
    failures = [
        save_pb2.Failure(
            rank=rank, host=host, kind=save_pb2.FAILURE_KIND_CLIENT, message=texts[rank]
        )
        for rank in sorted(causes)
    ]
    types = {type(cause) for cause, _ in causes.values()}
    common = types.pop() if len(types) == 1 else LoadError
    if len(set(texts.values())) == 1:
        message = f"{ranks_text(sorted(causes))}: {next(iter(texts.values()))}"
    else:
        shown = [f"rank {rank}: {texts[rank]}" for rank in sorted(causes)]
        message = shorten(shown, 4, separator="; ")
    if issubclass(common, PannierError) and not issubclass(common, LoadError):
        return common(message, failures)
    return LoadError(message, failures, causes)
