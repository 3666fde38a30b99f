"""The bytes of an archive that a load reads for its items.

In: the archive's place, what ``.metadata`` says of it, and the items. Out: spans of its file: all of it,
or, of a large plain tensor of which the items need less, its head and their parts. Pure; any thread.
"""

from collections.abc import Iterator, Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from pannier.client.loading.archive_layout import expect_item
from pannier.client.loading.range_reader import Range
from pannier.client.restore.restore_plan import Span
from pannier.wire.errors import IntegrityError


def spans_of(
    metadata: Metadata, place: Range, items: Sequence[ReadItem], request_bytes: int
) -> Iterator[Span]:
    """The bytes of an archive that are read for these items.

    Args:
        items: at least one.
        request_bytes: archives that are no longer are read whole.
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
