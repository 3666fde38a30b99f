"""Which embedded daemons: a runtime directory, and what ``pannier up`` is told.

There is a usual pair, which serves the jobs of this host, and one for each start of a job on several
hosts. In the directory of the latter lies a record of what it was told, by which it can be started
again, and its certificate. Owned by whoever starts them.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pannier.client.config import Settings
from pannier.client.embedded.certificates import TlsBundle
from pannier.wire import addresses

_RECORD: Final = "pair.json"
_FILES: Final = ("cert.pem", "key.pem", "ca.pem")
_IDLE_EXIT_S: Final = 300.0
_JOB_IDLE_EXIT_S: Final = 60.0
"""No later start of the job uses them."""


@dataclass(frozen=True)
class DaemonSpec:
    """A sidecar and mostly a coordinator."""

    directory: Path
    """Has their sockets and their log."""
    spool: Path | None
    """None: ``pannier up`` chooses."""
    idle_exit_s: float = _IDLE_EXIT_S
    """They leave when they had neither clients nor uploads for so long."""
    flags: tuple[str, ...] = ()
    """More of ``pannier up``."""
    on_start: Callable[[], None] | None = field(default=None, compare=False)
    """Called by the process that has started them."""

    @property
    def serves_others(self) -> bool:
        """Whether their coordinator is that of other hosts, too."""
        return "--listen" in self.flags


def host_daemons(settings: Settings) -> DaemonSpec:
    """The pair for jobs on this host alone."""
    return DaemonSpec(settings.runtime_dir, settings.spool)


def job_daemons(
    settings: Settings,
    directory: Path,
    *,
    listen: str | None = None,
    coordinator: str | None = None,
) -> DaemonSpec:
    """The pair of one start of a job on several hosts, with the papers that lie in ``directory``.

    Args:
        listen: its coordinator listens there, ``host:port``; or
        coordinator: it has none and uses that one.

    Raises ConfigurationError: the directory's name is too long for sockets.
    """
    setting = "PANNIER_RUNTIME_DIR, with this job's directory in it,"
    for address in (addresses.embedded_sidecar, addresses.embedded_coordinator):
        addresses.parse_address(address(directory), setting=setting)
    where = ("--listen", listen) if listen else ("--coordinator", str(coordinator))
    files = zip(("--tls-cert", "--tls-key", "--tls-ca"), tls_files(directory), strict=True)
    tls = [word for flag, path in files for word in (flag, str(path))]
    return DaemonSpec(
        directory,
        None if settings.spool is None else settings.spool / directory.name,
        _JOB_IDLE_EXIT_S,
        (*where, *tls, "--discard"),
    )


def write_record(pair: DaemonSpec) -> None:
    """Leaves in its directory what :func:`read_record` reads."""
    spool = None if pair.spool is None else str(pair.spool)
    write_private_file(pair.directory / _RECORD, json.dumps({"spool": spool, "flags": pair.flags}))


def read_record(directory: Path) -> DaemonSpec | None:
    """The pair of a job on several hosts whose directory this is; None: it has left for good."""
    try:
        told = json.loads((directory / _RECORD).read_text())
    except FileNotFoundError:
        return None
    spool = None if told["spool"] is None else Path(told["spool"])
    return DaemonSpec(directory, spool, _JOB_IDLE_EXIT_S, tuple(told["flags"]))


def tls_files(directory: Path) -> tuple[Path, Path, Path]:
    """Certificate, key and CA of the pair with this directory."""
    cert, key, ca = (directory / name for name in _FILES)
    return cert, key, ca


def write_tls_files(directory: Path, papers: TlsBundle) -> tuple[Path, Path, Path]:
    """Writes the pair's certificate, key and CA, for this user alone; returns their paths."""
    files = tls_files(directory)
    for path, text in zip(files, (papers.cert, papers.key, papers.ca), strict=True):
        write_private_file(path, text)
    return files


def write_private_file(path: Path, text: str) -> None:
    """Writes a file with mode 0600 in one piece; one that says the same stays as it is."""
    try:
        if path.read_text() == text:
            return
    except FileNotFoundError:
        pass
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
