"""Saves and loads checkpoints of PyTorch training jobs; saves are committed in the background.

    from pannier import client

    handle = client.async_save({"model": model}, checkpoint_id="gs://bucket/run/step-100")
    ...  # training goes on
    handle.result()

The functions of this module use one client per process, which is made at its first use. To have
others, make a :class:`Client`.

Rank 0 logs one line per save and load, and what a call waits for if that takes longer than 2 s. Lines go to
stderr, unless the program has handlers for the logger ``pannier``: then to these, at the program's level.
``PANNIER_LOG`` sets that logger's level: ``debug``, ``info``, ``warning``, ``error``, ``critical`` or
``off``.
"""

import builtins
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

# gRPC reads this when it is imported. Unset means off to its Python package, but on to its core, which then
# prints a line at each fork: for each shell command of a notebook, and each worker of a DataLoader.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from pannier.client.client import Client, close, default_client
from pannier.client.conversion.export import FORMAT, MAX_FILE_BYTES, ExportResult, Format, Progress
from pannier.client.conversion.export import export as export_checkpoint
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.default_factory import configure, default_settings, raise_unretrieved
from pannier.client.handle import SaveHandle, SaveResult, SaveStatus
from pannier.client.integrations.dcp_patch import patch_dcp
from pannier.client.loading import catalog
from pannier.client.loading.catalog import CheckpointInfo
from pannier.client.loading.filesystem import MissingError
from pannier.client.loading.load import load as load_checkpoint
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.messages import console
from pannier.client.options import OnBusy, Staging
from pannier.client.ranks.load_error import LoadError
from pannier.client.restore.load_report import LoadReporter
from pannier.client.restore.load_result import LoadResult
from pannier.client.restore.load_sharing import LoadSharing
from pannier.client.resume.extra_files import read_extra_file
from pannier.client.resume.ingested_saves import default_ingested
from pannier.client.resume.latest import latest
from pannier.client.staging.optimizer_guard import Guard
from pannier.common.locations import CHILDREN
from pannier.common.save_interval import Advice
from pannier.wire.errors import (
    BusyError,
    CheckpointExistsError,
    CommitCallbackError,
    ConfigurationError,
    DeadlineError,
    Failure,
    ForbiddenError,
    InDoubtError,
    IntegrityError,
    InvalidRequestError,
    OverloadedError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    StorageError,
    UnauthenticatedError,
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
    on_busy: OnBusy = "wait",
    timeout: float | None = None,
    staging: Staging = "blocking",
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
    on_busy: OnBusy = "wait",
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

    Computed from this process's last 20 committed saves (of its largest group, where several groups of
    ranks save) and its last 20 loads. ``str()`` of the advice is one line. The interval is the one that
    loses the least time by the estimate of Young (1974) and Daly (2006);
    :mod:`pannier.common.save_interval` has the model. No other rank is asked, so that ranks may get
    different advice: a loop must follow that of one rank. Unlike other calls, this one raises no
    unretrieved errors.

    The cost of a save is how long ``async_save`` kept the training loop on the slowest rank
    (:func:`save` also waits for the commit). Not measured and not counted: slower steps while a save is
    in flight, an optimizer's wait for an overlapped copy, and the time until a failure is noticed and
    processes are started again. Saves by :class:`StorageWriter` aren't counted. Without any load, a
    restore is assumed to take as long as a save takes until it is durable.

    Args:
        mtbf: mean time between failures of the whole job, seconds or a timedelta; for example 45 hours
            for 16 hosts that each fail once in 30 days. None: only the costs are returned.

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

    All ranks of the group call it. Tensors must already be allocated on their devices, with the
    shapes of the checkpoint; their sharding may differ from the saved one. They are filled in place
    and keep their identity and sharding, also in torch_xla's SPMD programs: a parameter sees what
    was loaded.

    Files that a sidecar of this host still has in its spool are read from there, and compared with
    their checksums; everything else is read from storage, or through sidecars from other hosts. No
    daemon is started for that. If the checkpoint isn't committed yet and a sidecar of the first
    rank's host still has its save in progress, the call waits for the commit.

    Args:
        state_dict: tensors to fill, ``Stateful`` objects, and keys of other objects.
        checkpoint_id: directory: a path, or a URL such as ``gs://bucket/run/step-100``.
        storage_reader: a :class:`pannier.client.StorageReader` with options other than the
            defaults; then ``checkpoint_id`` may be left out. It may be given by position.
        planner: default: ``DefaultLoadPlanner``. To load a part only, give
            ``DefaultLoadPlanner(allow_partial_load=True)``. torch_xla's ``SPMDLoadPlanner`` works,
            but isn't needed.
        process_group: the ranks that load together. Default: all.
        no_dist: this process loads by itself.
        verify: compare what is read with the checksums that were taken when it was saved; whole
            data files are read for that, from storage. Only for what Pannier wrote.
        timeout: seconds to wait for another rank at each step: to call ``load``, to plan, to read
            ``.metadata`` for all, and to read its part (while it makes no progress). Default: 600.
            The error names the missing ranks and their hosts. Must be the same on all ranks.
        extra_files: names of extra files to read with the state, or a function that returns whether
            a name is wanted. They belong to the same save as the state, also while the checkpoint is
            being replaced. Each rank finds the files that it asked for in its result.

    Returns:
        the numbers of files and bytes by source, of all ranks together; and this rank's extra files.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved; on all ranks.
        IntegrityError: with ``verify``, bytes of a file differ from those that were saved; names the
            file. ``state_dict`` is then filled in part.
        InvalidRequestError: an argument can't be accepted.
        MissingError: there is no such checkpoint; also a FileNotFoundError.
        StorageError: ``.metadata`` can't be read.
        LoadError: anything else; with failures by rank, which include ranks that ended or did not
            arrive in time. It is also torch's ``CheckpointException``. If a rank ended or stopped
            while the ranks exchanged their plans, the process group may no longer be usable.
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
        raise_unretrieved=raise_unretrieved,
        sharing=LoadSharing(default_settings),
        reporting=LoadReporter(default_settings).reporting,
        finish_ingested=default_ingested(no_dist=no_dist).finish_one,
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
        pattern: as in :func:`latest`. A checkpoint's step is the last number in the part of its name
            that the wildcards match.
        storage_options: of the fsspec file system. Default: from the environment.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved.
        InvalidRequestError: the root is not a path, or the pattern can't be used.
        StorageError: it can't be read.
        IntegrityError: a decision is damaged, so that the order isn't known.
    """
    raise_unretrieved()
    return catalog.list_checkpoints(root, pattern=pattern, storage_options=storage_options)


def export(
    checkpoint_id: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: Format = FORMAT,
    prefix: str = "",
    keys: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Writes tensors of a checkpoint as safetensors files, which Hugging Face's libraries read.

    To be called in a process that doesn't train; ``pannier export`` does the same from a shell. Needs
    ``pannier[export]``, and memory for three times the largest file, since torch's
    ``HuggingFaceStorageWriter`` holds a file's tensors and two copies of its bytes. The directory
    appears when all is written and synced.

    A tensor that the checkpoint has under two keys (tied weights) is written twice, unless one is
    excluded.

    Args:
        checkpoint_id: directory of a DCP checkpoint, Pannier's or another: a path or a URL.
        directory: local; must not exist, or be empty.
        format: ``"safetensors"``.
        prefix: only keys that begin with it are exported, and named without it: ``"model."``.
        keys: names of the tensors to export, or patterns with shell wildcards; compared without the prefix.
            Default: all.
        exclude: names or patterns of tensors to leave out, compared in the same way.
        dtype: to convert floating-point tensors to, or its name: ``"bfloat16"``. Default: as they are stored.
        max_file_bytes: most bytes of tensors in a file, by default 2 GB; a larger tensor has a file of its own.
        storage_options: of the fsspec file system. Default: from the environment.
        progress: called with the bytes of tensors that were read so far, and with the total.

    Raises:
        PannierError: an earlier save failed and its error was not retrieved.
        InvalidRequestError: an argument can't be accepted; a chosen value isn't a tensor that safetensors
            can hold (names its key); the directory isn't empty; this is a rank of a process group.
        ConfigurationError: safetensors isn't installed.
        MissingError: there is no such checkpoint; also a FileNotFoundError.
        StorageError: it can't be read; the directory can't be written.
        IntegrityError: a part of a tensor is missing, or bytes are damaged.
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
    "Failure",
    "ForbiddenError",
    "Guard",
    "InDoubtError",
    "IntegrityError",
    "InvalidRequestError",
    "LoadError",
    "LoadResult",
    "MissingError",
    "OverloadedError",
    "PannierError",
    "SaveAbortedError",
    "SaveHandle",
    "SaveResult",
    "SaveSkippedError",
    "SaveStatus",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "UnauthenticatedError",
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

for _exported in [globals()[name] for name in __all__]:
    if isinstance(_exported, type) and issubclass(_exported, PannierError):
        # So that a traceback has the name that an ``except`` needs.
        _exported.__module__ = __name__
