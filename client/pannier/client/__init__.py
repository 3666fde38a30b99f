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

import os
from collections.abc import Iterable, Mapping
from typing import Any

# gRPC reads this when it is imported. Unset means off to its Python package, but on to its core, which then
# prints a line at each fork: for each shell command of a notebook, and each worker of a DataLoader.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import torch

from pannier.client import console
from pannier.client.client import Client
from pannier.client.conversion.export import FORMAT, MAX_FILE_BYTES, ExportResult, Format, Progress
from pannier.client.conversion.export import export as export_checkpoint
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.default import (
    advice,
    async_save,
    close,
    configure,
    default_client,
    guard,
    latest,
    list,
    load,
    prepare,
    raise_unretrieved,
    read_extra_file,
    save,
    wait_all,
)
from pannier.client.handle import SaveHandle, SaveResult, SaveStatus
from pannier.client.integrations.dcp_patch import patch_dcp
from pannier.client.loading.catalog import CheckpointInfo
from pannier.client.loading.filesystem import MissingError
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.ranks.load_error import LoadError
from pannier.client.restore.load_result import LoadResult
from pannier.client.staging.optimizer_guard import Guard
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
