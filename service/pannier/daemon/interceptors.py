"""From an error in a handler to the gRPC status that the caller sees.

Handlers only raise. A PannierError crosses with its class, message and failures
(:mod:`pannier.wire.errors`); anything else is a bug: logged with its traceback,
and told to the caller as an internal error.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, NoReturn

import grpc

from pannier.daemon.handler_wrapping import Continuation, Handler, Rewrapping, rewrapped
from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError, trailing_metadata
from pannier.wire.failures import cut_text

_log = logging.getLogger(__name__)

_OURS: Final = "/pannier.v1."
_DETAILS: Final = 2000
"""Characters of a status message; the whole text is in the trailing metadata."""
_FAILURES_BYTES: Final = 16 << 10
"""Most bytes of failures by rank that go into the trailing metadata: headers have a limit."""


class UnknownSaveError(PannierError):
    """No save by that name."""

    code = grpc.StatusCode.NOT_FOUND


def status_of(error: Exception, method: str) -> tuple[grpc.StatusCode, str, Any]:
    """Code, details and trailing metadata for ``error``; logs it when it is a bug."""
    if isinstance(error, PannierError):
        fitting = _fitting(error)
        return error.code, cut_text(str(error), _DETAILS), trailing_metadata(fitting)
    _log.error("%s failed", method, exc_info=error)
    known = PannierError(f"internal error in {method}: {type(error).__name__}: {error}")
    return (
        grpc.StatusCode.INTERNAL,
        cut_text(str(known), _DETAILS),
        trailing_metadata(_fitting(known)),
    )


def _fitting(error: PannierError) -> PannierError:
    """``error`` with as many failures as fit."""
    room = _FAILURES_BYTES
    kept: list[save_pb2.Failure] = []
    for failure in error.failures.values():
        short = save_pb2.Failure()
        short.CopyFrom(failure)
        short.message = cut_text(failure.message, _DETAILS)
        room -= short.ByteSize()
        if room < 0:
            break
        kept.append(short)
    message = cut_text(str(error), _FAILURES_BYTES)
    fitting = type(error).__new__(type(error))
    PannierError.__init__(fitting, message, kept)
    fitting.resume_at = error.resume_at
    return fitting


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For a synchronous server: ``grpc.server(..., interceptors=[ErrorInterceptor()])``."""

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handlers of our own services."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        return rewrapped(handler, lambda function: _sync(function, handler, method))


class AioErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For an aio server: ``grpc.aio.server(interceptors=[AioErrorInterceptor()])``.

    Takes coroutines and asynchronous generators as handlers.
    """

    def __init__(self) -> None:
        self._rewrapped = Rewrapping()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handlers of our own services."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        return self._rewrapped(handler, method, lambda function: _aio(function, method))


def _abort(context: grpc.ServicerContext, error: Exception, method: str) -> NoReturn:
    code, details, metadata = status_of(error, method)
    context.set_trailing_metadata(metadata)
    context.abort(code, details)
    raise AssertionError("abort returned")


def _sync(function: Callable[..., Any], handler: Handler, method: str) -> Callable[..., Any]:
    def unary(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return function(request, context)
        except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
            _abort(context, error, method)

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from function(request, context)
        except Exception as error:  # noqa: BLE001 - top of the call: becomes its status
            if not context.is_active():
                # The caller is gone: what its end made of the handler is nobody's error.
                _log.debug("%s ended with its caller: %s", method, error)
                return
            _abort(context, error, method)

    return stream if handler.response_streaming else unary


def _aio(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def abort(context: Any, error: Exception) -> NoReturn:
        code, details, metadata = status_of(error, method)
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
