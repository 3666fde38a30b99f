"""Two hosts in this process that exchange replicas: one saves, the other holds; a coordinator of its own each."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import coordinator_pb2, restore_pb2, save_pb2, sidecar_pb2
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import Trainer
from support.storage.directories import files_below
from support.storage.unreliable_store import UnreliableStore


class NoUploads(UnreliableStore):
    """Begins no upload."""

    async def upload(self, key: str, source: Any, *, progress: Any, retried: Any) -> ObjectInfo:
        import asyncio

        await asyncio.Event().wait()
        raise AssertionError


def stalled(url: str) -> Store:
    """A store that takes no data file."""
    return NoUploads(open_store(url))


class ReplicaHosts:
    """See the module. ``origin`` is node-0, ``holder`` node-1."""

    def __init__(self, origin: Host, holder: Host) -> None:
        self.origin = origin
        self.holder = holder
        self._port = _free_port()

    @property
    def held(self) -> list[coordinator_pb2.HeldReplica]:
        """Replicas as the holder last reported them."""
        for request in reversed(list(self.holder.coordinator.requests)):
            if request.HasField("copies"):
                return list(request.copies.replicas)
        return []

    def start(self, *, store: Any = stalled, **settings: Any) -> None:
        """Starts both; the origin's store takes nothing unless another one is given."""
        self.start_holder()
        self.start_origin(store=store, **settings)

    def start_origin(self, *, store: Any = stalled, **settings: Any) -> None:
        address = f"127.0.0.1:{_free_port()}"
        self.origin.start(store=store, peers=address, replicas=1, **settings)
        attached = self.origin.coordinator.await_request
        attached(lambda request: request.replicas.failure_domain == "node-0")

    def start_holder(self, **settings: Any) -> None:
        address = f"127.0.0.1:{self._port}"
        self.holder.start(**{"peers": address, "replicas": 1, **settings})

    def assign(self, host: str = "node-1", port: int = 0) -> None:
        """Names the holder to the origin."""
        address = f"127.0.0.1:{port or self._port}"
        peer = restore_pb2.FetchHost(host=host, peer_address=address if host else "")
        self.origin.coordinator.respond(coordinator_pb2.AttachResponse(replica_holder=peer))

    def ingest(
        self, *data: bytes, number: int = 1, rank: int = 0
    ) -> tuple[Trainer, sidecar_pb2.SaveContext]:
        """A rank on the origin is ingested, with a file of each of these contents."""
        trainer = self.origin.trainer(rank, (0, 1))
        context = trainer.context(self.origin.id(number), number)
        files = [trainer.write(context, str(index), each) for index, each in enumerate(data)]
        trainer.hand_over(context, *files)
        return trainer, context

    def await_held(self, complete: int) -> None:
        """Returns when the holder reports so many complete replicas, and no others."""

        def reported() -> bool:
            held = self.held
            return [each.complete for each in held] == [True] * complete

        await_true(reported, f"{complete} complete replicas")

    def take_over(self, context: sidecar_pb2.SaveContext) -> None:
        """Has the holder upload a rank."""
        request = coordinator_pb2.TakeOver(save=context.save, rank=context.rank)
        self.holder.coordinator.respond(coordinator_pb2.AttachResponse(take_over=[request]))

    def decide(self, context: sidecar_pb2.SaveContext, state: "save_pb2.SaveState") -> None:
        """Both coordinators report the outcome."""
        self.origin.coordinator.decide(context, state)
        self.holder.coordinator.decide(context, state)

    def objects(self, context: sidecar_pb2.SaveContext) -> dict[str, bytes]:
        """What lies in storage, by key."""
        directory = Path(context.checkpoint_id)
        return {key: (directory / key).read_bytes() for key in files_below(directory)}


@contextmanager
def replica_hosts() -> Iterator[ReplicaHosts]:
    """Both hosts, not started yet."""
    with running_host("node-0") as origin, running_host("node-1") as holder:
        yield ReplicaHosts(origin, holder)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
