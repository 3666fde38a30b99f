"""The reports of this host's loads: from trainers in, to the coordinator out.

In: streams of trainers. Out: loads for operators, here and, while it is attached, at the coordinator. If a
stream ends and its load hasn't, the trainer's process is dead, unless it soon opens another one. On the event
loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from pannier.common import timeouts
from pannier.daemon.loads.load_registry import LoadRegistry
from pannier.v1 import load_status_pb2
from pannier.wire.errors import InvalidRequestError, check_wire_version


@dataclass
class Sent:
    """What one stream to the coordinator has sent."""

    at: float = 0.0
    calls: set[str] = field(default_factory=set)
    """Calls that were reported with the ranks of their group."""
    ended: set[str] = field(default_factory=set)
    """Calls whose end was reported."""

    @property
    def due(self) -> bool:
        """Whether loads are to be reported again."""
        return time.monotonic() - self.at >= timeouts.HEARTBEAT_S


class LoadReports:
    """See the module.

    Args:
        registry: of this daemon.
        job: the only job that the sidecar serves; empty: any.
    """

    def __init__(self, registry: LoadRegistry, *, job: str = "") -> None:
        self._registry = registry
        self._job = job
        self._streams: dict[str, int] = {}
        """Number of open streams, by call."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """By call without an open stream; a timer that fires fails the call's rank."""
        self._idle_since = time.monotonic()

    async def follow(self, requests: AsyncIterator[load_status_pb2.ReportRequest]) -> None:
        """Takes one trainer's reports, until it ends the stream.

        Raises VersionMismatchError, InvalidRequestError, OverloadedError.
        """
        call = ""
        try:
            async for request in requests:
                report = request.report
                if not call:
                    check_wire_version("the trainer", request.wire_version, "this sidecar")
                    self._registry.apply(self._named(report))
                    call = report.call
                    self._open(call)
                elif report.call != call:
                    raise InvalidRequestError("a stream of reports is about one call of load")
                else:
                    self._registry.apply(self._named(report))
        finally:
            if call:
                self._close(call)

    def reports(self, sent: Sent) -> Iterator[load_status_pb2.LoadReport]:
        """What the coordinator doesn't know: running loads, and ended ones once."""
        sent.at = time.monotonic()
        known = set()
        for load, rank in self._registry.ranks():
            known.add(rank.call)
            if rank.ended and rank.call in sent.ended:
                continue
            yield load_status_pb2.LoadReport(
                call=rank.call,
                load=load.load_id,
                group=load.group,
                job=load.job,
                checkpoint_id=load.checkpoint_id,
                attempt=load.attempt,
                ranks=() if rank.call in sent.calls else load.group_ranks,
                status=rank.status(),
                pid=rank.pid,
            )
            sent.calls.add(rank.call)
            if rank.ended:
                sent.ended.add(rank.call)
            else:
                # The rank was taken for dead, and reports again.
                sent.ended.discard(rank.call)
        sent.calls &= known
        sent.ended &= known

    def idle_s(self) -> float:
        """Seconds since the last stream ended; 0: one is open."""
        return 0.0 if self._streams else time.monotonic() - self._idle_since

    def _named(self, report: load_status_pb2.LoadReport) -> load_status_pb2.LoadReport:
        if self._job:
            report.job = self._job
        return report

    def _open(self, call: str) -> None:
        self._streams[call] = self._streams.get(call, 0) + 1
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _close(self, call: str) -> None:
        self._streams[call] -= 1
        if not self._streams[call]:
            del self._streams[call]
            self._idle_since = time.monotonic()
            loop = asyncio.get_running_loop()
            self._timers[call] = loop.call_later(timeouts.LOAD_RETURN_S, self._lose, call)

    def _lose(self, call: str) -> None:
        del self._timers[call]
        self._registry.lose(call, "died while it loaded")
