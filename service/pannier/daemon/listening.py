"""Where a daemon listens: its unix socket, for this user alone, and TCP when asked for.

Owns the socket's file and the lock beside it. On TCP there is mutual TLS, or loopback, or
somebody's explicit word that none of it is needed. The same for synchronous and aio
servers; called once, before the server starts.
"""

import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
import grpc

from pannier.wire.addresses import ChannelOptions, channel_options, parse_address
from pannier.wire.errors import ConfigurationError
from pannier.wire.tls import FLAGS, Tls, is_unix

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


def check_exposure(address: str, tls: Tls | None, insecure: bool, *, setting: str) -> None:
    """Raises ConfigurationError when strangers could reach ``address`` and read what is said there.

    Args:
        address: where a daemon is to listen.
        insecure: that is wanted (``--insecure-listen``).
    """
    if is_unix(address) or tls is not None or insecure or _is_loopback(address):
        return
    raise ConfigurationError(
        f"{setting}={address} can be reached from other hosts, and without TLS anybody there could "
        f"save, abort and read along: give {', '.join(FLAGS)}, listen on 127.0.0.1, or pass "
        "--insecure-listen if the network keeps strangers out"
    )


@contextmanager
def listening(
    server: "grpc.Server | grpc.aio.Server",
    address: str,
    extra: str | None = None,
    *,
    tls: Tls | None = None,
    shared: bool = False,
) -> Iterator[None]:
    """Binds ``server`` to ``address`` and, if given, to the TCP address ``extra``.

    A unix socket gets mode 0600, in a directory with mode 0700, which is made if it doesn't
    exist; a socket that a dead daemon left is removed. While the context lasts a lock
    file beside it keeps a second daemon away; at its end the socket is gone.

    Args:
        tls: for TCP; None: plaintext.
        shared: other users may connect, because the server looks who they are
            (:mod:`pannier.daemon.peers`): socket 0666, directory 0711.

    Raises ConfigurationError when someone else listens there or may enter or put files
    there, or when it can't be bound.
    """
    if address.startswith(_UNIX):
        with _unix_socket(address, shared=shared) as path:
            _bind_private(server, address, path, shared=shared)
            if extra is not None:
                _bind(server, extra, "--listen", tls)
            yield
        return
    for each in (address, extra):
        if each is not None:
            _bind(server, each, "--address", tls)
    yield


def socket_path(address: str) -> Path | None:
    """Path of a unix socket's address; None for TCP."""
    return Path(address.removeprefix(_UNIX)) if address.startswith(_UNIX) else None


@contextmanager
def _unix_socket(address: str, *, shared: bool) -> Iterator[Path]:
    path = Path(parse_address(address, setting="--address").removeprefix(_UNIX))
    directory = path.parent
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            if shared:
                directory.chmod(0o711)
        _check_directory(directory, shared=shared)
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


def _check_directory(directory: Path, *, shared: bool) -> None:
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"{directory} is no directory: choose another --address")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"{directory} belongs to user {found.st_uid}, who could put a socket of their own "
            f"there: choose an --address in a directory of user {os.geteuid()}"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"other users may replace files in {directory} (mode {mode:o}), so it can't hold a "
            f"socket: chmod {'711' if shared else '700'} it, or choose an --address in a directory "
            "below it that doesn't exist yet"
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and not shared:
        raise ConfigurationError(
            f"other users may enter {directory} (mode {mode:o}), so it can't hold a socket: chmod "
            "700 it, or choose an --address in a directory below it that doesn't exist yet"
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


def _bind_private(
    server: "grpc.Server | grpc.aio.Server", address: str, path: Path, *, shared: bool
) -> None:
    # Never open to others, not even for the moment until the chmod.
    previous = os.umask(0o177)
    try:
        _bind(server, address, "--address", None)
    finally:
        os.umask(previous)
    path.chmod(0o666 if shared else 0o600)


def _bind(
    server: "grpc.Server | grpc.aio.Server", address: str, setting: str, tls: Tls | None
) -> None:
    where = parse_address(address, setting=setting)
    try:
        if tls is None or is_unix(where):
            server.add_insecure_port(where)
        else:
            server.add_secure_port(where, tls.server_credentials())
    except RuntimeError as error:
        raise ConfigurationError(f"can't listen on {address} ({setting}): {error}") from error


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
