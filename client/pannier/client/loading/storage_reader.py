"""DCP's ``StorageReader`` over fsspec: reads any DCP checkpoint from any storage.

In: a path or URL, and DCP's load plans. Out: the planner's tensors, filled. A checkpoint may be
replaced while ranks begin to read it: every rank's plan carries the generation of its ``.metadata``,
and plans of different generations are refused. Blocking; one load at a time.
"""

import contextlib
import dataclasses
import os
import posixpath
import socket
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pannier.client.loading import absence, filesystem, metadata_reader, read_lease
from pannier.client.loading.checksum_verifier import ChecksumVerifier, Receipts
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.item_loader import ItemLoader
from pannier.client.loading.metadata_reader import Generation, check_generations
from pannier.client.loading.range_reader import (
    KeyIndex,
    Range,
    in_parallel,
    read_ranges,
)
from pannier.client.loading.torch_metadata import build_metadata
from pannier.client.restore import load_progress
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.local_file import LocalFile
from pannier.client.restore.needed_spans import locate, spans_of
from pannier.client.restore.restore_plan import LoadName, RankNeeds, RankPlan
from pannier.client.restore.sources import Sharing, Sources
from pannier.common import timeouts
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError, PannierError

MEMORY_BYTES: Final = 64 << 20
"""Default of the memory for what is read ahead."""


class PlannedRank(NamedTuple):
    """What a rank's plan carries to the rank that makes the global plan."""

    generation: Generation | None
    needs: RankNeeds | None


@dataclasses.dataclass
class _Load:
    """The state of one load."""

    verify: bool
    """All that is read is compared with the checksums of the receipts."""
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    lease: read_lease.Lease | None = None
    shared: bytes | None = None
    """``.metadata``, from the rank that fetched it for all."""
    parsed: tuple[bytes, Metadata] | None = None
    """``.metadata`` that this rank fetched for all."""
    generation: Generation | None = None
    attempt: str = ""
    receipts: Receipts | None = None
    metadata: Metadata = dataclasses.field(default_factory=lambda: Metadata({}))
    sharing: Sharing | None = None
    sources: Sources | None = None
    progress: LoadProgress = dataclasses.field(default_factory=LoadProgress)


class StorageReader(storage.StorageReader):
    """Reads a DCP checkpoint from a path or a URL; for ``dcp.load(storage_reader=...)``.

    Reads what Pannier, torch's ``FileSystemWriter`` and ``FsspecWriter`` wrote.
    Of ``.metadata`` only DCP's own classes are accepted, and nothing in it is run. One load at a time.

    Args:
        path: directory of the checkpoint: a path, or a URL of a scheme that fsspec knows.
        storage_options: of the fsspec file system. Default: from the environment.
        thread_count: requests at the same time.
        memory_bytes: most memory for what is read ahead, unless one tensor's archive is larger.
        verify: compare all that is read with the checksums that were taken when it was saved.
            Reads whole data files. Only for checkpoints that Pannier wrote.

    Raises:
        InvalidRequestError: it is not a path or URL, or its scheme is unknown.
        ConfigurationError: the scheme's package isn't installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        thread_count: int = 8,
        memory_bytes: int = MEMORY_BYTES,
        verify: bool = False,
    ) -> None:
        super().__init__()
        if thread_count < 1 or memory_bytes < 1:
            raise InvalidRequestError(
                f"thread_count={thread_count} and memory_bytes={memory_bytes} must be positive"
            )
        self._options = storage_options
        self._threads = thread_count
        self._memory_bytes = memory_bytes
        self._verify = verify
        self._directory = filesystem.open_dir(path, storage_options)
        self._load = _Load(verify)

    @property
    def checkpoint_id(self) -> str:
        """The directory that is read: an absolute path or a URL."""
        return self._directory.url

    @property
    def directory(self) -> StorageDir:
        """The directory in storage."""
        return self._directory

    @property
    def path(self) -> str | Path:
        """:attr:`checkpoint_id` as ``path`` of torch's ``FileSystemReader``; a URL as of ``FsspecReader``."""
        return filesystem.as_torch(self._directory.url)

    @property
    def load_id(self) -> str:
        """The id of this load, which :meth:`reset` changes; ``read_metadata`` puts it into its result."""
        return self._load.id

    @property
    def host(self) -> str:
        """Name of this host; if ranks share what they read, as its sidecar reports it."""
        return self._load.sharing.host if self._load.sharing is not None else socket.gethostname()

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """The options of the fsspec file system, as given."""
        return self._options

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new load, of ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._directory = filesystem.open_dir(checkpoint_id, self._options)
        self.release()
        self._load = _Load(self._verify)

    def verify_once(self) -> None:
        """Turns ``verify`` on until the next :meth:`reset`."""
        self._load.verify = True

    def use_sidecars(self, sharing: Sharing | None, *, together: bool) -> None:
        """Reads through ``sharing`` what this host's spool has, until the next :meth:`reset`.

        Args:
            sharing: None: all is read from storage.
            together: several ranks load, and share what they need.
        """
        self._load.sharing = sharing
        if sharing is not None:
            sharing.together = together

    def use_progress(self, progress: LoadProgress) -> None:
        """Counts in ``progress`` what this load reads, until the next :meth:`reset`."""
        self._load.progress = progress
        progress.describe(checkpoint_id=self.checkpoint_id)

    @property
    def attempt(self) -> str:
        """The attempt that this load reads; empty: Pannier didn't write it, or it isn't known yet."""
        return self._load.attempt

    def progress_text(self) -> str:
        """How far this load is: ``1.2 GiB of 4.0 GiB read``; empty before it reads."""
        return self._load.progress.text()

    def release(self) -> None:
        """Ends the lease: the files may be removed when the checkpoint is replaced.

        Also closes files in the spool, which the sidecar may then reuse.
        """
        sources, self._load.sources = self._load.sources, None
        if sources is not None:
            sources.close()
        if self._load.sharing is not None:
            self._load.sharing.close()
        lease, self._load.lease = self._load.lease, None
        if lease is not None:
            lease.release()

    def fetch_metadata(self, name: str = object_names.METADATA) -> bytes:
        """See :func:`pannier.client.loading.metadata_reader.fetch_metadata`."""
        return metadata_reader.fetch_metadata(self._directory, name)

    def resolve(self, *, idle_s: float | None = None) -> bytes:
        """The bytes of ``.metadata``, with a lease of the files that it refers to.

        Until :meth:`release`, these files are not removed when the checkpoint is replaced; where no
        lease can be written, they stay for the grace period.

        Args:
            idle_s: seconds without a read after which the lease ends; None: never.

        Raises: as :func:`pannier.client.loading.metadata_reader.read_leased`, and ExtensionsError.
        """
        self._load.parsed = self._resolve(idle_s)
        metadata_reader.check_extensions(self._load.parsed[1], self._directory.url)
        return self._load.parsed[0]

    def _resolve(self, idle_s: float | None) -> tuple[bytes, Metadata]:
        self.release()
        resolved = metadata_reader.read_leased(
            self._directory, reader=self, idle_s=idle_s, verify=self._load.verify
        )
        self._load.lease = resolved.lease
        return resolved.content, resolved.metadata

    def share_metadata(self, content: bytes, load_id: str | None = None) -> None:
        """Uses the ``.metadata`` that another rank has fetched, until the next :meth:`reset`.

        Args:
            load_id: that rank's :attr:`load_id`, by which the load is known on all ranks.
        """
        self._load.shared = content
        self._load.id = load_id or self._load.id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's ``Metadata``.

        Args:
            args: ignored.
            kwargs: ``rank`` for that rank's own ``.metadata``, of a checkpoint that was saved with
                ``use_collectives=False``.

        Raises:
            StorageError: there is no checkpoint, or it can't be read.
            InvalidRequestError: it is not that of a DCP checkpoint, or not safe to unpickle.
        """
        rank = kwargs.get("rank")
        name = object_names.METADATA if rank is None else f"__{rank}{object_names.METADATA}"
        if rank is None and self._load.shared is None:
            content, metadata = self._resolve(timeouts.LEASE_IDLE_S)
        else:
            if rank is not None and self._load.verify:
                raise InvalidRequestError(
                    "verify=True: a checkpoint per rank (use_collectives=False) has no receipts"
                )
            shared = self._load.shared if rank is None else None
            content = self.fetch_metadata(name) if shared is None else shared
            parsed, self._load.parsed = self._load.parsed, None
            metadata = (
                parsed[1]
                if parsed is not None and parsed[0] is shared
                else build_metadata(content, posixpath.join(self.checkpoint_id, name))
            )
        self._load.generation = None
        if rank is None:
            own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._load.generation = Generation.of(content, own, self.checkpoint_id)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        self._load.attempt = metadata_reader.attempt_of(metadata)
        self._load.receipts = None
        metadata.storage_meta.load_id = self._load.id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Takes the items' storage locations from ``metadata``. Raises InvalidRequestError."""
        if not isinstance(metadata.storage_data, Mapping):
            raise InvalidRequestError(
                f"the metadata of {self.checkpoint_id} doesn't say where its data is"
            )
        self._load.metadata = metadata
        self._load.progress.describe(attempt=self._load.attempt)
        self._load.progress.begin(load_progress.PLANNING)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds to the plan the generation of ``.metadata``, and what this rank needs and can share."""
        needs = None
        if self._may_share:
            assert self._load.sharing is not None
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            name = LoadName(self._load.id, self.checkpoint_id, self._load.attempt, rank)
            needs = self._load.sharing.survey(name, self._receipts, self._load.metadata, plan.items)
        data = self._load.generation if needs is None else PlannedRank(self._load.generation, needs)
        return dataclasses.replace(plan, storage_data=data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Plans what the ranks share. Raises InvalidRequestError when the plans are of different generations."""
        ranks = [_planned(plan) for plan in plans]
        check_generations([each.generation for each in ranks if each.generation is not None])
        needs = {number: each.needs for number, each in enumerate(ranks) if each.needs is not None}
        if not needs or self._load.sharing is None:
            return plans
        found = self._load.sharing.plan(self._receipts, list(needs.values()))
        shared = dict(zip(needs, found, strict=True))
        return [
            dataclasses.replace(plan, storage_data=shared.get(number))
            for number, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items; the returned future is done.

        Raises:
            StorageError: a file is missing or too short, or can't be read.
            IntegrityError: the bytes are not the archive that should be there, or, with ``verify``,
                not those that were saved; then part of the state is filled.
            InvalidRequestError: an item is stored in a way that Pannier can't read.
        """
        found: defaultdict[Range, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            found[locate(item, self._load.metadata, self.checkpoint_id)].append(item)
        items = {each: found[each] for each in sorted(found)}
        self._load.progress.begin(load_progress.READING)
        try:
            shared = plan.storage_data if isinstance(plan.storage_data, RankPlan) else None
            self._read(items, planner, shared)
        except filesystem.MissingError as error:
            what = absence.describe_removal(self._directory) or (
                "was the checkpoint replaced or removed while it was read?"
            )
            raise filesystem.MissingError(
                f"{error}, but {object_names.METADATA} refers to it: {what}; pannier.client.latest "
                "tells which checkpoint is the newest"
            ) from error
        finally:
            # A rank that resolved .metadata for all releases the lease when all ranks are done.
            if self._load.shared is None:
                self.release()
        self._load.progress.settle()
        self._load.progress.begin(load_progress.FINISHING)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self,
        items: Mapping[Range, Sequence[ReadItem]],
        planner: LoadPlanner,
        shared: RankPlan | None,
    ) -> None:
        files = sorted({each.file for each in items})
        reader = None
        if shared is not None and self._load.sharing is not None:
            reader = self._load.sharing.open_blocks(shared, self._load.progress)
        self._load.sources = sources = Sources(
            self._directory,
            self.checkpoint_id,
            self._local_files(files),
            self._load.progress,
            reader,
        )
        sizes: Counter[str] = Counter()
        for place, held in items.items():
            most = sources.request_bytes(place.file)
            for span in spans_of(self._load.metadata, place, held, most):
                sizes[place.file] += span.end - span.start
        self._load.progress.expect(sizes)
        loader = ItemLoader(self._directory, self._load.metadata, planner, sources)
        index = KeyIndex(
            {each: [str(item.storage_index.fqn) for item in held] for each, held in items.items()}
        )
        large = [each for each, held in items.items() if loader.is_large(each, held)]
        tensors = in_parallel(
            lambda each: loader.find_tensor(each, items[each][0], index),
            large,
            threads=self._threads,
        )
        reads = loader.reads(items, dict(zip(large, tensors, strict=True)))
        verifier: ChecksumVerifier | None = None
        if self._load.verify:
            verifier = ChecksumVerifier(self._directory, self._receipts, files, index)
            reads = verifier.cover(reads)
            self._load.progress.expect(verifier.sizes)
        contents = read_ranges(
            sources,
            reads,
            threads=self._threads,
            memory_bytes=self._memory_bytes if reader is None else self._memory_bytes // 2,
            request_bytes=sources.request_bytes,
            index=index,
            cancel=sources.cancel,
        )
        # Closing it ends its threads, also after an error.
        with contextlib.closing(contents):
            for run in contents:
                if self._load.lease is not None:
                    self._load.lease.touch()
                for each, content in run:
                    if verifier is not None:
                        verifier.update(each.range, content)
                    each.use(content)
                loader.copy_gathered()

    @property
    def _receipts(self) -> Receipts:
        """Of the attempt that this load reads, each read once."""
        if self._load.receipts is None:
            self._load.receipts = Receipts(self._directory, self._load.attempt)
        return self._load.receipts

    @property
    def _may_share(self) -> bool:
        """Whether ranks share what they read; not if storage is local, or is to be verified."""
        return (
            self._load.sharing is not None
            and self._load.sharing.together
            and not self._load.verify
            and self._load.generation is not None
            and not self._directory.is_local
            # Sidecars read storage with their own options; the checksums of an attempt show whether the bytes
            # are the same.
            and bool(self._load.attempt or self._options is None)
        )

    def _local_files(self, files: Sequence[str]) -> Mapping[str, LocalFile]:
        """The files among these that this host's spool has; none if storage is to be verified."""
        if self._load.sharing is None or not self._load.attempt or self._load.verify:
            return {}
        if self._may_share:
            return self._load.sharing.local_files
        return self._load.sharing.locate(self._receipts, files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or URL that can be read; touches no storage."""
        try:
            filesystem.readable(checkpoint_id)
        except PannierError:
            return False
        return True


def _planned(plan: LoadPlan) -> PlannedRank:
    """What a plan carries; a planner may have left it out."""
    data = plan.storage_data
    if isinstance(data, PlannedRank):
        return data
    return PlannedRank(data if isinstance(data, Generation) else None, None)
