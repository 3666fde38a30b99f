"""Finds or starts the host's embedded daemons (``pannier up``).

In: settings. Out: the address of a sidecar that accepts connections. The daemons are detached from
the process tree: they survive the trainer, Ctrl-C and a launcher that kills its workers. There is one
sidecar and coordinator per host, user and wire version, and their environment decides where
checkpoints are stored: a trainer with another environment gets an error rather than daemons of its
own, whose spool and status its user wouldn't find. Idle ones of another version are replaced. A job on
several hosts has separate daemons (:mod:`pannier.client.embedded.daemon_spec`). Blocking.
"""

import functools
import logging
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import filelock

from pannier.client.config import Settings
from pannier.client.embedded import daemon_status, network
from pannier.client.embedded.daemon_spec import DaemonSpec, host_daemons
from pannier.client.process_group import process_rank
from pannier.common import daemon_record, timeouts
from pannier.common.daemon_process import accepts, await_restored, is_serving
from pannier.common.daemon_record import DaemonRecord
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, UnavailableError, VersionMismatchError

_log = logging.getLogger(__name__)

LOG: Final = addresses.LOG
_LOG_LIMIT: Final = 16 << 20

_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}
"""Variables that a launcher sets for one rank, which the daemons don't get."""
_FILES = (
    *("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"),
    *("AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Variables that may hold a path relative to the trainer's directory."""


def ensure(settings: Settings, spec: DaemonSpec | None = None) -> str:
    """The address of the embedded sidecar; starts the daemons unless they run.

    Any number of processes may call it at the same time: one of them starts the daemons.

    Args:
        spec: default: the daemons of jobs on this host alone.

    Raises:
        ConfigurationError: the runtime directory isn't this user's, or its daemons were started
            with another environment; names the variables that differ.
        VersionMismatchError: its daemons have another wire version, and are busy.
        UnavailableError: the daemons didn't start; with the end of their log.
    """
    spec = spec or host_daemons(settings)
    directory = spec.directory
    address = addresses.embedded_sidecar(directory)
    up = is_serving(spec.directory)
    if up:
        _check_owner(directory)
    if not up or _may_be_replaced(settings, spec):
        _start_or_replace(settings, spec)
    _check_daemons(settings, spec)
    return address


def _start_or_replace(settings: Settings, spec: DaemonSpec) -> None:
    directory = spec.directory
    make_private_dir(directory)
    try:
        with filelock.FileLock(
            directory / daemon_record.START_LOCK, timeout=2 * timeouts.DAEMONS_START_S, mode=0o600
        ):
            if (
                is_serving(spec.directory)
                and _may_be_replaced(settings, spec)
                and daemon_status.is_idle(spec)
            ):
                _end(settings, spec)
            await_restored(directory, is_serving)
            if not is_serving(spec.directory):
                _start(settings, spec)
                if spec.on_start is not None:
                    spec.on_start()
    except filelock.Timeout as error:
        raise UnavailableError(
            f"another process has been starting the daemons in {directory} for {2 * timeouts.DAEMONS_START_S:g} s; "
            f"their log ends with:\n{_tail(directory / LOG)}"
        ) from error


def await_listening(spec: DaemonSpec, address: str, timeout_s: float) -> str:
    """Waits until the daemons listen on ``host:port``; returns why they don't, or "".

    Fails early when the daemons exit.
    """
    deadline = time.monotonic() + timeout_s
    while why := network.probe_port(address, timeouts.DAEMONS_START_POLL_S):
        if not is_serving(spec.directory) or time.monotonic() > deadline:
            log = spec.directory / LOG
            return f"{why}; {log} ends with:\n{_tail(log)}"
        time.sleep(timeouts.DAEMONS_START_POLL_S)
    return ""


@dataclass(frozen=True)
class RunningDaemons:
    """Embedded daemons, as their record describes them."""

    name: str
    """For messages: "process 25"."""
    ended_by: str | None
    """What may end them together with their starter; None: known to be nothing."""


def running_daemons(spec: DaemonSpec) -> RunningDaemons:
    """The daemons in the directory of ``spec``."""
    record = daemon_record.read(spec.directory)
    if record is None:
        return RunningDaemons(f"the sidecar in {spec.directory}", "what has started it there")
    return RunningDaemons(f"process {record.pid}", record.ended_by)


def make_private_dir(directory: Path) -> None:
    """Creates a runtime directory for this user alone. Raises ConfigurationError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"PANNIER_RUNTIME_DIR={directory} can't be created: {error.strerror}"
        ) from error
    _check_owner(directory)
    os.chmod(directory, 0o700)


def _check_owner(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigurationError(
            f"PANNIER_RUNTIME_DIR={directory} is not a directory of user {os.getuid()}, but of "
            f"{daemon_record.user_name(found.st_uid)}, whose daemons could be there: set another one"
        )


def differing_variables(settings: Settings, spec: DaemonSpec) -> list[str]:
    """Variables with another value in the daemons' environment, so that they would store elsewhere.

    Raises FileNotFoundError: they left no record of it.
    """
    record = daemon_record.read(spec.directory)
    if record is None:
        raise FileNotFoundError(f"no record of daemons in {spec.directory}")
    return _differing(settings, spec, record)


def _differing(settings: Settings, spec: DaemonSpec, record: DaemonRecord) -> list[str]:
    own = daemon_record.decisive_variables(environment(settings, spec))
    return daemon_record.differing(record.variables, own)


def _check_daemons(settings: Settings, spec: DaemonSpec) -> None:
    """Raises for daemons that this process can't use; logs once any that it can, but should not."""
    directory = spec.directory
    record = daemon_record.read(directory)
    if record is None:  # a sidecar that was started there by hand
        return
    end_them = f"end them (`pannier down --runtime-dir {directory}`)"
    if not record.speaks_ours:
        raise VersionMismatchError(
            f"the embedded daemons in {directory} ({record.description}) {record.mismatch()}: wait until "
            f"they are idle, {end_them}, or set another PANNIER_RUNTIME_DIR"
        )
    names = _differing(settings, spec, record)
    if names:
        raise ConfigurationError(
            f"the embedded daemons in {directory} ({record.description}) were started with another "
            f"value of {', '.join(names)}, and would store this trainer's checkpoints elsewhere, or keep "
            f"others of them: wait until they exit ({spec.idle_exit_s:g} s after their last trainer), "
            f"{end_them}, or set another PANNIER_RUNTIME_DIR"
        )
    if _has_other_credentials(settings, spec, record):
        _log_once(
            f"the daemons in {directory} ({record.description}) have other credentials in their environment than "
            f"this process, those of {record.started}, and are busy: if these expire, `pannier down --runtime-dir "
            f"{directory}` ends the daemons, and the next save starts them with its own; a profile (AWS_PROFILE) is "
            "read again instead"
        )
    if mismatch := record.mismatch():
        _log_once(
            f"using the daemons in {directory} ({record.description}), though they {mismatch}: when "
            f"they are idle, `pannier down --runtime-dir {directory}` ends them"
        )


@functools.cache
def _log_once(text: str) -> None:
    if not process_rank():
        _log.warning("%s", text)


def _has_other_credentials(settings: Settings, spec: DaemonSpec, record: DaemonRecord) -> bool:
    own = daemon_record.credentials_digest(environment(settings, spec))
    return record.credentials not in (None, own)


def _may_be_replaced(settings: Settings, spec: DaemonSpec) -> bool:
    """Whether daemons of another version run there, with other credentials, or of an environment that no longer exists.

    Only those of jobs on this host alone: others serve the job that they were started for. Daemons
    that don't exit when idle were started by hand.
    """
    record = None if spec.flags else daemon_record.read(spec.directory)
    return (
        record is not None
        and record.exits_idle
        and (bool(record.mismatch()) or _has_other_credentials(settings, spec, record))
    )


def _end(settings: Settings, spec: DaemonSpec) -> None:
    """Ends idle daemons. A client that connects just now connects to their successors.

    Raises UnavailableError: they didn't exit.
    """
    directory = spec.directory
    record = daemon_record.read(directory)
    command = [*_pannier(), "down", "--runtime-dir", str(directory)]
    command += ["--timeout", f"{timeouts.DAEMONS_START_S:g}"]
    ended = subprocess.run(
        command,
        cwd="/",
        env=environment(settings, spec),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise UnavailableError(
            f"the idle daemons in {directory} could not be ended: {ended.stdout.strip()}"
        )
    if record is not None:
        _log.info("replaced idle daemons: %s", record.description)


def _start(settings: Settings, spec: DaemonSpec) -> None:
    directory = spec.directory
    if spec.prepare is not None:
        spec.prepare()
    command = [*_pannier(), "up", "--runtime-dir", str(directory)]
    command += ["--idle-exit", f"{spec.idle_exit_s:g}", *spec.flags]
    log = directory / LOG
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
    since = log.stat().st_size if log.exists() else 0
    alive, child_end = os.pipe()
    try:
        with log.open("ab") as sink:
            # The shell exits at once, so that init adopts the daemons: they don't become zombies of this
            # process, and are not killed with its process tree.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" & ', "sh", *command],
                cwd="/",
                env=environment(settings, spec),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                close_fds=True,
                pass_fds=(child_end,),
                check=True,
            )
        os.close(child_end)
        child_end = -1
        _await_start(settings, spec, alive, partial(_tail, log, since))
    finally:
        os.close(alive)
        if child_end >= 0:
            os.close(child_end)


def _pannier() -> list[str]:
    return [sys.executable, "-m", "pannier.cli"]


def _await_start(settings: Settings, spec: DaemonSpec, alive: int, tail: Callable[[], str]) -> None:
    """Also for the coordinator, which may refuse what the sidecar accepts."""
    deadline = time.monotonic() + timeouts.DAEMONS_START_S
    coordinator = addresses.embedded_coordinator(spec.directory)
    has_own = settings.coordinator is None and "--coordinator" not in spec.flags
    log = spec.directory / LOG
    while not (is_serving(spec.directory) and (not has_own or accepts(coordinator))):
        # Readable once the other end is closed: the daemons' supervisor has exited.
        ended, _, _ = select.select([alive], [], [], timeouts.DAEMONS_START_POLL_S)
        if ended:
            raise UnavailableError(
                f"the embedded daemons exited while starting; {log} ends with:\n{tail()}"
            )
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the embedded daemons did not start within {timeouts.DAEMONS_START_S:g} s; {log} ends with:\n"
                f"{tail()}"
            )


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
    for name in _FILES:
        if name in kept and os.path.exists(kept[name]):
            kept[name] = os.path.abspath(kept[name])
    if kept.get("PYTHONPATH"):
        parts = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return kept


def _tail(log: Path, since: int = 0, size: int = 4096) -> str:
    """The end of a log, of what was written after its first ``since`` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError as error:
        return f"({error})"
