"""Reads ``.metadata`` consistently: one generation, with a lease of the files that it refers to.

In: a checkpoint directory. Out: the bytes of ``.metadata``, parsed and compared with the decision
that committed them, and the lease. A checkpoint may be replaced meanwhile: then it is read again.
Blocking.
"""

import posixpath
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import crc32c
from torch.distributed.checkpoint.metadata import Metadata

from pannier.client.loading import absence, read_lease
from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.loading.filesystem import MissingError, StorageDir
from pannier.client.loading.range_reader import in_parallel
from pannier.client.loading.torch_metadata import build_metadata
from pannier.wire import object_names
from pannier.wire.errors import InvalidRequestError, StorageError
from pannier.wire.records import MOST_METADATA

_MOST_REPLACEMENTS: Final = 10
"""After so many commits in a row while ``.metadata`` is read, reading it fails."""


class ExtensionsError(InvalidRequestError):
    """The checkpoint's bytes were transformed by extensions of torch's writer, which ``client.load`` doesn't apply."""


class Generation(NamedTuple):
    """Which ``.metadata`` a rank has read."""

    rank: int
    """Global rank, 0 without torch.distributed."""
    size: int
    """Bytes."""
    crc32c: int
    checkpoint_id: str

    @classmethod
    def of(cls, content: bytes, rank: int, checkpoint_id: str) -> "Generation":
        """The generation with these bytes."""
        return cls(rank, len(content), crc32c.crc32c(content), checkpoint_id)


class LeasedMetadata(NamedTuple):
    """A ``.metadata``, and the lease of its attempt's files."""

    content: bytes
    metadata: Metadata
    lease: read_lease.Lease | None
    """None: Pannier didn't write the checkpoint, or no lease can be written there."""


def fetch_metadata(directory: StorageDir, name: str = object_names.METADATA) -> bytes:
    """The bytes of ``.metadata``.

    Raises StorageError: it can't be read, or there is no checkpoint; then the message says what the
    directory holds instead.
    """
    try:
        return directory.read(name, MOST_METADATA)
    except MissingError as error:
        raise absence.absence_error(directory, name) from error


def read_leased(
    directory: StorageDir, *, reader: object, idle_s: float | None, verify: bool
) -> LeasedMetadata:
    """Reads ``.metadata`` and takes a lease, so that no commit in between removes its files.

    Args:
        reader: the lease ends with this object, at the latest.
        idle_s: the lease ends after so many seconds without a read; None: never.
        verify: the checkpoint must have checksums to compare with.

    Raises:
        StorageError: as :func:`fetch_metadata`.
        InvalidRequestError: it is not that of a DCP checkpoint, or not safe to unpickle, or can't be
            verified, because Pannier didn't write it.
        IntegrityError: it is not what was committed; where the decision can't be read, only with
            ``verify``.
    """
    path = posixpath.join(directory.url, object_names.METADATA)
    for _ in range(_MOST_REPLACEMENTS):
        stamp = _stamp(directory)
        content = fetch_metadata(directory)
        metadata = build_metadata(content, path)
        attempt = attempt_of(metadata)
        if verify and not attempt:
            raise InvalidRequestError(
                f"verify=True: {path} was not written by Pannier, so that there are no "
                "checksums to compare with"
            )
        if not attempt:
            return LeasedMetadata(content, metadata, None)
        check = partial(Receipts(directory, attempt).check_metadata, content, required=verify)
        take = partial(read_lease.take, directory, attempt, reader=reader, idle_s=idle_s)
        unchanged, lease = _take_lease(directory, attempt, stamp, check, take)
        if unchanged:
            return LeasedMetadata(content, metadata, lease)
    raise StorageError(f"{path} was replaced {_MOST_REPLACEMENTS} times while it was read")


def _take_lease(
    directory: StorageDir,
    attempt: str,
    stamp: str,
    check: Callable[[], None],
    take: Callable[[], read_lease.Lease | None],
) -> tuple[bool, read_lease.Lease | None]:
    """Takes a lease; returns whether ``.metadata`` is still the one with ``stamp``.

    Without a lease that is not checked.

    Args:
        check: raises unless the ``.metadata`` that was read is the committed one. Runs in parallel with
            ``take``, since both wait for storage.
    """
    leases: list[read_lease.Lease] = []

    def keep() -> None:
        lease = take()
        if lease is not None:
            leases.append(lease)

    try:
        _together(check, keep)
        lease = leases[0] if leases else None
        # Both after the lease was written: the files of a replaced checkpoint are removed only after a look
        # for leases.
        _, seen = _together(
            partial(absence.check_not_removed, directory, attempt),
            lambda: stamp if lease is None else _stamp(directory),
        )
    except BaseException:
        for each in leases:
            each.release()
        raise
    if lease is not None and seen != stamp:
        lease.release()
    return seen == stamp, lease


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls in parallel, since each waits for storage; returns their results.

    Raises the first error, once all calls have ended.
    """
    return in_parallel(lambda call: call(), calls, threads=len(calls))


def attempt_of(metadata: Metadata) -> str:
    """The attempt that a ``.metadata`` belongs to; empty: Pannier didn't write it."""
    return object_names.own_attempt(getattr(metadata.storage_meta, "save_id", None))


def check_extensions(metadata: Metadata, url: str) -> None:
    """Raises ExtensionsError if extensions of torch's writer transformed the checkpoint's bytes."""
    # A writer's extensions transform all that it writes.
    first = next(iter((metadata.storage_data or {}).values()), None)
    if transforms := getattr(first, "transform_descriptors", None):
        raise ExtensionsError(
            f"{url} was transformed by {list(transforms)} when it was saved; load it "
            "with torch's FileSystemReader and the extensions that it was saved with"
        )


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


def _stamp(directory: StorageDir) -> str:
    try:
        return directory.stamp(object_names.METADATA)
    except MissingError:
        return ""
