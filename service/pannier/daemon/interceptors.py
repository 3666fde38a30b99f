"""Interceptors of a daemon's gRPC server: limits of calls at a time, and errors as gRPC statuses.

In: handlers. Out: handlers that a server calls in their place. Handlers only raise: a PannierError
reaches the caller with its class, message and failures (:mod:`pannier.wire.errors`); any other
exception is a bug, logged with its traceback and reported to the caller as an internal error.
Thread-safe.
"""

import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import grpc

from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError, trailing_metadata
from pannier.wire.failures import cut_text

_log = logging.getLogger(__name__)

STATUS_LIMITS: Final = {
    "/pannier.v1.Status/ListSaves": 32,
    "/pannier.v1.Status/GetSave": 32,
    "/pannier.v1.Status/WatchSave": 64,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 16,
}
"""Calls at a time of the services that every daemon has."""
DEFAULT_LIMIT: Final = 64
"""Calls at a time of a method without a limit of its own."""

_PANNIER: Final = "/pannier.v1."
_MAX_DETAILS: Final = 2000
"""Characters of a status message; the whole text is in the trailing metadata."""
_MAX_FAILURES_BYTES: Final = 16 << 10
"""Of failures by rank, in the trailing metadata: the size of headers is limited."""

Handler = Any
"""gRPC's method handler: a function of one of four kinds, and its serializers."""
Continuation = Callable[[grpc.HandlerCallDetails], "Handler | None"]

_HANDLER_KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def wrap_handler(handler: Handler, wrap: Callable[[Any], Any]) -> Handler:
    """A copy of the handler whose function is ``wrap(function)``."""
    name, make = _HANDLER_KINDS[(handler.request_streaming, handler.response_streaming)]
    return make(
        wrap(getattr(handler, name)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


# Errors.


def rpc_status(error: Exception, method: str) -> tuple[grpc.StatusCode, str, Any]:
    """Code, details and trailing metadata for ``error``; logs it when it is a bug."""
    if isinstance(error, PannierError):
        return (
            error.code,
            cut_text(str(error), _MAX_DETAILS),
            trailing_metadata(_fit_metadata(error)),
        )
    _log.error("%s failed", method, exc_info=error)
    known = PannierError(f"internal error in {method}: {type(error).__name__}: {error}")
    details = cut_text(str(known), _MAX_DETAILS)
    return grpc.StatusCode.INTERNAL, details, trailing_metadata(_fit_metadata(known))


def abort_call(context: grpc.ServicerContext, error: Exception, method: str) -> NoReturn:
    """Ends a call of a synchronous server with the status of ``error``."""
    code, details, metadata = rpc_status(error, method)
    context.set_trailing_metadata(metadata)
    context.abort(code, details)
    raise AssertionError("abort returned")


def _fit_metadata(error: PannierError) -> PannierError:
    """A copy of ``error`` with as many failures as trailing metadata can hold."""
    room = _MAX_FAILURES_BYTES
    kept: list[save_pb2.Failure] = []
    for failure in error.failures.values():
        short = save_pb2.Failure()
        short.CopyFrom(failure)
        short.message = cut_text(failure.message, _MAX_DETAILS)
        room -= short.ByteSize()
        if room < 0:
            break
        kept.append(short)
    fitting = type(error).__new__(type(error))
    PannierError.__init__(fitting, cut_text(str(error), _MAX_FAILURES_BYTES), kept)
    fitting.resume_at = error.resume_at
    return fitting


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For a synchronous server: ``grpc.server(..., interceptors=[ErrorInterceptor()])``."""

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handlers of Pannier's services."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PANNIER):
            return handler
        return wrap_handler(handler, lambda function: _report_errors(function, handler, method))


class AioErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For an aio server: ``grpc.aio.server(interceptors=[AioErrorInterceptor()])``.

    Takes coroutines and asynchronous generators as handlers.
    """

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        """By method, the handler and its wrapper: an aio server calls its interceptors for each call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handlers of Pannier's services."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PANNIER):
            return handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            wrapped = wrap_handler(handler, lambda function: _report_errors_aio(function, method))
            known = self._wrapped[method] = (handler, wrapped)
        return known[1]


def _report_errors(
    function: Callable[..., Any], handler: Handler, method: str
) -> Callable[..., Any]:
    def unary(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return function(request, context)
        except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
            abort_call(context, error, method)

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from function(request, context)
        except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
            if not context.is_active():
                # The caller has disconnected: the handler failed because of that.
                _log.debug("%s ended with its caller: %s", method, error)
                return
            abort_call(context, error, method)

    return stream if handler.response_streaming else unary


def _report_errors_aio(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def abort(context: Any, error: Exception) -> NoReturn:
        code, details, metadata = rpc_status(error, method)
        await context.abort(code, details, metadata)
        raise AssertionError("abort returned")

    if inspect.isasyncgenfunction(function):

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in function(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
                await abort(context, error)

        return stream

    async def unary(request: Any, context: Any) -> Any:
        try:
            return await function(request, context)
        except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
            await abort(context, error)

    return unary


# Limits.


class AdmissionInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Limits the calls of each method that run at a time on a synchronous server.

    Calls above the limit fail at once with RESOURCE_EXHAUSTED, which our clients treat as a busy
    daemon. All methods share the server's threads: without limits, one method's long calls would
    occupy them all.

    Args:
        limits: calls at a time by full name of the method, ``/package.Service/Method``; others
            have :data:`DEFAULT_LIMIT`.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handlers of all services."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        return wrap_handler(handler, lambda function: self._limit_calls(function, handler, method))

    def _limit_calls(
        self, function: Callable[..., Any], handler: Handler, method: str
    ) -> Callable[..., Any]:
        if getattr(function, "experimental_non_blocking", False):
            return function  # takes no thread

        @functools.wraps(function)
        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            with self._admitted(context, method):
                return function(request, context)

        @functools.wraps(function)
        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._admitted(context, method):
                yield from function(request, context)

        return stream if handler.response_streaming else unary

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext, method: str) -> Iterator[None]:
        """Counts the call until the context ends; aborts it above the limit."""
        limit = self._limits.get(method, DEFAULT_LIMIT)
        with self._lock:
            admitted = self._running[method] < limit
            self._running[method] += admitted
        if not admitted:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{limit} calls of {method} are running, which is the limit: try again later",
            )
        try:
            yield
        finally:
            with self._lock:
                self._running[method] -= 1
