"""Where a daemon listens: its unix socket, for this user alone, and TCP when asked for.

Owns the socket's file and the lock beside it. The same for synchronous and aio
servers; called once, before the server starts.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import grpc

from pannier.wire.addresses import ChannelOptions, channel_options, parse_address
from pannier.wire.errors import ConfigurationError

_UNIX = "unix://"


def server_options() -> ChannelOptions:
    """gRPC options of a daemon's server."""
    return [
        *channel_options(),
        # Two daemons on one port would share its connections silently.
        ("grpc.so_reuseport", 0),
        # Peers ping often to notice a silent daemon; by default that ends in "too_many_pings".
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]


@contextmanager
def listening(
    server: "grpc.Server | grpc.aio.Server", address: str, extra: str | None = None
) -> Iterator[None]:
    """Binds ``server`` to ``address`` and, if given, to the TCP address ``extra``.

    A unix socket gets mode 0600 and its directory, when it is made here, 0700; a
    socket that a dead daemon left is removed. While the context lasts a lock file
    beside it keeps a second daemon away; at its end the socket is gone.

    Raises ConfigurationError when someone else listens there or may put files
    there, or when it can't be bound.
    """
    if address.startswith(_UNIX):
        with _unix_socket(address) as path:
            _bind_private(server, address, path)
            if extra is not None:
                _bind(server, extra, "--listen")
            yield
        return
    for each in (address, extra):
        if each is not None:
            _bind(server, each, "--address")
    yield


@contextmanager
def _unix_socket(address: str) -> Iterator[Path]:
    path = Path(parse_address(address, setting="--address").removeprefix(_UNIX))
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_directory(path.parent)
        lock = filelock.FileLock(f"{path}.lock", timeout=0, mode=0o600, is_singleton=False)
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigurationError(
            f"another daemon listens on {address}; stop it, or choose another --address"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"can't listen on {address}: {error}") from error
    try:
        _remove_stale(path, address)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    finally:
        lock.release()


def _check_directory(directory: Path) -> None:
    found = directory.stat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and not found.st_mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"other users may replace files in {directory}, so it can't hold a socket: "
            "chmod go-w it, or choose another --address"
        )


def _remove_stale(path: Path, address: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{path} is in the way of the socket: it isn't one; move it away")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigurationError(f"can't listen on {address}: {error}") from error
    raise ConfigurationError(f"another program listens on {address}; choose another --address")


def _bind_private(server: "grpc.Server | grpc.aio.Server", address: str, path: Path) -> None:
    # Never open to others, not even for the moment until the chmod.
    previous = os.umask(0o177)
    try:
        _bind(server, address, "--address")
    finally:
        os.umask(previous)
    path.chmod(0o600)


def _bind(server: "grpc.Server | grpc.aio.Server", address: str, setting: str) -> None:
    try:
        server.add_insecure_port(parse_address(address, setting=setting))
    except RuntimeError as error:
        raise ConfigurationError(f"can't listen on {address} ({setting}): {error}") from error
