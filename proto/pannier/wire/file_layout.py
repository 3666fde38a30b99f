"""Where archives lie in a rank's data files.

In: the lengths of each archive (head, raw bytes, tail). Out: a file, an offset and a length for each. A
pure function, so that offsets and sizes are known with the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; raw tensor bytes start at a multiple of it, as any dtype's view needs."""
PAGE = 4096
"""Alignment of raw bytes of :data:`LARGE` tensors, and of file sizes."""
LARGE = 1 << 20
FILE_BYTES = 256 << 20
"""A rank's archives are split over files of about this size, which upload in parallel."""
MAX_FILES = 8
"""Most data files of planned slots per rank."""
STAMP_BYTES = 8
"""Bytes of the stamp that follows the capacity of a spool file which a trainer maps."""


@dataclass(frozen=True)
class Layout:
    """``file[i]``, ``offset[i]``, ``length[i]`` place archive ``i``; ``sizes`` are the files' bytes."""

    file: list[int]
    offset: list[int]
    length: list[int]
    sizes: list[int]


def lay_out(head: Sequence[int], body: Sequence[int], tail: Sequence[int]) -> Layout:
    """Places archives one after another, in order, over at most :data:`MAX_FILES` files.

    Args:
        head, body, tail: bytes per archive, of equal length.

    The raw bytes of each archive are aligned to :data:`ALIGNMENT`, those of at
    least :data:`LARGE` bytes to :data:`PAGE`. Gaps belong to no archive.
    """
    total = sum(head) + sum(body) + sum(tail)
    count = max(1, min(MAX_FILES, -(-total // FILE_BYTES)))
    target = -(-total // count)
    layout = Layout([], [], [], [])
    cursor = 0
    for h, b, t in zip(head, body, tail, strict=True):
        alignment = PAGE if b >= LARGE else ALIGNMENT
        length = h + b + t
        if cursor >= target and len(layout.sizes) < count - 1:
            layout.sizes.append(cursor)
            cursor = 0
        offset = -(-(cursor + h) // alignment) * alignment - h
        layout.file.append(len(layout.sizes))
        layout.offset.append(offset)
        layout.length.append(length)
        cursor = offset + length
    if cursor:
        layout.sizes.append(cursor)
    return layout
