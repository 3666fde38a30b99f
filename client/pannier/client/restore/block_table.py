"""The shared blocks of one rank: where they lie in their files, and where they come from.

In: the rank's part of the restore plan. Out: look-ups by file and block. Immutable; any thread.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pannier.client.restore.restore_plan import BlockSource, Host, RankPlan
from pannier.v1 import records_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.records import parse_blocks


class SharedBlock(NamedTuple):
    """One block."""

    file: int
    """Index into :attr:`BlockTable.files`."""
    number: int
    offset: int
    size: int
    crc32c: int | None
    """From the receipt; None: there is none."""
    source: BlockSource


class LoadName(NamedTuple):
    """Which load of what."""

    load: str
    """Its random id, the same on all ranks."""
    checkpoint_id: str
    attempt: str
    """Empty: Pannier didn't write the checkpoint."""
    rank: int
    """This one's global rank."""


class BlockTable:
    """See the module."""

    def __init__(self, plan: RankPlan) -> None:
        self.hosts: Final[Sequence[Host]] = plan.hosts
        self.own: Final = plan.own
        self.files: Final = [
            records_pb2.DataFile.FromString(file.record) for file in plan.files.values()
        ]
        self.names: Final = frozenset(plan.files)
        found: dict[tuple[str, int], SharedBlock] = {}
        for index, (record, file) in enumerate(zip(self.files, plan.files.values(), strict=True)):
            sums = parse_blocks(record)
            for number, source in file.sources():
                offset = number * BLOCK_BYTES
                found[record.name, number] = SharedBlock(
                    index,
                    number,
                    offset,
                    min(BLOCK_BYTES, record.size - offset),
                    sums[number] if sums else None,
                    source,
                )
        self.blocks: Final[Mapping[tuple[str, int], SharedBlock]] = found
