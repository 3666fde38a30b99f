"""Takes a training job's checkpoints off its hands.

    from pannier import client

    handle = client.async_save({"model": model}, checkpoint_id="gs://bucket/run/step-100")
    ...  # training goes on
    handle.result()

The functions here act on one client per process, made when it is first used;
:class:`Client` makes others.

Rank 0 logs one line per save, and what a call waits for that takes longer than 2 s: on stderr, or where
the program's own handlers put records of the logger ``pannier``, at the level that it chose.
``PANNIER_LOG`` sets that logger's level: ``debug``, ``info``, ``warning``, ``error``, ``critical`` or
``off``.
"""

import builtins
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

# Read when gRPC is imported. Unset, it is off for gRPC's Python package, but on for its core, which prints a line
# at each fork: for each shell command of a notebook, and each worker of a DataLoader.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from pannier.client.client import Client, close, default_client
from pannier.client.conversion.export import FORMAT, MAX_FILE_BYTES, ExportResult, Progress
from pannier.client.conversion.export import export as export_checkpoint
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.handle import SaveHandle, SaveResult, SaveStatus
from pannier.client.integrations.dcp_patch import patch_dcp
from pannier.client.loading import catalog
from pannier.client.loading.catalog import CheckpointInfo
from pannier.client.loading.load import load as load_checkpoint
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.messages import console
from pannier.client.ranks.load_error import LoadError
from pannier.client.restore.load_report import LoadReporter
from pannier.client.restore.load_result import LoadResult
from pannier.client.restore.load_sharing import LoadSharing
from pannier.client.resume.extra_files import read_extra_file
from pannier.client.resume.ingested_saves import default_ingested
from pannier.client.resume.latest import latest
from pannier.client.save_factory import configure, default_settings, raise_unretrieved
from pannier.client.staging.optimizer_guard import Guard
from pannier.common.locations import CHILDREN
from pannier.common.save_interval import Advice
from pannier.wire.errors import (
    BusyError,
    CheckpointExistsError,
    CommitCallbackError,
    ConfigurationError,
    DeadlineError,
    InDoubtError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    StorageError,
    UnavailableError,
    VersionMismatchError,
)

console.install()


def async_save(
    state_dict: Mapping[str, Any],
    storage_writer: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_busy: str = "wait",
    timeout: float | None = None,
    staging: str = "blocking",
    metrics: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    on_commit: Callable[[SaveResult], object] | None = None,
    overwrite: bool | None = None,
) -> SaveHandle:
    """Saves in the background; returns when the state is staged. See :meth:`Client.async_save`."""
    return default_client().async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
        on_busy=on_busy,
        timeout=timeout,
        staging=staging,
        metrics=metrics,
        extra_files=extra_files,
        on_commit=on_commit,
        overwrite=overwrite,
    )


def prepare(
    state_dict: Mapping[str, Any],
    checkpoint_root: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Plans and reserves before training starts. See :meth:`Client.prepare`."""
    default_client().prepare(
        state_dict, checkpoint_root, planner=planner, process_group=process_group, no_dist=no_dist
    )


def guard(optimizer: torch.optim.Optimizer, *, wait: bool = True) -> Guard:
    """Makes an optimizer's steps wait for overlapped staging. See :meth:`Client.guard`.

    It must be called again after :func:`close`.
    """
    return default_client().guard(optimizer, wait=wait)


def save(
    state_dict: Mapping[str, Any],
    storage_writer: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_busy: str = "wait",
    timeout: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    on_commit: Callable[[SaveResult], object] | None = None,
    overwrite: bool | None = None,
) -> SaveResult:
    """Saves, and returns when the checkpoint is committed. See :meth:`Client.save`."""
    return default_client().save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
        on_busy=on_busy,
        timeout=timeout,
        metrics=metrics,
        extra_files=extra_files,
        on_commit=on_commit,
        overwrite=overwrite,
    )


def wait_all(timeout: float | None = None) -> None:
    """Waits until every save has ended. See :meth:`Client.wait_all`."""
    default_client().wait_all(timeout)


def advice(*, mtbf: float | timedelta | None = None) -> Advice | None:
    """What saves cost, and how often to save; None before the first commit.

    By this process's last 20 committed saves (of its largest group, where several groups of ranks save) and last
    20 loads. ``str()`` of it is one line. The interval is the one that loses the least time, as Young (1974) and
    Daly (2006) estimate it; :mod:`pannier.common.save_interval` has the model. No other rank is asked: a loop that
    goes by it takes one rank's. It raises no unretrieved errors.

    What a save costs is for how long ``async_save`` kept the loop, on the slowest rank (:func:`save` waits for the
    commit besides). Not measured, and not counted: slower steps while a save is in flight, an optimizer's wait for
    an overlapped copy, and the time until a failure is noticed and processes are started again. Saves by
    :class:`StorageWriter` aren't counted. Without any load, a restore is assumed to take as long as a
    save until it is durable.

    Args:
        mtbf: mean time between failures of the whole job, seconds or a timedelta: with 16 hosts that
            each fail once in 30 days, 45 hours. None: the costs alone.

    Raises:
        InvalidRequestError: ``mtbf`` is below a second, or not finite.
    """
    return default_client().advice(mtbf=mtbf)


# Reading needs no sidecar, starts none, and makes no client. Unretrieved errors are raised here, too.


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
    extra_files: Collection[str] | Callable[[str], bool] = (),
) -> LoadResult:
    """Loads a checkpoint into ``state_dict`` in place, as ``torch.distributed.checkpoint.load``.

    All ranks of the group call it. Tensors must lie where they are wanted, with
    the shapes of the checkpoint; their sharding may be another. So they keep their identity and
    sharding, those of torch_xla's SPMD programs too: a parameter sees what was loaded.

    What a sidecar of this host still has in its spool is read there, each byte compared with its
    checksum; everything else from storage. No daemon is started for that. A checkpoint that isn't
    committed yet, and that a sidecar of the first rank's host is still at, is waited for.

    Args:
        state_dict: tensors to fill, ``Stateful`` objects, and keys of other objects.
        checkpoint_id: directory: a path, or a URL such as ``gs://bucket/run/step-100``.
        storage_reader: a :class:`pannier.client.StorageReader` with other than the
            default options; then ``checkpoint_id`` may be left out. It may be given by position.
        planner: default: ``DefaultLoadPlanner``. To load a part only, give
            ``DefaultLoadPlanner(allow_partial_load=True)``. torch_xla's ``SPMDLoadPlanner`` works,
            but isn't needed.
        process_group: the ranks that load together. Default: all.
        no_dist: this process loads by itself.
        verify: compare what is read with the checksums that were taken when it was saved; whole
            data files are read for that, from storage. Only for what Pannier wrote.
        timeout: seconds to wait for another rank: to call ``load``, to plan, to read ``.metadata``
            for all, to read its part (as long as it reads nothing more). Default: 600. The ranks
            that were waited for are named by number and host. It must be the same on all ranks.
        extra_files: names of extra files to read with the state, so that they are of the same save also
            while the checkpoint is being replaced; or a function that says which are wanted. Each
            rank asks for its own. They are in the result.

    Returns:
        how many files and bytes came from where, on all ranks together; and this rank's extra files.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved; on all ranks.
        IntegrityError: with ``verify``, bytes are not those that were saved, naming the file; a
            part of ``state_dict`` is filled then.
        InvalidRequestError: an argument can't be accepted.
        StorageError: there is no such checkpoint, or ``.metadata`` can't be read.
        LoadError: anything else; with failures by rank: also those that ended, or were not there in
            time. It is torch's ``CheckpointException``, too. Where a rank ended or stopped while the
            ranks exchanged their plans, the process group may be of no more use.
    """
    return load_checkpoint(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        verify=verify,
        timeout=timeout,
        extra_files=extra_files,
        before=raise_unretrieved,
        sharing=LoadSharing(default_settings),
        reporting=LoadReporter(default_settings).reporting,
        finish=default_ingested(no_dist=no_dist).finish_one,
    )


def list(
    root: str | os.PathLike[str],
    *,
    pattern: str = CHILDREN.text,
    storage_options: Mapping[str, Any] | None = None,
) -> builtins.list[CheckpointInfo]:
    """The checkpoints below ``root``, oldest first, in the order of their saves.

    Those that Pannier didn't write come first, by time.

    Args:
        root: a path or a URL; need not exist, but its bucket must.
        pattern: as of :func:`latest`. The step of each is taken from the part that its wildcards match.
        storage_options: of the fsspec file system. Default: from the environment.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved.
        InvalidRequestError: the root is no path, or the pattern can't be used.
        StorageError: it can't be read.
        IntegrityError: a decision is damaged, so that the order isn't known.
    """
    raise_unretrieved()
    return catalog.list_checkpoints(root, pattern=pattern, storage_options=storage_options)


def export(
    checkpoint_id: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: str = FORMAT,
    prefix: str = "",
    keys: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Writes tensors of a checkpoint as safetensors files, which Hugging Face's libraries read.

    For a process that doesn't train: ``pannier export`` does the same from a shell. Needs ``pannier[export]``, and
    memory for three times the largest file: torch's ``HuggingFaceStorageWriter``, which writes them, has a file's
    tensors, and its bytes twice, in memory at a time. The directory appears when all is written and synced.

    A tensor that the checkpoint has under two keys (tied weights) is written twice, unless one is
    excluded.

    Args:
        checkpoint_id: directory of a DCP checkpoint, Pannier's or another: a path or a URL.
        directory: local; must not exist, or be empty.
        format: ``"safetensors"``.
        prefix: takes the keys that begin with it, and removes it from their names: ``"model."``.
        keys: names, or patterns with shell wildcards, of which tensors to take; compared without the prefix.
            Default: all.
        exclude: the same, for what to leave out of those.
        dtype: of all floating-point tensors, or its name: ``"bfloat16"``. Default: as they are stored.
        max_file_bytes: most bytes of tensors in a file, by default 2 GB; a larger tensor has a file of its own.
        storage_options: of the fsspec file system. Default: from the environment.
        progress: called with the bytes of tensors that were read, and of all.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved.
        InvalidRequestError: an argument can't be accepted; a value that was chosen is no tensor that
            safetensors can hold, named by its key; the directory isn't empty; this is a rank of a process group.
        ConfigurationError: safetensors isn't installed.
        StorageError: there is no such checkpoint, or it can't be read; the directory can't be written.
        IntegrityError: a part of a tensor is missing, or bytes are not what they should be.
    """
    return export_checkpoint(
        checkpoint_id,
        directory,
        format=format,
        prefix=prefix,
        keys=keys,
        exclude=exclude,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        storage_options=storage_options,
        progress=progress,
        before=raise_unretrieved,
    )


__all__ = [
    "Advice",
    "BusyError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "Client",
    "CommitCallbackError",
    "ConfigurationError",
    "DeadlineError",
    "ExportResult",
    "Guard",
    "InDoubtError",
    "IntegrityError",
    "InvalidRequestError",
    "LoadError",
    "LoadResult",
    "PannierError",
    "SaveAbortedError",
    "SaveHandle",
    "SaveResult",
    "SaveSkippedError",
    "SaveStatus",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "UnavailableError",
    "VersionMismatchError",
    "advice",
    "async_save",
    "close",
    "configure",
    "default_client",
    "export",
    "guard",
    "latest",
    "list",
    "load",
    "patch_dcp",
    "prepare",
    "read_extra_file",
    "save",
    "wait_all",
]
