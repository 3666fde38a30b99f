"""Texts and messages that name the ranks a save waits for, and the times that each rank took.

Pure; any thread.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pannier.common.message_json import duration, seconds_of
from pannier.common.units import counted
from pannier.v1 import save_pb2
from pannier.wire import limits
from pannier.wire.failures import ranks_text


@dataclass(frozen=True)
class Awaited:
    """A rank that a save waits for."""

    rank: int
    host: str = ""
    """Empty: unknown."""
    last_seen_s: float | None = None
    """Seconds since its last message; None: none yet."""
    replica: str = ""
    """The host that has its files, too, while its own host's sidecar is disconnected."""
    no_sidecar: bool = False
    """The sidecar of its host doesn't respond, so nothing is known of the rank itself."""


def waiting_text(awaited: Iterable[Awaited]) -> str:
    """``ranks [3, 7] (host node-2, last seen 12 s ago)``, by host; empty without ranks."""
    by_host: dict[str, list[Awaited]] = {}
    for one in sorted(awaited, key=lambda one: one.rank):
        by_host.setdefault(one.host, []).append(one)
    return ", ".join(
        f"{ranks_text([one.rank for one in group])} ({_where(host, group)})"
        for host, group in by_host.items()
    )


def waiting_on(awaited: Iterable[Awaited], *, deadline_s: float = 0) -> save_pb2.WaitingOn:
    """The message for these ranks; ``deadline_s`` is the remaining time."""
    listed = list(awaited)
    return save_pb2.WaitingOn(
        ranks=sorted(one.rank for one in listed),
        text=waiting_text(listed),
        deadline_s=deadline_s if listed else 0,
    )


def wait_word(reason: int) -> str:
    """``room`` of ``WAIT_REASON_ROOM``."""
    return save_pb2.WaitReason.Name(reason).removeprefix("WAIT_REASON_").lower()


def training_waits(waits: Iterable[save_pb2.TrainingWait]) -> list[save_pb2.TrainingWait]:
    """One for all ranks with the same call, checkpoint and reason; the longest first."""
    found: dict[tuple[str, str, int], save_pb2.TrainingWait] = {}
    for each in waits:
        key = (each.call, each.checkpoint_id, each.reason)
        one = found.setdefault(key, save_pb2.TrainingWait())
        ranks = one.ranks + each.ranks
        if seconds_of(each.duration) >= seconds_of(one.duration):
            one.CopyFrom(each)
        one.ranks = ranks
    for one in found.values():
        name = one.checkpoint_id.rstrip("/").rpartition("/")[2]
        what = f"{one.call} of {name}" if name else one.call
        seconds = seconds_of(one.duration)
        one.summary = (
            f"{counted(one.ranks, 'rank')} in {what} for {seconds:.0f} s ({wait_word(one.reason)})"
        )
    return sorted(found.values(), key=lambda one: -seconds_of(one.duration))


_REASONS: Final = frozenset(save_pb2.WaitReason.values())


def aged(wait: save_pb2.TrainingWait, seconds: float) -> save_pb2.TrainingWait:
    """A wait that a rank has reported, some seconds later, with its texts cut to their limits."""
    return save_pb2.TrainingWait(
        call=wait.call[: limits.MAX_HOST],
        checkpoint_id=wait.checkpoint_id[: limits.MAX_NAME],
        reason=wait.reason if wait.reason in _REASONS else save_pb2.WAIT_REASON_UNSPECIFIED,
        duration=duration(limits.age(seconds_of(wait.duration)) + seconds),
        ranks=1,
    )


def set_times(out: save_pb2.RankStatus, reached: Mapping[int, float], start: float) -> None:
    """Sets the time that a rank took to each phase; a phase that wasn't observed keeps the reported time.

    Args:
        reached: when it reached a phase, by ``RankPhase``, on the monotonic clock.
        start: when the save's first message arrived.
    """
    latest = math.inf
    for phase, name in _TIMES:
        moment = reached.get(phase)
        seconds = limits.age(getattr(out, name)) if moment is None else moment - start
        # Reported times count from another start than observed ones.
        seconds = min(seconds, latest)
        setattr(out, name, seconds)
        latest = seconds or latest


_TIMES: Final = (
    (save_pb2.RANK_PHASE_DURABLE, "durable_s"),
    (save_pb2.RANK_PHASE_INGESTED, "ingested_s"),
    (save_pb2.RANK_PHASE_STREAMING, "staged_s"),
    (save_pb2.RANK_PHASE_PLANNED, "planned_s"),
)
"""The last phase first."""


def _where(host: str, group: list[Awaited]) -> str:
    ages = [one.last_seen_s for one in group if one.last_seen_s is not None]
    when = f"last seen {min(ages):.0f} s ago" if ages else "not seen yet"
    holders = sorted({one.replica for one in group if one.replica})
    if holders and all(one.replica for one in group):
        what = "its replica" if len(group) == 1 else "their replicas"
        when += f"; {' and '.join(holders)} {'has' if len(holders) == 1 else 'have'} {what}"
    if all(one.no_sidecar for one in group):
        host += ", whose sidecar does not respond"
    return f"host {host}, {when}" if host else when
