"""Where a daemon listens: its unix socket, for this user alone, and TCP when asked for.

Owns the socket's file and the lock beside it. On TCP there is mutual TLS, or loopback, or
somebody's explicit word that none of it is needed. The same for synchronous and aio
servers; called once, before the server starts.
"""

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

from pannier.daemon.private_directories import make_private
from pannier.wire.addresses import ChannelOptions, channel_options, is_loopback, parse_address
from pannier.wire.errors import ConfigurationError
from pannier.wire.tls import FLAGS, Tls, is_unix

MAX_CONNECTIONS: Final = 4096
"""Of one daemon at a time; more are closed at once."""
_DESCRIPTORS: Final = 1 << 16
_UNIX = "unix://"

# POSIX access control lists, as Linux keeps them (linux/posix_acl_xattr.h).
_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_USER_OWNER, _USER, _GROUP_OWNER, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_ENTER, _READ_WRITE = 1, 6


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as it may; the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def server_options() -> ChannelOptions:
    """gRPC options of a daemon's server."""
    return [
        *channel_options(),
        # Two daemons on one port would share its connections silently.
        ("grpc.so_reuseport", 0),
        # Each takes a descriptor, which files need as well.
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
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
    if is_unix(address) or tls is not None or insecure or is_loopback(_host(address)):
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
    allow_uid: Collection[int] = (),
) -> Iterator[None]:
    """Binds ``server`` to ``address`` and, if given, to the TCP address ``extra``.

    A unix socket gets mode 0600, in a directory with mode 0700, which is made if it doesn't
    exist; a socket that a dead daemon left is removed. While the context lasts a lock
    file beside it keeps a second daemon away; at its end the socket is gone.

    Args:
        tls: for TCP; None: plaintext.
        allow_uid: other users that may connect: they get entries in the access control lists of
            directory and socket.

    Raises ConfigurationError when someone else listens there or may enter or put files
    there, or when it can't be bound.
    """
    if address.startswith(_UNIX):
        with _unix_socket(address, allow_uid) as path:
            _bind_private(server, address, path, allow_uid)
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
def private_socket(path: Path, allow_uid: Collection[int]) -> Iterator[socket.socket]:
    """A listening unix socket beside a daemon's own, with the same rights as that.

    The daemon listens already: the lock of its own socket keeps this one's place, too.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        previous = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        try:
            path.chmod(0o600)
            _grant(path, allow_uid, _READ_WRITE)
            listener.listen(socket.SOMAXCONN)
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _unix_socket(address: str, allow_uid: Collection[int]) -> Iterator[Path]:
    path = Path(parse_address(address, setting="--address").removeprefix(_UNIX))
    directory = path.parent
    try:
        make_private(directory)
        _check_directory(directory)
        _grant(directory, allow_uid, _ENTER)
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
            "socket: chmod 700 it, or choose an --address in a directory below it that doesn't "
            "exist yet"
        )
    # The group's rights are those of the list's entries, where there is one.
    strangers = stat.S_IRWXO if _has_acl(directory) else stat.S_IRWXG | stat.S_IRWXO
    if mode & strangers:
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
    server: "grpc.Server | grpc.aio.Server", address: str, path: Path, allow_uid: Collection[int]
) -> None:
    # Never open to others, not even for the moment until the chmod.
    previous = os.umask(0o177)
    try:
        _bind(server, address, "--address", None)
    finally:
        os.umask(previous)
    path.chmod(0o600)
    _grant(path, allow_uid, _READ_WRITE)


def _grant(path: Path, allow_uid: Collection[int], rights: int) -> None:
    """Gives these users, and nobody else, rights to a socket or directory besides its owner's."""
    if not allow_uid:
        if _has_acl(path):
            os.removexattr(path, _ACL)
            path.chmod(0o700 if path.is_dir() else 0o600)
        return
    owner = 7 if path.is_dir() else 6
    entries = [
        (_USER_OWNER, owner, _NO_ID),
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


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
