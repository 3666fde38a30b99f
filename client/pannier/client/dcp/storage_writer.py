"""DCP's ``StorageWriter`` over the sidecar, for code that calls ``dcp.save`` itself.

In: DCP's save plans; torch makes the global one. Out: a checkpoint that is
committed when ``finish`` returns. The coordinator rank opens the save with
``Begin`` and tells the others its attempt in their plans; every rank stages,
streams and hands over its own items; ``Finish`` commits.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pannier.client import torch_compat
from pannier.client.config import check_metrics, check_timeout
from pannier.client.interrupts import aside
from pannier.client.loading import filesystem
from pannier.client.planning.local_plan import bare, release, resolves_as_planned
from pannier.client.staging import stager
from pannier.client.staging.stager import Staged
from pannier.client.transport.save_errors import fail_request, in_doubt
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.common.deadline import Deadline
from pannier.v1 import sidecar_pb2
from pannier.wire import object_names, plan_codec
from pannier.wire.errors import (
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
)
from pannier.wire.failures import rank_list, ranks_text

if TYPE_CHECKING:
    from pannier.client.client import Client

_log = logging.getLogger(__name__)

_DCP_VERSION: Final = "1.0.0"
"""``Metadata.version`` as FileSystemWriter sets it since torch 2.10."""
_NO_PLAN_CACHE: Final = (
    "a planner with enable_plan_caching=True reuses plans that belong to an earlier save; leave it "
    "off here (pannier.client.async_save plans quickly without it)"
)


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a rank's plan carries between the ranks, as ``SavePlan.storage_data``."""

    rank: int
    """Global rank."""
    save: bytes
    """The SaveId, serialised."""
    checkpoint_id: str
    attempt: str = ""
    """Empty on the way to the coordinator rank."""


class _Save:
    """One save of this writer on this rank."""

    def __init__(
        self, session: SidecarClient, context: sidecar_pb2.SaveContext, timeout_s: float
    ) -> None:
        self.session = session
        self.context = context
        self.deadline = Deadline(timeout_s)
        self.attempt = ""
        self.set_up = False
        self.is_open = False
        """This rank has opened it with Begin, and not ended it."""
        self.writing = False

    @property
    def ticket(self) -> Ticket:
        return Ticket(
            self.context.rank,
            self.context.save.SerializeToString(deterministic=True),
            self.context.checkpoint_id,
            self.attempt,
        )

    def fail(self, error: BaseException) -> None:
        """Ends the save on all ranks. The caller raises ``error``, whether they heard of it or not."""
        self.is_open = False
        if isinstance(error, SaveAbortedError):
            return
        try:
            self.session.fail(fail_request(self.context, error))
        except PannierError as problem:
            if len(self.context.ranks) > 1:
                _log.warning("the other ranks could not be told of %r: %s", error, problem)


class StorageWriter(storage.StorageWriter):
    """Writes a checkpoint through Pannier; for ``dcp.save(storage_writer=...)``.

    ``dcp.save`` returns when the checkpoint is committed. ``dcp.async_save`` works
    too, at the price of torch's own staging: it copies the state dict first, on the
    training thread; :func:`pannier.client.async_save` copies once. A writer can be
    used for many saves, one at a time; all ranks of the group make the same ones.

    Args:
        path: directory of the checkpoint: a path, or a URL such as ``gs://bucket/run/step-100``.
        client: default: the process's own.
        process_group: the one that ``dcp.save`` gets, so that saves of several
            groups can be told apart.
        no_dist: as ``dcp.save`` gets it.
        timeout: seconds until a save must be committed. Default: the client's ``save_timeout``.
        metrics: as :meth:`pannier.client.Client.async_save` takes them: what :attr:`metrics` is at first.
        overwrite: as :meth:`pannier.client.Client.async_save` takes it; True and False as torch's
            ``FileSystemWriter`` has them.

    Raises:
        InvalidRequestError: the path is none, the timeout not within 7 days, or a metric no number.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        client: "Client | None" = None,
        process_group: Any = None,
        no_dist: bool = False,
        timeout: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool | None = None,
    ) -> None:
        super().__init__()
        if not (overwrite is None or isinstance(overwrite, bool)):
            raise InvalidRequestError(f"overwrite={overwrite!r}: use None, True or False")
        self._overwrite = overwrite
        self._checkpoint_id = _checkpoint_id(path)
        self._own_client = client
        self._process_group = process_group
        self._no_dist = no_dist
        self._timeout = None if timeout is None else check_timeout(timeout)
        self.metrics = metrics
        self._save: _Save | None = None
        self._save_id = ""

    @property
    def checkpoint_id(self) -> str:
        """The directory that is written: an absolute path or a URL."""
        return self._checkpoint_id

    @property
    def path(self) -> str | Path:
        """:attr:`checkpoint_id` as torch's ``FileSystemWriter`` has it, or ``FsspecWriter`` for a URL."""
        return filesystem.as_torch(self._checkpoint_id)

    @property
    def save_id(self) -> str:
        """The attempt of the last ``dcp.save``, as in ``.metadata``; empty until it writes data."""
        return self._save_id

    @property
    def process_group(self) -> Any:
        """The ranks that save together; None: all."""
        return self._process_group

    @property
    def no_dist(self) -> bool:
        """Whether this process saves by itself."""
        return self._no_dist

    @property
    def timeout(self) -> float | None:
        """Seconds until a save must be committed; None: the client's ``save_timeout``."""
        return self._timeout

    @property
    def overwrite(self) -> bool | None:
        """Whether a checkpoint is replaced; None: one of this job."""
        return self._overwrite

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers by name that go with the saves from now on; set them anew before the next one.

        Setting raises InvalidRequestError naming what is no number.
        """
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Mapping[str, Any] | None) -> None:
        self._metrics = check_metrics(metrics)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, to ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._checkpoint_id = _checkpoint_id(checkpoint_id)
        self._save_id = ""

    def storage_meta(self) -> StorageMeta:
        """Takes the number of the group's next save, on every rank: DCP's first call of a save.

        Raises:
            InvalidRequestError: this rank is not in the group, or the writer is at a save.
            UnavailableError: the sidecar can't be reached.
        """
        save = self._begin()
        return StorageMeta(
            checkpoint_id=self._checkpoint_id, save_id=object_names.save_text(save.context.save)
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks that this save is one Pannier can make. Raises InvalidRequestError."""
        if not kwargs.get("use_collectives", True):
            raise InvalidRequestError(
                "use_collectives=False writes a checkpoint per rank, which Pannier does not: leave "
                "it out, or give no_dist=True and a checkpoint per rank"
            )
        save = self._save
        if save is None or save.set_up:
            save = self._begin()
        save.set_up = True
        own = list(save.context.ranks).index(save.context.rank)
        if kwargs.get("rank", own) != own or is_coordinator != (own == 0):
            raise InvalidRequestError(
                f"this StorageWriter is for the ranks {rank_list(save.context.ranks)}, of which "
                f"this is number {own}, but dcp.save runs on other ranks: give "
                "StorageWriter(process_group=..., no_dist=...) what dcp.save gets"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Notes on the plan whose it is. Raises InvalidRequestError for one out of torch's cache."""
        if not plan.usable:
            raise InvalidRequestError(_NO_PLAN_CACHE)
        items = _without_replicas(plan.items)
        return dataclasses.replace(plan, items=items, storage_data=self._current().ticket)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Opens the save, and tells each rank's plan its attempt. On the coordinator rank.

        Raises:
            InvalidRequestError: the ranks are not at the same save.
            PannierError: the coordinator doesn't take it.
        """
        save = self._current()
        ranks = list(save.context.ranks)
        if len(plans) != len(ranks):
            raise InvalidRequestError(
                f"dcp.save runs on {len(plans)} ranks, this StorageWriter is for {len(ranks)} "
                f"({rank_list(ranks)}): give StorageWriter(process_group=..., no_dist=...) what "
                "dcp.save gets"
            )
        _check_tickets(save.ticket, [plan.storage_data for plan in plans])
        request = sidecar_pb2.BeginRequest(
            context=save.context, save_timeout_s=save.deadline.remaining()
        )
        try:
            save.attempt = save.session.begin(request).attempt
        except PannierError as error:
            save.fail(error)
            raise
        save.is_open = True
        ticket = save.ticket
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(ticket, rank=rank))
            for plan, rank in zip(plans, ranks, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stages and streams this rank's items; returns when they are ingested.

        Raises:
            InvalidRequestError: an item can't be saved; names its key.
            Exception: whatever the planner, pickling or a copy raised, with a note of the key.
            SaveAbortedError: the save ended on all ranks, with failures by rank.
        """
        save = self._current()
        with self._ending_on_error(save):
            ticket = plan.storage_data
            if torch_compat.caches_plans(bare(planner)):
                raise InvalidRequestError(_NO_PLAN_CACHE)
            if not isinstance(ticket, Ticket) or ticket.save != save.ticket.save:
                raise InvalidRequestError(
                    f"the plan of rank {save.context.rank} is not the one that was made for save "
                    f"{object_names.save_text(save.context.save)}: the planner must leave "
                    "SavePlan.storage_data as it is"
                )
            save.attempt = self._save_id = ticket.attempt
            staged = self._ingest(save, plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=placed.length,
                    storage_data=torch_compat.StorageInfo(
                        placed.file, placed.offset, placed.length
                    ),
                )
                for item, placed in zip(plan.items, staged.locations, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits; ``metadata`` gets what ``.metadata`` will hold. On the coordinator rank.

        Raises:
            InvalidRequestError: the metadata is none that Pannier can write.
            SaveAbortedError: the save ended without a checkpoint, with failures by rank.
            InDoubtError: how it ended is not known.
        """
        save = self._current()
        with self._ending_on_error(save):
            if hasattr(metadata, "version"):
                metadata.version = _DCP_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for rank in results for result in rank
            }
            metadata.storage_meta = StorageMeta(
                checkpoint_id=save.context.checkpoint_id, save_id=save.attempt
            )
            seconds = save.deadline.remaining()
            request = sidecar_pb2.FinishRequest(
                context=save.context,
                attempt=save.attempt,
                metadata=plan_codec.encode_metadata(_checked(metadata)),
                timeout_s=seconds,
            )
            try:
                save.session.finish(request, seconds)
            except (SaveAbortedError, InvalidRequestError):
                raise
            except PannierError as error:
                # The coordinator may have the metadata: the commit needs nothing more from here.
                raise in_doubt(save.context, str(error)) from error
        save.is_open = False
        self._save = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be written there."""
        try:
            _checkpoint_id(checkpoint_id)
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

    def _client(self) -> "Client":
        if self._own_client is None:
            # The default client knows this class.
            from pannier.client import client as api

            return api.default_client()
        return self._own_client

    def _begin(self) -> _Save:
        client = self._client()
        previous, self._save = self._save, None
        # First of all: whatever is raised below, the ranks' numbers stay in step.
        context = client.open_save(
            self._checkpoint_id, self._process_group, self._no_dist, self._overwrite
        )
        session, _ = client.session_for(self._process_group, self._no_dist)
        if previous is not None and previous.writing:
            self._save = previous
            raise InvalidRequestError(
                f"this StorageWriter is still writing {previous.context.checkpoint_id}: wait for "
                "that save first, or use another StorageWriter"
            )
        if previous is not None and previous.is_open:
            previous.fail(PannierError("dcp.save failed before this rank's data was written"))
        timeout = client.settings.save_timeout if self._timeout is None else self._timeout
        self._save = _Save(session, context, timeout)
        self._save_id = ""
        return self._save

    def _current(self) -> _Save:
        if self._save is None:
            raise InvalidRequestError("this StorageWriter is at no save: dcp.save sets it up")
        return self._save

    def _ingest(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> Staged:
        slots = self._client().slots
        saving = aside(
            lambda: SaveTask(
                save.session,
                save.context,
                on_busy="wait",
                metrics=self._metrics,
                deadline=save.deadline,
            )
        )
        try:
            slot = slots.admit("wait", save.deadline.remaining())
            try:
                saving.planned(save.attempt, "")
                staged = stager.stage_external(
                    plan.items,
                    planner.resolve_data,
                    save.attempt,
                    save.context.rank,
                    lambda sizes: aside(lambda: slot.hold(save.session.arena(slots.pool, sizes))),
                    as_planned=resolves_as_planned(planner),
                )
                release(planner)
                saving.staged(staged)
            except BaseException:
                aside(slot.free)
                raise
        except BaseException:
            aside(saving.status.forget)
            raise
        aside(lambda: saving.send(slot))
        if saving.status.stop.is_set:
            # The news of the abort bring the causes, of all ranks.
            error = saving.handle.exception()
            assert error is not None
            raise error
        # The process may end before it hears of the commit, which torch's coordinator rank waits for.
        saving.status.trace()
        return staged

    @contextlib.contextmanager
    def _ending_on_error(self, save: _Save) -> Iterator[None]:
        save.writing = True
        try:
            yield
        except BaseException as error:
            save.fail(error)
            name_save(error, object_names.save_text(save.context.save), save.context.checkpoint_id)
            raise
        finally:
            save.writing = False


def _without_replicas(items: list[WriteItem]) -> list[WriteItem]:
    """One item for each chunk of a rank: torch_xla's planner drops those that the rank has twice."""
    seen: dict[tuple[Any, ...], WriteItem] = {}
    for item in items:
        # The index alone would not tell a key that is both an object and a tensor.
        seen.setdefault((item.index, item.type), item)
    return list(seen.values())


def _checkpoint_id(path: str | os.PathLike[str]) -> str:
    url = filesystem.absolute(path)
    object_names.split_checkpoint_id(url)
    return url


def _check_tickets(own: Ticket, tickets: Sequence[Any]) -> None:
    """Raises InvalidRequestError unless all ranks are at the same save of the same checkpoint."""
    given = [ticket for ticket in tickets if isinstance(ticket, Ticket)]
    others = [t for t in given if t.checkpoint_id != own.checkpoint_id]
    if others:
        raise InvalidRequestError(
            "ranks disagree on the checkpoint: "
            + "; ".join(f"rank {t.rank} saves {t.checkpoint_id}" for t in (own, *others[:4]))
        )
    strays = [ticket.rank for ticket in given if ticket.save != own.save]
    if strays:
        raise InvalidRequestError(
            f"{ranks_text(strays)} joined another save than rank {own.rank}: have all ranks "
            "of the group made the same calls to save?"
        )


def _checked(metadata: Metadata) -> Metadata:
    data = metadata.planner_data
    if data is None or (
        isinstance(data, Mapping)
        and all(
            isinstance(key, str)
            and isinstance(path, Sequence)
            and all(isinstance(part, str | int) for part in path)
            for key, path in data.items()
        )
    ):
        return metadata
    raise InvalidRequestError(
        f"planner_data of type {type(data).__name__} can't be saved; only flatten mappings (key to "
        "path) can: keep the rest in the state dict, or save with torch's own storage writer"
    )
