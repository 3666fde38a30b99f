"""Where a daemon listens: a unix socket for its user, and TCP when asked for.

In: a server that hasn't started, and addresses. Out: the server bound to them, and a listening socket
for descriptors. Owns the sockets' files, their directory's rights and the lock beside them.

The kernel decides at connect(2) who may use a unix socket: the socket has mode 0600 in a directory
of mode 0700, and access control lists admit further users. TCP takes mutual TLS, loopback, or
``--insecure-listen``. For synchronous and aio servers. Blocking; not thread-safe: sets the umask.
"""

import logging
import os
import resource
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import filelock
import grpc

from pannier.common.cgroup import memory_limit
from pannier.wire.addresses import ChannelOptions, channel_options, is_loopback, parse_address
from pannier.wire.errors import ConfigurationError
from pannier.wire.tls import FLAGS, Tls, is_unix

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
"""Connections of one daemon at a time; further ones are closed at once."""
_DESCRIPTORS: Final = 1 << 16
_UNIX: Final = "unix://"

# POSIX access control lists, as Linux keeps them (linux/posix_acl_xattr.h).
_ACL: Final = "system.posix_acl_access"
_ACL_VERSION: Final = 2
_USER_OWNER, _USER, _GROUP_OWNER, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF
_SEARCH, _READ_WRITE = 1, 6

Server = grpc.Server | grpc.aio.Server


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as it may; the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_grpc_thread() -> None:
    """Keeps gRPC's thread for asyncio until the process ends; for the event loop's thread.

    Otherwise whatever frees the last server or channel ends the thread and waits for that, also the garbage
    collector: with Python 3.13.0 both waited for ever, and a daemon frees its server as it ends.
    https://github.com/grpc/grpc/blob/v1.76.0/src/python/grpcio/grpc/_cython/_cygrpc/aio/grpc_aio.pyx.pxi
    """
    grpc.aio.init_grpc_aio()


def server_options() -> ChannelOptions:
    """gRPC options of a daemon's server."""
    return [
        *channel_options(),
        # By default two daemons may bind one port, and each gets part of its connections.
        ("grpc.so_reuseport", 0),
        # Each takes a descriptor, which files need as well.
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        # Peers ping often to notice an unresponsive daemon; by default that ends in "too_many_pings".
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def check_exposure(address: str, tls: Tls | None, insecure: bool, *, setting: str) -> None:
    """Raises ConfigurationError when other hosts can reach ``address`` and it has no TLS.

    Args:
        address: where a daemon is to listen.
        insecure: plaintext is wanted there (``--insecure-listen``).
    """
    host = address.rpartition(":")[0].strip("[]")
    if is_unix(address) or tls is not None or insecure or is_loopback(host):
        return
    raise ConfigurationError(
        f"{setting}={address} can be reached from other hosts, and without TLS anyone there could "
        f"save, abort and read checkpoints: give {', '.join(FLAGS)}, listen on 127.0.0.1, or pass "
        "--insecure-listen if the network admits trusted hosts only"
    )


@contextmanager
def bind_listeners(
    server: Server,
    address: str,
    extra: str | None = None,
    *,
    tls: Tls | None = None,
    allow_uid: Collection[int] = (),
) -> Iterator[None]:
    """Binds ``server`` to ``address`` and, if given, to the TCP address ``extra``.

    A unix socket gets mode 0600, in a directory of mode 0700, which is created unless it
    exists; a socket that a dead daemon left is removed. While the context lasts, a lock
    file beside it keeps a second daemon away; at its end the socket is removed.

    Args:
        tls: for TCP; None: plaintext.
        allow_uid: further users that may connect: entries in the access control lists of
            directory and socket.

    Raises ConfigurationError when another daemon listens there, when other users may enter the
    directory or create files in it, or when the address can't be bound.
    """
    if address.startswith(_UNIX):
        with _socket_place(address, allow_uid) as path:
            with _private_umask():
                _bind(server, address, "--address", None)
            _set_rights(path, 0o600, allow_uid)
            if extra is not None:
                _bind(server, extra, "--listen", tls)
            yield
        return
    _bind(server, address, "--address", tls)
    if extra is not None:
        _bind(server, extra, "--listen", tls)
    yield


def bind_tcp(
    server: Server, address: str, *, setting: str, tls: Tls | None, any_port: bool = False
) -> str:
    """Binds ``server`` to a TCP address, which is returned.

    Args:
        any_port: if the port is taken, another one serves as well.

    Raises ConfigurationError naming ``setting``.
    """
    try:
        _bind(server, address, setting, tls)
    except ConfigurationError:
        if not any_port:
            raise
        host = address.rpartition(":")[0]
        try:
            port = _add_port(server, f"{host}:0", tls)
        except RuntimeError as error:
            raise ConfigurationError(f"can't listen on {host} ({setting}): {error}") from error
        return f"{host}:{port}"
    return address


def socket_path(address: str) -> Path | None:
    """Path of a unix socket's address; None for TCP."""
    return Path(address.removeprefix(_UNIX)) if address.startswith(_UNIX) else None


@contextmanager
def private_socket(path: Path, allow_uid: Collection[int]) -> Iterator[socket.socket]:
    """A listening unix socket beside a daemon's own, with the same rights.

    The daemon listens already, so that the lock of its own socket protects this one as well.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        with _private_umask():
            listener.bind(str(path))
        try:
            _set_rights(path, 0o600, allow_uid)
            listener.listen(socket.SOMAXCONN)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def make_private_directory(directory: Path) -> None:
    """Creates the directory with mode 0700 whatever the umask, and its parents with 0755 at most.

    One that exists stays as it is: the caller checks it. Raises OSError.
    """
    missing = [each for each in directory.parents if not each.exists()]
    for parent in reversed(missing):
        # Not mkdir(parents=True), which under a umask of 0 would let any user write to them.
        parent.mkdir(mode=0o755, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    # The umask may have removed rights of the owner.
    directory.chmod(0o700)


@contextmanager
def _socket_place(address: str, allow_uid: Collection[int]) -> Iterator[Path]:
    """The socket's path, locked and free, in a directory that other users can't enter."""
    path = Path(parse_address(address, setting="--address").removeprefix(_UNIX))
    directory = path.parent
    try:
        make_private_directory(directory)
        _check_directory(directory)
        _set_rights(directory, 0o700, allow_uid)
        lock = filelock.FileLock(f"{path}.lock", timeout=0, mode=0o600, is_singleton=False)
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigurationError(
            f"another daemon listens on {address}; stop it, or choose another --address"
        ) from error
    except PermissionError as error:
        raise ConfigurationError(
            f"can't listen on {address}: {error}; create {directory} as this user's, or choose another --address"
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
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"{directory} is not a directory: choose another --address")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"{directory} belongs to user {found.st_uid}, who could put a socket of their own "
            f"there: choose an --address in a directory of user {os.geteuid()}"
        )
    # With an access control list, the group's bits are the mask of its entries, which are replaced.
    may_enter = stat.S_IRWXO if _has_acl(directory) else stat.S_IRWXG | stat.S_IRWXO
    if mode & (stat.S_IWGRP | stat.S_IWOTH | may_enter):
        what = "replace files in" if mode & (stat.S_IWGRP | stat.S_IWOTH) else "enter"
        raise ConfigurationError(
            f"other users may {what} {directory} (mode {mode:o}), so it can't hold a socket: chmod "
            "700 it, or choose an --address in a directory below it that doesn't exist yet"
        )


def _remove_stale(path: Path, address: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(
            f"can't listen on {address}: {path} exists and is not a socket; move it away"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            limit = memory_limit()
            _log.warning(
                "the last process that listened on %s was killed, or the machine went down: its socket is still there%s",
                address,
                ""
                if limit is None
                else f"; {limit}, and the kernel has killed {limit.kills} "
                "processes there for lack of memory",
            )
            return
        except OSError as error:
            raise ConfigurationError(f"can't listen on {address}: {error}") from error
    raise ConfigurationError(f"another program listens on {address}; choose another --address")


@contextmanager
def _private_umask() -> Iterator[None]:
    """For binding a socket: without it, other users could connect until its mode is set."""
    previous = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(previous)


def _set_rights(path: Path, mode: int, allow_uid: Collection[int]) -> None:
    """Admits the owner by ``mode``, and these users by an access control list, which is replaced."""
    is_directory = path.is_dir()
    if not allow_uid:
        if _has_acl(path):
            os.removexattr(path, _ACL)
        elif is_directory:
            return  # checked, and perhaps root's
        path.chmod(mode)
        return
    rights = _SEARCH if is_directory else _READ_WRITE
    entries = [
        (_USER_OWNER, mode >> 6, _NO_ID),
        *((_USER, rights, uid) for uid in sorted(allow_uid)),
        (_GROUP_OWNER, 0, _NO_ID),
        (_MASK, rights, _NO_ID),
        (_OTHERS, 0, _NO_ID),
    ]
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, _ACL, struct.pack("<I", _ACL_VERSION) + packed)
    except OSError as error:
        raise ConfigurationError(
            f"--allow-uid needs access control lists, and {path} can have none "
            f"({error.strerror}): choose an --address on another file system"
        ) from error


def _has_acl(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, _ACL))
    except OSError:
        return False


def _bind(server: Server, address: str, setting: str, tls: Tls | None) -> None:
    where = parse_address(address, setting=setting)
    try:
        _add_port(server, where, tls)
    except RuntimeError as error:
        raise ConfigurationError(f"can't listen on {address} ({setting}): {error}") from error


def _add_port(server: Server, where: str, tls: Tls | None) -> int:
    if tls is None or is_unix(where):
        return server.add_insecure_port(where)
    return server.add_secure_port(where, tls.server_credentials())
