"""Which embedded daemons to run: their runtime directory, the flags of ``pannier up``, their environment and files.

In: settings. Out: a :class:`DaemonSpec`. One set of daemons serves all jobs that run on this host
alone; each start of a job on several hosts has its own, whose directory also holds a record of its
flags, by which it can be started again, and its certificate. Owned by the client that starts them.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded.certificates import PEER_NAME, TlsBundle
from pannier.common import timeouts
from pannier.wire import addresses

_RECORD: Final = "daemons.json"
_TLS_FILES: Final = ("cert.pem", "key.pem", "ca.pem")

_LAUNCHER: Final = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}
"""Variables that a launcher sets for one rank, which the daemons don't get."""
_PATHS: Final = (
    *("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"),
    *("AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Variables that may hold a path relative to the trainer's directory."""


@dataclass(frozen=True)
class DaemonSpec:
    """A sidecar, and a coordinator unless the flags name another one."""

    directory: Path
    """Their runtime directory, with their sockets and their log."""
    spool: Path | None
    """None: ``pannier up`` chooses."""
    idle_exit_s: float = timeouts.HOST_DAEMONS_IDLE_S
    """Seconds without clients and uploads after which they exit."""
    flags: tuple[str, ...] = ()
    """Further flags of ``pannier up``; empty: the daemons of jobs on this host alone."""
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Private files to write into their directory before their start, by name; with private keys."""

    @property
    def sidecar(self) -> str:
        """Address of their sidecar."""
        return addresses.embedded_sidecar(self.directory)

    @property
    def coordinator(self) -> str:
        """Address of their coordinator on this host, if they have one."""
        return addresses.embedded_coordinator(self.directory)

    @property
    def log(self) -> Path:
        """Their log."""
        return self.directory / addresses.LOG

    @property
    def serves_others(self) -> bool:
        """Whether their coordinator also serves other hosts."""
        return "--listen" in self.flags

    def without_coordinator(self) -> "DaemonSpec":
        """The sidecar alone, with the address of the coordinator that ran beside it, which may be dead."""
        flags = ("--coordinator" if flag == "--listen" else flag for flag in self.flags)
        return replace(self, flags=tuple(flags))


def host_daemons(settings: Settings) -> DaemonSpec:
    """The daemons of jobs that run on this host alone."""
    return DaemonSpec(settings.runtime_dir, settings.spool)


def job_daemons(
    settings: Settings,
    directory: Path,
    *,
    listen: str | None = None,
    coordinator: str | None = None,
    peers: str | None = None,
    files: Mapping[str, str] = {},
) -> DaemonSpec:
    """The daemons of one start of a job on several hosts, with the TLS files in ``directory``.

    Args:
        listen: address of its coordinator, ``host:port``; or
        coordinator: address of the coordinator on another host.
        peers: where the other hosts' sidecars can reach this one's, ``host:port``; None: nowhere.
        files: see :class:`DaemonSpec`; with :func:`tls_texts`, unless the TLS files are there.

    Raises:
        ConfigurationError: the directory's name is too long for sockets.
    """
    setting = "PANNIER_RUNTIME_DIR, with this job's directory in it,"
    for address in (addresses.embedded_sidecar, addresses.embedded_coordinator):
        addresses.parse_address(address(directory), setting=setting)
    address_flags = ("--listen", listen) if listen else ("--coordinator", str(coordinator))
    peer_flags = ("--peers", peers, "--peers-name", PEER_NAME) if peers else ()
    tls_flags = zip(("--tls-cert", "--tls-key", "--tls-ca"), tls_files(directory), strict=True)
    return DaemonSpec(
        directory,
        None if settings.spool is None else settings.spool / directory.name,
        timeouts.JOB_DAEMONS_IDLE_S,
        (
            *address_flags,
            *peer_flags,
            *(word for flag, path in tls_flags for word in (flag, str(path))),
            "--discard",
        ),
        files,
    )


def write_files(spec: DaemonSpec) -> None:
    """Writes what daemons of a job on several hosts need, and the record that :func:`read_record` reads.

    Their certificates and keys are written here alone. All files have mode 0600, and are whole at any time. For the
    process that holds the lock of their start.
    """
    if not spec.flags:
        return
    spool = None if spec.spool is None else str(spec.spool)
    record = json.dumps({"spool": spool, "flags": spec.flags})
    for name, text in {**spec.files, _RECORD: record}.items():
        path = spec.directory / name
        new = path.with_name(f"{name}.new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        new.replace(path)


def read_record(directory: Path) -> DaemonSpec | None:
    """The daemons of a job on several hosts with this directory; None: they have exited for good."""
    try:
        record = json.loads((directory / _RECORD).read_text())
    except FileNotFoundError:
        return None
    spool = None if record["spool"] is None else Path(record["spool"])
    return DaemonSpec(directory, spool, timeouts.JOB_DAEMONS_IDLE_S, tuple(record["flags"]))


def tls_files(directory: Path) -> tuple[Path, Path, Path]:
    """Paths of the certificate, the key and the CA of the daemons with this directory."""
    cert, key, ca = (directory / name for name in _TLS_FILES)
    return cert, key, ca


def tls_texts(tls: TlsBundle) -> dict[str, str]:
    """The contents of :func:`tls_files`, by name."""
    return dict(zip(_TLS_FILES, (tls.cert, tls.key, tls.ca), strict=True))


def environment(settings: Settings, spec: DaemonSpec) -> dict[str, str]:
    """The daemons' environment: this process's, with the settings as variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    for name, value in (
        ("PANNIER_SPOOL", spec.spool),
        ("PANNIER_LISTEN", None),
        ("PANNIER_PEERS", None),
        ("PANNIER_PEERS_NAME", None),
        ("PANNIER_COORDINATOR", settings.coordinator),
        ("PANNIER_TLS_CERT", settings.tls_cert),
        ("PANNIER_TLS_KEY", settings.tls_key),
        ("PANNIER_TLS_CA", settings.tls_ca),
    ):
        kept.pop(name, None)
        if value is not None:
            kept[name] = str(value)
    for name in _PATHS:
        if name in kept and os.path.exists(kept[name]):
            kept[name] = os.path.abspath(kept[name])
    if kept.get("PYTHONPATH"):
        parts = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return kept
