"""What a trainer calls to read checkpoints: ``load``, ``latest``, ``list``, ``read_extra_file``.

In: state dicts to fill, roots, checkpoint ids. Out: what :mod:`pannier.client.loading` and
:mod:`pannier.client.resume` read, after errors of earlier saves that no call has raised; a load raises these on all
ranks. Needs no sidecar. Thread-safe.
"""

import builtins
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner

from pannier.client.config import Settings
from pannier.client.loading import catalog
from pannier.client.loading.checksum_verifier import Wanted
from pannier.client.loading.load import load
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.restore.load_report import LoadReporter
from pannier.client.restore.load_result import LoadResult
from pannier.client.restore.load_sharing import LoadSharing
from pannier.client.resume import extra_files as extra
from pannier.client.resume.ingested_saves import IngestedSaves
from pannier.client.resume.latest import Include, find_latest
from pannier.client.resume.sidecar_status import SidecarStatus
from pannier.client.user_errors import at_call
from pannier.common.locations import CHILDREN


class Reader:
    """See the module.

    Args:
        settings: where this host's sidecars are.
        raise_unretrieved: raises errors of earlier saves that were not retrieved.
        start_daemons: starts embedded daemons, for this process alone if its argument (``no_dist``) says so.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        raise_unretrieved: Callable[[], None],
        start_daemons: Callable[[bool], object],
    ) -> None:
        self._settings = settings
        self._raise_unretrieved = raise_unretrieved
        self._start_daemons = start_daemons

    @at_call
    def load(
        self,
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
        return load(
            state_dict,
            storage_reader,
            checkpoint_id=checkpoint_id,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            verify=verify,
            timeout=timeout,
            extra_files=extra_files,
            raise_unretrieved=self._raise_unretrieved,
            sharing=LoadSharing(self._settings),
            reporting=LoadReporter(self._settings).reporting,
            finish_ingested=self._ingested(no_dist).finish_one,
        )

    @at_call
    def latest(
        self,
        root: str | os.PathLike[str],
        *,
        pattern: str = CHILDREN.text,
        process_group: Any = None,
        no_dist: bool = False,
        include: Include = "committed",
        timeout: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """The newest checkpoint below ``root``; None when there is none.

        It is that of the newest save, by incarnation and save number, whatever the order of their commits
        and the clocks. Among checkpoints that Pannier didn't write, which come before its own, the one
        written last.

        The group's first rank looks it up and the others get its answer through the
        group's store, so that all ranks load the same. No collective: a rank that
        calls alone waits at most ``timeout``, and the first rank for no other's call. The n-th call of
        each rank of a group belongs together; for one rank alone, use ``no_dist``.

        With ``include="ingested"`` it first waits for saves that are newer than that and not committed yet:
        what every rank had ingested before the job was started again is uploaded by its sidecars and
        committed by the coordinator, so that no step is lost. Embedded daemons are started for that, on every
        host whose ranks call it. A save that can't be finished (a rank was not ingested, a host is lost) is
        logged with its ranks and hosts, and the newest that is committed is returned.

        Args:
            root: a path or a URL; need not exist, but its bucket must.
            pattern: which directories are checkpoints, by their names below the root, with shell wildcards:
                ``"checkpoint-*/dcp"``. Default: those directly below it.
            process_group: the ranks that ask together. Default: all.
            no_dist: this process looks by itself.
            include: ``"committed"``, or ``"ingested"``.
            timeout: seconds to wait for the first rank's answer, by default 60; with ``"ingested"`` for
                saves to be committed, by default 600, and up to 60 more for the answer.
            storage_options: of the fsspec file system. Default: from the environment.

        Raises:
            PannierError: an earlier save failed and its error was not retrieved.
            StorageError: the root can't be read; on all ranks.
            DeadlineError: the first rank hasn't answered in time.
            LoadError: the process group's store, which rank 0 or its launcher serves, doesn't answer, or the
                first rank to save or load doesn't confirm the job's start.
            InvalidRequestError: ranks gave different roots or patterns; the pattern can't be used.
            IntegrityError: the decision of the newest save is damaged, so that its order isn't known.
        """
        return find_latest(
            root,
            pattern=pattern,
            process_group=process_group,
            no_dist=no_dist,
            include=include,
            timeout=timeout,
            storage_options=storage_options,
            before=self._raise_unretrieved,
            ingested=self._ingested(no_dist),
        )

    @at_call
    def list(
        self,
        root: str | os.PathLike[str],
        *,
        pattern: str = CHILDREN.text,
        storage_options: Mapping[str, Any] | None = None,
    ) -> builtins.list[catalog.CheckpointInfo]:
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
        self._raise_unretrieved()
        return catalog.list_checkpoints(root, pattern=pattern, storage_options=storage_options)

    @at_call
    def read_extra_file(
        self,
        checkpoint_id: str | os.PathLike[str],
        name: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> bytes:
        """A file that ``async_save(extra_files=...)`` added to a checkpoint; each rank reads by itself.

        The file belongs to the same save as the state that :func:`load` reads, also while the checkpoint is being
        replaced, and is compared with its checksum. For a checkpoint that Pannier didn't write, the object at
        ``<checkpoint_id>/<name>`` is read.

        Args:
            checkpoint_id: directory: a path or a URL.
            name: as it was given.
            storage_options: of the fsspec file system. Default: from the environment.

        Raises:
            PannierError: an earlier save failed and its error was not retrieved.
            MissingError: there is no such checkpoint, or it has no such file.
            StorageError: it can't be read.
            IntegrityError: the bytes aren't those that were committed.
        """
        self._raise_unretrieved()
        return extra.read(checkpoint_id, name, storage_options)

    def _ingested(self, no_dist: bool) -> IngestedSaves:
        def start() -> None:
            if self._settings().embedded:
                self._start_daemons(no_dist)

        return IngestedSaves(SidecarStatus(self._settings), start)
