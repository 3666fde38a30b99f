"""DCP's ``StorageWriter`` over the sidecar, for code that calls ``dcp.save`` itself.

In: DCP's calls of one save after the other; torch makes the global plan. Out: a checkpoint that is
committed when ``finish`` returns. The coordinator rank opens the save with ``Begin`` and sends its
attempt to the others in their plans; every rank stages, streams and hands over its own items;
``Finish`` commits.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pannier.client.client import Client
from pannier.client.dcp.writer_save import NO_PLAN_CACHE, WriterSave
from pannier.client.default import default_client
from pannier.client.loading import filesystem
from pannier.client.options import Destination, checkpoint_path
from pannier.client.user_errors import at_call
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError, PannierError


class StorageWriter(Destination, storage.StorageWriter):
    """Writes a checkpoint through Pannier; for ``dcp.save(storage_writer=...)``.

    ``dcp.save`` returns when the checkpoint is committed. ``dcp.async_save`` works
    too, at the price of torch's own staging: it copies the state dict first, on the
    training thread; :func:`pannier.client.async_save` copies once. A writer can be
    used for many saves, one at a time; all ranks of the group make the same ones.

    Args:
        path: directory of the checkpoint: a path, or a URL such as ``gs://bucket/run/step-100``.
        client: default: the process's own.
        process_group: the one that ``dcp.save`` gets, so that saves of several
            groups can be distinguished.
        no_dist: as ``dcp.save`` gets it.
        timeout: seconds until a save must be committed. Default: the client's ``save_timeout``.
        metrics, extra_files: initial values of :attr:`metrics` and :attr:`extra_files`; as
            :meth:`pannier.client.Client.async_save` takes them.
        overwrite: as :meth:`pannier.client.Client.async_save` takes it; True and False as torch's
            ``FileSystemWriter`` has them.

    Raises:
        InvalidRequestError: the path is not valid, the timeout is over 7 days, a metric is not a number, or a
            file can't be added.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        client: Client | None = None,
        process_group: Any = None,
        no_dist: bool = False,
        timeout: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        overwrite: bool | None = None,
    ) -> None:
        super().__init__(
            path,
            process_group=process_group,
            no_dist=no_dist,
            timeout=timeout,
            metrics=metrics,
            extra_files=extra_files,
            overwrite=overwrite,
        )
        self._own_client = client
        self._save: WriterSave | None = None
        self._save_id = ""

    @property
    def path(self) -> str | Path:
        """:attr:`checkpoint_id` as torch's ``FileSystemWriter`` has it, or ``FsspecWriter`` for a URL."""
        return filesystem.as_torch(self._checkpoint_id)

    @property
    def save_id(self) -> str:
        """The attempt of the last ``dcp.save``, as in ``.metadata``; empty until it writes data."""
        return self._save_id

    @at_call
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, to ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._checkpoint_id = checkpoint_path(checkpoint_id)
        self._save_id = ""

    @at_call
    def storage_meta(self) -> StorageMeta:
        """Takes the number of the group's next save, on every rank: DCP's first call of a save.

        Raises:
            InvalidRequestError: this rank is not in the group, or the writer has a save in progress.
            UnavailableError: the sidecar can't be reached.
        """
        save = self._begin()
        return StorageMeta(
            checkpoint_id=self._checkpoint_id, save_id=object_names.save_text(save.context.save)
        )

    @at_call
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks that this save is one Pannier can make. Raises InvalidRequestError."""
        if not kwargs.get("use_collectives", True):
            raise InvalidRequestError(
                "use_collectives=False writes a checkpoint per rank, which Pannier does not: leave "
                "it out, or give no_dist=True and a checkpoint per rank"
            )
        save = self._save
        if save is None or save.is_set_up:
            save = self._begin()
        save.set_up(is_coordinator, kwargs.get("rank"))

    @at_call
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds the save's ticket to the plan. Raises InvalidRequestError for a plan from torch's cache."""
        if not plan.usable:
            raise InvalidRequestError(NO_PLAN_CACHE)
        items = _without_replicas(plan.items)
        return dataclasses.replace(plan, items=items, storage_data=self._current().ticket)

    @at_call
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Opens the save, and adds its attempt to each rank's plan. On the coordinator rank.

        Raises:
            InvalidRequestError: the ranks are not at the same save.
            PannierError: the coordinator doesn't accept it.
        """
        return self._current().open(plans)

    @at_call
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stages and streams this rank's items; returns when they are ingested.

        Raises:
            InvalidRequestError: an item can't be saved; names its key.
            Exception: whatever the planner, pickling or a copy raised, with a note of the key.
            SaveAbortedError: the save ended on all ranks, with failures by rank.
        """
        save = self._current()
        try:
            results = save.write(plan, planner, self._metrics, self._extra_files)
        finally:
            self._save_id = save.attempt
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @at_call
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits; ``metadata`` gets what ``.metadata`` will hold. On the coordinator rank.

        Raises:
            InvalidRequestError: Pannier can't write this metadata.
            SaveAbortedError: the save ended without a checkpoint, with failures by rank.
            InDoubtError: its outcome is not known.
        """
        self._current().finish(metadata, results)
        self._save = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be written there."""
        try:
            checkpoint_path(checkpoint_id)
        except PannierError:
            return False
        return True

    def __reduce__(self) -> NoReturn:
        # AsyncCheckpointerType.PROCESS sends the writer to another process.
        raise InvalidRequestError(
            "a StorageWriter can't leave its process (is it AsyncCheckpointerType.PROCESS?): the "
            "sidecar is the other process already; use pannier.client.async_save, or the THREAD "
            "type"
        )

    def _begin(self) -> WriterSave:
        client = self._own_client or default_client()
        previous, self._save = self._save, None
        # First of all, so that the ranks' numbers stay in step if anything below raises.
        timeout = client.settings.save_timeout if self._timeout is None else self._timeout
        sidecar, save = client.open_save(
            self._checkpoint_id,
            self._process_group,
            self._no_dist,
            timeout_s=timeout,
            overwrite=self._overwrite,
        )
        if previous is not None and previous.is_writing:
            self._save = previous
            raise InvalidRequestError(
                f"this StorageWriter is still writing {previous.context.checkpoint_id}: wait for "
                "that save first, or use another StorageWriter"
            )
        if previous is not None:
            previous.abandon()
        self._save = WriterSave(sidecar, save, client.saves)
        self._save_id = ""
        return self._save

    def _current(self) -> WriterSave:
        if self._save is None:
            raise InvalidRequestError(
                "this StorageWriter has no save in progress: dcp.save sets it up"
            )
        return self._save


def _without_replicas(items: list[WriteItem]) -> list[WriteItem]:
    """One item for each chunk of a rank: torch_xla's planner drops those that the rank has twice."""
    seen: dict[tuple[Any, ...], WriteItem] = {}
    for item in items:
        # A key may be both an object and a tensor, which have equal indices.
        seen.setdefault((item.index, item.type), item)
    return list(seen.values())
