"""Addresses of daemons and the gRPC options both ends use.

An address is ``unix:///path`` or ``host:port``.
"""

import ipaddress
import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from pannier.wire.chunk_codec import MAX_MESSAGE_BYTES
from pannier.wire.errors import ConfigurationError
from pannier.wire.version import WIRE_VERSION

ChannelOptions = list[tuple[str, int]]

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_MAX_SOCKET_PATH = 105
"""Linux takes 107 bytes, gRPC (1.85) two less: it can't bind longer ones, and only says so when it tries."""


def parse_address(address: str, *, setting: str) -> str:
    """``address`` in the form that gRPC takes.

    Raises ConfigurationError naming ``setting`` when it is neither ``unix:///path``
    nor ``host:port``.
    """
    if not address.isprintable():
        # A line break or a NUL would give it another meaning.
        raise ConfigurationError(f"{setting}={address!r} has characters that can't be printed")
    if address.startswith("unix:///"):
        path = address.removeprefix("unix://")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise ConfigurationError(
                f"{setting}={address}: a socket path has at most {_MAX_SOCKET_PATH} bytes, this one "
                f"has {len(os.fsencode(path))}; choose a shorter directory"
            )
        return address
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigurationError(f"{setting}={address!r} is neither unix:///path nor host:port")
    return address


def is_wildcard(address: str) -> bool:
    """Whether a ``host:port`` is a wildcard: an address to listen on, not to connect to."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address (without brackets) is the local host's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def channel_options() -> ChannelOptions:
    """Options for channels and servers: message limits, fast reconnects, the receiver's memory."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Trailing metadata carries an error's failures by rank, which exceed gRPC's limit of 8 KiB.
        ("grpc.max_metadata_size", 128 << 10),
        ("grpc.absolute_max_metadata_size", 128 << 10),
        # Without it a TCP receiver grows its window to 50 MiB a stream.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # The time-out of one connection attempt, TLS included: a remote peer needs several round trips,
        # and the kernel retransmits the first packet after 1 s.
        ("grpc.min_reconnect_backoff_ms", 3000),
        ("grpc.max_reconnect_backoff_ms", 200),
        # Peers are on the same host or in the cluster: never through a web proxy.
        ("grpc.enable_http_proxy", 0),
    ]


def keepalive_options() -> ChannelOptions:
    """Options for channels over TCP: a broken link is noticed within seconds.

    The second option is the effective time-out; ``keepalive_timeout_ms`` has no effect (grpcio 1.85).
    On a unix socket they have no effect: the kernel of a stopped peer still answers.
    """
    return [
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.http2.ping_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def runtime_dir() -> Path:
    """Directory of the embedded daemons' sockets: one per user and wire version.

    ``PANNIER_RUNTIME_DIR``, else below ``/tmp``. Not below ``XDG_RUNTIME_DIR``, which is removed at
    the user's last logout, and which cron and ssh sessions may not have. Not created here.
    """
    configured = os.environ.get("PANNIER_RUNTIME_DIR")
    return Path(configured or f"{_usual_dir()}{WIRE_VERSION}")


def usual_dirs() -> list[Path]:
    """The existing directories of this user below ``/tmp``, of all wire versions."""
    usual = _usual_dir()
    found = sorted(usual.parent.glob(f"{usual.name}*"))
    return [each for each in found if each.lstat().st_uid == os.getuid()]


def _usual_dir() -> Path:
    """The usual runtime directory, without the wire version at its end."""
    return Path(f"/tmp/pannier-{os.getuid()}-v")


LOG: Final = "up.log"
"""Name of the embedded daemons' log in their runtime directory."""
_JOBS: Final = "job-"
"""Prefix of the runtime directories of jobs on several hosts, below the usual one."""


def job_dir(directory: Path, job: str, meeting: str, place: str) -> Path:
    """Runtime directory, below the usual one, of the daemons of a job on several hosts.

    Args:
        job: text that stays the same when the job is restarted.
        meeting: name of one start, without ``-``.
        place: id of this host's usual directory; hosts may share its file system. Not the host's name,
            which may change.
    """
    return directory / f"{_JOBS}{_hash(job)}-{meeting}-{_hash(place)}"


def is_job_dir(directory: Path) -> bool:
    """Whether it is one of :func:`job_dir`; its name is no other start's, on any host."""
    return directory.name.startswith(_JOBS)


def job_dirs(directory: Path, job: str | None = None) -> list[Path]:
    """The existing directories of :func:`job_dir` (of one job), oldest first; of all hosts that share them."""
    pattern = f"{_JOBS}{_hash(job) if job else '*'}-*-*"
    found: list[tuple[float, Path]] = []
    for path in directory.glob(pattern):
        with suppress(FileNotFoundError):  # just removed by another process
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                found.append((status.st_mtime, path))
    return [path for _, path in sorted(found)]


def _hash(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def embedded_sidecars(directory: Path) -> list[str]:
    """Addresses of the embedded sidecars that may run: first that of the usual directory, then those of jobs on
    several hosts, newest first."""
    return [embedded_sidecar(place) for place in (directory, *reversed(job_dirs(directory)))]


def embedded_sidecar(directory: Path) -> str:
    """Address of the embedded sidecar."""
    return f"unix://{directory}/sidecar.sock"


def log_beside(address: str) -> Path:
    """Log of the embedded daemons whose socket has this address."""
    return Path(address.removeprefix("unix://")).with_name(LOG)


def embedded_coordinator(directory: Path) -> str:
    """Address of the embedded coordinator."""
    return f"unix://{directory}/coordinator.sock"
