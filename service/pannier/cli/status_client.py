"""A client of a daemon's Status service. In: calls. Out: messages or PannierErrors. Blocking."""

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import click
import grpc

from pannier.cli.options import Address, combined, option, tls_options
from pannier.common import timeouts
from pannier.common.daemon_process import await_restored, is_serving, serving_sidecars
from pannier.common.locations import absolute
from pannier.v1 import load_status_pb2, save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses, errors
from pannier.wire.auth_token import Metadata, TokenFile
from pannier.wire.tls import open_channel, tls_of

_NO_ANSWER: Final = "no answer"
TERMINAL = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)

daemon_option = combined(
    option(
        "--address",
        envvar="PANNIER_SIDECAR",
        type=Address(),
        help="The daemon to ask, a sidecar or the coordinator: unix:///path or host:port.  "
        "[default: this user's embedded sidecar]",
    ),
    tls_options,
    option(
        "--token-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Contains the job's token, for the job's socket where a node serves several jobs.",
    ),
)
"""Arguments of :class:`StatusClient`."""


def token_metadata(token_file: Path | None) -> Metadata:
    """Metadata of each call. Raises ConfigurationError when the file contains no token."""
    return () if token_file is None else TokenFile(token_file, setting="--token-file").metadata()


def embedded_sidecars() -> list[str]:
    """Addresses of this user's embedded sidecars on this host that listen, else of the default one.

    The default one comes before those of jobs on several hosts.
    """
    directory = addresses.runtime_dir()
    await_restored(directory, is_serving)
    return serving_sidecars(directory) or [addresses.embedded_sidecar(directory)]


def as_named(save: str) -> str:
    """A save's or load's id as it is; a checkpoint id as daemons have it, without ``~`` or a trailing slash."""
    return absolute(save) if "://" in save or save.startswith(("/", "./", "../", "~")) else save


def _refusal(address: str) -> str:
    """Why no connection to ``address`` can be made; empty: it can."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(timeouts.CONNECT_S)
                probe.connect(address.removeprefix("unix://"))
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeouts.CONNECT_S).close()
    except TimeoutError:
        return _NO_ANSWER
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


class UnknownNameError(errors.PannierError):
    """The daemon knows nothing by that name."""


class NoDaemonError(errors.UnavailableError):
    """No process listens at the address."""

    def __init__(self, address: str, refusal: str) -> None:
        if address in addresses.embedded_sidecars(addresses.runtime_dir()):
            idle = f"{timeouts.HOST_DAEMONS_IDLE_S / 60:.0f} minutes"
            super().__init__(
                f"no daemon runs here: it leaves {idle} after the last trainer ({address}: {refusal})"
            )
            self.hint = (
                "checkpoints: `pannier ls ROOT`; another daemon: --address or PANNIER_SIDECAR"
            )
        else:
            super().__init__(f"no daemon can be reached at {address}: {refusal}")
            self.hint = (
                "correct --address or PANNIER_SIDECAR, or start the daemon; checkpoints: "
                "`pannier ls ROOT`"
            )


@contextmanager
def translate_rpc_errors(address: str) -> Iterator[None]:
    """Turns an RpcError of a call to the daemon at ``address`` into a PannierError."""
    try:
        yield
    except grpc.RpcError as error:
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        refusal = _refusal(address) if unavailable else ""
        if refusal not in ("", _NO_ANSWER):
            raise NoDaemonError(address, refusal) from None
        raise errors.from_rpc_error(error, peer=f"the daemon at {address}") from error


class StatusClient:
    """One daemon's Status service. A context manager; not for several threads.

    All methods raise PannierError subclasses: UnavailableError and DeadlineError
    when the daemon can't be reached.
    """

    def __init__(
        self,
        address: str | None,
        *,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        tls_ca: Path | None = None,
        token_file: Path | None = None,
    ) -> None:
        """Raises ConfigurationError when the TLS files, or the token's, can't be used."""
        if address is None:
            address = embedded_sidecars()[0]
        self.address = address
        tls = tls_of(tls_cert, tls_key, tls_ca)
        self._metadata = token_metadata(token_file)
        self._channel = open_channel(address, addresses.channel_options(), tls)
        self._stub: Any = status_pb2_grpc.StatusStub(self._channel)

    def list_saves(self, request: status_pb2.ListSavesRequest) -> status_pb2.ListSavesResponse:
        """The daemon's saves, newest first."""
        with self._translated():
            response: status_pb2.ListSavesResponse = self._stub.ListSaves(
                request, timeout=timeouts.STATUS_CALL_S, metadata=self._metadata
            )
            return response

    def get_save(self, save: str) -> status_pb2.GetSaveResponse:
        """A save by its id, or the newest one of a checkpoint id."""
        with self._translated():
            response: status_pb2.GetSaveResponse = self._stub.GetSave(
                status_pb2.GetSaveRequest(id=save),
                timeout=timeouts.STATUS_CALL_S,
                metadata=self._metadata,
            )
            return response

    def get_load(self, load: str) -> status_pb2.GetLoadResponse:
        """A load by its id, or the newest one of a checkpoint id."""
        with self._translated():
            response: status_pb2.GetLoadResponse = self._stub.GetLoad(
                status_pb2.GetLoadRequest(id=load),
                timeout=timeouts.STATUS_CALL_S,
                metadata=self._metadata,
            )
            return response

    def watch_save(self, save: str) -> Iterator[status_pb2.WatchSaveResponse]:
        """Every change of a save until its terminal state; reconnects if the daemon restarts meanwhile."""
        request = status_pb2.WatchSaveRequest(id=save)
        return self._follow("WatchSave", request, lambda each: each.save.state in TERMINAL)

    def watch_load(self, load: str) -> Iterator[status_pb2.WatchLoadResponse]:
        """Every change of a load until it ends; reconnects as :meth:`watch_save`."""
        request = status_pb2.WatchLoadRequest(id=load)
        running = load_status_pb2.LOAD_STATE_LOADING
        return self._follow("WatchLoad", request, lambda each: each.load.state != running)

    def _follow(self, method: str, request: Any, is_last: Callable[[Any], bool]) -> Iterator[Any]:
        # An error is final before the first response; later, only WATCH_RECONNECT_S after a stream broke.
        give_up = 0.0
        stream = getattr(self._stub, method)
        while True:
            try:
                with self._translated():
                    for response in stream(
                        request, timeout=timeouts.WATCH_STREAM_S, metadata=self._metadata
                    ):
                        give_up = math.inf
                        yield response
                        if is_last(response):
                            return
                raise errors.UnavailableError(
                    f"the daemon at {self.address} ended the stream of {request.id}"
                )
            except (errors.UnavailableError, errors.DeadlineError, UnknownNameError):
                # A restarted daemon doesn't know the save before a sidecar has connected to it again.
                now = time.monotonic()
                give_up = min(give_up, now + timeouts.WATCH_RECONNECT_S)
                if now >= give_up:
                    raise
            time.sleep(timeouts.STATUS_INTERVAL_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with translate_rpc_errors(self.address):
            try:
                yield
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise UnknownNameError(f"{self.address}: {error.details()}") from error
                raise

    def __enter__(self) -> "StatusClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
