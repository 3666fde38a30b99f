"""Room in the spool that is reserved for saves that began earlier.

In: the saves under way, and the bytes that each rank had in its group's previous save. Out: the bytes
that the saves before a given one still need on this host. Without reservations, two saves that don't fit
together could each hold a part of the room and wait for the other's. On the event loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from pannier.sidecar.save_state import BEFORE_HAND_OVER, FAILED, RankSave, Save

_GROUPS_KEPT: Final = 64
"""Groups whose usage is remembered."""

Group = tuple[str, str, str]
"""Job, incarnation, name of the group."""


class Reservations:
    """Bytes of this host's spool that earlier saves still need.

    Args:
        leased: bytes that a rank (job, incarnation, number) has leased to stage into, and not used.
    """

    def __init__(self, leased: Callable[[tuple[str, str, int]], int] = lambda owner: 0) -> None:
        self._leased = leased
        self._usage: OrderedDict[Group, dict[int, int]] = OrderedDict()
        """Bytes by rank of this host in the last save that the rank handed over."""

    def record_usage(self, rank: RankSave) -> None:
        """Notes the bytes of a rank that was handed over: it has opened all its files."""
        group = _group(rank.save)
        self._usage.setdefault(group, {})[rank.rank] = rank.opened_bytes
        self._usage.move_to_end(group)
        while len(self._usage) > _GROUPS_KEPT:
            self._usage.popitem(last=False)

    def reserved_before(self, save: Save, undecided: Iterable[Save]) -> int:
        """Bytes that the saves before ``save`` still need.

        Args:
            undecided: all saves, in the order in which they began on this host.
        """
        total = 0
        for older in undecided:
            if older is save:
                break
            total += self._missing(older)
        return total

    def _missing(self, save: Save) -> int:
        ranks = dict(save.ranks)
        if any(rank.phase in FAILED for rank in ranks.values()):
            # It will be aborted, and its room freed.
            return 0
        usual = dict(self._usage.get(_group(save), {}))
        missing = {number: size for number, size in usual.items() if number not in ranks}
        for number, rank in ranks.items():
            if rank.phase in BEFORE_HAND_OVER:
                expected = max(sum((rank.plan.sizes or {}).values()), usual.get(number, 0))
                missing[number] = expected - rank.opened_bytes
        job, incarnation = save.id.job, save.id.incarnation
        return sum(
            max(0, size - self._leased((job, incarnation, number)))
            for number, size in missing.items()
        )


def _group(save: Save) -> Group:
    return (save.id.job, save.id.incarnation, save.id.group)
