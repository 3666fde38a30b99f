"""Who may take what is left of the spool: a save that began earlier goes first.

In: the saves under way, and what each rank had of its group's last one. Out: bytes that those
before a save will still need on this host. Without it two saves that don't fit together could
each hold a part of the room and wait for the other's. Thread-safe.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from pannier.sidecar.save_state import BEFORE_INGESTION, Phase, RankSave, Save

_KEPT: Final = 64
"""Groups of which it is remembered what their saves take."""

Group = tuple[str, str, str]
"""Job, incarnation, name of the group."""


class Shares:
    """What saves take of this host's spool.

    Args:
        idle: bytes that a rank (job, incarnation, number) has been lent to stage into, unused.
    """

    def __init__(self, idle: Callable[[tuple[str, str, int]], int] = lambda owner: 0) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._usual: OrderedDict[Group, dict[int, int]] = OrderedDict()
        """Bytes by rank of this host, as of the last save that the rank handed over."""

    def ingested(self, rank: RankSave) -> None:
        """The rank has opened all files that it needs."""
        with self._lock:
            usual = self._usual.setdefault(_group(rank.save), {})
            usual[rank.rank] = _opened(rank)
            self._usual.move_to_end(_group(rank.save))
            while len(self._usual) > _KEPT:
                self._usual.popitem(last=False)

    def owed(self, save: Save, undecided: Iterable[Save]) -> int:
        """Bytes that saves before ``save`` still lack.

        Args:
            undecided: all, in the order in which they were first heard of.
        """
        total = 0
        for older in undecided:
            if older is save:
                break
            total += self._lacks(older)
        return total

    def _lacks(self, save: Save) -> int:
        ranks = dict(save.ranks)
        if any(rank.phase is Phase.FAILED for rank in ranks.values()):
            # It will be aborted, and gives back what it has.
            return 0
        with self._lock:
            usual = dict(self._usual.get(_group(save), {}))
        lacks = {number: bytes_ for number, bytes_ in usual.items() if number not in ranks}
        for number, rank in ranks.items():
            if rank.phase in BEFORE_INGESTION:
                expected = max(sum((rank.planned or {}).values()), usual.get(number, 0))
                lacks[number] = expected - _opened(rank)
        job, incarnation = save.id.job, save.id.incarnation
        return sum(
            max(0, bytes_ - self._idle((job, incarnation, number)))
            for number, bytes_ in lacks.items()
        )


def _group(save: Save) -> Group:
    return (save.id.job, save.id.incarnation, save.id.group)


def _opened(rank: RankSave) -> int:
    return sum(file.size for file in list(rank.files.values()))
