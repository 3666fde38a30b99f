"""``client.load``: DCP's load, from one ``.metadata`` that one rank reads for all.

In: a state dict to fill. Out: the same, filled in place, with DCP's resharding. Collective, as
``dcp.load`` is; a failure on one rank is raised on all, with the rank. Blocking.
"""

import collections
import contextlib
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from pannier.client import console, torch_compat
from pannier.client.config import check_timeout
from pannier.client.loading import filesystem, highest_incarnation, state_keys
from pannier.client.loading.catalog import PerRankError
from pannier.client.loading.checksum_verifier import Receipts, Wanted
from pannier.client.loading.filesystem import MissingError, StorageDir
from pannier.client.loading.state_keys import OtherKeys
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.process_group import is_alone, process_rank
from pannier.client.ranks.load_ranks import CALL, END, METADATA, READ, LoadRanks
from pannier.client.restore import load_progress
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.load_result import (
    LoadResult,
    ReadCounts,
    combine,
    from_json,
    to_json,
)
from pannier.client.restore.sources import Sharing
from pannier.client.xla import planners, runtime
from pannier.common import timeouts
from pannier.common.save_interval import RECENT
from pannier.wire.errors import InvalidRequestError
from pannier.wire.failures import shorten

Finish = Callable[[StorageDir, float], str | None]
"""See :meth:`pannier.client.resume.ingested_saves.IngestedSaves.finish_one`."""
Reporting = Callable[[LoadProgress], contextlib.AbstractContextManager[None]]
"""Reports a load to operators as long as the context lasts."""

_PLAIN: Final = (bool, int, float, complex, str, bytes)
"""Types of values into which a stored tensor can't be loaded."""
_NOT_STATEFUL: Final = (torch.Tensor, torch.nn.Parameter, DTensor, dict, *_PLAIN)
"""Common types that are not ``Stateful``."""
_NEVER: Final = 2**31 - 1
"""Threshold of a generation that the garbage collector never collects."""
_recent_s: Final[collections.deque[float]] = collections.deque(maxlen=RECENT)


class _FullGcPause:
    """Suspends full garbage collections while a thread is in its context; young objects are still collected.

    Plans for tens of thousands of tensors create objects that stay alive: because of them the collector would
    traverse all objects of the process again and again, which takes as long as the rest of such a load.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._threshold = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                young, middle, self._threshold = gc.get_threshold()
                gc.set_threshold(young, middle, _NEVER)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            young, middle, threshold = gc.get_threshold()
            # Unless the user's code has set another one meanwhile.
            if not self._inside and threshold == _NEVER:
                gc.set_threshold(young, middle, self._threshold)


_full_gc_pause: Final = _FullGcPause()


def recent_seconds() -> list[float]:
    """Durations of this process's last loads that succeeded on all ranks, for advice on how often to save."""
    return list(_recent_s)


def load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    verify: bool = False,
    timeout: float | None = None,
    extra_files: Wanted = (),
    raise_unretrieved: Callable[[], None] = lambda: None,
    sharing: Sharing | None = None,
    reporting: Reporting = lambda _: contextlib.nullcontext(),
    finish_ingested: Finish | None = None,
) -> LoadResult:
    """See :func:`pannier.client.load`.

    Args:
        raise_unretrieved: called first; what it raises is raised on all ranks.
        sharing: reads through this host's sidecars what they have; None: all is read from storage.
        reporting: reports the load's progress to operators.
        finish_ingested: waits for a save of the checkpoint that isn't committed yet.
    """
    began = time.monotonic()
    alone = is_alone(no_dist)
    if not alone and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidRequestError(
            f"rank {dist.get_rank()} is not in this process group: only its ranks may load with it"
        )

    def make() -> StorageReader:
        if not isinstance(state_dict, dict):
            raise InvalidRequestError(
                f"state_dict={type(state_dict).__name__} can't be filled: give a dict"
            )
        if timeout is not None:
            check_timeout(timeout)
        if isinstance(extra_files, str):
            raise InvalidRequestError(
                f"extra_files={extra_files!r}: give a collection of names, as [{extra_files!r}]"
            )
        raise_unretrieved()
        reader = _reader(checkpoint_id, storage_reader)
        if verify:
            reader.verify_once()
        reader.use_sidecars(sharing, together=len(ranks.ranks) > 1)
        reader.use_progress(progress)
        return reader

    named = _described(checkpoint_id, storage_reader)
    timeout_s = timeouts.LOAD_S
    # Invalid arguments, this one too, are refused by ``make``, on all ranks and after the call is counted: so
    # the ranks' next loads stay in step.
    with contextlib.suppress(InvalidRequestError):
        timeout_s = timeout_s if timeout is None else check_timeout(timeout)
    ranks = LoadRanks(
        process_group,
        alone=alone,
        timeout_s=timeout_s,
        description=f"load of {named}",
    )
    progress = LoadProgress(
        process_rank() if alone else ranks.rank,
        [process_rank()] if alone else sorted(ranks.ranks),
        checkpoint_id=named,
    )
    ranks.show_waits(progress.waiting)
    with _full_gc_pause, _tracked(progress, reporting), ranks:
        reader = _make_readers(ranks, make)
        try:
            progress.begin(load_progress.RESOLVING)
            progress.describe(load=_share_metadata(ranks, reader, timeout_s, finish_ingested))
            read = _fill(ranks, state_dict, reader, _wrap_for_xla(planner), progress, extra_files)
            result = dataclasses.replace(
                _finish(ranks, reader, progress, began), attempt=reader.attempt, extra_files=read
            )
        finally:
            # All ranks are done, or all have failed. ``dcp.load`` doesn't reset a reader that it is given next.
            reader.reset()
    if ranks.is_first:
        console.log_loaded(
            result.checkpoint_id, result.total_bytes, result.seconds, result.files_text
        )
        state_keys.warn(result)
    _recent_s.append(result.seconds)
    return result


def _described(checkpoint_id: str | os.PathLike[str] | None, storage_reader: object) -> str:
    """The checkpoint, for messages: the arguments aren't checked yet."""
    if checkpoint_id is None and isinstance(storage_reader, StorageReader):
        return storage_reader.checkpoint_id
    return "a checkpoint" if checkpoint_id is None else str(checkpoint_id)


def _make_readers(ranks: LoadRanks, make: Callable[[], StorageReader]) -> StorageReader:
    """Makes this rank's reader, after a check that all ranks load the same checkpoint."""
    made: list[StorageReader] = []

    def checkpoint_id() -> str:
        made.append(make())
        return made[0].checkpoint_id

    def check_same(ids: Mapping[int, str]) -> None:
        if len(set(ids.values())) > 1:
            by_rank = shorten([f"rank {rank}: {each}" for rank, each in ids.items()], 16)
            raise InvalidRequestError(f"ranks load different checkpoints: {by_rank}")

    ranks.together(CALL, checkpoint_id, check_same)
    return made[0]


@contextlib.contextmanager
def _tracked(progress: LoadProgress, reporting: Reporting) -> Iterator[None]:
    """Reports the load as long as this block runs, and how it ends."""
    with reporting(progress):
        try:
            yield
        except BaseException as error:
            progress.end(error)
            raise
        progress.end()


def _share_metadata(
    ranks: LoadRanks, reader: StorageReader, timeout_s: float, finish_ingested: Finish | None
) -> str:
    """Reads ``.metadata`` on the first rank, and the highest incarnation at its root before it.

    Returns the id of the load, which all ranks share.
    """
    root = highest_incarnation.root_of(reader.checkpoint_id)

    def read() -> tuple[bytes, tuple[int | None, str]]:
        incarnation = highest_incarnation.read(root, reader.storage_options)
        return resolve(), (incarnation, reader.load_id)

    def resolve() -> bytes:
        try:
            with console.logged(f"load of {reader.checkpoint_id}", lambda: "its .metadata"):
                return reader.resolve()
        except PerRankError:
            raise
        except MissingError as error:
            began = time.monotonic()
            # ``finish_ingested`` has its own deadline.
            with ranks.showing_progress(METADATA, lambda: f"{time.monotonic() - began:.0f} s"):
                problem = (
                    finish_ingested(reader.directory, timeout_s)
                    if finish_ingested is not None
                    else None
                )
            if problem is None:
                raise
            if problem:
                raise MissingError(f"{error}; {problem}") from error
        return reader.resolve()

    content, facts = ranks.from_first(METADATA, read)
    incarnation: int | None = facts[0]
    load_id: str = facts[1]
    highest_incarnation.remember(root, incarnation)
    reader.share_metadata(content, load_id)
    return load_id


def _fill(
    ranks: LoadRanks,
    state_dict: dict[str, Any],
    reader: StorageReader,
    planner: LoadPlanner | None,
    progress: LoadProgress,
    extra_files: Wanted,
) -> dict[str, bytes]:
    """Fills the state in the steps of ``dcp.load``, with the same calls of planner and reader; returns the extra files.

    With torch's own function each rank would wait in collectives, even after another rank has failed, until a
    time-out that doesn't name the missing ranks.
    """
    planner = DefaultLoadPlanner() if planner is None else planner
    values: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    others: list[OtherKeys] = []

    def plan() -> LoadPlan:
        # Sorted, so that collectives in a state_dict() are called in the same order on all ranks.
        for key in sorted(state_dict):
            value = state_dict[key]
            values[key] = value.state_dict() if _is_stateful(value) else value
        for name, tensor in _tensors(values):
            if problem := torch_compat.shard_problem(tensor):
                raise InvalidRequestError(f"{name!r} can't be loaded: {problem}")
        metadata = reader.read_metadata()
        try:
            planner.set_up_planner(values, metadata, ranks.is_first)
            reader.set_up_storage_reader(metadata, ranks.is_first)
            local = planner.create_local_plan()
        except ValueError as error:
            if problem := _unclear_mismatch(values, metadata):
                raise InvalidRequestError(problem) from error
            raise
        except RuntimeError as error:
            if hint := state_keys.missing_hint(values, metadata):
                raise RuntimeError(f"{error} {hint}") from error
            raise
        others.append(OtherKeys(planner, values))
        return reader.prepare_local_plan(local)

    def plan_globally(plans: list[LoadPlan]) -> list[LoadPlan]:
        progress.unread = state_keys.unread(reader.read_metadata(), plans)
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read() -> None:
        waits = console.logged(
            f"load of {reader.checkpoint_id}", lambda: progress.stalled_on() or None
        )
        with ranks.showing_progress(READ, reader.progress_text), waits:
            reader.read_data(planner.finish_plan(central), planner).wait()
            for each in others:
                each.restore()
            progress.cast = state_keys.narrowed(planner, reader.read_metadata())
            files.update(Receipts(reader.directory, reader.attempt).extra_files(extra_files))

    central = ranks.plan(plan, plan_globally)
    ranks.together(READ, read, lambda _: None)
    for key, value in values.items():
        # As in torch: keys that the planner has added are not the caller's.
        if key not in state_dict:
            continue
        target = state_dict[key]
        if _is_stateful(target):
            target.load_state_dict(value)
        else:
            state_dict[key] = value
    return files


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    # isinstance with a protocol looks at many attributes of a type, 50 of them for a tensor.
    return type(value) not in _NOT_STATEFUL and isinstance(value, Stateful)


def _tensors(container: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors at any depth of mappings and lists, by their keys."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping | list | tuple):
            yield from _tensors(value, name)


def _unclear_mismatch(values: dict[str, Any], metadata: Metadata) -> str:
    """Why a stored tensor can't be loaded, where DCP's own error is unclear; empty: another cause."""
    flat, _ = torch_compat.flatten_state_dict(values)
    for key, value in flat.items():
        stored = metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            continue
        text = (
            f"{key!r} can't be loaded: {stored.properties.dtype} of {tuple(stored.size)} is stored"
        )
        if isinstance(value, torch.Tensor) and value.is_meta:
            return (
                f"{text}, and state_dict has a tensor on meta, which has no memory: allocate it first, as "
                "by module.to_empty(device=...)"
            )
        if value is None or isinstance(value, _PLAIN):
            return (
                f"{text}, but state_dict has {value!r:.40} ({type(value).__name__}): give a tensor of that "
                "shape"
            )
    return ""


def _finish(
    ranks: LoadRanks, reader: StorageReader, progress: LoadProgress, began: float
) -> LoadResult:
    """The result of the load, from what all ranks have read."""

    def counts() -> dict[str, Any]:
        found = progress.counts()
        found.seconds = time.monotonic() - began
        found.host = reader.host
        return to_json(found)

    def put_together(found: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        by_rank = {rank: ReadCounts(**from_json(each)) for rank, each in found.items()}
        return to_json(combine(reader.checkpoint_id, by_rank))

    return LoadResult(**from_json(ranks.together(END, counts, put_together)))


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
