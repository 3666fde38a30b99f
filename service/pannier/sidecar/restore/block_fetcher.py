"""Gets one block from the first of its sources that has it, checked, in spite of slow and wrong ones.

In: sources in order, the nearest first and storage last. Out: the block, or an error that names what each
source answered. A source that fails, or sends a wrong block, is followed by the next at once; one that
takes long is followed by the next, too, and the first good answer counts. The last source may be asked
twice at a time. At most two requests for a block are under way at a time, and of all blocks only so many
second ones as there is memory for: else the older request ends first. On the event loop; checksums are taken by threads.
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

_KNOWN: Final = 64
"""Durations of a kind that its median is of."""
_ENOUGH: Final = 5
"""Fewer durations have no median."""
_LONG: Final = 4
"""Times the median: then a block is requested elsewhere, too."""
_MOST: Final = 2
"""Requests for one block at a time: each may hold all of its bytes."""
_POLL_S: Final = 0.25
_PIECE: Final = 1 << 20


class Attempt:
    """One request to one source, as the source sees it."""

    def __init__(self) -> None:
        self.begin()
        self.retries = 0
        """How often the source had to be asked again."""

    def begin(self) -> None:
        """From now on it counts how long it takes."""
        self.began = self.seen = observer_clock.now()
        """By the clock that stops while this process doesn't run."""
        self.quiet_s = timeouts.BLOCK_STALL_S
        """How long a source that shows life may send nothing."""
        self.patient = False
        """It takes long for a reason that another request wouldn't end, as a store that answers with errors."""

    def mark_seen(self) -> None:
        """The source has sent something."""
        self.seen = observer_clock.now()


class BlockSource(Protocol):
    """A place that may have the block."""

    @property
    def kind(self) -> str:
        """Sources of a kind take similar times."""

    @property
    def host(self) -> str:
        """Name of the host; empty: storage."""

    @property
    def shows_life(self) -> bool:
        """Whether it sends something while it works."""

    async def read(self, attempt: Attempt) -> Sequence[bytes]:
        """The block's bytes, in pieces. Raises PannierError; is cancelled when another source was faster."""

    def failed(self, error: PannierError | None) -> None:
        """It failed, or sent a wrong block; None: it takes too long."""


@dataclass
class _Counts:
    rejected: int = 0
    failed: int = 0
    hedged: int = 0


class BlockFetcher:
    """Knows how long sources take.

    Args:
        spare: blocks for which there is memory for a second request at a time.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KNOWN))

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
        running: dict[asyncio.Task[tuple[Sequence[bytes], int]], tuple[BlockSource, Attempt]] = {}
        ended: list[asyncio.Task[tuple[Sequence[bytes], int]]] = []
        errors: list[PannierError] = []
        counts = _Counts()
        attempts: list[Attempt] = []
        again = True
        taken = 0
        """Of the spare memory, by second requests in ``running``."""

        def settle_spare() -> None:
            nonlocal taken
            needed = max(0, len(running) - 1)
            self._spare -= needed - taken
            taken = needed

        def start(source: BlockSource) -> None:
            if len(running) == _MOST or (running and self._spare <= 0):
                oldest = next(iter(running))
                del running[oldest]
                oldest.cancel()
                ended.append(oldest)
            attempt = Attempt()
            attempts.append(attempt)
            work = _read_checked(source, attempt, size, expected, what)
            running[asyncio.get_running_loop().create_task(work)] = source, attempt
            settle_spare()

        start(pending.popleft())
        try:
            while running:
                source, attempt = list(running.values())[-1]
                left = (
                    self._due(source, attempt) - observer_clock.now() if pending or again else 1.0
                )
                done, _ = await asyncio.wait(
                    running,
                    timeout=min(max(left, 0.0), _POLL_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    source, attempt = running.pop(task)
                    settle_spare()
                    try:
                        pieces, crc = task.result()
                    except PannierError as error:
                        errors.append(error)
                        counts.rejected += isinstance(error, IntegrityError)
                        counts.failed += not isinstance(error, IntegrityError)
                        source.failed(error)
                        continue
                    self._durations[source.kind].append(observer_clock.now() - attempt.began)
                    return Fetched(
                        *(pieces, crc, source.host),
                        *(counts.rejected, counts.failed, counts.hedged),
                        retries=sum(each.retries for each in attempts),
                    )
                if not running and pending:
                    start(pending.popleft())
                elif running and not done and self._due(source, attempt) <= observer_clock.now():
                    if pending:
                        source.failed(None)
                        start(pending.popleft())
                        counts.hedged += 1
                    elif again:
                        # Of storage, too, a single request may hang.
                        again = False
                        start(source)
                        counts.hedged += 1
            raise _all_failed(what, errors)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *ended, return_exceptions=True)
            running.clear()
            settle_spare()

    def _due(self, source: BlockSource, attempt: Attempt) -> float:
        """When the next source is asked, too."""
        if attempt.patient:
            return math.inf
        known = self._durations[source.kind]
        usual = _LONG * median(known) if len(known) >= _ENOUGH else 0.0
        if source.shows_life:
            # It asks elsewhere itself for what takes long there.
            longest = attempt.began + max(timeouts.BLOCK_SLOW_S, usual)
            return min(attempt.seen + attempt.quiet_s, longest)
        return attempt.began + max(timeouts.BLOCK_STALL_S, usual or timeouts.BLOCK_FIRST_STALL_S)


async def _read_checked(
    source: BlockSource, attempt: Attempt, size: int, expected: int | None, what: str
) -> tuple[Sequence[bytes], int]:
    """The block's pieces and their crc32c. Raises PannierError."""
    try:
        pieces = await source.read(attempt)
    except PannierError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error
    crc = await block_threads.run(checksum, pieces)
    found = sum(map(len, pieces))
    if found != size:
        raise IntegrityError(f"{what} has {found} bytes there, {size} were expected")
    if expected is not None and crc != expected:
        raise IntegrityError(f"{what} has crc32c {crc:08x} there, saved was {expected:08x}")
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
