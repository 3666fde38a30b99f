"""Which ranks share a host, and the addresses by which hosts reach each other.

In: a runtime directory; names and addresses of hosts. Out: an id that is equal for all processes that
can share the daemons of the directory; addresses and ports of this host. Blocking.
"""

import hashlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pannier.common import machine, timeouts
from pannier.wire.addresses import channel_options
from pannier.wire.errors import ConfigurationError, from_rpc_error
from pannier.wire.tls import channel_to

_ANYWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849): the route to them is the default route."""


def runtime_dir_id(directory: Path) -> str:
    """An id that is equal for all processes that see this directory and can use its sockets.

    Not the hostname, which containers may share, nor the path of the directory. It must exist.
    """
    status = directory.stat()
    text = f"{machine.boot_id()} {status.st_dev} {status.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def own_address(towards: Iterable[str | None]) -> str | None:
    """This host's IP address on the route to the first of these hosts that has one.

    Prefers addresses that other hosts can reach to loopback, which only processes of the same
    network namespace can. Sends nothing.

    Args:
        towards: names or IP addresses; None is skipped.
    """
    last = None
    for name in (*towards, *_ANYWHERE):
        address = _source(name) if name else None
        if address is None:
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
        last = last or address
    return last


def free_port(address: str) -> int:
    """A TCP port that is free now on ``address``, an IP address of this host.

    Raises:
        ConfigurationError: the address isn't this host's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigurationError(
                f"nothing can listen on {address} here ({error.strerror}): name this host's own "
                "address by PANNIER_LISTEN=HOST:PORT"
            ) from error
        port: int = probe.getsockname()[1]
        return port


def check_free(address: str) -> None:
    """Checks that a server can listen on ``host:port``.

    Raises:
        ConfigurationError: it can't; names PANNIER_LISTEN.
    """
    host, port = split_address(address)
    try:
        (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: closed connections in TIME_WAIT don't matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigurationError(
            f"PANNIER_LISTEN={address}: {error.strerror or error} on host {socket.gethostname()}, "
            "which has the job's coordinator: give an address of that host with a free port, or none"
        ) from error


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def probe_port(address: str, timeout_s: float) -> str:
    """Why no TCP connection to ``host:port`` can be made from here; "": it can."""
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def probe_daemon(address: str, credentials: grpc.ChannelCredentials, timeout_s: float) -> str:
    """Why no daemon at ``host:port`` accepts calls with these credentials; "": one does.

    Args:
        timeout_s: for its answer; a busy host's daemon listens long before it answers. That there is a
            way to it shows within ``timeouts.COORDINATOR_REACH_S``.
    """
    if why := probe_port(address, min(timeout_s, timeouts.COORDINATOR_REACH_S)):
        return why
    with channel_to(address, channel_options(), credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(from_rpc_error(error, peer="the daemon there"))
    return ""


def all_ranks_here(size: int) -> bool:
    """Whether all of ``size`` ranks are on this host, by the launcher's variables."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return local.isdecimal() and int(local) >= size


def _source(name: str) -> str | None:
    try:
        routes = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in routes:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(where)
            except OSError:
                continue
            source = str(probe.getsockname()[0]).partition("%")[0]
        if not ipaddress.ip_address(source).is_link_local:
            return source
    return None
