"""How the ranks of a load share what they read: one rank's side.

In: DCP's load plans: they carry what each rank needs to the rank that makes the global plan, and carry back
what each rank takes through sidecars. Out: this rank's files in its host's spool, and its shared blocks. The
rank that makes the global plan also reads the receipts of files that are shared. Nothing fails here: what
can't be shared is read from storage. Blocking; for one load of one rank.
"""

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from pannier.client.config import Settings
from pannier.client.loading.checksum_verifier import Receipts
from pannier.client.loading.filesystem import StorageDir
from pannier.client.loading.range_reader import GAP_BYTES, Range, in_parallel
from pannier.client.restore.host_copies import HostCopies, HostSurvey
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.restore.local_file import LocalFile
from pannier.client.restore.needed_spans import locate, spans_of
from pannier.client.restore.restore_plan import (
    LoadName,
    RankNeeds,
    RankPlan,
    Span,
    merge,
    plan_restore,
    shared_candidates,
)
from pannier.client.restore.shared_blocks import BlockReader
from pannier.client.restore.sources import REMOTE_REQUEST_BYTES
from pannier.v1 import records_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import PannierError, StorageError
from pannier.wire.records import parse_blocks

_log = logging.getLogger(__name__)

_THREADS: Final = 8
"""Requests for receipts and sizes at a time."""


class LoadSharing:
    """See the module.

    Args:
        settings: where this host's sidecars are.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self.together = False
        """Whether several ranks load."""
        self._copies = HostCopies(settings)
        self._survey = HostSurvey()
        self._load = LoadName("", "", "", 0)

    def locate(self, receipts: Receipts, names: Sequence[str]) -> Mapping[str, LocalFile]:
        """The files of the receipts' attempt that are in this host's spool, for a load of one rank."""
        return self._copies.locate(receipts, names)

    def survey(
        self, load: LoadName, receipts: Receipts, metadata: Metadata, items: Sequence[ReadItem]
    ) -> RankNeeds:
        """What this rank needs of files that aren't in its own spool, and what others may read here."""
        self._load = load
        spans = _needed(metadata, items, load.checkpoint_id)
        others = {
            str(getattr(each, "relative_path", "")) for each in metadata.storage_data.values()
        }
        survey = self._survey = self._copies.survey(
            load, receipts, sorted(spans), others - spans.keys()
        )
        return RankNeeds(
            load.rank,
            survey.host,
            survey.held,
            {
                name: merge(found, GAP_BYTES)
                for name, found in spans.items()
                if name not in survey.files
            },
            asks_peers=survey.reads_peers,
            credentials=survey.credentials,
        )

    @property
    def host(self) -> str:
        """Name of this host; after :meth:`survey`, as its sidecar reports it."""
        return self._survey.host.name if self._survey.host is not None else socket.gethostname()

    @property
    def local_files(self) -> Mapping[str, LocalFile]:
        """The rank's files in its own spool, after :meth:`survey`."""
        return self._survey.files

    def plan(self, receipts: Receipts, needs: Sequence[RankNeeds]) -> list[RankPlan | None]:
        """Each rank's plan, in the order of ``needs``; None: it takes nothing through sidecars."""
        names = sorted(shared_candidates(needs))
        records = {} if not names else _records(receipts, names)
        return plan_restore(needs, records)

    def close(self) -> None:
        """Drops the files in the spool."""
        self._survey.files.clear()

    def open_blocks(self, plan: RankPlan, progress: LoadProgress) -> BlockReader | None:
        """A reader that gets the blocks of this rank's plan through sidecars; None: that isn't possible."""
        try:
            return self._copies.open_blocks(self._survey, plan, self._load, progress)
        except PannierError as error:
            _log.warning("%s is read from storage: %s", self._load.checkpoint_id, error)
            return None


def _needed(
    metadata: Metadata, items: Sequence[ReadItem], url: str
) -> defaultdict[str, list[Span]]:
    """What the items need, by file."""
    held: defaultdict[Range, list[ReadItem]] = defaultdict(list)
    for item in items:
        try:
            held[locate(item, metadata, url)].append(item)
        except PannierError as error:
            # Raised when it is read, unless the planner takes it out of the plan.
            _log.debug("%s", error)
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for place, wanted in held.items():
        found[place.file] += spans_of(metadata, place, wanted, REMOTE_REQUEST_BYTES)
    return found


def _records(receipts: Receipts, names: Sequence[str]) -> dict[str, records_pb2.DataFile]:
    """The files' records: from the receipts, else their sizes in storage; without those that have neither."""
    found = receipts.recorded(names, threads=_THREADS)
    missing = [name for name in names if name not in found]
    sizes = in_parallel(lambda name: _size(receipts.directory, name), missing, threads=_THREADS)
    for name, size in zip(missing, sizes, strict=True):
        if size is not None:
            found[name] = records_pb2.DataFile(name=name, size=size)
    return {name: _normal(record) for name, record in found.items()}


def _size(directory: StorageDir, name: str) -> int | None:
    try:
        return directory.size(name)
    except StorageError as error:
        _log.debug("%s isn't shared: %s", name, error)
        return None


def _normal(record: records_pb2.DataFile) -> records_pb2.DataFile:
    """The record, with checksums of blocks of the usual size or without any."""
    size, column = 0, b""
    if record.block_bytes == BLOCK_BYTES and parse_blocks(record):
        size, column = BLOCK_BYTES, record.block_crc32c
    elif record.crc32c and record.size <= BLOCK_BYTES:
        size, column = BLOCK_BYTES, record.crc32c.to_bytes(4, "little")
    return records_pb2.DataFile(
        name=record.name,
        size=record.size,
        crc32c=record.crc32c,
        block_bytes=size,
        block_crc32c=column,
    )
