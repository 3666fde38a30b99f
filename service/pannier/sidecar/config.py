"""Settings of a sidecar, checked when they are made."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pannier.daemon.listeners import check_exposure
from pannier.daemon.settings import DaemonSettings
from pannier.wire.addresses import is_wildcard, parse_address
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.limits import check_host
from pannier.wire.tls import is_unix

_LEAST_MEMORY: Final = 8 << 20
_LEAST_LIMIT: Final = 1 << 20
_USUAL_THREADS: Final = 8
_MOST_THREADS: Final = 64


@dataclass(frozen=True, kw_only=True)
class SidecarConfig(DaemonSettings):
    """The settings of ``pannier sidecar``. Raises ConfigurationError naming the setting."""

    coordinator: str = ""
    """Address of the job's coordinator: ``unix:///path`` or ``host:port``; may be missing where all
    ``jobs`` name their own."""
    spool: Path | None = None
    """Directory that holds data files until they are in storage; made with mode 0700. With ``jobs``: each
    job has a directory below it. None: see :mod:`pannier.sidecar.spool.default_spool`."""
    jobs: Path | None = None
    """Directory with one settings file per job. Each job gets a sidecar process, and tokens that its calls
    must carry. None: one sidecar, without tokens."""
    address: str = "unix:///run/pannier/sidecar.sock"
    """Address for trainers."""
    spool_budget: int | None = None
    """Most bytes the spool may take; None: what its file system has. With ``jobs``: the default per job."""
    memory: int = 192 << 20
    """Most bytes of upload buffers. With ``jobs``: the default per job."""
    upload_threads: int = 0
    """Cores that uploads may use at a time; 0: :func:`default_upload_threads`. With ``jobs``: per job."""
    upload_limit: int | None = None
    """Most bytes per second of all uploads together; None: no limit. With ``jobs``: per job."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec file systems."""
    nice: int = 10
    """Added to the process's niceness, so that trainers go first where cores are short."""
    peers: str | None = None
    """Where other hosts of the job read blocks and send replicas, ``host:port``; None: nowhere."""
    peers_name: str = ""
    """A name that the certificates of all peers have; empty: each certificate has the host of the peer's
    address."""
    restore_budget: int = 256 << 20
    """Most bytes of blocks that are kept for loads. With ``jobs``: per job."""
    replicas: int = 0
    """Number of other hosts that get a copy of what this host's ranks save: 0 or 1. With 1, this host also
    holds copies of other hosts' ranks."""
    replicas_limit: int = 256 << 20
    """Most bytes per second that are sent to another host's spool; half of it while uploads run."""
    failure_domain: str = ""
    """Name that is the same for all hosts that fail together; empty: the host's name."""
    idle_exit_s: float | None = None
    """Exit after so many seconds without a client or an undecided save; None: never."""
    grace_s: float = 30
    """Seconds to finish uploads in after SIGTERM."""
    embedded: bool = False
    """Started by a client (``pannier up``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coordinator or self.jobs is None:
            if not self.coordinator:
                raise ConfigurationError(
                    "--coordinator is missing: name the job's coordinator, unix:///path or host:port"
                )
            parse_address(self.coordinator, setting="--coordinator")
        if self.jobs is not None:
            self._check_jobs()
        if self.spool is not None:
            object.__setattr__(self, "spool", Path(os.path.abspath(self.spool)))
        elif self.jobs is not None or not is_unix(self.address):
            raise ConfigurationError(
                f"--spool (PANNIER_SPOOL) is missing: only a sidecar of one job that serves a socket has a "
                f"default, and {'--jobs is given' if self.jobs else f'--address is {self.address}'}"
            )
        if self.spool_budget is not None and self.spool_budget < 1:
            raise ConfigurationError(f"--spool-budget {self.spool_budget} is not positive")
        if self.memory < _LEAST_MEMORY:
            raise ConfigurationError(
                f"--memory {self.memory} is too little to upload with: give at least "
                f"{_LEAST_MEMORY >> 20} MiB"
            )
        self._check_uploads()
        if self.restore_budget < BLOCK_BYTES:
            raise ConfigurationError(
                f"--restore-budget {self.restore_budget} is less than one block of a checkpoint: give "
                f"at least {BLOCK_BYTES >> 20} MiB"
            )
        if self.peers is not None:
            object.__setattr__(self, "peers", _peer_address(self.peers))
            check_exposure(self.peers, self.tls, self.insecure_listen, setting="--peers")
        self._check_replicas()
        if not 0 <= self.nice <= 19:
            raise ConfigurationError(f"--nice {self.nice} is not from 0 to 19")
        for setting, value in (("--idle-exit", self.idle_exit_s), ("--grace", self.grace_s)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"{setting} {value} is not a positive number of seconds")

    @property
    def jobs_spool(self) -> Path:
        """The directory of the jobs' spools, with ``jobs``."""
        assert self.spool is not None
        return self.spool

    @property
    def runtime_dir(self) -> Path:
        """The directory of the socket at ``address``."""
        return Path(self.address.removeprefix("unix://")).parent

    def _check_uploads(self) -> None:
        if not self.upload_threads:
            object.__setattr__(self, "upload_threads", default_upload_threads())
        if not 1 <= self.upload_threads <= _MOST_THREADS:
            raise ConfigurationError(
                f"--upload-threads {self.upload_threads} is not from 1 to {_MOST_THREADS}"
            )
        if self.upload_limit is not None and self.upload_limit < _LEAST_LIMIT:
            raise ConfigurationError(
                f"--upload-limit {self.upload_limit} is too little: give at least "
                f"{_LEAST_LIMIT >> 20} MiB per second"
            )

    def _check_replicas(self) -> None:
        if self.replicas not in (0, 1):
            raise ConfigurationError(
                f"--replicas {self.replicas} is neither 0 nor 1: one other host gets a copy, or none"
            )
        if self.replicas and self.peers is None:
            raise ConfigurationError(
                "--replicas 1 needs --peers HOST:PORT, where the sidecars of other hosts send their replicas to"
            )
        if self.replicas_limit < _LEAST_LIMIT:
            raise ConfigurationError(
                f"--replicas-limit {self.replicas_limit} is too little: give at least "
                f"{_LEAST_LIMIT >> 20} MiB per second"
            )
        try:
            check_host(self.failure_domain)
        except InvalidRequestError as error:
            raise ConfigurationError(f"--failure-domain: {error}") from error
        if not self.failure_domain:
            object.__setattr__(self, "failure_domain", self.host)

    def _check_jobs(self) -> None:
        if not is_unix(self.address):
            raise ConfigurationError(
                f"--address={self.address} is not a unix:///path: the sockets of --jobs lie beside it"
            )
        for setting, value, instead in (
            ("--replicas", self.replicas, "replicas of one job are not for the hosts of another"),
            ("--peers", self.peers, "blocks of one job are not for the peers of another"),
            ("--listen", self.listen, "trainers reach it by their jobs' sockets only"),
            ("--allow", self.allow, "each job's file names its own roots"),
            ("--idle-exit", self.idle_exit_s, "a sidecar of several jobs doesn't exit"),
        ):
            if value:
                raise ConfigurationError(f"{setting} doesn't go with --jobs: {instead}")


def default_upload_threads() -> int:
    """A quarter of the cores that this process may use, at least 1 and at most 8."""
    return min(max(1, len(os.sched_getaffinity(0)) // 4), _USUAL_THREADS)


def _peer_address(address: str) -> str:
    # Manifests say "[$(POD_IP)]:PORT", whose brackets are wrong around an IPv4 address.
    host, _, port = address.rpartition(":")
    if host.startswith("[") and ":" not in host:
        address = f"{host[1:-1]}:{port}"
    parse_address(address, setting="--peers")
    if is_unix(address):
        raise ConfigurationError(f"--peers={address} is not host:port: other hosts connect to it")
    if is_wildcard(address):
        raise ConfigurationError(
            f"--peers={address} is no address that other hosts can connect to: name this host's own"
        )
    return address
