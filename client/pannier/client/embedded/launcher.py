"""Finds or starts the host's embedded daemons (``pannier up``).

In: settings. Out: the address of a sidecar that accepts connections. The daemons
belong to nobody's process tree: they outlive the trainer, Ctrl-C and a launcher
that ends its workers. There is one pair per host, user and wire version, and its
environment decides where checkpoints go: a trainer whose own says otherwise is
told so, and doesn't get a second pair behind its back, whose sockets, spool and
status nobody would look for. A job on several hosts has pairs of its own
(:mod:`pannier.client.embedded.daemon_spec`).
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
from pannier.common import env_fingerprint
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from pannier.wire.errors import ConfigurationError, UnavailableError

LOG: Final = addresses.LOG
START_S: Final = 30.0
"""Until daemons that don't come up are an error."""
_LOG_LIMIT: Final = 16 << 20
_POLL_S: Final = 0.05

_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}
"""A launcher's words to one rank, which the daemons are not."""
_FILES = (
    *("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"),
    *("AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Variables that may hold a path relative to the trainer's directory."""


def ensure(settings: Settings, pair: DaemonSpec | None = None) -> str:
    """Address of the embedded sidecar; starts the daemons when none answer.

    Any number of processes may call it at the same time: one starts them.

    Args:
        pair: default: the usual one.

    Raises:
        ConfigurationError: the runtime directory isn't this user's, or its daemons
            were started for another place; names the variables that differ.
        UnavailableError: the daemons didn't come up; with the end of their log.
    """
    pair = pair or host_daemons(settings)
    directory = pair.directory
    address = addresses.embedded_sidecar(directory)
    path = address.removeprefix("unix://")
    if _accepts(path):
        _check_owner(directory)
        _check_environment(settings, pair)
        return address
    make_private_dir(directory)
    try:
        with filelock.FileLock(directory / "start.lock", timeout=2 * START_S, mode=0o600):
            if not _accepts(path):
                _start(settings, pair, path)
                if pair.on_start is not None:
                    pair.on_start()
    except filelock.Timeout as error:
        raise UnavailableError(
            f"another process has been starting the daemons in {directory} for {2 * START_S:g} s; "
            f"their log ends with:\n{_tail(directory / LOG)}"
        ) from error
    _check_environment(settings, pair)
    return address


def is_up(pair: DaemonSpec) -> bool:
    """Whether its sidecar accepts connections."""
    return _accepts(addresses.embedded_sidecar(pair.directory).removeprefix("unix://"))


def await_listening(pair: DaemonSpec, address: str, timeout_s: float) -> str:
    """Waits until something listens on ``host:port``; why nothing does, or empty.

    The pair was started with that: it is given up when its daemons end.
    """
    deadline = time.monotonic() + timeout_s
    while why := network.probe_port(address, _POLL_S):
        if not is_up(pair) or time.monotonic() > deadline:
            log = pair.directory / LOG
            return f"{why}; {log} ends with:\n{_tail(log)}"
        time.sleep(_POLL_S)
    return ""


def outlives_trainer() -> bool:
    """Whether the daemons go on when the trainer's last process ends.

    Not in a container, whose end is the end of all, nor in a Slurm step, which
    kills what its tasks leave behind.
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
    """Makes a runtime directory for this user alone. Raises ConfigurationError: it can't be."""
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
            "there could be anyone's; set another one"
        )


def differing_variables(settings: Settings, pair: DaemonSpec) -> list[str]:
    """Variables of which the pair's daemons have another value, so that they store elsewhere.

    Raises FileNotFoundError when they left no record.
    """
    theirs = env_fingerprint.decode((pair.directory / env_fingerprint.FILE).read_text())
    return env_fingerprint.differing(theirs, env_fingerprint.record(environment(settings, pair)))


def _check_environment(settings: Settings, pair: DaemonSpec) -> None:
    directory = pair.directory
    try:
        names = differing_variables(settings, pair)
    except FileNotFoundError:  # A sidecar that someone runs there by hand.
        return
    if names:
        try:
            supervisor = (directory / "up.pid").read_text().strip()
        except FileNotFoundError:  # It is just leaving.
            supervisor = "their supervisor"
        raise ConfigurationError(
            f"the embedded daemons in {directory} were started with another value of "
            f"{', '.join(names)}, and would not store this trainer's checkpoints as it asks: wait "
            f"until they leave ({pair.idle_exit_s:g} s after their last trainer), end them (kill "
            f"{supervisor}), or set another PANNIER_RUNTIME_DIR"
        )


def _start(settings: Settings, pair: DaemonSpec, path: str) -> None:
    directory = pair.directory
    command = [sys.executable, "-m", "pannier.cli", "up", "--runtime-dir", str(directory)]
    command += ["--idle-exit", f"{pair.idle_exit_s:g}", *pair.flags]
    log = directory / LOG
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
    alive, its_end = os.pipe()
    try:
        with log.open("ab") as sink:
            # The shell is gone at once, so that the daemons are nobody's children:
            # neither a zombie here, nor killed by what walks the process tree.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" & ', "sh", *command],
                cwd="/",
                env=environment(settings, pair),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                close_fds=True,
                pass_fds=(its_end,),
                check=True,
            )
        os.close(its_end)
        its_end = -1
        _await(path, alive, log)
    finally:
        os.close(alive)
        if its_end >= 0:
            os.close(its_end)


def _await(path: str, alive: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _accepts(path):
        # The other end of the pipe is closed when the daemons' supervisor ends.
        ended, _, _ = select.select([alive], [], [], _POLL_S)
        if ended:
            raise UnavailableError(
                f"the embedded daemons ended while starting; {log} ends with:\n{_tail(log)}"
            )
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the embedded daemons did not come up within {START_S:g} s; {log} ends with:\n"
                f"{_tail(log)}"
            )


def environment(settings: Settings, pair: DaemonSpec) -> dict[str, str]:
    """What the daemons get: this process's, with the settings that are theirs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    for name, value in (
        ("PANNIER_SPOOL", pair.spool),
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


_log = logging.getLogger(__name__)

_ENDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_EVERY_S: Final = 0.2
_CALL_S: Final = 10.0


def await_others(pair: DaemonSpec, job: str, timeout_s: float | None) -> str:
    """Waits; which saves are still under way after ``timeout_s`` seconds, or empty.

    None is no endless wait: each save ends, well or not, soon after its own deadline.
    """
    if not pair.serves_others:
        return ""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    running = [name for name, state in save_pb2.SaveState.items() if state and state not in _ENDED]
    request = status_pb2.ListSavesRequest(job=job, states=running, limit=16)
    address = addresses.embedded_coordinator(pair.directory)
    told = False
    with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        while True:
            try:
                saves = stub.ListSaves(request, timeout=_CALL_S).saves
            except grpc.RpcError as error:
                _log.warning("the coordinator can't be asked what is under way: %s", error)
                return ""
            if not saves:
                return ""
            if not told:
                _log.info("waiting for %d saves of other hosts to be committed", len(saves))
                told = True
            if deadline is not None and time.monotonic() > deadline:
                return "; ".join(each.checkpoint_id for each in saves)
            time.sleep(_EVERY_S)
