"""A real coordinator and real sidecars for tests, on unix sockets in a directory of their own."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.processes import fork_server
from support.processes.channels import OWN_CONNECTION
from support.processes.processes import SESSION, Process, python
from support.processes.stretch import BOUND_S

READY_S = BOUND_S
"""Deadline until a daemon says that it is serving."""


def short_directory() -> Path:
    """A new directory whose sockets' paths are short enough; named after this session."""
    return Path(tempfile.mkdtemp(prefix=f"pannier-{SESSION}-", dir="/tmp"))


def memory_directory() -> Path:
    """A new directory on tmpfs; named after this session."""
    return Path(tempfile.mkdtemp(prefix=f"pannier-{SESSION}-", dir="/dev/shm"))


def clean_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """This process's environment without what a launcher says to a rank, and without a terminal's width."""
    launcher = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "COLUMNS",
    }
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in launcher and not key.startswith("TORCHELASTIC_")
    }
    return {**kept, **extra}


def await_serving(
    address: str, *, timeout: float = READY_S, process: Process | None = None
) -> None:
    """Returns when the daemon at ``address`` is healthy.

    Raises AssertionError with the log when ``process`` ends or the deadline passes.
    """
    deadline = time.monotonic() + timeout
    problem = "no answer"
    with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if process is not None and process.returncode is not None:
                raise AssertionError(
                    f"{process.name} exited with {process.returncode}:\n{process.log()}"
                )
            try:
                # Short, so that a process that dies is noticed soon.
                answer = stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=0.5, wait_for_ready=True
                )
            except grpc.RpcError as error:
                problem = str(error)
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            problem = f"status {answer.status}"
            time.sleep(0.05)
    log = process.log() if process else ""
    raise AssertionError(f"{address} is not serving after {timeout} s ({problem}):\n{log}")


class Daemon:
    """One daemon that can be killed, stopped, paused and started again on the same state."""

    def __init__(
        self, name: str, address: str, arguments: Sequence[str], env: Mapping[str, str], logs: Path
    ) -> None:
        self.name = name
        self.address = address
        self.arguments = list(arguments)
        """Of ``python -m pannier.cli``; may be changed before :meth:`start`."""
        self.environment = dict(env)
        """May be changed before :meth:`start`."""
        self.forked = True
        """Whether it may come from a fork server; may be changed before :meth:`start`."""
        self.constants: dict[str, float] = {}
        """Of the product, by module and name, where it is to wait less; before :meth:`start`."""
        self.prefix: Sequence[str] = ()
        """Of the command: where it runs (:mod:`support.network.netns`)."""
        self._logs = logs
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, *, ready: bool = True) -> None:
        """Starts it; with ``ready`` returns when it is serving."""
        assert self._process is None or self._process.returncode is not None
        self.close()
        self._process = Process(
            self.name,
            [*self.prefix, *self._command()],
            environment=self.environment,
            log=self._logs / f"{self.name.replace(' ', '-')}.log",
            imported=self._imported(),
        )
        if ready:
            await_serving(self.address, process=self._process)

    def _command(self) -> list[str]:
        if not self.constants:
            return python("-m", "pannier.cli", *self.arguments)
        code = ""
        for name, value in self.constants.items():
            module, _, constant = name.rpartition(".")
            code += f"import {module} as module; module.{constant} = {value}; "
        code += "from pannier.cli.main import main; main()"
        return python("-c", code, *self.arguments)

    def _imported(self) -> tuple[str, ...]:
        if not self.forked:
            return ()
        return fork_server.modules_of(self.arguments[0])

    def stop(self, timeout: float = BOUND_S) -> int:
        """SIGTERM; returns the exit status."""
        return self.process.stop(timeout)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self.process.resume()

    def restart(self) -> None:
        """Starts it again after :meth:`kill` or :meth:`stop`; kills it first when it runs."""
        self.process.kill()
        self.start()

    def log(self) -> str:
        return self.process.log()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class Daemons:
    """``with Daemons(tmp_path) as d:`` runs one coordinator and ``sidecars`` sidecars.

    Args:
        directory: for logs; the sockets lie in a short directory of their own.
        sidecars: each is a host of its own, named ``node-0``, ``node-1``, ….
        allow: ``--allow`` of all daemons.
        environment: added to the daemons' environment (storage endpoints).
        sidecar_arguments, coordinator_arguments: more flags.
        spool: parent of the spools; default a directory on tmpfs that is removed
            at the end.
        start: False to start them by hand (``d.coordinator.start()``).
    """

    def __init__(
        self,
        directory: Path,
        *,
        sidecars: int = 1,
        allow: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        sidecar_arguments: Sequence[str] = (),
        coordinator_arguments: Sequence[str] = (),
        spool: Path | None = None,
        start: bool = True,
    ) -> None:
        self._stack = ExitStack()
        self._start = start
        self.directory = short_directory()
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        if spool is None:
            spool = memory_directory()
            self._stack.callback(shutil.rmtree, spool, ignore_errors=True)
        self.spool = spool
        logs = directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.environment = dict(environment)
        env = clean_environment(environment)
        allowed = [word for root in allow for word in ("--allow", root)]

        address = f"unix://{self.directory}/c.sock"
        self.coordinator = Daemon(
            "coordinator",
            address,
            ["coordinator", "--address", address, *allowed, *coordinator_arguments],
            env,
            logs,
        )
        self.sidecars: list[Daemon] = []
        for index in range(sidecars):
            own = f"unix://{self.directory}/s{index}.sock"
            arguments = ["sidecar", "--address", own, "--coordinator", address]
            arguments += ["--spool", str(spool / str(index)), "--host", f"node-{index}"]
            arguments += ["--grace", "5", *allowed, *sidecar_arguments]
            self.sidecars.append(Daemon(f"sidecar {index}", own, arguments, env, logs))

    @property
    def sidecar(self) -> Daemon:
        """The first one."""
        return self.sidecars[0]

    @property
    def sidecar_address(self) -> str:
        return self.sidecar.address

    @property
    def coordinator_address(self) -> str:
        return self.coordinator.address

    def env(self, sidecar: int = 0, **more: str) -> dict[str, str]:
        """What a trainer beside that sidecar has in its environment; to be added to its own."""
        return {
            "PANNIER_SIDECAR": self.sidecars[sidecar].address,
            "PANNIER_JOB": "test",
            **more,
        }

    def __enter__(self) -> "Daemons":
        try:
            for daemon in (self.coordinator, *self.sidecars):
                self._stack.callback(daemon.close)
                if self._start:
                    daemon.start(ready=False)
            if self._start:
                for daemon in (self.coordinator, *self.sidecars):
                    await_serving(daemon.address, process=daemon.process)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
