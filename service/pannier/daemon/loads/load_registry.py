"""The loads that a daemon knows: those that run, and for some time those that have ended.

In: reports of single ranks; at a sidecar also the ends of their streams. Out: statuses, and totals since the
daemon started. Reports of one load are put together by its id; while that isn't known, by the group
of ranks: a rank is in one load of a group at a time. On the event loop, but for notifications.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from typing import Final

from prometheus_client import Histogram

from pannier.common import observer_clock, timeouts
from pannier.daemon.loads.load_state import Load, RankLoad, name_of
from pannier.daemon.status_registry import Notifier, UnknownSaveError
from pannier.v1 import load_status_pb2
from pannier.wire.errors import OverloadedError
from pannier.wire.limits import check_load_report

_log = logging.getLogger(__name__)

_DEFAULT_LIMIT: Final = 100
_ENDED_KEPT: Final = 64
_RANKS_KEPT: Final = 1 << 17
"""Ranks of all loads; reports of more are refused."""


class UnknownLoadError(UnknownSaveError):
    """No load by that name."""


class LoadRegistry(Notifier):
    """See the module.

    Args:
        sees_all: sidecars report whole groups here: a rank without a report for some time is lost.
    """

    def __init__(self, *, sees_all: bool = False) -> None:
        super().__init__()
        self._sees_all = sees_all
        self._loads: dict[str, Load] = {}
        """By key, the newest last."""
        self._by_call: dict[str, Load] = {}
        self._briefs: dict[str, tuple[float, load_status_pb2.LoadStatus]] = {}
        """Statuses without ranks by key, each with its expiry on the monotonic clock."""
        self._keys = itertools.count(1)
        self.totals: Counter[str] = Counter()
        """Bytes by ``bytes SOURCE``, and events by their name in the report."""
        self.ended: Counter[int] = Counter()
        """Loads by ``LoadState``."""
        self.seconds: Histogram | None = None
        """Gets the duration of each load."""

    # In.

    def apply(self, report: load_status_pb2.LoadReport) -> None:
        """Takes the next report about one rank's call. Raises InvalidRequestError, OverloadedError."""
        check_load_report(report)
        load = self._enter(report)
        load.describe(report)
        rank = load.ranks.get(report.status.rank)
        if rank is None or rank.call != report.call:
            if len(self._by_call) >= _RANKS_KEPT:
                raise OverloadedError(f"{len(self._by_call)} ranks load, which is the limit")
            rank = load.ranks[report.status.rank] = RankLoad(report.call, report.status.rank)
            self._by_call[report.call] = load
        self.totals += rank.apply(report)
        self._update(load)

    def lose(self, call: str, reason: str) -> None:
        """Fails the rank that made this call, and whose process is dead, unless the call had ended."""
        load = self._by_call.get(call)
        if load is None:
            return
        rank = next((each for each in load.ranks.values() if each.call == call), None)
        if rank is None or rank.ended:
            return
        host = rank.status().host
        process = f"process {rank.pid} of " if rank.pid else ""
        rank.fail(f"{process}rank {rank.rank} on host {host} {reason}")
        _log.warning("%s of %s: %s", load.id, load.checkpoint_id, rank.status().last_error)
        self._update(load)

    def _enter(self, report: load_status_pb2.LoadReport) -> Load:
        """The load that the rank's call belongs to."""
        load = self._by_call.get(report.call)
        if load is not None and report.load and load.load_id not in ("", report.load):
            # The call was assigned to this load by its group, before the id of its own was known.
            self._remove_rank(load, report.status.rank)
            load = None
        if load is None:
            load = self._find_for(report) or self._begin(report)
        if report.load and not load.load_id:
            load.load_id = report.load
        return load

    def _find_for(self, report: load_status_pb2.LoadReport) -> Load | None:
        """The known load that a new call belongs to; None: there is none."""
        rank = report.status.rank
        if report.load:
            for load in reversed(self._loads.values()):
                if load.load_id == report.load and _has_room(load, rank):
                    return load
        for load in list(self._loads.values()):
            same = load.group == report.group and not (report.load and load.load_id)
            if not same or load.ended:
                continue
            if _has_room(load, rank):
                return load
            if load.load_id:
                # Other ranks may report this load's end after this rank began its next load. A dead rank is
                # noticed by its stream.
                continue
            # A rank is in one load at a time: the processes of this load have ended.
            load.superseded = True
            self._update(load)
        return None

    def _begin(self, report: load_status_pb2.LoadReport) -> Load:
        self._forget()
        load = Load(str(next(self._keys)), report, sees_all=self._sees_all)
        self._loads[load.key] = load
        return load

    def _remove_rank(self, load: Load, rank: int) -> None:
        gone = load.ranks.pop(rank, None)
        if gone is not None:
            self._by_call.pop(gone.call, None)
        if not load.ranks:
            del self._loads[load.key]
            self._briefs.pop(load.key, None)
        self.notify(load.key)

    def _update(self, load: Load) -> None:
        """Called after a change: counts the load once it has ended, and notifies watches."""
        if load.ended and load.ended_at is None:
            load.ended_at = time.monotonic()
            self.ended[load.state] += 1
            if self.seconds is not None and load.state == load_status_pb2.LOAD_STATE_LOADED:
                self.seconds.observe(load.seconds)
        if load.ended_at is not None:
            self._briefs.pop(load.key, None)
        self.notify(load.key)

    def _forget(self) -> None:
        """Forgets loads that ended long ago, or before many others."""
        ended = [load for load in self._loads.values() if load.ended_at is not None]
        before = time.monotonic() - timeouts.ENDED_LOAD_KEPT_S
        kept = len(ended)
        for load in ended:
            if kept < _ENDED_KEPT and (load.ended_at or 0.0) > before:
                break
            kept -= 1
            del self._loads[load.key]
            self._briefs.pop(load.key, None)
            for rank in load.ranks.values():
                self._by_call.pop(rank.call, None)

    async def keep_checking(self) -> None:
        """Fails ranks that no sidecar has reported for long, until it is cancelled."""
        while True:
            await asyncio.sleep(timeouts.CHECK_S)
            self._check()

    def _check(self) -> None:
        now = observer_clock.now()
        for load in list(self._loads.values()):
            for rank in list(load.ranks.values()):
                if not rank.ended and now - rank.reported_at > timeouts.LOAD_LOST_S:
                    self.lose(
                        rank.call,
                        f"was last seen {rank.unseen_s:.0f} s ago: the host or its sidecar is down",
                    )
            if load.ended_at is None and load.unreported_s > timeouts.LOAD_LOST_S:
                load.all_reported = True
                self._update(load)

    # Out.

    @property
    def running(self) -> int:
        """How many loads haven't ended."""
        return sum(not load.ended for load in self._loads.values())

    def ranks(self) -> list[tuple[Load, RankLoad]]:
        """All ranks of all loads, the oldest first."""
        return [(load, rank) for load in self._loads.values() for rank in load.ranks.values()]

    def find(self, name: str) -> str:
        """Key of a load by its id, or of the newest load of a checkpoint id or one that ends with ``/name``.

        Raises UnknownLoadError.
        """
        for matches in (
            lambda load: name in _names(load),
            lambda load: name == load.checkpoint_id,
            lambda load: load.checkpoint_id.endswith(f"/{name}"),
        ):
            for key, load in reversed(self._loads.items()):
                if matches(load):
                    return key
        raise UnknownLoadError(f"this daemon knows no load {name!r}; `pannier status` lists them")

    def get(self, name: str) -> load_status_pb2.LoadStatus:
        """Status by id, or of the newest load of a checkpoint id. Raises UnknownLoadError."""
        return self.status_of(self.find(name), name)

    def status_of(self, key: str, name: str) -> load_status_pb2.LoadStatus:
        """Status of the load with a key. Raises UnknownLoadError, which calls it ``name``: it was forgotten."""
        load = self._loads.get(key)
        if load is None:
            raise UnknownLoadError(
                f"this daemon has forgotten load {name!r}: it keeps at most {_ENDED_KEPT} loads that have ended"
            )
        return load.status()

    def list(self, *, job: str = "", limit: int = 0) -> "list[load_status_pb2.LoadStatus]":
        """Newest first, without ranks; see ListSavesResponse."""
        self._forget()
        found = [load for load in reversed(self._loads.values()) if job in ("", load.job)]
        return [self._brief(load) for load in found[: limit or _DEFAULT_LIMIT]]

    def _brief(self, load: Load) -> load_status_pb2.LoadStatus:
        """The status without ranks, cached as it is made from all ranks: a moment, or for good once ended."""
        now = time.monotonic()
        until, status = self._briefs.get(load.key, (0.0, None))
        if status is None or now >= until:
            status = load.status(ranks=False)
            kept_s = math.inf if load.ended else timeouts.STATUS_CACHED_S
            self._briefs[load.key] = (now + kept_s, status)
        return status


def _names(load: Load) -> tuple[str, ...]:
    return (load.id, load.load_id, name_of(load.group))


def _has_room(load: Load, rank: int) -> bool:
    """Whether the load has no call of this rank."""
    return rank not in load.ranks
