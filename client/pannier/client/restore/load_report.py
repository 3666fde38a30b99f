"""Reports a running load to this host's sidecars, for operators.

In: the load's progress. Out: a report soon after its begin, each second, and at its end, to each sidecar
that runs; none is started. Of a short load only the end is reported, after it. A sidecar that can't be
reached, or doesn't know the call, changes nothing for the load. Two threads for each sidecar while it runs.
"""

import atexit
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from pannier.client.config import Settings
from pannier.client.embedded.rendezvous import job_key
from pannier.client.interrupts import aside
from pannier.client.restore.load_progress import LoadProgress
from pannier.client.transport.channel import SidecarChannel
from pannier.common import timeouts
from pannier.v1 import load_status_pb2, restore_pb2_grpc
from pannier.wire.errors import PannierError
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Statuses of a sidecar that may take reports later."""


class LoadReporter:
    """Reports loads of this process.

    Args:
        settings: where the sidecars are.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings

    @contextmanager
    def reporting(self, progress: LoadProgress) -> Iterator[None]:
        """Reports this load as long as the context lasts; raises nothing of its own."""
        reports = _Reports(self._settings, progress)
        # An interrupt may end the wait for the start, which goes on: the reports must be ended then, too.
        try:
            reports.start()
            yield
        finally:
            reports.finish()


class _Reports:
    """The reports of one load, to all sidecars of this host."""

    def __init__(self, settings: Callable[[], Settings], progress: LoadProgress) -> None:
        self._settings = settings
        self._progress = progress
        self._ended = threading.Event()
        self._begun = False
        self._thread = threading.Thread(target=self._run, name="pannier-load-report", daemon=True)

    def start(self) -> None:
        """Reports in the background from now on, if a thread can be started for that."""
        try:
            aside(self._thread.start)
        except RuntimeError as error:
            _log.debug("this load is not reported: %s", error)

    def finish(self) -> None:
        """Starts the report of the end; if the load was reported before, waits a moment for it to arrive.

        Otherwise the report is sent in the background, so that it doesn't slow a short load.
        """
        aside(self._end)

    def _end(self) -> None:
        # An interpreter that ends at once waits for the report, too.
        atexit.register(self._join)
        self._ended.set()
        if self._begun:
            self._join()

    def _join(self) -> None:
        if self._thread.is_alive():  # it was started
            self._thread.join(timeouts.LOAD_REPORT_END_S)

    def _run(self) -> None:
        try:
            self._begun = not self._ended.wait(timeouts.LOAD_REPORT_BEGIN_S)
            self._report()
        except Exception:  # noqa: BLE001 - top of the thread: no load fails by its report
            _log.debug("this load is not reported", exc_info=True)
        finally:
            self._ended.wait()
            atexit.unregister(self._join)

    def _report(self) -> None:
        settings = self._settings()
        fields = {"job": settings.job or "", "group": _group(settings, self._progress)}
        streams = [
            _Stream(_channel(settings, address), self._progress, fields, self._ended)
            for address in settings.sidecars()
        ]
        further = [
            threading.Thread(target=each.run, name="pannier-load-report", daemon=True)
            for each in streams[1:]
        ]
        for thread in further:
            thread.start()
        if streams:
            streams[0].run()
        for thread in further:
            thread.join()


class _Stream:
    """Reports to one sidecar."""

    def __init__(
        self,
        channel: SidecarChannel,
        progress: LoadProgress,
        fields: dict[str, str],
        ended: threading.Event,
    ) -> None:
        self._channel = channel
        self._progress = progress
        self._fields = fields
        self._ended = ended

    def run(self) -> None:
        """Reports until the load has ended, and its end."""
        pause = timeouts.LOAD_REPORT_AGAIN_S
        try:
            while not self._report():
                if self._ended.wait(pause):
                    # The sidecar counts a rank whose stream ended as dead, if nothing follows.
                    self._report()
                    return
                pause = min(2 * pause, timeouts.LOAD_REPORT_S)
        finally:
            self._channel.close()

    def _report(self) -> bool:
        """Makes one stream of reports, until it ends; returns whether no further one is needed."""

        def start(connection: grpc.Channel) -> Any:
            stub: Any = restore_pb2_grpc.RestoreStub(connection)
            return stub.Report.future(self._messages(), metadata=self._channel.metadata())

        try:
            with self._channel.call(start) as call:
                self._await(call)
        except grpc.RpcError as error:
            _log.debug("the sidecar at %s takes no reports: %s", self._channel.address, error)
            return error.code() not in _AGAIN
        except PannierError as error:
            _log.debug("the sidecar at %s takes no reports: %s", self._channel.address, error)
            return False
        return True

    def _await(self, call: Any) -> None:
        """Returns when the call has ended; cancels it a while after the load: the sidecar may be stopped."""
        while not self._ended.is_set():
            with suppress(grpc.FutureTimeoutError):
                call.result(timeouts.LOAD_REPORT_S)
                return
        try:
            call.result(timeouts.LOAD_REPORT_LAST_S)
        except grpc.FutureTimeoutError:
            _log.debug("the sidecar at %s doesn't take the end of a load", self._channel.address)
            call.cancel()

    def _messages(self) -> Iterator[load_status_pb2.ReportRequest]:
        version, ended = WIRE_VERSION, False
        while not ended:
            # Before the report is made, which then shows the end.
            ended = self._ended.is_set()
            report = self._progress.report()
            for name, value in self._fields.items():
                setattr(report, name, value)
            if not version:
                del report.ranks[:]
            yield load_status_pb2.ReportRequest(wire_version=version, report=report)
            version = 0
            if not ended:
                self._ended.wait(timeouts.LOAD_REPORT_S)


def _channel(settings: Settings, address: str) -> SidecarChannel:
    return SidecarChannel(
        address, tls=settings.tls(), trusted_uids=settings.trusted_uids, token=settings.token()
    )


def _group(settings: Settings, progress: LoadProgress) -> str:
    """See LoadReport.group."""
    if len(progress.ranks) == 1:
        return progress.call
    text = f"{job_key(settings)} {progress.ranks}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
