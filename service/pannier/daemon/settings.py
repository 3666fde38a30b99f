"""Settings that both daemons have: addresses, TLS, users and roots; validated on construction."""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pannier.common.locations import parse
from pannier.daemon.http_server import http_address
from pannier.daemon.listeners import check_exposure
from pannier.daemon.logging import FORMATS, TEXT
from pannier.wire import limits
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.tls import Tls, is_unix, tls_of

_LARGEST_UID: Final = (1 << 32) - 2


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """Settings of either daemon. Raises ConfigurationError naming the setting."""

    address: str
    """Where its callers reach it: ``unix:///path`` or ``host:port``."""
    listen: str | None = None
    """Another address to listen on, ``host:port``."""
    health: str | None = None
    """Where only health checks are served, ``host:port``, in plaintext."""
    metrics: str | None = None
    """Where metrics and the status page are served over HTTP, ``[host:]port``, in plaintext."""
    log_format: str = TEXT
    """``text``, or ``json``: one object per line."""
    tls_cert: Path | None = None
    """Own certificate, PEM: presented on TCP to clients and to servers."""
    tls_key: Path | None = None
    """Its private key."""
    tls_ca: Path | None = None
    """CAs that must have signed the peer's certificate."""
    insecure_listen: bool = False
    """Listen in plaintext where other hosts can connect as well."""
    allow_uid: tuple[int, ...] = ()
    """Users besides this one and root that may connect to the unix socket."""
    allow: tuple[str, ...] = ()
    """Roots that checkpoints must lie below; none: anywhere."""
    host: str = field(default_factory=socket.gethostname)
    """This host in status, errors and decisions."""
    tls: Tls | None = field(init=False, default=None, compare=False)
    """Built from the three files; None: plaintext."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tls", tls_of(self.tls_cert, self.tls_key, self.tls_ca))
        for address, setting in ((self.address, "--address"), (self.listen, "--listen")):
            if address is not None:
                parse_address(address, setting=setting)
                check_exposure(address, self.tls, self.insecure_listen, setting=setting)
        if self.health is not None and is_unix(parse_address(self.health, setting="--health")):
            raise ConfigurationError(
                f"--health={self.health} is not host:port: the unix socket at --address serves "
                "health checks as well"
            )
        if self.metrics is not None and not is_unix(self.metrics):
            object.__setattr__(self, "metrics", http_address(self.metrics, setting="--metrics"))
        if self.log_format not in FORMATS:
            raise ConfigurationError(
                f"--log-format {self.log_format!r} is not one of {', '.join(FORMATS)}"
            )
        for uid in self.allow_uid:
            if not 0 <= uid <= _LARGEST_UID:
                raise ConfigurationError(f"--allow-uid {uid} is not a user id")
        for root in self.allow:
            try:
                parse(root)
            except InvalidRequestError as error:
                raise ConfigurationError(f"--allow {root!r}: {error}") from error
        try:
            limits.check_host(self.host)
        except InvalidRequestError as error:
            raise ConfigurationError(f"--host: {error}") from error
        if not self.host:
            raise ConfigurationError("--host is empty")
