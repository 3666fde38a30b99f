"""Authentication and authorization on the sockets of one job, where a node serves several (``--jobs``).

In: calls. Out: the same calls, if they carry a token of the job, and name no other job and no checkpoint
outside of the job's roots. A pod's user is no identity, so any user may connect, and every call
but health needs a token. Digests of one length are compared, in constant time. On the event loop.
"""

import hmac
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NoReturn

from pannier.common import timeouts
from pannier.daemon.interceptors import WrappingInterceptor, abort_call
from pannier.sidecar.multi_job.job_config import JobConfig, read_digests
from pannier.storage import check_allowed_in_time
from pannier.v1 import sidecar_pb2
from pannier.wire import auth_token
from pannier.wire.auth_token import file_stamp
from pannier.wire.errors import (
    ConfigurationError,
    ForbiddenError,
    PannierError,
    UnauthenticatedError,
)

_log = logging.getLogger(__name__)

_OPEN: Final = "/grpc.health.v1.Health/"
_OURS: Final = "/pannier.v1.Sidecar/"


class JobAuth:
    """The tokens and roots of one job."""

    def __init__(self, job: JobConfig) -> None:
        self.job = job.name
        self._allow = job.allow
        self._operator = frozenset(() if job.operator is None else (job.operator,))
        self._digests = job.digests
        self._path = job.path
        self.leaving = False
        """The job was removed: its sidecar exits once the job's saves have ended."""
        if job.leaving:
            self.leave()
        self._stamp: tuple[int, ...] | None = None
        self._logged_at = -timeouts.REFUSALS_LOG_S

    def replace_tokens(self, digests: Collection[bytes]) -> None:
        """Accepts these tokens from now on, and no others."""
        self._digests = frozenset(digests)

    def leave(self) -> None:
        """Rejects the job's calls from now on. May be called by a signal handler."""
        self.leaving = True
        self._path = None

    def refresh(self) -> None:
        """Reads the tokens from the job's file, if it has changed.

        A missing or invalid file changes nothing: the supervisor decides whether the job is still served. An
        invalid one is read again each time: a correction of another job's file may make it valid.
        """
        path = self._path
        stamp = None if path is None else file_stamp(path)
        if path is None or stamp is None or stamp == self._stamp:
            return
        try:
            digests = read_digests(path)
        except ConfigurationError:
            return
        self._stamp = stamp
        if digests != self._digests:
            self.replace_tokens(digests)
            _log.info("job %s has other tokens", self.job)

    def accepts(self, digest: bytes) -> bool:
        """Whether ``digest`` is that of a valid token."""
        known = self._operator if self.leaving else self._digests | self._operator
        # Compares all of them, so that the time is the same for each.
        return sum(hmac.compare_digest(each, digest) for each in known) > 0

    def check_caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises UnauthenticatedError unless a call's metadata has a valid token."""
        token = auth_token.find_token(metadata)
        if token is not None and self.accepts(auth_token.digest(token)):
            return
        if self.leaving:
            raise UnauthenticatedError(f"job {self.job} is no longer served here: see --jobs")
        if token is None:
            raise UnauthenticatedError(
                f"a call to the socket of job {self.job} carries no token: set {auth_token.VARIABLE} to the "
                "file with the job's token (pannier: --token-file)"
            )
        raise UnauthenticatedError(
            f"the token of a call to the socket of job {self.job} is not one of that job's: correct "
            f"the file that {auth_token.VARIABLE} names, or the job's file in --jobs"
        )

    async def check_request(self, request: Any) -> None:
        """Checks the job and checkpoint that a message of ``pannier.v1.Sidecar`` names.

        Raises:
            ForbiddenError: it names another job.
            InvalidRequestError: it names a checkpoint that doesn't lie below the job's roots. That goes
                for ``Fail``, too: the coordinator would write the save's decision there.
            UnavailableError: the checkpoint's file system doesn't respond.
        """
        for job, checkpoint_id in named_jobs(request):
            if job != self.job:
                raise ForbiddenError(
                    f"{type(request).__name__} names job {job[:64]!r}, and this is the socket of job "
                    f"{self.job}: correct PANNIER_JOB or PANNIER_SIDECAR"
                )
            if checkpoint_id is not None:
                await check_allowed_in_time(checkpoint_id, self._allow)

    def log_refusal(self, error: PannierError) -> None:
        """Logs that a call was refused, with a limited rate."""
        now = time.monotonic()
        due = now - self._logged_at >= timeouts.REFUSALS_LOG_S
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


class JobAuthInterceptor(WrappingInterceptor):
    """Before all other interceptors of a server but that of errors."""

    def __init__(self, auth: JobAuth) -> None:
        super().__init__()
        self._auth = auth

    def applies(self, method: str) -> bool:
        """All but health."""
        return not method.startswith(_OPEN)

    @asynccontextmanager
    async def around(self, context: Any, method: str) -> AsyncIterator[None]:
        """Checks the token."""
        try:
            self._auth.check_caller(context.invocation_metadata() or ())
        except PannierError as error:
            await self._refuse(context, error, method)
        yield

    def wrap(self, function: Callable[..., Any], method: str) -> Callable[..., Any]:
        """Checks the request as well, if it is the sidecar's; a stream checks each of its headers."""
        if not method.startswith(_OURS):
            return super().wrap(function, method)

        async def checked(request: Any, context: Any) -> Any:
            await self._check_request(request, context, method)
            return await function(request, context)

        async def checked_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            if method.endswith("/Write"):
                request = self._checked_messages(request)
            else:
                await self._check_request(request, context, method)
            async with aclosing(function(request, context)) as responses:
                async for response in responses:
                    yield response

        is_stream = inspect.isasyncgenfunction(function)
        return super().wrap(checked_stream if is_stream else checked, method)

    async def _check_request(self, request: Any, context: Any, method: str) -> None:
        try:
            await self._auth.check_request(request)
        except PannierError as error:
            await self._refuse(context, error, method)

    async def _checked_messages(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The messages of a ``Write`` call. Raises PannierError at a header that isn't the job's."""
        async for message in messages:
            if isinstance(message, sidecar_pb2.FileHeader):
                try:
                    await self._auth.check_request(message)
                except PannierError as error:
                    self._auth.log_refusal(error)
                    raise
            yield message

    async def _refuse(self, context: Any, error: PannierError, method: str) -> NoReturn:
        self._auth.log_refusal(error)
        await abort_call(context, error, method)
