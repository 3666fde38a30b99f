"""Fetches one block, checked, from the first of its sources that has it; tolerates slow and wrong sources.

In: sources in order, the nearest first and storage last. Out: the block, or an error that names what each
source answered. When a source fails or sends a wrong block, the next one is asked at once. When it takes
long, the next one is asked as well, and the first good answer counts. The last source may be asked twice at a
time. At most two requests for a block are under way at a time. Second requests of all blocks are limited by
the memory for them: without any left, the older request is cancelled first. On the event loop; checksums are
computed in threads.
"""

import asyncio
import logging
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

import crc32c

from pannier.common import observer_clock, timeouts
from pannier.sidecar.restore.block_cache import Fetched, block_threads
from pannier.wire.errors import IntegrityError, PannierError, StorageError

_log = logging.getLogger(__name__)

_SAMPLES_KEPT: Final = 64
"""Latest durations per kind of source, of which the median is taken."""
_MIN_SAMPLES: Final = 5
"""With fewer durations there is no median."""
_SLOW_FACTOR: Final = 4
"""After so many times the median a block is requested elsewhere, too."""
_MAX_REQUESTS: Final = 2
"""Requests for one block at a time: each may hold all of its bytes."""
_POLL_S: Final = 0.25


class SourceRequest:
    """One request to one source, as the source sees it."""

    def __init__(self) -> None:
        self.begin()
        self.retries = 0
        """How often the source had to be asked again."""

    def begin(self) -> None:
        """Starts the request's clock, and resets its limits."""
        self.began = self.seen = observer_clock.now()
        """On the observer clock, which stops while this process doesn't run."""
        self.quiet_s = timeouts.BLOCK_STALL_S
        """How long a source that shows life may send nothing."""
        self.patient = False
        """Another request would take as long, as while a store answers with errors: none is made."""

    def mark_seen(self) -> None:
        """The source has sent something."""
        self.seen = observer_clock.now()


class BlockSource(Protocol):
    """A place that may have the block."""

    @property
    def kind(self) -> str:
        """Durations of sources of one kind are compared with each other."""

    @property
    def host(self) -> str:
        """Name of the host; empty: storage."""

    @property
    def shows_life(self) -> bool:
        """Whether the source sends something while it works."""

    async def read(self, request: SourceRequest) -> Sequence[bytes]:
        """The block's bytes, in pieces. Raises PannierError; is cancelled when another source was faster."""

    def succeeded(self) -> None:
        """Called when the source sent the right block."""

    def failed(self, error: PannierError | None) -> None:
        """Called when the source failed or sent a wrong block; None: it takes too long."""


_Checked = tuple[Sequence[bytes], int]
"""A block's pieces and their crc32c."""


@dataclass
class _Counts:
    rejected: int = 0
    failed: int = 0
    hedged: int = 0


class BlockFetcher:
    """Fetches blocks, by how long each kind of source took lately.

    Args:
        spare: blocks for which there is memory for a second request at a time.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._durations: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_SAMPLES_KEPT)
        )

    async def fetch(
        self, sources: Sequence[BlockSource], size: int, expected: int | None, what: str
    ) -> Fetched:
        """The block from the first source that has it.

        Args:
            sources: at least one.
            size: bytes of the block.
            expected: its crc32c; None: not known.
            what: the block, for messages.

        Raises StorageError, or IntegrityError when a source sent a wrong block and none a good one.
        """
        pending = deque(sources)
        running: dict[asyncio.Task[_Checked], tuple[BlockSource, SourceRequest]] = {}
        ended: list[asyncio.Task[_Checked]] = []
        errors: list[PannierError] = []
        counts = _Counts()
        requests: list[SourceRequest] = []
        again = True
        taken = 0
        """Of the spare memory, by second requests in ``running``."""

        def settle_spare() -> None:
            nonlocal taken
            needed = max(0, len(running) - 1)
            self._spare -= needed - taken
            taken = needed

        def start(source: BlockSource) -> None:
            if len(running) == _MAX_REQUESTS or (running and self._spare <= 0):
                oldest = next(iter(running))
                del running[oldest]
                oldest.cancel()
                ended.append(oldest)
            request = SourceRequest()
            requests.append(request)
            work = _read_checked(source, request, size, expected, what)
            running[asyncio.get_running_loop().create_task(work)] = source, request
            settle_spare()

        start(pending.popleft())
        try:
            while running:
                source, request = list(running.values())[-1]
                left = (
                    self._due(source, request) - observer_clock.now() if pending or again else 1.0
                )
                done, _ = await asyncio.wait(
                    running,
                    timeout=min(max(left, 0.0), _POLL_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    source, request = running.pop(task)
                    settle_spare()
                    try:
                        pieces, crc = task.result()
                    except PannierError as error:
                        errors.append(error)
                        counts.rejected += isinstance(error, IntegrityError)
                        counts.failed += not isinstance(error, IntegrityError)
                        source.failed(error)
                        continue
                    source.succeeded()
                    self._durations[source.kind].append(observer_clock.now() - request.began)
                    return Fetched(
                        *(pieces, crc, source.host),
                        *(counts.rejected, counts.failed, counts.hedged),
                        retries=sum(each.retries for each in requests),
                    )
                if not running and pending:
                    start(pending.popleft())
                elif running and not done and self._due(source, request) <= observer_clock.now():
                    if pending:
                        source.failed(None)
                        start(pending.popleft())
                        counts.hedged += 1
                    elif again:
                        # A single request to storage may hang, too. ``source`` may be a slow peer, once a
                        # request to storage has failed.
                        again = False
                        start(sources[-1])
                        counts.hedged += 1
            raise _all_failed(what, errors)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *ended, return_exceptions=True)
            running.clear()
            settle_spare()

    def _due(self, source: BlockSource, request: SourceRequest) -> float:
        """When the next source is asked as well, on the observer clock."""
        if request.patient:
            return math.inf
        known = self._durations[source.kind]
        usual = _SLOW_FACTOR * median(known) if len(known) >= _MIN_SAMPLES else 0.0
        if source.shows_life:
            # Such a source asks elsewhere itself when its own sources are slow.
            longest = request.began + max(timeouts.BLOCK_SLOW_S, usual)
            return min(request.seen + request.quiet_s, longest)
        return request.began + max(timeouts.BLOCK_STALL_S, usual or timeouts.BLOCK_FIRST_STALL_S)


async def _read_checked(
    source: BlockSource, request: SourceRequest, size: int, expected: int | None, what: str
) -> _Checked:
    """Raises PannierError."""
    try:
        pieces = await source.read(request)
    except PannierError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error
    crc = await block_threads.run(checksum, pieces)
    found = sum(map(len, pieces))
    where = f"from {source.host}" if source.host else "from storage"
    if found != size:
        raise IntegrityError(f"{what} has {found} bytes {where}, the receipt has {size}")
    if expected is not None and crc != expected:
        raise IntegrityError(f"{what} has crc32c {crc:08x} {where}, the receipt has {expected:08x}")
    return pieces, crc


def checksum(pieces: Sequence[bytes]) -> int:
    """The crc32c of all pieces, one after another; blocking."""
    crc = 0
    for piece in pieces:
        crc = crc32c.crc32c(piece, crc)
    return crc


def _all_failed(what: str, errors: Sequence[PannierError]) -> PannierError:
    kind = (
        IntegrityError if any(isinstance(each, IntegrityError) for each in errors) else StorageError
    )
    return kind(f"{what} could not be read: {'; '.join(dict.fromkeys(map(str, errors)))}")
