"""Finds, starts, replaces and leaves embedded daemons (``pannier up``).

In: settings and a spec. Out: a sidecar that accepts connections. The daemons are detached from
the process tree: they survive the trainer, Ctrl-C and a launcher that kills its workers. There is one
sidecar and coordinator per host, user and wire version, and their environment decides where
checkpoints are stored: a trainer with another environment gets an error rather than daemons of
its own, whose spool and status its user wouldn't find. Idle ones of another version are replaced. A job on
several hosts has separate daemons (:mod:`pannier.client.embedded.daemon_spec`). Whether they run says
:mod:`pannier.common.daemon_process`; what they are, their :class:`DaemonRecord`. Blocking; any thread.
"""

import functools
import logging
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import filelock
import grpc

from pannier.client.config import Settings
from pannier.client.embedded import network
from pannier.client.embedded.daemon_spec import DaemonSpec, environment, write_files
from pannier.client.process_group import process_rank
from pannier.common import daemon_record, timeouts
from pannier.common.daemon_process import accepts, await_restored, is_serving
from pannier.common.daemon_record import DaemonRecord
from pannier.common.units import counted
from pannier.v1 import save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from pannier.wire.errors import (
    ConfigurationError,
    PannierError,
    UnavailableError,
    VersionMismatchError,
    from_rpc_error,
)

_log = logging.getLogger(__name__)

_LOG_LIMIT: Final = 16 << 20
_DECIDED: Final = (
    save_pb2.SAVE_STATE_COMMITTED,
    save_pb2.SAVE_STATE_ABORTED,
    save_pb2.SAVE_STATE_PREPARED,
)
_UNDECIDED: Final = [
    name for name, state in save_pb2.SaveState.items() if state and state not in _DECIDED
]


def ensure(settings: Settings, spec: DaemonSpec) -> None:
    """Starts the embedded daemons unless they run; replaces those that :attr:`Difference.is_reason_to_replace`.

    Any number of processes may call it at the same time: one of them starts the daemons.

    Raises:
        ConfigurationError: the runtime directory isn't this user's, or its daemons were started
            with another environment; names the variables that differ.
        VersionMismatchError: its daemons have another wire version, and are busy.
        UnavailableError: the daemons didn't start; with the end of their log.
    """
    directory = spec.directory
    make_private_dir(directory)
    if not is_serving(directory) or _should_be_replaced(settings, spec):
        with start_lock(spec):
            await_restored(directory, is_serving)
            if is_serving(directory) and _should_be_replaced(settings, spec) and is_idle(spec):
                _down(settings, spec)
            if not is_serving(directory):
                start(settings, spec)
    _check_usable(settings, spec)


def make_private_dir(directory: Path) -> None:
    """Creates a runtime directory for this user alone.

    Raises:
        ConfigurationError: it can't be created, or is another user's.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"PANNIER_RUNTIME_DIR={directory} can't be created: {error.strerror}"
        ) from error
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigurationError(
            f"PANNIER_RUNTIME_DIR={directory} is not a directory of user {os.getuid()}, but of "
            f"{daemon_record.user_name(status.st_uid)}, whose daemons could be there: set another one"
        )
    os.chmod(directory, 0o700)


@contextmanager
def start_lock(spec: DaemonSpec) -> Iterator[None]:
    """Held by a process that starts these daemons, or ends them to start others.

    Raises:
        UnavailableError: another process has held it for too long.
    """
    timeout_s = 2 * timeouts.DAEMONS_START_S
    lock = filelock.FileLock(spec.directory / daemon_record.START_LOCK, mode=0o600)
    try:
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout as error:
        raise UnavailableError(
            f"another process has been starting the daemons in {spec.directory} for {timeout_s:g} s; "
            f"their log ends with:\n{_tail(spec.log)}"
        ) from error
    try:
        yield
    finally:
        lock.release()


# What runs there, and whether this process can use it


@dataclass(frozen=True)
class Difference:
    """How daemons that run, or ran last, differ from those that this process would start."""

    record: DaemonRecord
    """Theirs."""
    variables: list[str]
    """Names of those with another value, so that they store elsewhere, or keep other checkpoints."""
    version: str
    """See :meth:`DaemonRecord.mismatch`; empty: none."""
    has_other_credentials: bool
    """Whether their environment has other credentials, or none."""

    @property
    def is_reason_to_replace(self) -> bool:
        """Whether idle ones are replaced. Those that don't exit when idle were started by hand."""
        return self.record.exits_idle and (bool(self.version) or self.has_other_credentials)


def compare(settings: Settings, spec: DaemonSpec) -> Difference | None:
    """How the daemons in the directory of ``spec`` differ; None: no record, as of a sidecar that was started there alone."""
    record = daemon_record.read(spec.directory)
    if record is None:
        return None
    variables = environment(settings, spec)
    return Difference(
        record,
        daemon_record.differing(record.variables, daemon_record.decisive_variables(variables)),
        record.mismatch(),
        record.credentials not in (None, daemon_record.credentials_digest(variables)),
    )


def _should_be_replaced(settings: Settings, spec: DaemonSpec) -> bool:
    """Only those of jobs on this host alone: others serve the job that they were started for."""
    difference = None if spec.flags else compare(settings, spec)
    return difference is not None and difference.is_reason_to_replace


def _check_usable(settings: Settings, spec: DaemonSpec) -> None:
    """Raises for daemons that this process can't use; logs once any that it can, but should not."""
    directory = spec.directory
    difference = compare(settings, spec)
    if difference is None:
        return
    record = difference.record
    end_them = f"end them (`pannier down --runtime-dir {directory}`)"
    if not record.speaks_ours:
        raise VersionMismatchError(
            f"the embedded daemons in {directory} ({record.description}) {difference.version}: wait until "
            f"they are idle, {end_them}, or set another PANNIER_RUNTIME_DIR"
        )
    if difference.variables:
        raise ConfigurationError(
            f"the embedded daemons in {directory} ({record.description}) were started with another "
            f"value of {', '.join(difference.variables)}, and would store this trainer's checkpoints elsewhere, or keep "
            f"others of them: wait until they exit ({spec.idle_exit_s:g} s after their last trainer), "
            f"{end_them}, or set another PANNIER_RUNTIME_DIR"
        )
    if difference.has_other_credentials:
        _log_once(
            f"the daemons in {directory} ({record.description}) have other credentials in their environment than "
            f"this process, those of {record.started}, and are busy: if these expire, `pannier down --runtime-dir "
            f"{directory}` ends the daemons, and the next save starts them with its own; a profile (AWS_PROFILE) is "
            "read again instead"
        )
    if difference.version:
        _log_once(
            f"using the daemons in {directory} ({record.description}), though they {difference.version}: when "
            f"they are idle, `pannier down --runtime-dir {directory}` ends them"
        )


@functools.cache
def _log_once(text: str) -> None:
    if not process_rank():
        _log.warning("%s", text)


# Start


def start(settings: Settings, spec: DaemonSpec) -> None:
    """Starts daemons, and waits until they serve. For the holder of :func:`start_lock`, where none run.

    Raises:
        UnavailableError: they didn't start; with the end of their log.
    """
    write_files(spec)
    log = spec.log
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
    since = log.stat().st_size if log.exists() else 0
    command = [*_pannier(), "up", "--runtime-dir", str(spec.directory)]
    command += ["--idle-exit", f"{spec.idle_exit_s:g}", *spec.flags]
    alive, child_end = os.pipe()
    try:
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
        finally:
            os.close(child_end)
        if why := _await_start(settings, spec, alive):
            raise UnavailableError(
                f"the embedded daemons {why}; {log} ends with:\n{_tail(log, since)}"
            )
    finally:
        os.close(alive)


def _await_start(settings: Settings, spec: DaemonSpec, alive: int) -> str:
    """Waits until all of them serve; returns why they don't. The coordinator may refuse what the sidecar accepts.

    Args:
        alive: descriptor that is readable once their supervisor has exited, which holds its other end.
    """
    deadline = time.monotonic() + timeouts.DAEMONS_START_S
    has_coordinator = settings.coordinator is None and "--coordinator" not in spec.flags
    while not (is_serving(spec.directory) and (not has_coordinator or accepts(spec.coordinator))):
        has_exited, _, _ = select.select([alive], [], [], timeouts.DAEMONS_START_POLL_S)
        if has_exited:
            return "exited while starting"
        if time.monotonic() > deadline:
            return f"did not start within {timeouts.DAEMONS_START_S:g} s"
    return ""


def await_listening(spec: DaemonSpec, address: str, timeout_s: float) -> str:
    """Waits until the daemons listen on ``host:port``; returns why they don't, or "".

    Fails early when the daemons exit.
    """
    deadline = time.monotonic() + timeout_s
    while why := network.probe_port(address, timeouts.DAEMONS_START_POLL_S):
        if not is_serving(spec.directory) or time.monotonic() > deadline:
            return f"{why}; {spec.log} ends with:\n{_tail(spec.log)}"
        time.sleep(timeouts.DAEMONS_START_POLL_S)
    return ""


def _pannier() -> list[str]:
    return [sys.executable, "-m", "pannier.cli"]


def _tail(log: Path, since: int = 0, size: int = 4096) -> str:
    """The end of a log, of what was written after its first ``since`` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError as error:
        return f"({error})"


# End, and exit of the trainer


def _down(settings: Settings, spec: DaemonSpec) -> None:
    """Ends idle daemons. A client that connects just now connects to their successors.

    Raises:
        UnavailableError: they didn't exit.
    """
    directory = spec.directory
    record = daemon_record.read(directory)
    command = [*_pannier(), "down", "--runtime-dir", str(directory)]
    command += ["--timeout", f"{timeouts.DAEMONS_START_S:g}"]
    down = subprocess.run(
        command,
        cwd="/",
        env=environment(settings, spec),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if down.returncode:
        raise UnavailableError(
            f"the idle daemons in {directory} could not be ended: {down.stdout.strip()}"
        )
    if record is not None:
        _log.info("replaced idle daemons: %s", record.description)


def is_idle(spec: DaemonSpec) -> bool:
    """Whether their sidecar has no client and nothing to upload; also False if they don't say."""
    request = status_pb2.ListSavesRequest(states=_UNDECIDED, limit=1)
    try:
        status = _list_saves(spec.sidecar, "sidecar", request)
    except PannierError as error:
        _log.warning("can't see whether the daemons are idle: %s; they are not replaced", error)
        return False
    is_busy = (
        not status.HasField("trainers") or status.trainers or status.saves or status.bytes_queued
    )
    return not is_busy


@dataclass(frozen=True)
class RunningDaemons:
    """Embedded daemons, as their record describes them."""

    name: str
    """For messages: "process 25"."""
    ended_by: str | None
    """What may end them together with their starter; None: nothing."""


def running_daemons(spec: DaemonSpec) -> RunningDaemons:
    """The daemons in the directory of ``spec``."""
    record = daemon_record.read(spec.directory)
    if record is None:
        return RunningDaemons(f"the sidecar in {spec.directory}", "what has started it there")
    return RunningDaemons(f"process {record.pid}", record.ended_by)


def await_others(spec: DaemonSpec, job: str, incarnation: str, timeout_s: float | None) -> str:
    """Waits for the saves of other hosts, where this host has their coordinator.

    For daemons that don't outlive the trainer: the coordinator would end with this host. Saves that earlier
    starts left are waited for only ``timeouts.RESUMED_SAVE_S``: the job's next start can finish them as well.

    Args:
        timeout_s: None: no limit, since each save ends soon after its own deadline.

    Returns:
        The checkpoint ids still under way after ``timeout_s`` seconds; "": none.
    """
    if not spec.serves_others:
        return ""
    start = time.monotonic()
    request = status_pb2.ListSavesRequest(job=job, states=_UNDECIDED)
    logged = False
    while True:
        try:
            saves = list(_list_saves(spec.coordinator, "coordinator", request).saves)
        except PannierError as error:
            _log.warning(
                "can't list the saves of other hosts: %s; this host's coordinator may end before they "
                "are committed",
                error,
            )
            return ""
        waited_s = time.monotonic() - start
        if waited_s > timeouts.RESUMED_SAVE_S:
            saves = [save for save in saves if save.save.incarnation == incarnation]
        if not saves:
            return ""
        if not logged:
            others = counted(len(saves), "save")
            _log.info("waiting for %s of other hosts to be committed", others)
            logged = True
        if timeout_s is not None and waited_s > timeout_s:
            return "; ".join(save.checkpoint_id for save in saves)
        time.sleep(timeouts.DAEMONS_STATUS_POLL_S)


def _list_saves(
    address: str, daemon: str, request: status_pb2.ListSavesRequest
) -> status_pb2.ListSavesResponse:
    """What an embedded daemon lists.

    Raises:
        PannierError: it can't be asked.
    """
    with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        try:
            response: status_pb2.ListSavesResponse = stub.ListSaves(
                request, timeout=timeouts.STATUS_CALL_S
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=f"{daemon} at {address}") from error
    return response
