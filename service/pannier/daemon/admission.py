"""How many calls of a method run at a time: one caller that asks too often keeps no other out.

In: a limit per method. Out: the calls within it; the others are told at once to come again
(RESOURCE_EXHAUSTED, which our clients take for a daemon that is busy). The threads of a
synchronous server are shared by all methods, so without it calls that stay for long would
take them all. Thread-safe.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import grpc

from pannier.daemon.handler_wrapping import Continuation, Handler, rewrapped

STATUS_LIMITS: Final = {
    "/pannier.v1.Status/ListSaves": 32,
    "/pannier.v1.Status/GetSave": 32,
    "/pannier.v1.Status/WatchSave": 64,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 16,
}
"""Of what operators ask either daemon."""
OTHERS_LIMIT: Final = 64
"""Of any method that isn't listed."""


class _Turnstile:
    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()

    def limit(self, method: str) -> int:
        return self._limits.get(method, OTHERS_LIMIT)

    @contextmanager
    def passing(self, method: str) -> Iterator[bool]:
        """Whether the call may run; it counts until the context ends."""
        with self._lock:
            admitted = self._inside[method] < self.limit(method)
            self._inside[method] += admitted
        try:
            yield admitted
        finally:
            if admitted:
                with self._lock:
                    self._inside[method] -= 1


class AdmissionInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For a synchronous server.

    Args:
        limits: calls at a time by full name of the method, ``/package.Service/Method``.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._turnstile = _Turnstile(limits)

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handlers of all services."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        return rewrapped(handler, lambda function: self._limited(function, handler, method))

    def _limited(
        self, function: Callable[..., Any], handler: Handler, method: str
    ) -> Callable[..., Any]:
        if getattr(function, "experimental_non_blocking", False):
            return function  # takes no thread

        @functools.wraps(function)
        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            with self._turnstile.passing(method) as admitted:
                if not admitted:
                    self._refuse(context, method)
                return function(request, context)

        @functools.wraps(function)
        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._turnstile.passing(method) as admitted:
                if not admitted:
                    self._refuse(context, method)
                yield from function(request, context)

        return stream if handler.response_streaming else unary

    def _refuse(self, context: grpc.ServicerContext, method: str) -> None:
        context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{self._turnstile.limit(method)} calls of {method} are under way here, which is the "
            "limit: try again later",
        )
