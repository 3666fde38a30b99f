"""Two hosts in this process that exchange replicas: one saves, the other holds; a coordinator of its own each."""

import asyncio
import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import crc32c
import grpc

from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import (
    coordinator_pb2,
    records_pb2,
    restore_pb2,
    restore_pb2_grpc,
    save_pb2,
    sidecar_pb2,
)
from pannier.wire import errors, object_names
from pannier.wire.version import WIRE_VERSION
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import PLAN_ID, TIMEOUT_S, Trainer, attempt_of, data_file
from support.processes.channels import OWN_CONNECTION
from support.processes.ranks import free_port
from support.storage.directories import files_below
from support.storage.unreliable_store import UnreliableStore


class NoUploads(UnreliableStore):
    """Begins no upload."""

    async def upload(self, key: str, source: Any, *, progress: Any, retried: Any) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError


def stalled(url: str) -> Store:
    """A store that takes no data file."""
    return NoUploads(open_store(url))


def without_ranks(context: sidecar_pb2.SaveContext) -> sidecar_pb2.SaveContext:
    """As all of a stream's reports have it: only the first one of a save lists the ranks."""
    found = sidecar_pb2.SaveContext()
    found.CopyFrom(context)
    del found.ranks[:]
    return found


def replica_start(
    checkpoint_id: str, *data: bytes, number: int = 1, timeout_s: float = 0.0
) -> restore_pb2.ReplicaStart:
    """The first message about rank 3 of node-9, with a file of each of these contents.

    Args:
        timeout_s: until its save's deadline; 0: it isn't known.
    """
    ranks = [2, 3]
    save = save_pb2.SaveId(
        job="job", incarnation="inc1", group=object_names.group_name(ranks), number=number
    )
    context = sidecar_pb2.SaveContext(
        save=save, checkpoint_id=checkpoint_id, ranks=ranks, world_size=4, rank=3, host="node-9"
    )
    attempt = attempt_of(save)
    files = [
        data_file(f"__{attempt}_3_{index}.distcp", content) for index, content in enumerate(data)
    ]
    receipt = records_pb2.Receipt(
        attempt=attempt, plan_id=PLAN_ID, rank=3, host="node-9", files=files
    )
    return restore_pb2.ReplicaStart(
        context=context,
        receipt=receipt,
        created_at=1000.0,
        save_timeout_s=timeout_s,
        host="node-9",
        wire_version=WIRE_VERSION,
    )


class ReplicaCall:
    """A call of ``Replicate``, message by message, as another host's sidecar makes it. Errors as that sees them."""

    def __init__(self, channel: grpc.Channel, start: restore_pb2.ReplicaStart) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._messages.put(restore_pb2.ReplicateRequest(start=start))
        messages = iter(self._messages.get, None)
        self._call = restore_pb2_grpc.PeerStub(channel).Replicate(messages, timeout=TIMEOUT_S)

    def send(self, file: int, offset: int, data: bytes, crc: int | None = None) -> None:
        chunk = restore_pb2.ReplicaChunk(
            file=file, offset=offset, data=data, crc32c=crc32c.crc32c(data) if crc is None else crc
        )
        self.send_raw(restore_pb2.ReplicateRequest(chunk=chunk))

    def send_raw(self, request: restore_pb2.ReplicateRequest) -> None:
        self._messages.put(request)

    def response(self) -> restore_pb2.ReplicateResponse:
        """The next one."""
        try:
            response: restore_pb2.ReplicateResponse = next(self._call)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, peer="holder") from error
        return response

    def await_complete(self) -> None:
        """Returns when the other side has all of it."""
        while not self.response().complete:
            pass

    def end(self) -> None:
        """Ends the stream from this side; returns when the other one has ended it."""
        self._messages.put(None)
        for _ in self._call:
            pass

    def cut(self) -> None:
        self._call.cancel()
        self._messages.put(None)


class ReplicaHosts:
    """See the module. ``origin`` is node-0, ``holder`` node-1."""

    def __init__(self, origin: Host, holder: Host) -> None:
        self.origin = origin
        self.holder = holder
        self._port = free_port()
        self._channels: list[grpc.Channel] = []

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
        address = f"127.0.0.1:{free_port()}"
        coordinator = self.origin.coordinator
        before = len(coordinator.requests)
        self.origin.start(store=store, peers=address, replicas=1, **settings)
        coordinator.await_request(
            lambda request: request.replicas.failure_domain == "node-0", after=before
        )

    def start_holder(self, **settings: Any) -> None:
        address = f"127.0.0.1:{self._port}"
        self.holder.start(**{"peers": address, "replicas": 1, **settings})

    def call(self, start: restore_pb2.ReplicaStart) -> ReplicaCall:
        """Sends a replica to the holder, over a connection of its own."""
        channel = grpc.insecure_channel(f"127.0.0.1:{self._port}", options=OWN_CONNECTION)
        self._channels.append(channel)
        return ReplicaCall(channel, start)

    def send(self, start: restore_pb2.ReplicaStart, *data: bytes) -> None:
        """Sends all of a replica to the holder, in a chunk for each file."""
        call = self.call(start)
        for index, content in enumerate(data):
            call.send(index, 0, content)
        call.await_complete()

    def restart_holder(self, **settings: Any) -> None:
        self.holder.end()
        self.start_holder(**settings)

    def tick(self) -> None:
        """The holder's periodic upkeep, and what it sets off."""
        self.holder.loop.run(self.holder.sidecar.replicas.tick())

    def close(self) -> None:
        for each in self._channels:
            each.close()

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

    def take_over(self, context: sidecar_pb2.SaveContext, rank: int | None = None) -> None:
        """Has the holder upload a rank; returns when it has read the order."""
        rank = context.rank if rank is None else rank
        request = coordinator_pb2.TakeOver(save=context.save, rank=rank)
        held = self.holder.sidecar.replicas.held
        with patch.object(held, "take_over", wraps=held.take_over) as read:
            self.holder.coordinator.respond(coordinator_pb2.AttachResponse(take_over=[request]))
            await_true(lambda: bool(read.called), "the holder has the order")

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
    with (
        running_host("node-0") as origin,
        running_host("node-1") as holder,
        closing(ReplicaHosts(origin, holder)) as hosts,
    ):
        yield hosts
