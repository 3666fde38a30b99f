"""The sidecars of several jobs in this process, their coordinators played, and trainers with tokens."""

import json
import os
import secrets
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.job_config import read_job
from pannier.sidecar.multi_job.sockets import (
    job_address,
    jobs_directory,
    make_directory,
    make_parent,
)
from pannier.sidecar.server import Sidecar
from pannier.storage import Store
from pannier.v1 import sidecar_pb2, sidecar_pb2_grpc
from pannier.wire import auth_token
from support.actors.lease_holder import LeaseHolder
from support.actors.loops import LoopThread
from support.actors.scripted import TIMEOUT_S, ScriptedCoordinator, Trainer
from support.processes.daemons import memory_directory, short_directory
from support.storage.directories import files_below


class JobFiles:
    """What is mounted for ``--jobs``, replaced as Kubernetes does it: all at once, by a link."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir()
        self.tokens: dict[str, str] = {}
        """The newest of each job."""
        self._files: dict[str, str] = {}
        self._version = 0

    def add(self, job: str, **fields: Any) -> str:
        """Adds a job or changes it; returns its token, which is new unless ``fields`` has one."""
        fields.setdefault("tokens", [secrets.token_hex(16)])
        self.tokens[job] = fields["tokens"][0]
        return self.write(job, json.dumps(fields)) or self.tokens[job]

    def write(self, job: str, text: str) -> None:
        """Any text."""
        self._files[f"{job}.json"] = text
        self._replace()

    def remove(self, job: str) -> None:
        del self._files[f"{job}.json"]
        self._replace()

    def _replace(self) -> None:
        self._version += 1
        version = self.directory / f"..{self._version}"
        version.mkdir()
        for name, text in self._files.items():
            (version / name).write_text(text)
            # As a Secret's with defaultMode 0440 are.
            (version / name).chmod(0o440)
        new, data = self.directory / "..new", self.directory / "..data"
        new.symlink_to(version.name)
        former = data.resolve() if data.exists() else None
        new.replace(data)
        for name in self._files:
            link = self.directory / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        for link in self.directory.glob("*.json"):
            if not link.exists():
                link.unlink()
        if former is not None:
            shutil.rmtree(former)


class TokenTrainer(Trainer):
    """A trainer whose calls carry a token; None: none."""

    def __init__(self, address: str, *, token: str | None, **settings: Any) -> None:
        super().__init__(address, **settings)
        self.token = token
        self.channel = grpc.intercept_channel(self.channel, _Shows(self))
        self.stub = sidecar_pb2_grpc.SidecarStub(self.channel)


class TokenLeaseHolder(LeaseHolder):
    """Leases with the trainer's token, or shows ``digest`` if it is given."""

    def __init__(self, trainer: TokenTrainer, sidecar: str, digest: bytes | None = None) -> None:
        super().__init__(trainer, sidecar)
        self._digest = auth_token.digest(trainer.token or "") if digest is None else digest

    def __enter__(self) -> "TokenLeaseHolder":
        super().__enter__()
        self.connection.sendall(self._digest)
        answer = self.connection.recv(1)
        if answer != b"\1":
            self.close()
            raise PermissionError(answer)
        return self


class NodeHost:
    """One host: a sidecar for each job, without their supervisor, and a coordinator for all of them."""

    def __init__(self, sockets: Path, memory: Path) -> None:
        self.sockets = sockets
        self.address = f"unix://{sockets}/s.sock"
        self.spool = memory / "spool"
        self.root = memory / "root"
        self.files = JobFiles(memory / "jobs")
        self.coordinator = ScriptedCoordinator(f"unix://{sockets}/c.sock")
        self.loop = LoopThread()
        """The sidecars'."""
        self.sidecars: dict[str, Sidecar] = {}
        """Those that run, by job."""
        self._trainers: list[Trainer] = []

    def job(self, name: str, **fields: Any) -> str:
        """Writes the file of a job whose checkpoints go below its own root; returns its token."""
        fields.setdefault("allow", [str(self.root / name)])
        return self.files.add(name, **fields)

    def start(self, *, store: Callable[[str], Store] | None = None, **settings: Any) -> None:
        """Serves all jobs that have a file."""
        for path in sorted(self.files.directory.glob("*.json")):
            self.serve(path.stem, store=store, **settings)

    def serve(
        self, name: str, *, store: Callable[[str], Store] | None = None, **settings: Any
    ) -> Sidecar:
        """Serves one job, as its own process does."""
        job = read_job(self.files.directory / f"{name}.json")
        parent = jobs_directory(self.address)
        make_parent(parent)
        make_directory(parent, name)
        config = SidecarConfig(
            address=self.socket(name),
            coordinator=job.coordinator or self.coordinator.address,
            spool=self.spool / name,
            spool_budget=job.spool_budget,
            allow=job.allow,
            host="node-0",
            **settings,
        )
        self.sidecars[name] = sidecar = Sidecar(config, store, job=job)
        self.loop.run(sidecar.__aenter__())
        return sidecar

    def tick(self, name: str) -> None:
        """As the process of the job's sidecar does every second."""
        self.loop.run(self.sidecars[name].tick())

    def end_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.die()
        self._trainers.clear()

    def stop(self) -> None:
        """The sidecars end; their spools stay."""
        while self.sidecars:
            self.loop.run(self.sidecars.popitem()[1].__aexit__())

    def socket(self, job: str) -> str:
        """Address of a job's socket."""
        return job_address(jobs_directory(self.address), job)

    def trainer(
        self, job: str, *, at: str | None = None, token: str | None = "", connect: bool = True
    ) -> TokenTrainer:
        """One of ``job``, at the socket of job ``at``, with its own token unless another is given."""
        shown = self.files.tokens[job] if token == "" else token
        trainer = TokenTrainer(self.socket(at or job), token=shown, job=job, client=f"c-{job}")
        self._trainers.append(trainer)
        if connect:
            trainer.connect()
        return trainer

    def id(self, job: str, step: int = 1) -> str:
        return f"{self.root}/{job}/step-{step}"

    def objects(self, job: str, step: int = 1) -> set[str]:
        return files_below(Path(self.id(job, step)))


@contextmanager
def node_host() -> Iterator[NodeHost]:
    """One whose sidecar isn't started yet; all is ended and removed afterwards."""
    sockets, memory = short_directory(), memory_directory()
    try:
        host = NodeHost(sockets, memory)
        with host.coordinator:
            try:
                yield host
            finally:
                host.end_trainers()
                host.stop()
                host.loop.close()
    finally:
        shutil.rmtree(sockets)
        shutil.rmtree(memory)


def raw_connection(address: str) -> socket.socket:
    """To the socket that passes descriptors."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(address.removeprefix("unix://") + ".fd")
    return connection


def inodes(directory: Path) -> set[int]:
    """Of all files below."""
    return {
        os.stat(os.path.join(where, name)).st_ino
        for where, _, names in os.walk(directory)
        for name in names
    }


class _Details(
    namedtuple(
        "_Details",
        ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression"),
    ),
    grpc.ClientCallDetails,
):
    """What gRPC wants of an interceptor."""


class _Shows(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token that the trainer has now."""

    def __init__(self, trainer: TokenTrainer) -> None:
        self._trainer = trainer

    def _shown(self, continuation: Any, details: Any, request: Any) -> Any:
        token = self._trainer.token
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        details = _Details(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        return continuation(details, request)

    intercept_unary_unary = _shown
    intercept_unary_stream = _shown
    intercept_stream_stream = _shown


def ingested(
    host: NodeHost, trainer: TokenTrainer, content: bytes, step: int = 1
) -> sidecar_pb2.SaveContext:
    """A save of one streamed file, which is in the spool."""
    context = trainer.context(host.id(trainer.job, step), step)
    host.coordinator.files[0] = {"0": len(content)}
    trainer.plan(context)
    trainer.hand_over(context, trainer.write(context, "0", content))
    return context
