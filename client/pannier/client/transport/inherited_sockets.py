"""Connections that a forked child inherits, and must not keep open.

In: the addresses that the parent is connected to. Out: nothing; their descriptors
lead nowhere afterwards. A connection lives as long as any process holds it: with
one in a long-lived child (a DataLoader worker), the sidecar would not notice that
the trainer died. Runs in a child right after the fork, so: no locks, no threads,
no name service.
"""

import os
import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

Peer = str | tuple[str, int]
"""What a socket is connected to: a path, or a number and a port."""

_DESCRIPTORS = "/proc/self/fd"


def peers(address: str) -> set[Peer]:
    """What sockets connected to ``address`` are connected to. For the parent: it may ask a server.

    A path counts as it is bound: a daemon that sees it elsewhere (another mount) is not recognised.
    """
    if address.startswith("unix://"):
        return {os.path.realpath(address.removeprefix("unix://"))}
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return set()  # nobody connects to what has no number
    return {(_plain(str(where[0])), int(where[1])) for *_, where in found}


def let_go(wanted: Collection[Peer]) -> None:
    """Puts /dev/null in the place of every descriptor that is connected to one of ``wanted``.

    Their numbers stay taken: whoever still believes to own one must not close
    another's. The connections themselves go on in the parent.
    """
    if not os.path.isdir(_DESCRIPTORS):
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir(_DESCRIPTORS):
        if _peer(int(name)) in wanted:
            os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _peer(descriptor: int) -> Peer | None:
    """What a descriptor is connected to; None when it isn't."""
    try:
        stream = socket.socket(fileno=descriptor)
    except OSError:
        return None  # no socket, or closed by now: the listing's own
    try:
        where = stream.getpeername()
    except OSError:
        return None  # not connected
    finally:
        stream.detach()
    if stream.family == socket.AF_UNIX:
        return os.path.realpath(where) if where and isinstance(where, str) else None
    if stream.family in (socket.AF_INET, socket.AF_INET6):
        return _plain(str(where[0])), int(where[1])
    return None


def _plain(number: str) -> str:
    """An IP number as text: of IPv4 where it was mapped into IPv6, and one for this host's own.

    gRPC finds more numbers of ``localhost`` than the system's resolver.
    """
    parsed: IPv4Address | IPv6Address = ip_address(number)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return "localhost" if parsed.is_loopback else str(parsed)
