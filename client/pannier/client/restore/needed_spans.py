"""The bytes that a load reads for its items.

In: items, and ``.metadata``. Out: the archive of each item, and the spans of it that are read: all of it, or,
of a large plain tensor of which the items need less, its head and their parts. Pure; any thread.
"""

import posixpath
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from pannier.client import torch_compat
from pannier.client.loading.archive_layout import expect_item
from pannier.client.loading.range_reader import Range
from pannier.client.restore.restore_plan import Span
from pannier.wire.errors import IntegrityError, InvalidRequestError


def locate(item: ReadItem, metadata: Metadata, url: str) -> Range:
    """The bytes that hold an item of the checkpoint at ``url``.

    Raises InvalidRequestError: they can't be read here.
    """
    info = metadata.storage_data.get(item.storage_index)
    what = f"{item.storage_index.fqn!r} of {url}"
    if not isinstance(info, torch_compat.StorageInfo):
        raise InvalidRequestError(
            f"{what} is stored in a way that Pannier can't read: {info!r:.120}"
        )
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        raise InvalidRequestError(
            f"{what} was transformed by {list(transforms)} when it was saved; load it "
            "with torch's FileSystemReader and the extensions that it was saved with"
        )
    path = _normal(info.relative_path)
    if path is None:
        raise InvalidRequestError(f"{what} lies outside the checkpoint, in {info.relative_path}")
    if info.offset < 0 or info.length < 0:
        raise InvalidRequestError(f"{what} has an invalid offset or length: {info}")
    return Range(path, info.offset, info.length)


def spans_of(
    metadata: Metadata, place: Range, items: Sequence[ReadItem], request_bytes: int
) -> Iterator[Span]:
    """The bytes of an archive that are read for these items.

    Args:
        items: at least one.
        request_bytes: archives up to this length are read whole.
    """
    whole = Span(place.offset, place.end)
    is_large = place.length > request_bytes
    is_tensor = is_large and all(item.type is not LoadItemType.BYTE_IO for item in items)
    known = expect_item(metadata, place.length, items[0]) if is_tensor else None
    if known is None:
        yield whole
        return
    try:
        parts = [known.tensor.narrow(item.storage_offsets, item.lengths) for item in items]
    except IntegrityError:
        yield whole
        return
    if sum(part.span for part in parts) > known.tensor.span:
        yield whole
        return
    yield Span(place.offset, place.offset + len(known.head))
    for part in parts:
        start = place.offset + part.offset
        yield Span(start, start + part.span)


@lru_cache(maxsize=256)
def _normal(path: str) -> str | None:
    """A file's path in the checkpoint; None: it lies outside."""
    path = posixpath.normpath(path)
    return None if path.startswith(("/", "../")) or path in ("..", ".") else path
