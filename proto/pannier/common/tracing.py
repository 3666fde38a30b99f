"""OpenTelemetry traces of saves, off unless the environment enables them.

In: a save's identity and past intervals. Out: spans, to the collector that ``OTEL_*`` names. All spans of a
save are one trace, from whichever process: the ids of the trace, of the save's span (exported by the
coordinator) and of each rank's span (exported by its client) are derived from the save's identity. So no
context is propagated, and neither a restart nor a cached plan breaks a trace. Spans are exported after the
save has ended, at no cost while bytes move. Without ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its like), or
without the packages (the extra ``otel``), a call costs a comparison. Thread-safe.
"""

import atexit
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from pannier.common import timeouts
from pannier.v1 import save_pb2
from pannier.wire.object_names import save_text
from pannier.wire.version import package_version

_log = logging.getLogger(__name__)

_ASKING: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
_NS: Final = 1_000_000_000


Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Interval:
    """A past interval; times are of the monotonic clock."""

    name: str
    begin: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty: it succeeded."""


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment enables traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in _ASKING)


def set_up(service: str, **resource: str) -> None:
    """Prepares the export of spans of ``service`` if the environment enables traces.

    Only the first call has an effect; its imports take some tenths of a second.
    """
    global _tracer
    with _lock:
        if _tracer is not None:
            return
        _tracer = False
        if not wanted(os.environ):
            return
        try:
            _tracer = _Tracer(service, resource)
        except ImportError as error:
            _log.info(
                "the environment enables traces, but %s is missing: pip install opentelemetry-sdk "
                "opentelemetry-exporter-otlp-proto-grpc",
                error.name,
            )
        except Exception as error:  # noqa: BLE001 - of a setting that OpenTelemetry can't read
            _log.warning("traces can't be exported: %s: %s", type(error).__name__, error)


@contextmanager
def exporting(service: str, **resource: str) -> Iterator[None]:
    """:func:`set_up` for a daemon; when the context ends, what is left is exported.

    A daemon may be a forked process, which runs no exit handlers.
    """
    set_up(service, **resource)
    try:
        yield
    finally:
        if isinstance(_tracer, _Tracer):
            _tracer.finish()


def export_save(save: save_pb2.SaveId, own: Interval, parts: Sequence[Interval] = ()) -> None:
    """Exports the save's span and its children. Called by the coordinator."""
    if isinstance(_tracer, _Tracer):
        _tracer.export(save, "", own, parts)


def export_rank(
    save: save_pb2.SaveId, rank: int, own: Interval, parts: Sequence[Interval] = ()
) -> None:
    """Exports a rank's span and its children. Called by the rank's client."""
    if _tracer is None:
        set_up("pannier-client")
    if isinstance(_tracer, _Tracer):
        _tracer.export(save, _rank_name(rank), own, parts)


def export_parts(save: save_pb2.SaveId, rank: int, parts: Sequence[Interval]) -> None:
    """Exports more children of a rank's span. Called by the rank's sidecar."""
    if isinstance(_tracer, _Tracer):
        _tracer.export(save, _rank_name(rank), None, parts)


def trace_id(save: save_pb2.SaveId) -> int:
    """Id of the save's trace: 128 bits."""
    return int.from_bytes(_digest(save, "trace")[:16], "big")


def span_id(save: save_pb2.SaveId, rank: int | None = None) -> int:
    """Id of the save's span, or of a rank's: 64 bits."""
    name = "" if rank is None else _rank_name(rank)
    return int.from_bytes(_digest(save, f"span {name}")[:8], "big")


def _digest(save: save_pb2.SaveId, what: str) -> bytes:
    return hashlib.sha256(f"{save_text(save)}\n{what}".encode()).digest()


def _rank_name(rank: int) -> str:
    return f"rank {rank}"


class _Tracer:
    """The exporter. Raises ImportError without the packages."""

    def __init__(self, service: str, resource: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        forced: ContextVar[tuple[int, int] | None] = ContextVar("pannier-span", default=None)

        class Ids(RandomIdGenerator):
            """Random ids, except for a span with derived ones."""

            def generate_trace_id(self) -> int:
                """See IdGenerator."""
                own = forced.get()
                return super().generate_trace_id() if own is None else own[0]

            def generate_span_id(self) -> int:
                """See IdGenerator."""
                own = forced.get()
                return super().generate_span_id() if own is None else own[1]

        name = os.environ.get("OTEL_SERVICE_NAME") or service
        # The application may have a provider, whose ids can't be changed: it stays untouched.
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": name, **resource}),
            id_generator=Ids(),
            # It would wait half a minute for an unreachable collector.
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self.provider.get_tracer("pannier", package_version())
        self._forced = forced
        self._pid = os.getpid()
        self._ending, self._sent = threading.Event(), threading.Event()
        # While the interpreter exits, no thread can be started.
        threading.Thread(target=self._send_last, name="pannier-traces", daemon=True).start()
        atexit.register(self.finish)

    def export(
        self, save: save_pb2.SaveId, name: str, own: Interval | None, parts: Sequence[Interval]
    ) -> None:
        """Exports ``own`` as the span ``name`` (None: another process does), and its children."""
        trace = trace_id(save)
        identity = int.from_bytes(_digest(save, f"span {name}")[:8], "big")
        common = {"pannier.job": save.job, "pannier.save": save_text(save)}
        if own is not None:
            token = self._forced.set((trace, identity))
            try:
                # The save's span has no parent; it is the parent of the ranks' spans.
                parent = self._remote(trace, span_id(save)) if name else self._no_parent()
                self._emit(own, parent, common)
            finally:
                self._forced.reset(token)
        inside = self._remote(trace, identity)
        for part in parts:
            self._emit(part, inside, common)

    def finish(self) -> None:
        """Exports what is left, within ``timeouts.TRACES_EXPORT_S``."""
        if os.getpid() != self._pid:
            # A forked child: the thread exists in the parent only.
            return
        self._ending.set()
        self._sent.wait(timeouts.TRACES_EXPORT_S)

    def _send_last(self) -> None:
        self._ending.wait()
        self.provider.force_flush()
        self._sent.set()

    def _emit(self, interval: Interval, context: Any, common: Mapping[str, str]) -> None:
        from opentelemetry.trace import Status, StatusCode

        # Intervals are on the monotonic clock, spans on the wall clock.
        shift = time.time_ns() - int(time.monotonic() * _NS)
        span = self._tracer.start_span(
            interval.name,
            context=context,
            start_time=int(interval.begin * _NS) + shift,
            attributes={**common, **interval.attributes},
        )
        if interval.error:
            span.set_status(Status(StatusCode.ERROR, interval.error))
        span.end(int(interval.end * _NS) + shift)

    def _no_parent(self) -> Any:
        from opentelemetry.context import Context

        return Context()

    def _remote(self, trace: int, span: int) -> Any:
        """A parent that another process exports, sampled as its trace is."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            TraceFlags,
            set_span_in_context,
        )

        no_parent = self._no_parent()
        decision = self.provider.sampler.should_sample(no_parent, trace, "save").decision
        sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        parent = SpanContext(trace, span, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(parent), no_parent)


_lock = threading.Lock()
_tracer: "_Tracer | bool | None" = None
"""None: not set up yet; False: traces are disabled."""
