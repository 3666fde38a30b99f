"""A coordinator on a real unix socket, and calls as ranks and sidecars make them, one by one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import crc32c
import grpc
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pannier.coordinator.commit.manifest import Manifest, agree
from pannier.coordinator.config import CoordinatorConfig
from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.global_plan import GlobalPlan
from pannier.coordinator.server import serving
from pannier.storage import ConflictError, open_store
from pannier.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    plan_pb2,
    records_pb2,
    save_pb2,
    sidecar_pb2,
    status_pb2,
    status_pb2_grpc,
)
from pannier.wire import errors, object_names, plan_codec
from pannier.wire.plan_columns import decode_column
from pannier.wire.version import WIRE_VERSION
from support.plan_messages import columns
from support.processes.channels import OWN_CONNECTION
from support.processes.stretch import BOUND_S

HEAD, TAIL = 704, 873


def shard(
    fqn: str,
    offset: Sequence[int],
    extent: Sequence[int],
    size: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    hint: int | None = None,
    kind: WriteItemType = WriteItemType.SHARD,
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, offset, hint), kind, tensor_data=data)


def tensor(fqn: str, *size: int, dtype: torch.dtype = torch.float32) -> WriteItem:
    return shard(fqn, [0] * len(size), size, size, dtype=dtype, kind=WriteItemType.TENSOR)


def thing(fqn: str) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def local_plan(
    items: Sequence[WriteItem],
    *,
    mappings: Mapping[str, Sequence[str | int]] | None = None,
    slots: Callable[[WriteItem], bool] = lambda item: item.tensor_data is not None,
    **options: Any,
) -> plan_pb2.LocalPlan:
    """A rank's plan; ``mappings`` None: without flattening."""
    lengths = []
    for item in items:
        body = 0
        if item.tensor_data is not None:
            body = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        lengths.append((HEAD, body, TAIL) if slots(item) else (0, 0, 0))
    head, body, tail = zip(*lengths, strict=True) if lengths else ((), (), ())
    message = plan_pb2.LocalPlan(
        items=plan_codec.encode_items(items),
        mappings=plan_codec.encode_mappings(mappings or {}).SerializeToString(deterministic=True),
        **columns(head=head, body=body, tail=tail),
    )
    message.options.CopyFrom(
        plan_pb2.PlannerOptions(
            planner="torch.distributed.checkpoint.default_planner:DefaultSavePlanner",
            flatten_state_dict=mappings is not None,
            flatten_sharded_tensors=True,
        )
    )
    for name, value in options.items():
        setattr(message.options, name, value)
    return message


def rank_plans(*local: plan_pb2.LocalPlan) -> list[RankPlan]:
    return [
        RankPlan(rank, f"node-{rank}", plan_codec.plan_digest(plan), plan)
        for rank, plan in enumerate(local)
    ]


def make_manifest(
    context: sidecar_pb2.SaveContext,
    attempt: object_names.Attempt,
    members: Sequence[RankPlan],
    plan: GlobalPlan,
) -> Manifest:
    """The manifest of a plan that was just made for these ranks."""
    hosts = {each.rank: each.host for each in members}
    return Manifest.of(agree(members, plan), context, attempt, hosts)


def context(
    rank: int,
    checkpoint_id: str,
    *,
    ranks: Sequence[int] = (0, 1),
    number: int = 1,
    world_size: int | None = None,
    incarnation: str = "aa",
) -> sidecar_pb2.SaveContext:
    return sidecar_pb2.SaveContext(
        save=save_pb2.SaveId(
            job="job", incarnation=incarnation, group=object_names.group_name(ranks), number=number
        ),
        checkpoint_id=checkpoint_id,
        ranks=ranks,
        world_size=max(ranks) + 1 if world_size is None else world_size,
        rank=rank,
        host=f"node-{rank}",
    )


def receipt_of(plan: plan_pb2.FinalPlan, rank: int) -> records_pb2.Receipt:
    """The receipt of a rank that has written its plan; data files are zeros of the planned size.

    Items without a planned place are 100 bytes long.
    """
    receipt = records_pb2.Receipt(
        attempt=plan.attempt, plan_id=plan.plan_id, rank=rank, host=f"node-{rank}"
    )
    objects = 0
    place = plan.placement
    own = map(decode_column, (plan.positions, place.file, place.length))
    for position, file, length in zip(*own, strict=True):
        if not length:
            receipt.varying.add(
                position=position, file=plan.files[file].name, offset=objects, length=100
            )
            objects += 100
    for file_ in plan.files:
        size = file_.size or objects
        receipt.files.add(name=file_.name, size=size, crc32c=crc32c.crc32c(bytes(size)))
    return receipt


def report(
    who: sidecar_pb2.SaveContext,
    attempt: str,
    phase: "save_pb2.RankPhase",
    *,
    receipt: records_pb2.Receipt | None = None,
    failure: save_pb2.Failure | None = None,
    **status: Any,
) -> coordinator_pb2.RankReport:
    return coordinator_pb2.RankReport(
        context=who,
        attempt=attempt,
        status=save_pb2.RankStatus(rank=who.rank, host=who.host, phase=phase, **status),
        receipt=receipt,
        failure=failure,
    )


def claim_report(
    who: sidecar_pb2.SaveContext,
    part: str,
    digest: str,
    attempt: str,
    *,
    phase: "save_pb2.RankPhase" = save_pb2.RANK_PHASE_HANDED_OVER,
    source: tuple[str, str] = ("", ""),
    timeout_s: float = BOUND_S,
    save_timeout_s: float = BOUND_S,
) -> coordinator_pb2.RankReport:
    """A report that the rank goes by its part of the plan of an earlier save.

    Args:
        source: checkpoint id and attempt of that save.
    """
    made = report(who, attempt, phase)
    made.claim.part, made.claim.digest = part, digest
    made.claim.checkpoint_id, made.claim.attempt = source
    made.timeout_s, made.save_timeout_s = timeout_s, save_timeout_s
    return made


async def write_receipts(reports: Iterable[coordinator_pb2.RankReport]) -> None:
    """Writes the receipts of these reports: a sidecar does so before it reports them."""
    for each in reports:
        if each.HasField("receipt"):
            store = open_store(each.context.checkpoint_id)
            key = object_names.receipt(each.attempt, each.context.rank)
            with suppress(ConflictError):
                await store.create(key, each.receipt.SerializeToString())
            await store.close()


class Sidecar:
    """An attached sidecar: sends reports, and keeps the last status of each save."""

    def __init__(self, stub: Any, host: str) -> None:
        self._call = stub.Attach()
        self._host = host
        self._statuses: dict[str, save_pb2.SaveStatus] = {}
        self.holder: str | None = None
        """The host that is to get replicas of this one's ranks, as the coordinator last named it."""
        self.orders: set[int] = set()
        """Ranks that it is to upload from their replicas."""
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        # gRPC takes one write of a stream at a time.
        self._writing = asyncio.Lock()

    async def open(self, *reports: coordinator_pb2.RankReport, **more: Any) -> None:
        await write_receipts(reports)
        await self._call.write(
            coordinator_pb2.AttachRequest(
                wire_version=WIRE_VERSION,
                host=self._host,
                sidecar=f"s-{self._host}",
                reports=reports,
                **more,
            )
        )
        self._reading = asyncio.create_task(self._read())

    async def send(self, *reports: coordinator_pb2.RankReport) -> None:
        await write_receipts(reports)
        async with self._writing:
            await self._call.write(coordinator_pb2.AttachRequest(reports=reports))

    async def send_unstored(self, *reports: coordinator_pb2.RankReport, **more: Any) -> None:
        """Sends reports whose receipts are not in storage."""
        request = coordinator_pb2.AttachRequest(reports=reports, **more)
        async with self._writing:
            await self._call.write(request)

    async def _read(self) -> None:
        async for response in self._call:
            for status in response.saves:
                self._statuses[status.id] = status
            if response.HasField("replica_holder"):
                self.holder = response.replica_holder.host
            self.orders |= {order.rank for order in response.take_over}
            self._changed.set()

    async def await_state(
        self, save: save_pb2.SaveId, *states: "save_pb2.SaveState", timeout: float = BOUND_S
    ) -> save_pb2.SaveStatus:
        """Waits until the save is in one of these states."""
        return await self.await_status(save, lambda status: status.state in states, timeout=timeout)

    async def await_status(
        self,
        save: save_pb2.SaveId,
        ready: Callable[[save_pb2.SaveStatus], bool],
        *,
        timeout: float = BOUND_S,
    ) -> save_pb2.SaveStatus:
        """The first status of the save for which ``ready`` is true."""
        key = object_names.save_text(save)

        async def wait() -> save_pb2.SaveStatus:
            while True:
                status = self._statuses.get(key)
                if status is not None and ready(status):
                    return status
                self._changed.clear()
                await self._changed.wait()

        return await asyncio.wait_for(wait(), timeout)

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)


class CoordinatorClient:
    """Makes calls as sidecars forward them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._sidecars: list[Sidecar] = []

    async def plan(
        self,
        who: sidecar_pb2.SaveContext,
        plan: plan_pb2.LocalPlan,
        *,
        timeout_s: float = BOUND_S,
        save_timeout_s: float = BOUND_S,
        storage_wait_s: float = 0.0,
        staged: plan_pb2.FinalPlan | None = None,
    ) -> plan_pb2.FinalPlan:
        """``staged``: what the rank has staged, and claims."""
        request = sidecar_pb2.PlanRequest(
            context=who,
            plan=plan,
            digest=plan_codec.plan_digest(plan),
            timeout_s=timeout_s,
            save_timeout_s=save_timeout_s,
            wire_version=WIRE_VERSION,
            storage_wait_s=storage_wait_s,
            staged_positions=b"" if staged is None else staged.positions,
        )
        answer: sidecar_pb2.PlanResponse = await self.call("Plan", request)
        return answer.plan

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, timeout=2 * BOUND_S)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error, peer="coordinator") from None

    async def fail(
        self,
        who: sidecar_pb2.SaveContext,
        kind: "save_pb2.FailureKind" = save_pb2.FAILURE_KIND_CLIENT,
        message: str = "boom",
    ) -> None:
        failure = save_pb2.Failure(rank=who.rank, host=who.host, kind=kind, message=message)
        await self.call("Fail", sidecar_pb2.FailRequest(context=who, failure=failure))

    async def attach(
        self,
        host: str = "node-0",
        reports: Iterable[coordinator_pb2.RankReport] = (),
        **more: Any,
    ) -> Sidecar:
        """A sidecar whose first request has these reports and ``more``."""
        sidecar = Sidecar(self.stub, host)
        self._sidecars.append(sidecar)
        await sidecar.open(*reports, **more)
        return sidecar

    async def await_status(
        self,
        place: str,
        ready: Callable[[save_pb2.SaveStatus], bool],
        timeout_s: float = BOUND_S,
    ) -> save_pb2.SaveStatus:
        """The first status of the newest save to ``place`` for which ``ready`` is true."""
        stub = status_pb2_grpc.StatusStub(self.channel)

        async def ask() -> save_pb2.SaveStatus:
            while True:
                with suppress(grpc.aio.AioRpcError):  # It has not begun yet.
                    answer = await stub.GetSave(status_pb2.GetSaveRequest(id=place))
                    if ready(answer.save):
                        return answer.save
                await asyncio.sleep(0.01)

        return await asyncio.wait_for(ask(), timeout_s)

    async def await_plans(self, place: str, *ranks: int) -> save_pb2.SaveStatus:
        """Returns when the plans of these ranks have arrived while those of others are missing."""
        return await self.await_status(
            place,
            lambda save: bool(save.waiting_on.ranks) and not {*ranks} & {*save.waiting_on.ranks},
        )

    async def close(self) -> None:
        for sidecar in self._sidecars:
            await sidecar.close()


@asynccontextmanager
async def connect_client(address: str) -> AsyncIterator[CoordinatorClient]:
    """A client of the coordinator at ``address``."""
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        calls = CoordinatorClient(channel)
        try:
            yield calls
        finally:
            await calls.close()


@asynccontextmanager
async def coordinator(directory: Path, **settings: Any) -> AsyncIterator[CoordinatorClient]:
    """A coordinator of this process and loop, on a unix socket below ``directory``."""
    address = f"unix://{directory}/c.sock"
    config = CoordinatorConfig(address=address, host="here", **settings)
    async with serving(config), connect_client(address) as calls:
        yield calls


def extra_receipt(
    attempt: str, rank: int, contents: Mapping[str, bytes]
) -> tuple[records_pb2.Receipt, bytes]:
    """A rank's receipt of these extra files alone, and the bytes of its data file."""
    name, data = object_names.extra_file(attempt, rank), b""
    receipt = records_pb2.Receipt(attempt=attempt, rank=rank, host=f"node-{rank}")
    for each, content in contents.items():
        receipt.extra_files.add(
            name=each,
            file=name if content else "",
            offset=len(data) if content else 0,
            size=len(content),
            crc32c=crc32c.crc32c(content),
        )
        data += content
    if data:
        receipt.files.add(name=name, size=len(data), crc32c=crc32c.crc32c(data))
    return receipt, data
