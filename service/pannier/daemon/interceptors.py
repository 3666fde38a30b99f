"""Interceptors of a daemon's gRPC server: limits of calls at a time, and errors as gRPC statuses.

In: handlers. Out: handlers that a server calls in their place. Handlers only raise: a PannierError
reaches the caller with its class, message and failures (:mod:`pannier.wire.errors`); any other
exception is a bug, logged with its traceback and reported to the caller as an internal error.
Handlers of streams are asynchronous generators, before and after: other people's interceptors understand
no other kind (opentelemetry-instrumentation-grpc iterates over them with ``async for``).
On the event loop.
"""

import asyncio
import inspect
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Final, NoReturn

import grpc

from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError, failure_messages, trailing_metadata
from pannier.wire.failures import cut_text

_log = logging.getLogger(__name__)

STATUS_LIMITS: Final = {
    "/pannier.v1.Status/ListSaves": 32,
    "/pannier.v1.Status/GetSave": 32,
    "/pannier.v1.Status/WatchSave": 64,
    "/pannier.v1.Status/GetLoad": 32,
    "/pannier.v1.Status/WatchLoad": 64,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 16,
}
"""Calls at a time of the services that every daemon has."""
DEFAULT_LIMIT: Final = 64
"""Calls at a time of a method without a limit of its own."""

_PANNIER: Final = "/pannier.v1."
_HEALTH: Final = "/grpc.health.v1."
_MAX_DETAILS: Final = 2000
"""Characters of a status message; the whole text is in the trailing metadata."""
_MAX_FAILURES_BYTES: Final = 16 << 10
"""Bytes of failures by rank in the trailing metadata: the size of headers is limited."""

Handler = Any
"""gRPC's method handler: a function of one of four kinds, and its serializers."""

_HANDLER_KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


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


async def abort_call(context: Any, error: Exception, method: str) -> NoReturn:
    """Ends a call with the status of ``error``."""
    code, details, metadata = rpc_status(error, method)
    await context.abort(code, details, metadata)
    raise AssertionError("abort returned")


def _fit_metadata(error: PannierError) -> PannierError:
    """A copy of ``error`` with as many failures as trailing metadata can hold."""
    room = _MAX_FAILURES_BYTES
    kept: list[save_pb2.Failure] = []
    for failure in failure_messages(error):
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


class WrappingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Puts :meth:`around` around handlers, which are coroutines or asynchronous generators."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        """By method, the handler and its wrapper: an aio server calls its interceptors for each call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handler, once."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not self.applies(method):
            return handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            kind, make = _HANDLER_KINDS[(handler.request_streaming, handler.response_streaming)]
            function = getattr(handler, kind)
            wrapped = make(
                self.wrap(function, method),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
            known = self._wrapped[method] = (handler, wrapped)
        return known[1]

    def wrap(self, function: Callable[..., Any], method: str) -> Callable[..., Any]:
        """What is called in place of ``function``, and of the same kind: a coroutine or a generator."""
        if inspect.isasyncgenfunction(function):

            async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
                async with (
                    self.around(context, method),
                    aclosing(function(request, context)) as responses,
                ):
                    async for response in responses:
                        yield response

            return stream

        async def call(request: Any, context: Any) -> Any:
            async with self.around(context, method):
                return await function(request, context)

        return call

    @abstractmethod
    def applies(self, method: str) -> bool:
        """Whether handlers of this method are wrapped."""

    @abstractmethod
    def around(self, context: Any, method: str) -> AbstractAsyncContextManager[None]:
        """Entered before each call, exited after it."""


class ErrorInterceptor(WrappingInterceptor):
    """Ends calls of Pannier's services with the status of what their handlers raise.

    The first of a server's interceptors: it closes the generators of the others, too. gRPC (1.85) and
    interceptors of others leave a generator whose call is cancelled between two responses to the garbage
    collector.
    """

    def __init__(self) -> None:
        super().__init__()
        self._closing: set[asyncio.Task[None]] = set()

    def applies(self, method: str) -> bool:
        """Those of Pannier's services."""
        return method.startswith(_PANNIER)

    def wrap(self, function: Callable[..., Any], method: str) -> Callable[..., Any]:
        """A generator is closed as soon as its call has ended."""
        wrapped = super().wrap(function, method)
        if not inspect.isasyncgenfunction(wrapped):
            return wrapped

        async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            responses = wrapped(request, context)
            context.add_done_callback(lambda _: self._close(responses))
            async for response in responses:
                yield response

        return stream

    def _close(self, responses: AsyncGenerator[Any, None]) -> None:
        task = asyncio.ensure_future(responses.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @asynccontextmanager
    async def around(self, context: Any, method: str) -> AsyncIterator[None]:
        """Aborts the call when it raises."""
        try:
            yield
        except grpc.aio.AbortError:
            # The handler has ended the call itself.
            raise
        except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
            await abort_call(context, error, method)


class AdmissionInterceptor(WrappingInterceptor):
    """Limits the calls of each method that run at a time.

    Calls above the limit fail at once with RESOURCE_EXHAUSTED, which our clients treat as a busy
    daemon: each call takes memory, and without limits one method's calls would delay the others.

    Args:
        limits: calls at a time by full name of the method, ``/package.Service/Method``; others
            have :data:`DEFAULT_LIMIT`.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        super().__init__()
        self._limits = limits
        self._running: Counter[str] = Counter()

    def applies(self, method: str) -> bool:
        """All but probes."""
        return not method.startswith(_HEALTH)

    @asynccontextmanager
    async def around(self, context: Any, method: str) -> AsyncIterator[None]:
        """Counts the call; aborts it above the limit."""
        limit = self._limits.get(method, DEFAULT_LIMIT)
        if self._running[method] >= limit:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{limit} calls of {method} are running, which is the limit: try again later",
            )
        self._running[method] += 1
        try:
            yield
        finally:
            self._running[method] -= 1
