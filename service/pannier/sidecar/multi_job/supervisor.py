"""One sidecar process for each job of a node, and the gateway that shows operators all of them.

In: ``--jobs``. Out: for each job a plain sidecar with sockets, spool, journal and coordinator stream of
its own, so that neither an error nor a stuck file system of one reaches another. Jobs are added, changed
and removed while the others go on; a process that ends is started again, and resumes from its journal.
All are forked from this process, which has imported their modules, and share that memory; so it has
one thread and no gRPC object.
"""

import dataclasses
import gc
import importlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import filelock

from pannier.common import timeouts
from pannier.common.locations import parse
from pannier.daemon.listeners import make_private_directory
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job import gateway
from pannier.sidecar.multi_job.job_config import JobConfig, JobDirectory
from pannier.sidecar.multi_job.reports import ReportSender
from pannier.sidecar.multi_job.sockets import (
    http_address,
    job_address,
    jobs_directory,
    make_directory,
    make_parent,
)
from pannier.supervisor.processes import (
    GAVE_UP,
    MISCONFIGURED,
    OK,
    Daemon,
    Signals,
    ending,
    fork,
    next_start,
)
from pannier.wire.auth_token import digest
from pannier.wire.errors import ConfigurationError, PannierError

_log = logging.getLogger(__name__)

LOCK: Final = ".lock"
LEAVE: Final = signal.SIGUSR1
"""Asks a job's sidecar to refuse its trainers, and to exit when its saves have ended."""

_STORES: Final = {"gs": "pannier.storage.gcs.store", "s3": "pannier.storage.s3.store"}
"""Modules of stores that are imported when they are needed, by scheme."""

RunJob = Callable[[SidecarConfig, JobConfig], int]
"""Serves one job until its process is asked to stop; returns the exit status."""


class _Job:
    """A job, and the process that serves it."""

    def __init__(self, config: JobConfig, launch: Callable[["_Job"], Any]) -> None:
        self.config = config
        self.daemon = Daemon(f"the sidecar of job {config.name}", lambda: launch(self))
        self.problem = ""
        """Why it isn't served."""
        self.kill_at: float | None = None
        """When its process, which was asked to stop, is killed; on the monotonic clock."""

    def restart(self, config: JobConfig) -> None:
        """Stops its process at once; the next one has the new settings, and resumes from the journal."""
        self.config, self.problem = config, ""
        if not self.daemon.running():
            self.daemon.restart()
            return
        self.kill_at = time.monotonic() + timeouts.JOB_RESTART_S
        # The second signal ends the grace period of the first.
        self.daemon.signal(signal.SIGTERM)
        self.daemon.signal(signal.SIGINT)

    def leave(self) -> None:
        """Asks its process to exit once the job's saves have ended."""
        self.config = dataclasses.replace(self.config, leaving=True)
        self.daemon.signal(LEAVE)

    def state(self) -> dict[str, Any]:
        """What the gateway shows."""
        return {
            "leaving": self.config.leaving,
            "starts": self.daemon.starts,
            "running": self.daemon.due is None,
            "problem": self.problem,
            "allow": self.config.allow,
        }


class JobSupervisor:
    """The supervisor of one node. :meth:`run` is called once, in the main thread.

    Args:
        config: the node's settings.
        run_job: serves one job, in a process of its own.
    """

    def __init__(self, config: SidecarConfig, run_job: RunJob) -> None:
        """Raises ConfigurationError when ``--jobs`` can't be read."""
        assert config.jobs is not None
        self._config = config
        self._run_job = run_job
        self._directory = JobDirectory(config.jobs)
        self._parent = jobs_directory(config.address)
        self._jobs: dict[str, _Job] = {}
        self._refused: dict[str, str] = {}
        """Why a job has no process, by its name."""
        self._token = secrets.token_hex(32)
        """Authenticates the gateway at all jobs' sockets."""
        self._gateway = Daemon("the gateway", self._launch_gateway)
        self._reports: ReportSender | None = None
        """Sends reports to the gateway's present process."""
        self._draining = False
        self._signals = Signals()

    def run(self) -> int:
        """Exit status: 0 stopped by a signal, 2 the gateway refuses its settings at its first start.

        The gateway and the jobs' sidecars are started again however often they fail.

        Raises ConfigurationError when the sockets' directory or the spool can't be used.
        """
        lock = self._prepare()
        with self._signals.blocked():
            try:
                self._apply_jobs()
                self._report_unserved()
                return self._supervise()
            finally:
                self._draining = True
                self._report()
                daemons = [job.daemon for job in self._jobs.values()]
                hurried = self._signals.end(daemons, self._config.grace_s + timeouts.JOB_KILL_S)
                self._signals.end([self._gateway], 0.0 if hurried else timeouts.JOB_KILL_S)
                lock.release()

    def _prepare(self) -> filelock.BaseFileLock:
        config = self._config
        try:
            make_private_directory(config.jobs_spool)
        except OSError as error:
            raise ConfigurationError(
                f"the spool {config.jobs_spool} can't be used: {error}"
            ) from error
        make_parent(self._parent)
        lock = filelock.FileLock(self._parent / LOCK, timeout=0, mode=0o600, is_singleton=False)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise ConfigurationError(
                f"another daemon listens on {config.address}; stop it, or choose another --address"
            ) from error
        for path in self._parent.glob(".*"):
            if path.is_socket():
                path.unlink()
        return lock

    def _supervise(self) -> int:
        while True:
            self._gateway.start_if_due()
            for name, job in self._jobs.items():
                if error := job.daemon.start_if_due():
                    job.problem = f"job {name}: its sidecar can't be started: {error}"
            self._report()
            due = next_start([self._gateway, *(job.daemon for job in self._jobs.values())])
            if self._signals.stop_requested(
                timeouts.CHECK_S if due is None else min(due, timeouts.CHECK_S)
            ):
                _log.info("stopping: received a signal")
                return OK
            code = self._gateway.poll()
            # Later, another process may hold its port for a while, which is no reason to end the jobs' sidecars.
            if code == MISCONFIGURED and self._gateway.starts == 1:
                return MISCONFIGURED
            if code is not None:
                self._gateway.crashed(code)
            for name, job in list(self._jobs.items()):
                self._check(name, job)
            self._apply_jobs()

    def _check(self, name: str, job: _Job) -> None:
        """Handles the end of a job's process, or kills it if its time to exit is over."""
        code = job.daemon.poll()
        if code is None:
            if job.kill_at is not None and time.monotonic() > job.kill_at:
                # Without waiting: it may be stuck in the kernel.
                job.daemon.signal(signal.SIGKILL)
            if job.problem and job.daemon.steady():
                job.problem = ""
            return
        if job.kill_at is not None:
            job.kill_at = None
            job.daemon.restart()
        elif job.config.leaving and code == OK:
            del self._jobs[name]
            with suppress(OSError):  # not empty: it stays
                (self._config.jobs_spool / name).rmdir()
            _log.info("job %s is no longer served: nothing of it is left to upload", name)
        else:
            job.daemon.crashed(code)
            job.problem = (
                f"job {name}: its sidecar ended with {ending(code)}, {job.daemon.crashes} times in a "
                f"row: {self._read_error(name) or 'see its log'}"
            )

    def _apply_jobs(self) -> None:
        wanted = self._directory.read()
        for name, job in self._jobs.items():
            found = wanted.get(name)
            if found is None:
                if not job.config.leaving:
                    _log.info("job %s was removed from --jobs: its uploads will be finished", name)
                    job.leave()
            elif job.config.leaving or not found.same_but_tokens(job.config):
                _log.info("job %s is restarted", name)
                job.restart(found)
            else:
                # Its process reads other tokens itself; the next process gets them from here.
                job.config = found
        refused: dict[str, str] = {}
        for name, found in wanted.items():
            try:
                self._check_job(found)
            except PannierError as error:
                refused[name] = f"job {name} is not served: {error}"
            else:
                if name not in self._jobs:
                    _import_stores(found)
                    self._jobs[name] = _Job(found, self._launch_job)
        for name, problem in refused.items():
            if self._refused.get(name) != problem:
                _log.error("%s", problem)
        self._refused = refused

    def _check_job(self, job: JobConfig) -> None:
        if not (job.coordinator or self._config.coordinator):
            raise ConfigurationError('it has no "coordinator", and --coordinator is not set')
        make_directory(self._parent, job.name)

    def _report_unserved(self) -> None:
        """Warns of files in the spool that belong to no job, so that they are never uploaded."""
        found = {path.name for path in self._config.jobs_spool.iterdir()}
        if unserved := sorted(found - self._jobs.keys()):
            more = f" and {len(unserved) - 4} more" if len(unserved) > 4 else ""
            _log.warning(
                "%s in the spool %s belongs to no job that is served and stays as it is: serve the job "
                "again, and what was handed over is uploaded; or remove it",
                *(", ".join(unserved[:4]) + more, self._config.spool),
            )

    def _job_settings(self, job: JobConfig) -> SidecarConfig:
        config = self._config
        return dataclasses.replace(
            config,
            jobs=None,
            address=job_address(self._parent, job.name),
            coordinator=job.coordinator or config.coordinator,
            spool=config.jobs_spool / job.name,
            spool_budget=job.spool_budget or config.spool_budget,
            memory=job.memory or config.memory,
            allow=job.allow,
            allow_uid=(),
            health=None,
            metrics=http_address(self._parent, job.name),
        )

    def _launch_job(self, job: _Job) -> Any:
        operator = digest(self._token)
        config = dataclasses.replace(job.config, operator=operator)
        self._error_file(config.name).unlink(missing_ok=True)

        def run() -> int:
            self._close_reports()
            try:
                return self._run_job(self._job_settings(config), config)
            except PannierError as error:
                _log.error("job %s is not served: %s", config.name, error)
                self._error_file(config.name).write_text(str(error))
                return MISCONFIGURED

        return fork(run)

    def _launch_gateway(self) -> Any:
        self._close_reports()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._reports = ReportSender(ours)

        def run() -> int:
            self._close_reports()
            try:
                return gateway.run(self._config, self._parent, self._token, theirs)
            except PannierError as error:
                _log.error("%s", error)
                return MISCONFIGURED if isinstance(error, ConfigurationError) else GAVE_UP

        with theirs:
            return fork(run)

    def _report(self) -> None:
        """Sends the gateway the state of all jobs; to be called every second or so."""
        if self._reports is None:
            return
        problems = [
            *self._directory.problems.values(),
            *self._refused.values(),
            *(job.problem for job in self._jobs.values() if job.problem),
        ]
        jobs = {name: job.state() for name, job in self._jobs.items()}
        self._reports.send({"draining": self._draining, "problems": problems, "jobs": jobs})

    def _close_reports(self) -> None:
        if self._reports is not None:
            self._reports.close()
            self._reports = None

    def _error_file(self, job: str) -> Path:
        return self._parent / f".{job}.error"

    def _read_error(self, job: str) -> str:
        try:
            return self._error_file(job).read_text()
        except OSError:
            return ""


def _import_stores(job: JobConfig) -> None:
    """Imports the modules of the job's stores here, so that all processes share them."""
    for root in job.allow:
        # One that is missing or fails is reported when the store is opened.
        with suppress(Exception):
            importlib.import_module(_STORES[parse(root).scheme])
    # What is shared isn't copied by the first garbage collection of each child.
    gc.collect()
    gc.freeze()
