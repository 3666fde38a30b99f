"""Which embedded daemons to run: their runtime directory and the flags of ``pannier up``.

In: settings. Out: a :class:`DaemonSpec`. One set of daemons serves all jobs that run on this host
alone; each start of a job on several hosts has its own, whose directory also holds a record of its
flags, by which it can be started again, and its certificate. Owned by the client that starts them.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded.certificates import PEER_NAME, TlsBundle
from pannier.common import timeouts
from pannier.wire import addresses

_RECORD: Final = "daemons.json"
_FILES: Final = ("cert.pem", "key.pem", "ca.pem")


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
    """Further flags of ``pannier up``."""
    prepare: Callable[[], None] | None = field(default=None, compare=False)
    """Writes the files that they need; called before their start, under its lock."""
    on_start: Callable[[], None] | None = field(default=None, compare=False)
    """Called by the process that started them, after their start."""

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
) -> DaemonSpec:
    """The daemons of one start of a job on several hosts, with the TLS files in ``directory``.

    Args:
        listen: address of its coordinator, ``host:port``; or
        coordinator: address of the coordinator on another host.
        peers: where the other hosts' sidecars can reach this one's, ``host:port``; None: nowhere.

    Raises ConfigurationError: the directory's name is too long for sockets.
    """
    setting = "PANNIER_RUNTIME_DIR, with this job's directory in it,"
    for address in (addresses.embedded_sidecar, addresses.embedded_coordinator):
        addresses.parse_address(address(directory), setting=setting)
    address_flags = ("--listen", listen) if listen else ("--coordinator", str(coordinator))
    peer_flags = ("--peers", peers, "--peers-name", PEER_NAME) if peers else ()
    files = zip(("--tls-cert", "--tls-key", "--tls-ca"), tls_files(directory), strict=True)
    tls_flags = [word for flag, path in files for word in (flag, str(path))]
    return DaemonSpec(
        directory,
        None if settings.spool is None else settings.spool / directory.name,
        timeouts.JOB_DAEMONS_IDLE_S,
        (*address_flags, *peer_flags, *tls_flags, "--discard"),
    )


def write_record(spec: DaemonSpec) -> None:
    """Writes the record that :func:`read_record` reads."""
    spool = None if spec.spool is None else str(spec.spool)
    write_private_file(spec.directory / _RECORD, json.dumps({"spool": spool, "flags": spec.flags}))


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
    cert, key, ca = (directory / name for name in _FILES)
    return cert, key, ca


def write_tls_files(directory: Path, tls: TlsBundle) -> tuple[Path, Path, Path]:
    """Writes the certificate, the key and the CA, readable by this user alone; returns their paths."""
    files = tls_files(directory)
    for path, text in zip(files, (tls.cert, tls.key, tls.ca), strict=True):
        write_private_file(path, text)
    return files


def write_private_file(path: Path, text: str) -> None:
    """Writes a file atomically, with mode 0600; leaves one with the same content as it is."""
    try:
        if path.read_text() == text:
            return
    except FileNotFoundError:
        pass
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
