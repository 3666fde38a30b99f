"""OpenTelemetry traces of saves, off unless the environment asks for them.

In: a save's identity and stretches of time that are over. Out: spans, to the collector that ``OTEL_*``
names. All of a save's spans are one trace, whoever tells them: the ids of the trace, of the save's own
span (the coordinator's) and of each rank's (its client's) follow from the save's identity, so nothing is
carried along, and neither a restart nor a plan from the cache tears a trace. Spans are told when
a save has ended, so nothing is done for them while bytes move. Without ``OTEL_EXPORTER_OTLP_ENDPOINT``
(or its like), or without the packages (``pip install 'pannier[otel]'``), a call costs a comparison.
Thread-safe.
"""

import atexit
import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

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
_LAST_S: Final = 2.0
"""At the process' end, for what was told last to be sent: the collector may be gone."""


Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Interval:
    """Something that is over; times are of the monotonic clock."""

    name: str
    begin: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty: it did not."""


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in _ASKING)


def set_up(service: str, **resource: str) -> None:
    """Prepares for spans of ``service`` if the environment asks for them; the first call counts.

    Takes some tenths of a second then, for imports; nothing else.
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
                "the environment asks for traces, but %s is missing: pip install 'pannier[otel]'",
                error.name,
            )


def export_save(save: save_pb2.SaveId, own: Interval, parts: Sequence[Interval] = ()) -> None:
    """The save's own span, and parts of it. Of the coordinator."""
    if isinstance(_tracer, _Tracer):
        _tracer.export(save, "", own, parts)


def export_rank(
    save: save_pb2.SaveId, rank: int, own: Interval, parts: Sequence[Interval] = ()
) -> None:
    """The span of one rank's part in the save, and parts of it. Of the rank's client."""
    if _tracer is None:
        set_up("pannier-client")
    if isinstance(_tracer, _Tracer):
        _tracer.export(save, _rank_name(rank), own, parts)


def export_parts(save: save_pb2.SaveId, rank: int, parts: Sequence[Interval]) -> None:
    """More parts of a rank's span. Of the rank's sidecar."""
    if isinstance(_tracer, _Tracer):
        _tracer.export(save, _rank_name(rank), None, parts)


def trace_id(save: save_pb2.SaveId) -> int:
    """The save's trace: 128 bits."""
    return int.from_bytes(_digest(save, "trace")[:16], "big")


def span_id(save: save_pb2.SaveId, rank: int | None = None) -> int:
    """The save's own span, or a rank's: 64 bits."""
    name = "" if rank is None else _rank_name(rank)
    return int.from_bytes(_digest(save, f"span {name}")[:8], "big")


def _digest(save: save_pb2.SaveId, what: str) -> bytes:
    return hashlib.sha256(f"{save_text(save)}\n{what}".encode()).digest()


def _rank_name(rank: int) -> str:
    return f"rank {rank}"


class _Tracer:
    """Raises ImportError where the packages aren't there."""

    def __init__(self, service: str, resource: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        forced: ContextVar[tuple[int, int] | None] = ContextVar("pannier-span", default=None)

        class Ids(RandomIdGenerator):
            """Random, but for a span that is to have one of its own."""

            def generate_trace_id(self) -> int:
                """See IdGenerator."""
                own = forced.get()
                return super().generate_trace_id() if own is None else own[0]

            def generate_span_id(self) -> int:
                """See IdGenerator."""
                own = forced.get()
                return super().generate_span_id() if own is None else own[1]

        name = os.environ.get("OTEL_SERVICE_NAME") or service
        # The application's own provider, if it has one, is left alone: its ids aren't ours to choose.
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": name, **resource}),
            id_generator=Ids(),
            # It waits half a minute for a collector that isn't there.
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self.provider.get_tracer("pannier", package_version())
        self._forced = forced
        self._pid = os.getpid()
        self._ending, self._sent = threading.Event(), threading.Event()
        # At the interpreter's end no thread can be started any more.
        threading.Thread(target=self._send_last, name="pannier-traces", daemon=True).start()
        atexit.register(self._end)

    def export(
        self, save: save_pb2.SaveId, name: str, own: Interval | None, parts: Sequence[Interval]
    ) -> None:
        """The span called ``name`` of a save, unless another tells it, and its parts."""
        trace = trace_id(save)
        identity = int.from_bytes(_digest(save, f"span {name}")[:8], "big")
        common = {"pannier.job": save.job, "pannier.save": save_text(save)}
        if own is not None:
            token = self._forced.set((trace, identity))
            try:
                # The save's own span is nobody's part; a rank's is the save's.
                parent = self._remote(trace, span_id(save)) if name else self._no_parent()
                self._emit(own, parent, common)
            finally:
                self._forced.reset(token)
        inside = self._remote(trace, identity)
        for part in parts:
            self._emit(part, inside, common)

    def _end(self) -> None:
        if os.getpid() != self._pid:
            # Forked: the thread is the parent's.
            return
        self._ending.set()
        self._sent.wait(_LAST_S)

    def _send_last(self) -> None:
        self._ending.wait()
        self.provider.force_flush()
        self._sent.set()

    def _emit(self, told: Interval, context: Any, common: Mapping[str, str]) -> None:
        from opentelemetry.trace import Status, StatusCode

        # What is known is when it was on a clock that isn't the calendar's.
        shift = time.time_ns() - int(time.monotonic() * _NS)
        span = self._tracer.start_span(
            told.name,
            context=context,
            start_time=int(told.begin * _NS) + shift,
            attributes={**common, **told.attributes},
        )
        if told.error:
            span.set_status(Status(StatusCode.ERROR, told.error))
        span.end(int(told.end * _NS) + shift)

    def _no_parent(self) -> Any:
        from opentelemetry.context import Context

        return Context()

    def _remote(self, trace: int, span: int) -> Any:
        """A parent that another process tells, sampled as the sampler says of its trace."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            TraceFlags,
            set_span_in_context,
        )

        nobody = self._no_parent()
        decision = self.provider.sampler.should_sample(nobody, trace, "save").decision
        sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        parent = SpanContext(trace, span, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(parent), nobody)


_lock = threading.Lock()
_tracer: "_Tracer | bool | None" = None
"""None: nobody has asked yet; False: there are no traces."""
