"""Takes a training job's checkpoints off its hands.

    from pannier import client

    handle = client.async_save({"model": model}, checkpoint_id="gs://bucket/run/step-100")
    ...  # training goes on
    handle.result()

The functions here act on one client per process, made when it is first used;
:class:`Client` makes others.
"""

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from pannier.client.api import Client, close, configure, default_client
from pannier.client.checkpoints import CheckpointInfo, latest
from pannier.client.checkpoints import list_checkpoints as list
from pannier.client.handle import SaveHandle, SaveResult, SaveStatus
from pannier.client.load import load
from pannier.client.reader import StorageReader
from pannier.client.writer import StorageWriter
from pannier.wire.errors import (
    BusyError,
    ConfigurationError,
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    LoadError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    StorageError,
    UnavailableError,
    VersionMismatchError,
)


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_busy: str = "wait",
    timeout: float | None = None,
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
    )


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_busy: str = "wait",
    timeout: float | None = None,
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
    )


def wait_all(timeout: float | None = None) -> None:
    """Waits until every save has ended. See :meth:`Client.wait_all`."""
    default_client().wait_all(timeout)


__all__ = [
    "BusyError",
    "CheckpointInfo",
    "Client",
    "ConfigurationError",
    "DeadlineError",
    "IntegrityError",
    "InvalidRequestError",
    "LoadError",
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
    "async_save",
    "close",
    "configure",
    "default_client",
    "latest",
    "list",
    "load",
    "save",
    "wait_all",
]
