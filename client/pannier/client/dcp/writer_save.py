"""One save of a storage writer on this rank: opened, staged, streamed, handed over, committed.

In: DCP's plans, whose ``storage_data`` carries a :class:`Ticket` between the ranks. Out: ingested
items, and on the coordinator rank a commit. Owned by a storage writer. Not thread-safe: DCP makes
one call at a time.
"""

import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from pannier.client import console, torch_compat
from pannier.client.engine import engine
from pannier.client.planning.local_plan import bare, resolves_as_planned
from pannier.client.saves.save import Save
from pannier.client.saves.saves import Saves
from pannier.client.staging import stager
from pannier.client.staging.layout import PlannerValues, own_layout
from pannier.client.staging.stager import Staged
from pannier.client.transport.save_errors import fail_request, in_doubt
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.client.user_errors import name_save
from pannier.v1 import sidecar_pb2
from pannier.wire import object_names, plan_codec
from pannier.wire.errors import (
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
)
from pannier.wire.failures import rank_list, ranks_text

_log = logging.getLogger(__name__)

_DCP_VERSION: Final = "1.0.0"
"""``Metadata.version`` as FileSystemWriter sets it since torch 2.10."""
NO_PLAN_CACHE: Final = (
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


class _State(enum.Enum):
    NUMBERED = enum.auto()
    """It has the group's next number."""
    SET_UP = enum.auto()
    """DCP has called ``set_up_storage_writer``."""
    OPEN = enum.auto()
    """This rank has opened it with ``Begin``, and not ended it."""
    ENDED = enum.auto()


class WriterSave:
    """See the module.

    Args:
        sidecar: gets the save.
        save: accepted, with the group's next number.
        saves: of the client, which isn't closed while DCP is about to finish this one.
    """

    def __init__(self, sidecar: SidecarClient, save: Save, saves: Saves) -> None:
        self.context = save.call.context(sidecar)
        self._sidecar = sidecar
        self._save = save
        self._began = time.monotonic()
        self._saves = saves
        self._attempt = ""
        self._state = _State.NUMBERED
        self._is_writing = False

    @property
    def attempt(self) -> str:
        """Empty until the coordinator rank has opened the save."""
        return self._attempt

    @property
    def is_set_up(self) -> bool:
        """Whether DCP has called ``set_up_storage_writer`` for it."""
        return self._state is not _State.NUMBERED

    @property
    def is_writing(self) -> bool:
        """Whether a thread of DCP is writing or finishing it."""
        return self._is_writing

    @property
    def ticket(self) -> Ticket:
        """For this rank's plan."""
        return Ticket(
            self.context.rank,
            self.context.save.SerializeToString(deterministic=True),
            self.context.checkpoint_id,
            self._attempt,
        )

    def set_up(self, is_coordinator: bool, rank: int | None) -> None:
        """Checks that DCP runs on this save's ranks.

        Args:
            rank: this process's number among DCP's ranks; None: not given.

        Raises InvalidRequestError: it runs on others.
        """
        self._state = _State.SET_UP
        own = list(self.context.ranks).index(self.context.rank)
        if (own if rank is None else rank) != own or is_coordinator != (own == 0):
            raise InvalidRequestError(
                f"this StorageWriter is for the ranks {rank_list(self.context.ranks)}, of which "
                f"this is number {own}, but dcp.save runs on other ranks: give "
                "StorageWriter(process_group=..., no_dist=...) what dcp.save gets"
            )

    def open(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Opens the save; the plans with tickets that name the attempt. On the coordinator rank.

        Raises:
            InvalidRequestError: the ranks are not at the same save.
            PannierError: the coordinator doesn't accept it.
        """
        ranks = list(self.context.ranks)
        if len(plans) != len(ranks):
            raise InvalidRequestError(
                f"dcp.save runs on {len(plans)} ranks, this StorageWriter is for {len(ranks)} "
                f"({rank_list(ranks)}): give StorageWriter(process_group=..., no_dist=...) what "
                "dcp.save gets"
            )
        _check_tickets(self.ticket, [plan.storage_data for plan in plans])
        request = sidecar_pb2.BeginRequest(
            context=self.context, save_timeout_s=self._save.options.deadline.remaining()
        )
        try:
            self._attempt = engine().call(lambda: self._sidecar.begin(request)).attempt
        except PannierError as error:
            self.fail(error)
            raise
        self._state = _State.OPEN
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(self.ticket, rank=rank))
            for plan, rank in zip(plans, ranks, strict=True)
        ]

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        metrics: Mapping[str, float],
        extra_files: Mapping[str, bytes],
    ) -> list[WriteResult]:
        """Stages, streams and hands over this rank's items; returns when they are ingested.

        Raises what :meth:`pannier.client.StorageWriter.write_data` raises.
        """
        with self._failing_on_error():
            ticket = plan.storage_data
            if torch_compat.caches_plans(bare(planner)):
                raise InvalidRequestError(NO_PLAN_CACHE)
            if not isinstance(ticket, Ticket) or ticket.save != self.ticket.save:
                raise InvalidRequestError(
                    f"the plan of rank {self.context.rank} is not the one that was made for save "
                    f"{object_names.save_text(self.context.save)}: the planner must leave "
                    "SavePlan.storage_data as it is"
                )
            self._attempt = ticket.attempt
            staged = self._ingest(plan, planner, metrics, extra_files)
        prefix = object_names.data_prefix(self._attempt)
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=placed.length,
                storage_data=torch_compat.StorageInfo(
                    prefix + placed.file, placed.offset, placed.length
                ),
            )
            for item, placed in zip(plan.items, staged.locations, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits; ``metadata`` gets what ``.metadata`` will hold. On the coordinator rank.

        Raises what :meth:`pannier.client.StorageWriter.finish` raises.
        """
        with self._failing_on_error():
            if hasattr(metadata, "version"):
                metadata.version = _DCP_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for rank in results for result in rank
            }
            metadata.storage_meta = StorageMeta(
                checkpoint_id=self.context.checkpoint_id, save_id=self._attempt
            )
            seconds = self._save.options.deadline.remaining()
            request = sidecar_pb2.FinishRequest(
                context=self.context,
                attempt=self._attempt,
                metadata=plan_codec.encode_metadata(_checked(metadata)),
                timeout_s=seconds,
            )
            try:
                engine().call(lambda: self._sidecar.finish(request, seconds))
            except (SaveAbortedError, InvalidRequestError):
                raise
            except PannierError as error:
                # The coordinator may have the metadata, and needs nothing more to commit.
                raise in_doubt(self.context, str(error)) from error
        self._state = _State.ENDED
        self._saves.let_go(self)
        size = sum(result.size_in_bytes for rank in results for result in rank)
        console.log_committed(self.context, size, time.monotonic() - self._began)

    def abandon(self) -> None:
        """Ends the save on all ranks if it is open: DCP failed elsewhere."""
        if self._state is _State.OPEN:
            self.fail(PannierError("dcp.save failed before this rank's data was written"))

    def fail(self, error: BaseException) -> None:
        """Ends the save on all ranks. The caller raises ``error``, even if they can't be reached."""
        self._state = _State.ENDED
        try:
            if not isinstance(error, SaveAbortedError):
                engine().call(lambda: self._sidecar.fail(fail_request(self.context, error)))
        except PannierError as problem:
            if len(self.context.ranks) > 1:
                _log.warning("%r could not be reported to the other ranks: %s", error, problem)
        finally:
            self._saves.let_go(self)

    def _ingest(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        metrics: Mapping[str, float],
        extra_files: Mapping[str, bytes],
    ) -> Staged:
        save = self._save
        frame = engine().at_end_of_call(partial(save.drop, None))  # noqa: F841 - freed with this call
        save.call.accept(
            self.context.checkpoint_id, dataclasses.replace(save.options, metrics=metrics)
        )
        try:
            save.connected(self._sidecar, self.context)
            is_planned = resolves_as_planned(planner)
            layout = own_layout(plan.items, self.context.rank, is_planned=is_planned)
            arena = engine().call(lambda: save.acquire(self._attempt, "", layout.sizes))
            handle = save.handle
            staged = stager.stage(layout, PlannerValues(plan.items, planner), arena)
            staged = stager.add_extra_files(staged, self.context.rank, extra_files)
            save.staged(staged)
        except BaseException:
            save.end_call()
            raise
        if self._state is _State.OPEN:
            # DCP calls `finish` on this rank, unless the save fails elsewhere.
            self._saves.hold(self, self._sidecar)

            def ended(_: object) -> None:
                if handle.outcome.error is not None:
                    self._saves.let_go(self)

            handle.add_done_callback(ended)
        if not engine().call(save.sent):
            self._saves.let_go(self)
            # With the causes of all ranks.
            error = handle.exception()
            assert error is not None
            raise error
        # Traced now: the process may end before the commit, for which only the coordinator rank waits.
        save.trace()
        return staged

    @contextlib.contextmanager
    def _failing_on_error(self) -> Iterator[None]:
        self._is_writing = True
        try:
            yield
        except BaseException as error:
            self.fail(error)
            name_save(error, object_names.save_text(self.context.save), self.context.checkpoint_id)
            raise
        finally:
            self._is_writing = False


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
