"""Handlers of a gRPC server, wrapped by interceptors. Knows nothing of what they do."""

from collections.abc import Callable
from typing import Any, Final

import grpc

Handler = Any
"""What gRPC calls a method handler: a function of one of four kinds, and how its messages are read."""
Continuation = Callable[[grpc.HandlerCallDetails], "Handler | None"]

_MAKERS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def rewrapped(handler: Handler, wrap: Callable[[Any], Any]) -> Handler:
    """The same handler, with ``wrap`` of its function."""
    name, make = _MAKERS[(handler.request_streaming, handler.response_streaming)]
    return make(
        wrap(getattr(handler, name)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class Rewrapping:
    """:func:`rewrapped`, but each handler only once: an aio server asks before each call."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Handler, Handler]] = {}
        """By method: the handler, and what became of it."""

    def __call__(self, handler: Handler, method: str, wrap: Callable[[Any], Any]) -> Handler:
        """What stands for the handler of this method."""
        known = self._known.get(method)
        if known is None or known[0] is not handler:
            known = self._known[method] = (handler, rewrapped(handler, wrap))
        return known[1]
