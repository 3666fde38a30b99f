"""Trainers that stage the next save into a mapped file too early: no save gets the other's content."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import DeadlineError, IntegrityError, InvalidRequestError
from pannier.wire.file_layout import STAMP_BYTES
from support.actors.hosts import Host, running_host
from support.actors.lease_holder import LeasedFile, LeaseHolder, Mapped, hand_over, staged
from support.actors.scripted import TIMEOUT_S, Trainer
from support.storage.unreliable_store import UnreliableStore

MIB = 1 << 20
FAILED, INGESTED = save_pb2.RANK_PHASE_FAILED, save_pb2.RANK_PHASE_INGESTED
DURABLE = save_pb2.RANK_PHASE_DURABLE


class Held(UnreliableStore):
    """Ends no upload before the gate is open."""

    def __init__(self, inner: Store, gate: threading.Event) -> None:
        super().__init__(inner)
        self._gate = gate

    async def upload(self, key: str, source: Any, *, progress: Any, retried: Any) -> ObjectInfo:
        info = await self.inner.upload(key, source, progress=progress, retried=retried)
        await asyncio.to_thread(self._gate.wait, TIMEOUT_S)
        return info


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


def name(trainer: Trainer, context: sidecar_pb2.SaveContext) -> str:
    return trainer.header(context, "0", 0).name


def write_new_stamp(leased: LeasedFile) -> None:
    """As a trainer does before it stages there again."""
    os.pwrite(leased.fd, os.urandom(STAMP_BYTES), leased.capacity)


def assert_failed(host: Host, context: sidecar_pb2.SaveContext, text: str) -> None:
    report = host.coordinator.await_phase(context, FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_INTEGRITY
    assert text in report.failure.message
    assert not report.HasField("receipt")
    assert not any(".receipt" in each for each in host.objects())


def test_a_hand_over_that_arrives_after_the_next_save_was_staged_fails_by_name(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context, following = trainer.context(host.id()), trainer.context(host.id(2), 2)
    with LeaseHolder(trainer, host.address) as holder:
        (leased,) = holder.lease(MIB)
        late = staged(leased, name(trainer, context), b"1" * MIB)
        data = b"2" * MIB
        file = staged(leased, name(trainer, following), data)
        with pytest.raises(IntegrityError, match="staged another save into the spool file"):
            hand_over(trainer, context, [late])
        assert_failed(host, context, "staged another save into the spool file")
        host.coordinator.decide(context, save_pb2.SAVE_STATE_ABORTED)
        trainer.await_state(context, save_pb2.SAVE_STATE_ABORTED)
        hand_over(trainer, following, [file])
        host.coordinator.await_phase(following, DURABLE)
    assert Path(host.id(2), name(trainer, following)).read_bytes() == data


@contextmanager
def ingested(
    host: Host, gate: threading.Event
) -> Iterator[tuple[sidecar_pb2.SaveContext, LeasedFile]]:
    """A save whose upload ends when the gate is open, and the file that its trainer still maps."""
    host.start(store=lambda url: Held(open_store(url), gate))
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        (leased,) = holder.lease(MIB)
        hand_over(trainer, context, [staged(leased, name(trainer, context), b"1" * MIB)])
        host.coordinator.await_phase(context, INGESTED)
        yield context, leased


def test_a_file_that_is_staged_into_during_its_upload_is_never_durable(host: Host) -> None:
    gate = threading.Event()
    with ingested(host, gate) as (context, leased):
        # The content is the same, so that no checksum differs.
        write_new_stamp(leased)
        gate.set()
        assert_failed(host, context, "staged another save into the spool file")


def test_a_restarted_sidecar_knows_the_stamps_of_what_it_goes_on_with(host: Host) -> None:
    gate = threading.Event()
    with ingested(host, gate) as (context, leased):
        fd = os.dup(leased.fd)
    try:
        host.end()
        os.pwrite(fd, os.urandom(STAMP_BYTES), leased.capacity)
    finally:
        os.close(fd)
    gate.set()
    host.start()
    assert_failed(host, context, "staged another save into the spool file")


@pytest.mark.parametrize("stamp", [b"", b"1" * (STAMP_BYTES - 1), b"1" * (STAMP_BYTES + 1)])
def test_a_mapped_file_without_a_stamp_is_refused(host: Host, stamp: bytes) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        (leased,) = holder.lease(MIB)
        with pytest.raises(InvalidRequestError, match="is mapped with the stamp"):
            hand_over(
                trainer, context, [Mapped(name(trainer, context), MIB, leased.spool_file, stamp)]
            )


def test_a_streamed_file_cannot_be_handed_over_as_mapped(host: Host) -> None:
    """What of it hasn't come would be whatever an earlier save left there."""
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with (
        LeaseHolder(trainer, host.address) as holder,
        trainer.stream(trainer.header(context, "0", MIB)) as stream,
    ):
        (leased,) = holder.lease(MIB)
        assert stream.committed() == 0
        with pytest.raises(InvalidRequestError, match="is mapped with the stamp"):
            hand_over(trainer, context, [staged(leased, name(trainer, context), bytes(MIB))])


@pytest.mark.parametrize("way", ["mapped", "streamed"])
def test_what_is_handed_over_after_its_deadline_is_refused_and_fails_by_name(
    host: Host, way: str
) -> None:
    host.start()
    trainer = host.trainer()
    host.coordinator.files[0] = {"0": MIB}
    context = trainer.context(host.id())
    trainer.plan(context)
    rank = host.sidecar.saves.find(context)
    assert rank is not None
    with LeaseHolder(trainer, host.address) as holder:
        (leased,) = holder.lease(MIB)
        file = staged(leased, name(trainer, context), bytes(MIB))
        streamed = [trainer.write(context, "0", bytes(MIB))] if way == "streamed" else []
        rank.deadlines.save = time.monotonic()
        mapped = partial(hand_over, trainer, context, [file])
        say = partial(trainer.hand_over, context, *streamed) if streamed else mapped
        with pytest.raises(DeadlineError, match="after the save's deadline"):
            say()
    report = host.coordinator.await_phase(context, FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_DEADLINE
    assert "rank 0 on node-0" in report.failure.message


def test_a_hand_over_that_failed_halfway_leaves_no_file_out_of_the_upload(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    names = [trainer.header(context, index, 0).name for index in "01"]
    with LeaseHolder(trainer, host.address) as holder:
        (leased,) = holder.lease(MIB)
        first = staged(leased, names[0], b"1" * MIB)
        with pytest.raises(InvalidRequestError, match="is no spool file that the rank has leased"):
            hand_over(trainer, context, [first, Mapped(names[1], MIB, "ended")])
        # Then all of it is streamed.
        files = [trainer.write(context, index, index.encode() * MIB) for index in "01"]
        trainer.hand_over(context, *files)
        host.coordinator.await_phase(context, DURABLE)
    for name_of, index in zip(names, "01", strict=True):
        assert Path(host.id(), name_of).read_bytes() == index.encode() * MIB
