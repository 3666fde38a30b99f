"""The errors that users see, and how they cross a gRPC connection.

An error's message has what happened to which save, rank and host, the value, and what to do. On the wire
it is a gRPC status whose trailing metadata holds an :class:`~pannier.v1.save_pb2.ErrorDetail`, from which
:func:`from_rpc_error` makes the same error again.
"""

import dataclasses
import logging
import re
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from pannier.v1 import save_pb2

_log = logging.getLogger(__name__)

_KEY = "pannier-error-bin"
_CONNECTION_PROBLEMS: Final = (
    (r"connection refused", "nothing listens there (is the daemon running?)"),
    (r"no such file or directory", "its socket doesn't exist (is the daemon running?)"),
    (r"permission denied", "this user may not open it"),
    (
        r"dns resolution|domain name not found|name or service not known|name resolution",
        "its host name can't be resolved",
    ),
    (r"network is unreachable|no route to host", "there is no route to its host"),
    # The kernel accepts connections for a process that is stopped.
    (
        r"before receiving settings frame|handshake read failed \((endpoint closing|fd shutdown)",
        "it accepts connections and does not answer ({unanswered})",
    ),
    # A connection that was never made ends as a handshake does, over TLS and without it (grpcio 1.85).
    (
        r"tcp handshaker shutdown|fd shutdown|connect\(\) timed out|remote host: connection timed out",
        "nothing answers at {where} (is its host up, and do a NetworkPolicy or a firewall let the packets "
        "through?)",
    ),
    (
        r"certificate has expired|certificate is not yet valid",
        "its TLS certificate isn't valid now",
    ),
    (r"unsupported certificate purpose", "its TLS certificate isn't one for a server"),
    (
        r"certificate_?\s?verify|unable to get .*issuer",
        "its TLS certificate isn't signed by a CA that is trusted here",
    ),
    (r"not in peer certificate|hostname verif", "its TLS certificate is for another host name"),
    (
        r"wrong_version_number|http1\.x|http/1|expected settings frame",
        "what listens there speaks another protocol, or only one side uses TLS",
    ),
    (
        r"ssl_|\bssl\b|\btls\b|handshak",
        "the TLS handshake failed (do both sides use TLS, with certificates of one CA?)",
    ),
    (
        r"timed? ?out|timeout|deadline|\bping\b|keepalive",
        "it does not answer ({unanswered})",
    ),
    (
        r"failed to connect.*(socket closed|connection reset)",
        "it closed the connection before it answered (does only one side use TLS, or did the daemon just "
        "end?)",
    ),
    (
        r"socket closed|reset|broken pipe|goaway|stream removed|recvmsg|sendmsg|end of tcp|\beof\b"
        r"|shutting ?down|transport|connection closed|closed by peer",
        "the connection broke (did the daemon end?)",
    ),
)
"""Patterns of texts of gRPC and the kernel about a connection, in lower case, and their meaning; the first match counts."""
_SOCKET: Final = re.compile(r"unix://(/\S+)")
_TARGET: Final = re.compile(r"\bipv[46]:(\S+?:\d+)(?=[:\s]|$)")
"""The address that gRPC tried, in its texts."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a save or a load failed, on one rank."""

    rank: int
    """Global rank; -1 when the failure is no single rank's."""
    host: str
    """Where that rank runs; empty: not known."""
    kind: str
    """``STORAGE``, ``DEADLINE``, ``LOST``, ...: a name of ``pannier.v1.FailureKind`` without its prefix."""
    message: str
    """What happened, with which value, and what to do."""

    @classmethod
    def of(cls, message: save_pb2.Failure) -> "Failure":
        """What a message says."""
        return cls(message.rank, message.host, kind_name(message.kind), message.message)


def kind_name(kind: int) -> str:
    """Short name of a kind: ``STORAGE`` for ``FAILURE_KIND_STORAGE``; its number if only newer versions know it."""
    if kind not in save_pb2.FailureKind.values():
        return str(kind)
    return save_pb2.FailureKind.Name(kind).removeprefix("FAILURE_KIND_")


class PannierError(Exception):
    """Base of all errors of this package."""

    code = grpc.StatusCode.UNKNOWN
    kind: save_pb2.FailureKind = save_pb2.FAILURE_KIND_UNSPECIFIED
    """Kind of the failure of a save that this error causes; see :mod:`pannier.wire.failures`."""

    def __init__(self, message: str, failures: Iterable[save_pb2.Failure] = ()) -> None:
        super().__init__(message)
        self._messages = {f.rank: f for f in failures}
        self.resume_at = 0
        """For a rank that was behind: number of its group's current save; else 0."""

    @property
    def failures(self) -> Mapping[int, Failure]:
        """Causes by global rank; -1 when the failure is no single rank's."""
        return {rank: Failure.of(message) for rank, message in self._messages.items()}

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild, (
            type(self).__name__,
            str(self),
            [f.SerializeToString() for f in self._messages.values()],
            self.resume_at,
        )


class InvalidRequestError(PannierError, ValueError):
    """An argument, a state dict or a message is not acceptable; nothing was done."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ConfigurationError(PannierError, ValueError):
    """A setting is missing or wrong."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnauthenticatedError(ConfigurationError):
    """A call to the socket of a job of ``--jobs`` came without a token of the job."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ForbiddenError(InvalidRequestError):
    """A call named something of another job than the one whose token it carries."""

    code = grpc.StatusCode.PERMISSION_DENIED


class VersionMismatchError(PannierError):
    """Client and daemon speak different wire versions."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnavailableError(PannierError):
    """A daemon can't be reached, or takes no new saves."""

    code = grpc.StatusCode.UNAVAILABLE


class OverloadedError(UnavailableError):
    """A daemon has reached a limit; the same call may succeed later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineError(PannierError):
    """A wait reached its deadline; the message names the ranks or daemons that it waited for."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    kind = save_pb2.FAILURE_KIND_DEADLINE


class SaveAbortedError(PannierError):
    """The save ended without a checkpoint; ``failures`` has the causes by rank."""

    code = grpc.StatusCode.ABORTED


class SaveSkippedError(SaveAbortedError):
    """A rank skipped the save (``on_busy="skip"``), which skips it on all ranks."""

    kind = save_pb2.FAILURE_KIND_SKIPPED


class CheckpointExistsError(SaveAbortedError, FileExistsError):
    """The save would replace a checkpoint that it may not; ``overwrite=True`` allows it."""

    code = grpc.StatusCode.ALREADY_EXISTS
    kind = save_pb2.FAILURE_KIND_EXISTS


class InDoubtError(PannierError):
    """The outcome of the save is unknown here: it may be committed, now or later.

    Its checkpoint id must not be used again or deleted before the outcome is known, by
    ``pannier status``, ``pannier ls`` or ``client.latest``.
    """

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    kind = save_pb2.FAILURE_KIND_DEADLINE


class BusyError(PannierError):
    """Earlier saves are still in flight or the spool is full (``on_busy="raise"``)."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    kind = save_pb2.FAILURE_KIND_SPOOL


class LoadError(PannierError):
    """A checkpoint could not be loaded; ``failures`` has the causes by rank."""


class CommitCallbackError(PannierError):
    """A function that was called after a commit raised; the checkpoint is committed all the same."""


class StorageError(PannierError):
    """Storage refused or lost an operation."""

    code = grpc.StatusCode.UNKNOWN
    kind = save_pb2.FAILURE_KIND_STORAGE


class IntegrityError(PannierError):
    """Bytes differ from their checksum."""

    code = grpc.StatusCode.DATA_LOSS
    kind = save_pb2.FAILURE_KIND_INTEGRITY


def _subclasses(cls: type[PannierError]) -> Iterable[type[PannierError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)


def failure_messages(error: PannierError) -> list[save_pb2.Failure]:
    """The failures of an error as daemons send and record them."""
    return [*error._messages.values()]


def rebuild(
    name: str, message: str, failures: Iterable[bytes] = (), resume_at: int = 0
) -> PannierError:
    """An error of the class with this name, as another process has described it; of an unknown class, a PannierError."""
    types = {cls.__name__: cls for cls in _subclasses(PannierError)}
    error = types.get(name, PannierError)(
        message, [save_pb2.Failure.FromString(f) for f in failures]
    )
    error.resume_at = resume_at
    return error


def trailing_metadata(error: PannierError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries ``error``; its status code is ``error.code``."""
    detail = save_pb2.ErrorDetail(
        type=type(error).__name__,
        message=str(error),
        failures=failure_messages(error),
        resume_at=error.resume_at,
    )
    return ((_KEY, detail.SerializeToString()),)


def _detail(value: bytes) -> save_pb2.ErrorDetail | None:
    try:
        return save_pb2.ErrorDetail.FromString(value)
    except DecodeError:
        # The server isn't one of ours: only its status counts.
        return None


def from_rpc_error(error: grpc.RpcError, *, peer: str) -> PannierError:
    """The PannierError behind a failed call.

    Args:
        error: a failed call, synchronous or aio.
        peer: description of the called daemon: ``sidecar at unix:///run/pannier/sidecar.sock``.
    """
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in metadata:
        if key == _KEY and (detail := _detail(value)) is not None:
            return rebuild(
                detail.type,
                detail.message,
                [f.SerializeToString() for f in detail.failures],
                detail.resume_at,
            )
    code = getattr(error, "code", lambda: None)()
    details = getattr(error, "details", lambda: "")() or str(error)
    _log.debug("a call to %s ended with %s: %s", peer, code, details)
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"{peer} can't be reached: {_connection_problem(details, peer)}")
    if code is grpc.StatusCode.CANCELLED:
        # By a daemon that stops, or by this side, which gave the call up.
        return UnavailableError(f"the call to {peer} was cancelled (did the daemon end?)")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{peer} did not answer within the deadline ({unanswered(peer)})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC uses this code for large messages, too: "Received message larger than max (9 vs. 5)".
        if "larger than max" in details:
            return InvalidRequestError(f"a message to {peer} is above its limit: {details}")
        return UnavailableError(f"{peer} is overloaded: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return VersionMismatchError(
            f"{peer} doesn't know the call ({details}): is it an older version?"
        )
    return PannierError(f"{peer}: {code.name if code else 'error'}: {details}")


def _connection_problem(details: str, peer: str) -> str:
    """Why a peer can't be reached, for people, from the text of gRPC or the kernel."""
    text = details.lower()
    for pattern, meaning in _CONNECTION_PROBLEMS:
        if re.search(pattern, text):
            target = _TARGET.search(details)
            return meaning.format(
                where=target[1] if target else "its address",
                unanswered=unanswered(peer) if "{unanswered}" in meaning else "",
            )
    return "the connection failed"


def unanswered(peer: str) -> str:
    """Why a process that accepts connections may not answer; arguments as of :func:`stopped`."""
    asked = "is it stopped?" if _SOCKET.search(peer) else "is it stopped, or are packets dropped?"
    return stopped(peer) or asked


def stopped(peer: str) -> str:
    """That the process of a peer is stopped, with its id; empty: it isn't, or that can't be seen.

    Args:
        peer: its description, with its address; only that of a unix socket leads to the process.
    """
    path = _SOCKET.search(peer)
    pid = _listener(path[1]) if path else 0
    return f"its process {pid} is stopped: `kill -CONT {pid}`" if _is_stopped(pid) else ""


def _listener(path: str) -> int:
    """Id of the process that listens on a unix socket; 0: unknown, or in another namespace."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
            # struct ucred of unix(7): of the process that called listen().
            found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    pid: int = struct.unpack("3i", found)[0]
    return pid


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger: states T and t of proc(5)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")
