"""What saves cost and how often to save, by a daemon's committed saves and its loads.

In: statuses. Out: advice by job. Pure.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from pannier.common.save_interval import RECENT, Advice, SaveCost, advise
from pannier.v1 import load_status_pb2, save_pb2


@dataclasses.dataclass(frozen=True)
class GroupAdvice:
    """Advice for the ranks of a job that save together."""

    job: str
    group: str
    ranks: int
    """Their number."""
    advice: Advice

    def fields(self) -> dict[str, Any]:
        """The advice as fields of a JSON object."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("advice"), **fields}

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{self.job}, {ranks} (group {self.group}): {self.advice}"


def advice_of(
    saves: Iterable[save_pb2.SaveStatus],
    loads: Iterable[load_status_pb2.LoadStatus] = (),
    mtbf_s: float | None = None,
) -> list[GroupAdvice]:
    """Advice for each job and group with a committed save among ``saves``, newest first.

    Args:
        loads: those by as many ranks, of checkpoints beside a group's own, show how long a restore takes.

    Raises InvalidRequestError: ``mtbf_s`` is below 1.
    """
    groups: dict[tuple[str, str, int], list[SaveCost]] = {}
    roots: dict[tuple[str, str, int], set[str]] = {}
    for save in saves:
        cost = _cost(save)
        if cost is not None:
            key = (save.save.job, save.save.group, len(save.ranks))
            groups.setdefault(key, []).append(cost)
            roots.setdefault(key, set()).add(_root(save.checkpoint_id))
    loaded = [each for each in loads if each.state == load_status_pb2.LOAD_STATE_LOADED]
    advised = []
    for key, costs in groups.items():
        restores = [
            each.seconds
            for each in loaded
            if _root(each.checkpoint_id) in roots[key] and each.group_size == key[2]
        ]
        advised.append((key, advise(costs[:RECENT], restores[:RECENT], mtbf_s)))
    return [GroupAdvice(*key, advice) for key, advice in advised if advice is not None]


def _root(checkpoint_id: str) -> str:
    return checkpoint_id.rstrip("/").rpartition("/")[0]


def _cost(save: save_pb2.SaveStatus) -> SaveCost | None:
    """What a save cost; None: it isn't committed, or was committed before this daemon started."""
    stalled_s = max((rank.stalled_s for rank in save.ranks), default=0.0)
    if save.state != save_pb2.SAVE_STATE_COMMITTED or not save.committed_s or not stalled_s:
        return None
    # The daemons' times begin at the save's first message, which by a cached plan comes after the stall.
    return SaveCost(
        stalled_s=stalled_s,
        ingested_s=stalled_s + save.ingested_s,
        durable_s=stalled_s + save.committed_s,
    )
