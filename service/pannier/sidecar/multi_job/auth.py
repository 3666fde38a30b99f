"""Authentication and authorization on the sockets of one job, where a sidecar serves several.

In: calls. Out: the same calls, if they carry a token of the job, and name no other job and no checkpoint
outside of the job's roots. A pod's user is no identity, so any user may connect, and every call
but health needs a token. Digests of one length are compared, in constant time. Thread-safe.
"""

import functools
import hmac
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NoReturn

import grpc

from pannier.daemon.interceptors import Continuation, Handler, abort_call, wrap_handler
from pannier.sidecar.multi_job.job_config import JobConfig
from pannier.storage import check_allowed
from pannier.v1 import sidecar_pb2
from pannier.wire import auth_token
from pannier.wire.errors import ForbiddenError, PannierError, UnauthenticatedError

_log = logging.getLogger(__name__)

_OPEN: Final = "/grpc.health.v1.Health/"
_OURS: Final = "/pannier.v1.Sidecar/"
_QUIET_S: Final = 10.0
"""Between two log lines about calls that are refused."""


class JobAuth:
    """The tokens and roots of one job."""

    def __init__(self, job: JobConfig) -> None:
        self.job = job.name
        self._allow = job.allow
        self._digests = job.digests
        self._lock = threading.Lock()
        self._logged_at = -_QUIET_S

    def replace_tokens(self, digests: Collection[bytes]) -> None:
        """Accepts these tokens from now on, and no others."""
        self._digests = frozenset(digests)

    def revoke_all(self) -> None:
        """Rejects all calls from now on."""
        self._digests = frozenset()

    def accepts(self, digest: bytes) -> bool:
        """Whether ``digest`` is that of a valid token."""
        known = self._digests
        # Compares all of them, so that the time is the same for each.
        return sum(hmac.compare_digest(each, digest) for each in known) > 0

    def check_caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises UnauthenticatedError unless a call's metadata has a valid token."""
        token = auth_token.find_token(metadata)
        if not self._digests:
            raise UnauthenticatedError(f"job {self.job} is no longer served here: see --jobs")
        if token is None:
            raise UnauthenticatedError(
                f"a call to the socket of job {self.job} carries no token: set {auth_token.VARIABLE} to the "
                "file with the job's token (pannier: --token-file)"
            )
        if not self.accepts(auth_token.digest(token)):
            raise UnauthenticatedError(
                f"the token of a call to the socket of job {self.job} is not one of that job's: correct "
                f"the file that {auth_token.VARIABLE} names, or the job's file in --jobs"
            )

    def check_request(self, request: Any) -> None:
        """Checks the job and checkpoint that a message of ``pannier.v1.Sidecar`` names.

        Raises:
            ForbiddenError: it names another job.
            InvalidRequestError: it names a checkpoint that doesn't lie below the job's roots. That goes
                for ``Fail``, too: the coordinator would write the save's decision there.
        """
        for job, checkpoint_id in named_jobs(request):
            if job != self.job:
                raise ForbiddenError(
                    f"{type(request).__name__} names job {job[:64]!r}, and this is the socket of job "
                    f"{self.job}: correct PANNIER_JOB or PANNIER_SIDECAR"
                )
            if checkpoint_id is not None:
                check_allowed(checkpoint_id, self._allow)

    def log_refusal(self, error: PannierError) -> None:
        """Logs that a call was refused, with a limited rate."""
        with self._lock:
            now = time.monotonic()
            due = now - self._logged_at >= _QUIET_S
            self._logged_at = now if due else self._logged_at
        if due:
            _log.warning("refused: %s", error, extra={"job": self.job})


def named_jobs(request: Any) -> Iterator[tuple[str, str | None]]:
    """All jobs that a message names, each with its checkpoint, if any.

    Raises ForbiddenError for an unknown kind of message.
    """
    contexts = []
    if isinstance(request, sidecar_pb2.ConnectRequest):
        yield request.job, None
        contexts = [each.context for each in request.pending]
    elif isinstance(request, _WITH_JOB):
        yield request.job, None
    elif isinstance(request, _WITH_CONTEXT):
        contexts = [request.context]
    else:
        raise ForbiddenError(f"{type(request).__name__} names no job")
    for context in contexts:
        yield context.save.job, context.checkpoint_id


_WITH_JOB: Final = (
    sidecar_pb2.ReserveRequest,
    sidecar_pb2.ReleaseRequest,
    sidecar_pb2.PingRequest,
)
_WITH_CONTEXT: Final = (
    sidecar_pb2.PlanRequest,
    sidecar_pb2.BeginRequest,
    sidecar_pb2.FileHeader,
    sidecar_pb2.HandOverRequest,
    sidecar_pb2.FinishRequest,
    sidecar_pb2.FailRequest,
)


class JobAuthInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For a synchronous server; the first of its interceptors."""

    def __init__(self, auth: JobAuth) -> None:
        self._auth = auth

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handlers of all services but health's."""
        method = handler_call_details.method
        handler = continuation(handler_call_details)
        if handler is None or method.startswith(_OPEN):
            return handler
        return wrap_handler(handler, lambda function: self._checked(function, handler, method))

    def _checked(
        self, function: Callable[..., Any], handler: Handler, method: str
    ) -> Callable[..., Any]:
        ours = method.startswith(_OURS)

        def check(request: Any, context: grpc.ServicerContext) -> Any:
            """The request, checked; a stream checks each of its messages."""
            try:
                self._auth.check_caller(context.invocation_metadata())
                if not ours:
                    return request
                if handler.request_streaming:
                    return self._headers(request)
                self._auth.check_request(request)
            except PannierError as error:
                self._refuse(context, error, method)
            return request

        @functools.wraps(function)
        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            return function(check(request, context), context)

        @functools.wraps(function)
        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            yield from function(check(request, context), context)

        return stream if handler.response_streaming else unary

    def _headers(self, messages: Iterator[Any]) -> Iterator[Any]:
        for message in messages:
            if isinstance(message, sidecar_pb2.FileHeader):
                self._auth.check_request(message)
            yield message
            # Frees its MiB while the next one arrives.
            del message

    def _refuse(self, context: grpc.ServicerContext, error: PannierError, method: str) -> NoReturn:
        self._auth.log_refusal(error)
        abort_call(context, error, method)
