"""Sidecars and ranks that are played against one coordinator, with the messages that real ones send.

In: a number of ranks. Out: saves without data files. One thread, one event loop: of what
it measures only the coordinator's CPU time is independent of it.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

import grpc

from pannier.daemon.rank_phase import has_reached
from pannier.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    plan_pb2,
    records_pb2,
    save_pb2,
    sidecar_pb2,
)
from pannier.wire import object_names
from pannier.wire.plan_codec import encode_mappings
from pannier.wire.plan_columns import decode_column, encode_column
from pannier.wire.version import WIRE_VERSION
from support.plan_messages import FLOAT32, columns, make_items
from support.processes.channels import OWN_CONNECTION

RANKS_OF_ONE: Final = 8
"""Of each sidecar."""
_CONNECTIONS: Final = 16
_TIMEOUT_S: Final = 600.0
_HEAD, _TAIL = 704, 873
_ROWS, _COLUMNS = 16, 256


def local_plans(ranks: int, tensors: int, replicas: int) -> list[plan_pb2.LocalPlan]:
    """Tensors that are split evenly over groups of ``replicas`` ranks, and one object on each rank."""
    shards = ranks // replicas
    names = [f"model.layers.{number // 10}.block.{number % 10}.weight" for number in range(tensors)]
    count = tensors + 1
    body = _ROWS * _COLUMNS * 4
    items = make_items(
        [*names, "epoch"],
        [FLOAT32],
        fqn=range(count),
        kind=[plan_pb2.ITEM_KIND_SHARD] * tensors + [plan_pb2.ITEM_KIND_BYTE_IO],
        ndim=[2] * tensors + [0],
        property=[0] * count,
        size=[_ROWS * shards, _COLUMNS] * tensors,
        chunk_size=[_ROWS, _COLUMNS] * tensors,
    )
    options = plan_pb2.PlannerOptions(
        planner="torch.distributed.checkpoint.default_planner:DefaultSavePlanner",
        flatten_state_dict=True,
        flatten_sharded_tensors=True,
    )
    mappings = encode_mappings({name: name.split(".") for name in [*names, "epoch"]})
    template = plan_pb2.LocalPlan(
        items=items,
        mappings=mappings.SerializeToString(deterministic=True),
        options=options,
        **columns(
            head=[_HEAD] * tensors + [0], body=[body] * tensors + [0], tail=[_TAIL] * tensors + [0]
        ),
    )
    plans = []
    for rank in range(ranks):
        plan = plan_pb2.LocalPlan()
        plan.CopyFrom(template)
        shard = rank // replicas
        plan.items.hint = encode_column([shard + 1] * tensors + [0])
        plan.items.chunk_offset = encode_column([_ROWS * shard, 0] * tensors)
        plans.append(plan)
    return plans


@dataclass
class Played:
    """One rank: what it holds, and what it was given."""

    rank: int
    plan: bytes
    digest: str
    given: plan_pb2.FinalPlan = field(default_factory=plan_pb2.FinalPlan)


class Sidecar:
    """One host's: a stream, and what the coordinator last said on it."""

    def __init__(self, channel: grpc.aio.Channel, host: str, ranks: Sequence[Played]) -> None:
        self.host = host
        self.ranks = ranks
        self.plan = channel.unary_unary("/pannier.v1.Coordinator/Plan")
        """Takes and gives serialised messages."""
        self.status = save_pb2.SaveStatus()
        self._call = coordinator_pb2_grpc.CoordinatorStub(channel).Attach()  # type: ignore[no-untyped-call]
        self._reported: set[int] = set()
        """Numbers of saves."""
        self._updated = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        first = coordinator_pb2.AttachRequest(
            wire_version=WIRE_VERSION, host=self.host, sidecar=f"s-{self.host}"
        )
        await self._call.write(first)
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            for status in response.saves:
                self.status = status
            self._updated.set()

    async def send(self, reports: list[coordinator_pb2.RankReport]) -> None:
        trainers = [
            coordinator_pb2.TrainerStatus(
                job="job", incarnation="aa", rank=played.rank, seconds_since_seen=0.1
            )
            for played in self.ranks
        ]
        for report in reports:
            save = report.context.save.number
            if save in self._reported:
                del report.context.ranks[:]
            self._reported.add(save)
        request = coordinator_pb2.AttachRequest(reports=reports, trainers=trainers)
        await self._call.write(request)

    async def await_status(
        self, number: int, wanted: Callable[[save_pb2.SaveStatus], bool]
    ) -> None:
        while not (self.status.save.number == number and wanted(self.status)):
            if self.status.state == save_pb2.SAVE_STATE_ABORTED:
                raise RuntimeError(f"aborted: {self.status.failures[:1]}")
            self._updated.clear()
            await asyncio.wait_for(self._updated.wait(), _TIMEOUT_S)

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)


class Cast:
    """``async with Cast(...) as cast:`` all sidecars and ranks of one job are attached."""

    def __init__(self, address: str, root: Path, plans: Sequence[plan_pb2.LocalPlan]) -> None:
        self._address = address
        self._root = root
        self.ranks = []
        for rank, plan in enumerate(plans):
            data = plan.SerializeToString(deterministic=True)
            self.ranks.append(Played(rank, data, hashlib.sha256(data).hexdigest()))
        self._numbers = range(len(plans))
        self._group = object_names.group_name(self._numbers)
        self._channels: list[grpc.aio.Channel] = []
        self.sidecars: list[Sidecar] = []

    async def __aenter__(self) -> "Cast":
        hosts = range(0, len(self.ranks), RANKS_OF_ONE)
        for _ in range(min(_CONNECTIONS, len(hosts))):
            self._channels.append(grpc.aio.insecure_channel(self._address, options=OWN_CONNECTION))
        for number, first in enumerate(hosts):
            channel = self._channels[number % len(self._channels)]
            ranks = self.ranks[first : first + RANKS_OF_ONE]
            self.sidecars.append(Sidecar(channel, f"node-{number}", ranks))
        await asyncio.gather(*(sidecar.attach() for sidecar in self.sidecars))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(sidecar.close() for sidecar in self.sidecars))
        for channel in self._channels:
            await channel.close()

    def place(self, number: int) -> Path:
        """Where a save goes."""
        return self._root / f"step-{number}"

    def attempt(self, number: int) -> str:
        """Of the first incarnation."""
        return object_names.Attempt(1, number, self._group, "aa").name

    def context(self, sidecar: Sidecar, rank: int, number: int) -> sidecar_pb2.SaveContext:
        """As each message of the rank has it, but for reports after a stream's first of a save."""
        return sidecar_pb2.SaveContext(
            save=save_pb2.SaveId(job="job", incarnation="aa", group=self._group, number=number),
            checkpoint_id=str(self.place(number)),
            ranks=self._numbers,
            world_size=len(self.ranks),
            rank=rank,
            host=sidecar.host,
        )

    async def plan(self, number: int) -> float:
        """All ranks hand their plans in; seconds until all are answered."""
        requests = []
        for sidecar in self.sidecars:
            for played in sidecar.ranks:
                # Ranks and their hosts serialise their messages, each its own, at the same time.
                request = sidecar_pb2.PlanRequest(
                    context=self.context(sidecar, played.rank, number),
                    digest=played.digest,
                    timeout_s=_TIMEOUT_S,
                    save_timeout_s=_TIMEOUT_S,
                    wire_version=WIRE_VERSION,
                )
                # Field 2, `plan`, as it was serialised for the digest.
                request.plan.ParseFromString(played.plan)
                requests.append((sidecar, played, request.SerializeToString()))
        begin = time.monotonic()
        answers = await asyncio.gather(
            *(sidecar.plan(data, timeout=_TIMEOUT_S) for sidecar, _, data in requests)
        )
        took = time.monotonic() - begin
        for (_, played, _), answer in zip(requests, answers, strict=True):
            played.given = sidecar_pb2.PlanResponse.FromString(answer).plan
        return took

    async def claim(self, number: int) -> float:
        """All ranks are handed over by the plan that they have; seconds until it is confirmed everywhere."""
        to_send = []
        for sidecar in self.sidecars:
            reports = [
                coordinator_pb2.RankReport(
                    context=self.context(sidecar, played.rank, number),
                    attempt=self.attempt(number),
                    status=self._status(sidecar, played, save_pb2.RANK_PHASE_HANDED_OVER),
                    timeout_s=_TIMEOUT_S,
                    save_timeout_s=_TIMEOUT_S,
                    claim=sidecar_pb2.CachedPlanClaim(
                        part=played.given.part, digest=played.digest, timeout_s=_TIMEOUT_S
                    ),
                )
                for played in sidecar.ranks
            ]
            to_send.append((sidecar, reports))
        begin = time.monotonic()
        await asyncio.gather(*(sidecar.send(reports) for sidecar, reports in to_send))
        for sidecar in self.sidecars:
            await sidecar.await_status(number, lambda status: bool(status.plan.id))
        return time.monotonic() - begin

    def _status(
        self, sidecar: Sidecar, played: Played, phase: "save_pb2.RankPhase"
    ) -> save_pb2.RankStatus:
        size = sum(file.size for file in played.given.files)
        ingested = size if has_reached(phase, save_pb2.RANK_PHASE_INGESTED) else 0
        durable = size if has_reached(phase, save_pb2.RANK_PHASE_DURABLE) else 0
        return save_pb2.RankStatus(
            rank=played.rank,
            host=sidecar.host,
            phase=phase,
            bytes_staged=size,
            bytes_ingested=ingested,
            bytes_uploaded=durable,
            bytes_durable=durable,
            seconds_since_seen=0.1,
        )

    def receipt(self, sidecar: Sidecar, played: Played, number: int) -> records_pb2.Receipt:
        """What the rank has written, if it had."""
        given = played.given
        receipt = records_pb2.Receipt(
            attempt=self.attempt(number),
            plan_id=given.plan_id,
            rank=played.rank,
            host=sidecar.host,
        )
        prefix = object_names.data_prefix(receipt.attempt)
        old = object_names.data_prefix(given.attempt)
        for file in given.files:
            name = prefix + file.name.removeprefix(old)
            receipt.files.add(name=name, size=file.size or 4096, crc32c=played.rank)
        place = given.placement
        own = map(decode_column, (given.positions, place.file, place.length))
        for position, index, length in zip(*own, strict=True):
            if not length:
                name = prefix + given.files[index].name.removeprefix(old)
                receipt.varying.add(
                    position=position, file=name, offset=0, length=1000 + number % 10
                )
        return receipt

    async def send(
        self,
        number: int,
        phase: "save_pb2.RankPhase",
        *,
        sidecars: Sequence[Sidecar] | None = None,
    ) -> None:
        """All ranks of these sidecars, or of all, have come so far; receipts are in storage then."""
        to_send = []
        for sidecar in self.sidecars if sidecars is None else sidecars:
            reports = []
            for played in sidecar.ranks:
                report = coordinator_pb2.RankReport(
                    context=self.context(sidecar, played.rank, number),
                    attempt=self.attempt(number),
                    status=self._status(sidecar, played, phase),
                )
                if phase == save_pb2.RANK_PHASE_DURABLE:
                    report.receipt.CopyFrom(self.receipt(sidecar, played, number))
                    key = object_names.receipt(report.attempt, played.rank)
                    path = self.place(number) / key
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(report.receipt.SerializeToString())
                reports.append(report)
            to_send.append((sidecar, reports))
        await asyncio.gather(*(sidecar.send(reports) for sidecar, reports in to_send))
