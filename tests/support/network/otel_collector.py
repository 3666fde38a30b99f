"""A tiny OpenTelemetry collector: takes spans over OTLP/gRPC and keeps them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """One that came in."""

    service: str
    name: str
    trace_id: int
    span_id: int
    parent: int
    """0: none."""
    begin: int
    """Unix time, nanoseconds."""
    end: int
    error: str
    """Message of its status; empty: none."""
    attributes: dict[str, Any]


@dataclass
class Collector:
    endpoint: str
    """For ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def environment(self) -> dict[str, str]:
        """Of a process whose spans come here soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def spans(self) -> list[Span]:
        """All so far."""
        with self._lock:
            return list(self._spans)

    def Export(self, request: Any, context: Any) -> Any:
        """See opentelemetry.proto.collector.trace.v1.TraceService."""
        for each in request.resource_spans:
            service = _attributes(each.resource.attributes)["service.name"]
            found = [
                Span(
                    service,
                    span.name,
                    int.from_bytes(span.trace_id, "big"),
                    int.from_bytes(span.span_id, "big"),
                    int.from_bytes(span.parent_span_id, "big"),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.message,
                    _attributes(span.attributes),
                )
                for scope in each.scope_spans
                for span in scope.spans
            ]
            with self._lock:
                self._spans += found
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """One on a port of loopback, until the context ends."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"http://127.0.0.1:{port}")
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
