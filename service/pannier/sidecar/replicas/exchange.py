"""The exchange of replicas between hosts, as the rest of the sidecar sees it: what is sent, and what is held.

In: the settings, changes of saves, and the coordinator's messages. Out: fields of the sidecar's reports. On the event
loop.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.replicas.held_replicas import HeldReplicas
from pannier.sidecar.replicas.replica_sender import ReplicaSender
from pannier.sidecar.restore.peers import Peers
from pannier.sidecar.save_registry import SaveRegistry
from pannier.storage import check_allowed_in_time, check_shared
from pannier.v1 import coordinator_pb2, restore_pb2, save_pb2, sidecar_pb2
from pannier.wire import limits, object_names
from pannier.wire.errors import ConfigurationError, check_wire_version


class Replicas:
    """See the module."""

    def __init__(self, config: SidecarConfig, saves: SaveRegistry, held: HeldReplicas) -> None:
        self._config = config
        self.held = held
        self.sender = ReplicaSender(
            saves, Peers.of(config), host=config.host, bytes_per_s=config.replicas_limit
        )

    @property
    def size(self) -> int:
        """Bytes of other hosts' ranks here."""
        return self.held.size

    @property
    def reserved(self) -> int:
        """Bytes of their spool files."""
        return self.held.reserved

    @property
    def sent(self) -> int:
        """Bytes of own ranks that were sent to other hosts."""
        return self.sender.sent

    @property
    def refused(self) -> int:
        """Replicas that this host had no room for."""
        return self.held.refused

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends and takes replicas as long as the context lasts."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.held.close)
            if self._config.embedded:
                stack.push_async_callback(self.held.end_incomplete)
            await stack.enter_async_context(self.sender.running())
            yield

    async def tick(self) -> None:
        """Periodic upkeep."""
        await self.held.tick()
        await self.sender.tick()

    def idle_s(self, detached_s: float) -> float:
        """Seconds for which no replica has needed this sidecar.

        Args:
            detached_s: seconds without a coordinator that could report outcomes.
        """
        return detached_s if self.held.complete else float("inf")

    async def check_start(self, start: restore_pb2.ReplicaStart) -> None:
        """Raises PannierError unless this host may take a replica."""
        peer, host = start.host or "a peer", self._config.host
        check_wire_version(peer, start.wire_version, f"the sidecar of {host}")
        if not self._config.replicas:
            raise ConfigurationError(
                f"the sidecar of {host} takes no replica from {peer}: it runs without --replicas 1"
            )
        limits.check_replica(start)
        object_names.split_checkpoint_id(start.context.checkpoint_id)
        check_shared(start.context.checkpoint_id)
        await check_allowed_in_time(start.context.checkpoint_id, self._config.allow)

    # The stream to the coordinator.

    def offer(self) -> coordinator_pb2.ReplicaOffer | None:
        """The offer of this host to take part; None: it doesn't."""
        if not self._config.replicas:
            return None
        return coordinator_pb2.ReplicaOffer(failure_domain=self._config.failure_domain)

    def reports(self, known: set[str]) -> list[coordinator_pb2.HeldReplica]:
        """See :meth:`HeldReplicas.reports`."""
        return self.held.reports(known)

    def unknown(self, since: float) -> list[sidecar_pb2.PendingSave]:
        """See :meth:`HeldReplicas.unknown`."""
        return self.held.unknown(since)

    def apply_status(self, status: save_pb2.SaveStatus) -> None:
        """Takes a status update of the coordinator."""
        self.held.apply_status(status)

    def apply(self, response: coordinator_pb2.AttachResponse) -> None:
        """Takes a response of the coordinator: where replicas go, and which ones are to be uploaded."""
        if response.HasField("replica_holder") and self._config.replicas:
            self.sender.set_holder(response.replica_holder)
        self._take_over(response.take_over)

    def _take_over(self, requests: Iterable[coordinator_pb2.TakeOver]) -> None:
        for each in requests:
            self.held.take_over(each.save, each.rank)
