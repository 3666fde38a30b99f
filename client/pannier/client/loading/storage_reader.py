"""DCP's ``StorageReader`` over fsspec: reads any DCP checkpoint, wherever it lies.

In: a path or URL, and DCP's load plans. Out: the planner's tensors, filled. A
checkpoint may be replaced while ranks begin to read it: every rank's plan says
which ``.metadata`` it was made from, and plans of two are refused.
"""

import contextlib
import dataclasses
import io
import os
import posixpath
import uuid
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import crc32c
import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pannier.client import torch_compat
from pannier.client.loading import catalog, filesystem, read_lease
from pannier.client.loading.checksum_verifier import Receipts, Verifier
from pannier.client.loading.range_reader import Contents, Range, fetch
from pannier.client.loading.safe_unpickler import unpickle_metadata
from pannier.wire import object_names, records
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, StorageError

MEMORY_BYTES: Final = 256 << 20
"""Held for what is read ahead, by default."""
_RACES: Final = 10
"""Commits in a row while ``.metadata`` is read."""


class Generation(NamedTuple):
    """Which ``.metadata`` a rank has read."""

    rank: int
    """Global rank, 0 without torch.distributed."""
    size: int
    crc32c: int
    checkpoint_id: str


class StorageReader(storage.StorageReader):
    """Reads a DCP checkpoint from a path or a URL; for ``dcp.load(storage_reader=...)``.

    Reads what Pannier, torch's ``FileSystemWriter`` and ``FsspecWriter`` wrote.
    ``.metadata`` is unpickled with DCP's own classes only. One load at a time.

    Args:
        path: directory of the checkpoint: a path, or a URL of a scheme that fsspec knows.
        storage_options: of the fsspec file system. Default: from the environment.
        thread_count: requests at the same time.
        memory_bytes: held at most for what is read ahead, unless one tensor's
            archive is larger.
        verify: compare all that is read with the checksums that were taken when it was
            saved. Reads whole data files. Only for what Pannier wrote.

    Raises:
        InvalidRequestError: the path is none, or its scheme is unknown.
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
        self._verify_now = verify
        self._lease: read_lease.Lease | None = None
        self._place = filesystem.open_dir(path, storage_options)
        self._shared: bytes | None = None
        self._parsed: tuple[bytes, Metadata] | None = None
        self._generation: Generation | None = None
        self._attempt = ""
        self._storage_data: Mapping[Any, Any] = {}
        self._load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """The directory that is read: an absolute path or a URL."""
        return self._place.url

    @property
    def path(self) -> str | Path:
        """:attr:`checkpoint_id` as torch's ``FileSystemReader`` has it, or ``FsspecReader`` for a URL."""
        return filesystem.as_torch(self._place.url)

    @property
    def load_id(self) -> str:
        """The id of this load, another after each :meth:`reset`; ``read_metadata`` puts it into its result."""
        return self._load_id

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Of the fsspec file system, as they were given."""
        return self._options

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, of ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._place = filesystem.open_dir(checkpoint_id, self._options)
        self.release()
        self._shared = self._generation = self._parsed = None
        self._storage_data = {}
        self._attempt = ""
        self._verify_now = self._verify
        self._load_id = str(uuid.uuid4())

    def verify_once(self) -> None:
        """As if made with ``verify``, until the next :meth:`reset`."""
        self._verify_now = True

    def release(self) -> None:
        """Lets go of the checkpoint's files: whoever replaces it may remove them."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def fetch_metadata(self, name: str = object_names.METADATA) -> bytes:
        """The bytes of ``.metadata``.

        Raises:
            StorageError: it can't be read, or there is no checkpoint; then the
                message says what is there instead.
        """
        try:
            return self._place.read(name)
        except filesystem.MissingError as error:
            raise filesystem.MissingError(catalog.describe_absence(self._place, name)) from error

    def resolve(self, *, idle_s: float | None = None) -> bytes:
        """The bytes of ``.metadata``, with a lease of the files that it refers to.

        Until :meth:`release`, these are not removed when the checkpoint is replaced; where no
        lease can be written, for the grace period.

        Args:
            idle_s: gives the lease up when nothing is read for so long; None: never.

        Raises:
            StorageError: as :meth:`fetch_metadata`.
            InvalidRequestError: it is no DCP checkpoint's, or not safe to unpickle, or can't be
                verified, because Pannier didn't write it.
            IntegrityError: it is not what was committed; where the record of that can't be
                read, only when it is to be verified.
        """
        self._parsed = self._resolve(idle_s)
        return self._parsed[0]

    def _resolve(self, idle_s: float | None) -> tuple[bytes, Metadata]:
        self.release()
        where = posixpath.join(self.checkpoint_id, object_names.METADATA)
        for _ in range(_RACES):
            stamp = self._stamp()
            content = self.fetch_metadata()
            metadata = unpickle_metadata(content, where)
            attempt = object_names.own_attempt(getattr(metadata.storage_meta, "save_id", None))
            if self._verify_now and not attempt:
                raise InvalidRequestError(
                    f"verify=True: {where} was not written by Pannier, so that there are no "
                    "checksums to compare with"
                )
            if not attempt:
                return content, metadata
            receipts = Receipts(self._place, attempt)
            receipts.check_metadata(content, required=self._verify_now)
            lease = read_lease.take(self._place, attempt, reader=self, idle_s=idle_s)
            try:
                catalog.check_not_removed(self._place, attempt)
                # Looked at again: what was replaced is removed only after a look for leases.
                unchanged = lease is None or self._stamp() == stamp
            except PannierError:
                if lease is not None:
                    lease.release()
                raise
            if unchanged:
                self._lease = lease
                return content, metadata
            assert lease is not None
            lease.release()
        raise StorageError(f"{where} was replaced {_RACES} times while it was read")

    def _stamp(self) -> str:
        try:
            return self._place.stamp(object_names.METADATA)
        except filesystem.MissingError:
            return ""

    def share_metadata(self, content: bytes) -> None:
        """Reads from what another rank has fetched, until the next :meth:`reset`."""
        self._shared = content

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's ``Metadata``.

        Args:
            args: ignored.
            kwargs: ``rank`` for that rank's own, of a checkpoint that was saved
                with ``use_collectives=False``.

        Raises:
            StorageError: there is no checkpoint, or it can't be read.
            InvalidRequestError: it is no DCP checkpoint's, or not safe to unpickle.
        """
        rank = kwargs.get("rank")
        name = object_names.METADATA if rank is None else f"__{rank}{object_names.METADATA}"
        if rank is None and self._shared is None:
            content, metadata = self._resolve(read_lease.IDLE_S)
        else:
            if rank is not None and self._verify_now:
                raise InvalidRequestError(
                    "verify=True: a checkpoint per rank (use_collectives=False) has no receipts"
                )
            shared = self._shared if rank is None else None
            content = self.fetch_metadata(name) if shared is None else shared
            parsed, self._parsed = self._parsed, None
            metadata = (
                parsed[1]
                if parsed is not None and parsed[0] is shared
                else unpickle_metadata(content, posixpath.join(self.checkpoint_id, name))
            )
        self._generation = None
        if rank is None:
            own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._generation = Generation(
                own, len(content), crc32c.crc32c(content), self.checkpoint_id
            )
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        self._attempt = object_names.own_attempt(getattr(metadata.storage_meta, "save_id", None))
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Takes the places of the items from ``metadata``. Raises InvalidRequestError."""
        if not isinstance(metadata.storage_data, Mapping):
            raise InvalidRequestError(
                f"the metadata of {self.checkpoint_id} doesn't say where its data is"
            )
        self._storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Notes on the plan which ``.metadata`` it was made from."""
        return dataclasses.replace(plan, storage_data=self._generation)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuses plans made from several ``.metadata``. Raises InvalidRequestError."""
        check_generations(
            [plan.storage_data for plan in plans if isinstance(plan.storage_data, Generation)]
        )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items; done when it returns.

        Raises:
            StorageError: a file is missing or too short, or can't be read.
            IntegrityError: bytes are not the archive that should be there, or, when it is to be
                verified, not those that were saved; then a part of the state is filled.
            InvalidRequestError: an item is stored in a way that Pannier can't read.
        """
        wanted: defaultdict[Range, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[self._range(item)].append(item)
        try:
            self._read(wanted, planner)
        except filesystem.MissingError as error:
            what = catalog.describe_removal(self._place) or (
                "was the checkpoint replaced or removed while it was read?"
            )
            raise filesystem.MissingError(
                f"{error}, but {object_names.METADATA} refers to it: {what}; pannier.client.latest "
                "tells which checkpoint is the newest"
            ) from error
        finally:
            # Where one rank resolved .metadata for all, it lets go when all are through.
            if self._shared is None:
                self.release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, wanted: Mapping[Range, Sequence[ReadItem]], planner: LoadPlanner) -> None:
        ranges = sorted(wanted)
        keys = {
            each: [str(item.storage_index.fqn) for item in items] for each, items in wanted.items()
        }
        contents = Contents(keys)
        verifier: Verifier | None = None
        if self._verify_now:
            receipts = Receipts(self._place, self._attempt)
            verifier = Verifier(self._place, receipts, ranges, contents)
            ranges = verifier.ranges
        fetched = fetch(
            self._place,
            ranges,
            threads=self._threads,
            memory_bytes=self._memory_bytes,
            contents=contents,
        )
        # Closed also while an error is on its way: its threads end with it.
        with contextlib.closing(fetched):
            for each, content in fetched:
                if self._lease is not None:
                    self._lease.touch()
                if verifier is not None:
                    verifier.follow(each, content)
                if each in wanted:
                    self._deliver(each, content, wanted[each], planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be read from there; looks at the words alone."""
        try:
            filesystem.readable(checkpoint_id)
        except PannierError:
            return False
        return True

    def _range(self, item: ReadItem) -> Range:
        info = self._storage_data.get(item.storage_index)
        what = f"{item.storage_index.fqn!r} of {self.checkpoint_id}"
        if not isinstance(info, torch_compat.StorageInfo):
            raise InvalidRequestError(f"{what} has no place that Pannier can read: {info!r:.120}")
        transforms = getattr(info, "transform_descriptors", None)
        if transforms:
            raise InvalidRequestError(
                f"{what} was transformed by {list(transforms)} when it was saved; load it with "
                "torch's FileSystemReader and the extensions that it was saved with"
            )
        path = posixpath.normpath(info.relative_path)
        if path.startswith(("/", "../")) or path in ("..", "."):
            raise InvalidRequestError(
                f"{what} lies outside the checkpoint, in {info.relative_path}"
            )
        if info.offset < 0 or info.length < 0:
            raise InvalidRequestError(f"{what} has a place that is none: {info}")
        return Range(path, info.offset, info.length)

    def _deliver(
        self, place: Range, content: memoryview, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_bytes(place, content, item, planner)
                continue
            if tensor is None:
                tensor = self._load(place, content, item)
            part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise InvalidRequestError(
                    f"{item.storage_index.fqn!r}: the planner wants {tuple(target.size())} where "
                    f"{self.checkpoint_id} has {tuple(part.size())}"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)

    def _load_bytes(
        self, place: Range, content: memoryview, item: ReadItem, planner: LoadPlanner
    ) -> None:
        try:
            planner.load_bytes(item, io.BytesIO(content))
        except Exception as error:
            # Of a whole archive, what the planner raises is about something else than the bytes.
            if isinstance(error, PannierError) or _is_whole(content):
                raise
            raise self._unreadable(place, item, error) from error

    def _unreadable(self, place: Range, item: ReadItem, error: Exception) -> IntegrityError:
        return IntegrityError(
            f"{item.storage_index.fqn!r} can't be read from bytes {place.offset} to "
            f"{place.offset + place.length} of {self.checkpoint_id}/{place.file}: "
            f"{type(error).__name__}: {error}"
        )

    def _load(self, place: Range, content: memoryview, item: ReadItem) -> torch.Tensor:
        try:
            tensor = torch.load(_MemoryFile(content), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except Exception as error:  # the bytes may be anything
            if self._is_safetensors(place.file):
                name = f"{self.checkpoint_id}/{place.file}"
                raise InvalidRequestError(
                    f"{item.storage_index.fqn!r} can't be read: "
                    + records.describe_safetensors_file(name)
                ) from error
            raise self._unreadable(place, item, error) from error
        if not isinstance(tensor, torch.Tensor):
            raise IntegrityError(
                f"{item.storage_index.fqn!r}: {self.checkpoint_id}/{place.file} holds a "
                f"{type(tensor).__name__} where its metadata has a tensor"
            )
        return tensor

    def _is_safetensors(self, file: str) -> bool:
        head = bytearray(records.SAFETENSORS_HEAD)
        try:
            self._place.read_into(file, 0, memoryview(head))
        except StorageError:  # shorter, or gone by now
            return False
        return records.is_safetensors(bytes(head))


def check_generations(seen: Sequence[Generation]) -> None:
    """Raises InvalidRequestError, naming the ranks, unless all have read the same ``.metadata``."""
    groups: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for each in seen:
        groups[each.checkpoint_id, each.size, each.crc32c].append(each.rank)
    if len(groups) <= 1:
        return
    ids = {checkpoint_id for checkpoint_id, _, _ in groups}
    if len(ids) > 1:
        raise InvalidRequestError(
            "ranks read different checkpoints: "
            + "; ".join(f"ranks {sorted(ranks)} {key[0]}" for key, ranks in groups.items())
        )
    raise InvalidRequestError(
        f"{ids.pop()} was replaced while ranks began to read it: "
        + ", ".join(
            f"ranks {sorted(ranks)} read a .metadata with crc32c {crc:08x}"
            for (_, _, crc), ranks in groups.items()
        )
        + "; load it again (pannier.client.load reads it once for all ranks)"
    )


def _is_whole(content: memoryview) -> bool:
    """Whether this is an archive of torch.save whose members have their checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError):
        return False


class _MemoryFile(io.RawIOBase):
    """Bytes in memory as the file that torch.load wants, without a copy."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._content)}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        part = self._content[self._position : self._position + len(view)]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)
