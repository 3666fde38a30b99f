"""Finds or starts the host's embedded daemons (``pannier up``), and waits for them at exit.

In: settings. Out: the address of a sidecar that accepts connections. The daemons are detached from
the process tree: they survive the trainer, Ctrl-C and a launcher that kills its workers. There is one
sidecar and coordinator per host, user and wire version, and their environment decides where
checkpoints are stored: a trainer with another environment gets an error rather than daemons of its
own, whose spool and status its user wouldn't find. A job on several hosts has separate daemons
(:mod:`pannier.client.embedded.daemon_spec`). Blocking.
"""

import logging
import os
import select
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import filelock
import grpc

from pannier.client.config import Settings
from pannier.client.embedded import network
from pannier.client.embedded.daemon_spec import DaemonSpec, host_daemons
from pannier.common import env_fingerprint, timeouts
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, UnavailableError, from_rpc_error

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
_ENDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)


def ensure(settings: Settings, spec: DaemonSpec | None = None) -> str:
    """The address of the embedded sidecar; starts the daemons unless they run.

    Any number of processes may call it at the same time: one of them starts the daemons.

    Args:
        spec: default: the daemons of jobs on this host alone.

    Raises:
        ConfigurationError: the runtime directory isn't this user's, or its daemons were started
            with another environment; names the variables that differ.
        UnavailableError: the daemons didn't start; with the end of their log.
    """
    spec = spec or host_daemons(settings)
    directory = spec.directory
    address = addresses.embedded_sidecar(directory)
    path = address.removeprefix("unix://")
    if _accepts(path):
        _check_owner(directory)
        _check_environment(settings, spec)
        return address
    make_private_dir(directory)
    try:
        with filelock.FileLock(
            directory / "start.lock", timeout=2 * timeouts.DAEMONS_START_S, mode=0o600
        ):
            if not _accepts(path):
                _start(settings, spec, path)
                if spec.on_start is not None:
                    spec.on_start()
    except filelock.Timeout as error:
        raise UnavailableError(
            f"another process has been starting the daemons in {directory} for {2 * timeouts.DAEMONS_START_S:g} s; "
            f"their log ends with:\n{_tail(directory / LOG)}"
        ) from error
    _check_environment(settings, spec)
    return address


def is_up(spec: DaemonSpec) -> bool:
    """Whether its sidecar accepts connections."""
    return _accepts(addresses.embedded_sidecar(spec.directory).removeprefix("unix://"))


def await_listening(spec: DaemonSpec, address: str, timeout_s: float) -> str:
    """Waits until the daemons listen on ``host:port``; returns why they don't, or "".

    Fails early when the daemons exit.
    """
    deadline = time.monotonic() + timeout_s
    while why := network.probe_port(address, timeouts.DAEMONS_START_POLL_S):
        if not is_up(spec) or time.monotonic() > deadline:
            log = spec.directory / LOG
            return f"{why}; {log} ends with:\n{_tail(log)}"
        time.sleep(timeouts.DAEMONS_START_POLL_S)
    return ""


def outlives_trainer() -> bool:
    """Whether the daemons survive the trainer's last process.

    Not in a container, which ends with its main process, nor in a Slurm step, which kills the
    processes that its tasks leave behind.
    """
    marks = ("/.dockerenv", "/run/.containerenv")
    contained = any(os.path.exists(mark) for mark in marks)
    return not contained and not {"KUBERNETES_SERVICE_HOST", "SLURM_STEP_ID"} & os.environ.keys()


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


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
            f"PANNIER_RUNTIME_DIR={directory} is not a directory of user {os.getuid()}: daemons "
            "there could be another user's; set another one"
        )


def differing_variables(settings: Settings, spec: DaemonSpec) -> list[str]:
    """Variables with another value in the daemons' environment, so that they would store elsewhere.

    Raises FileNotFoundError: they left no record of it.
    """
    theirs = env_fingerprint.decode((spec.directory / env_fingerprint.FILE).read_text())
    return env_fingerprint.differing(theirs, env_fingerprint.record(environment(settings, spec)))


def _check_environment(settings: Settings, spec: DaemonSpec) -> None:
    directory = spec.directory
    try:
        names = differing_variables(settings, spec)
    except FileNotFoundError:  # a sidecar that was started there by hand
        return
    if names:
        raise ConfigurationError(
            f"the embedded daemons in {directory} were started with another value of "
            f"{', '.join(names)}, and would store this trainer's checkpoints elsewhere: wait until "
            f"they exit ({spec.idle_exit_s:g} s after their last trainer), end them (`pannier down "
            f"--runtime-dir {directory}`), or set another PANNIER_RUNTIME_DIR"
        )


def _start(settings: Settings, spec: DaemonSpec, path: str) -> None:
    directory = spec.directory
    command = [sys.executable, "-m", "pannier.cli", "up", "--runtime-dir", str(directory)]
    command += ["--idle-exit", f"{spec.idle_exit_s:g}", *spec.flags]
    log = directory / LOG
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
    alive, child_end = os.pipe()
    try:
        with log.open("ab") as sink:
            # The shell exits at once, so that init adopts the daemons: they are no zombies here,
            # and are not killed with the process tree.
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
        _await_start(path, alive, log)
    finally:
        os.close(alive)
        if child_end >= 0:
            os.close(child_end)


def _await_start(path: str, alive: int, log: Path) -> None:
    deadline = time.monotonic() + timeouts.DAEMONS_START_S
    while not _accepts(path):
        # Readable once the other end is closed: the daemons' supervisor has exited.
        ended, _, _ = select.select([alive], [], [], timeouts.DAEMONS_START_POLL_S)
        if ended:
            raise UnavailableError(
                f"the embedded daemons exited while starting; {log} ends with:\n{_tail(log)}"
            )
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the embedded daemons did not start within {timeouts.DAEMONS_START_S:g} s; {log} ends with:\n"
                f"{_tail(log)}"
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


def _tail(log: Path, size: int = 4096) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError as error:
        return f"({error})"


def await_others(spec: DaemonSpec, job: str, incarnation: str, timeout_s: float | None) -> str:
    """Waits for the saves of other hosts, where this host has their coordinator.

    For daemons that don't outlive the trainer: the coordinator would end with this host. What earlier
    starts left has ``timeouts.RESUMED_SAVE_S``: the job's next start finishes it as well.

    Args:
        timeout_s: None: no limit, since each save ends soon after its own deadline.

    Returns the checkpoint ids still under way after ``timeout_s`` seconds, or "".
    """
    if not spec.serves_others:
        return ""
    start = time.monotonic()
    deadline = None if timeout_s is None else start + timeout_s
    running = [name for name, state in save_pb2.SaveState.items() if state and state not in _ENDED]
    request = status_pb2.ListSavesRequest(job=job, states=running)
    address = addresses.embedded_coordinator(spec.directory)
    logged = False
    with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        while True:
            try:
                saves = list(stub.ListSaves(request, timeout=timeouts.STATUS_CALL_S).saves)
            except grpc.RpcError as error:
                problem = from_rpc_error(error, peer=f"coordinator at {address}")
                _log.warning("can't list the saves of other hosts: %s", problem)
                return ""
            late = time.monotonic() - start > timeouts.RESUMED_SAVE_S
            saves = [each for each in saves if each.save.incarnation == incarnation or not late]
            if not saves:
                return ""
            if not logged:
                _log.info("waiting for %d saves of other hosts to be committed", len(saves))
                logged = True
            if deadline is not None and time.monotonic() > deadline:
                return "; ".join(each.checkpoint_id for each in saves)
            time.sleep(timeouts.DAEMONS_STATUS_POLL_S)
