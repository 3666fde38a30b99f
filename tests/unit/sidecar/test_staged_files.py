"""What a trainer has staged is handed over unread: its upload takes the checksums, in one pass."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import pytest

from pannier.sidecar.spool import boot_clock
from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.chunk_codec import BLOCK_BYTES, Checksums
from support.actors.hosts import Host, running_host
from support.actors.lease_holder import LeaseHolder, hand_over, staged
from support.actors.scripted import Trainer, attempt_of

SIZE = 2 * BLOCK_BYTES + 4097
INGESTED, DURABLE = save_pb2.RANK_PHASE_INGESTED, save_pb2.RANK_PHASE_DURABLE
FAILED = save_pb2.RANK_PHASE_FAILED


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


def stalled(url: str) -> Store:
    """A place that takes no data file, and never says so."""
    store = open_store(url)

    async def upload(*arguments: Any, **more: Any) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError

    store.upload = upload  # type: ignore[method-assign]
    return store


@contextmanager
def ingested(
    host: Host, data: bytes
) -> Iterator[tuple[Trainer, sidecar_pb2.SaveContext, list[Any]]]:
    """A rank with one mapped file, which is ingested."""
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        (leased,) = holder.lease(len(data))
        files = [staged(leased, trainer.header(context, "0", 0).name, data)]
        hand_over(trainer, context, files)
        host.coordinator.await_phase(context, INGESTED)
        yield trainer, context, files


def stored_receipt(host: Host, context: sidecar_pb2.SaveContext) -> records_pb2.Receipt:
    key = object_names.receipt(attempt_of(context.save), 0)
    return records_pb2.Receipt.FromString(Path(host.id(), key).read_bytes())


def check(host: Host, context: sidecar_pb2.SaveContext, data: bytes) -> None:
    """The receipt in storage, the reported one, and the object are of these bytes."""
    report = host.coordinator.await_phase(context, DURABLE)
    receipt = stored_receipt(host, context)
    assert report.receipt == receipt
    (file,) = receipt.files
    sums = Checksums().followed_by(memoryview(data))
    assert (file.size, file.crc32c) == (len(data), crc32c.crc32c(data))
    assert (file.block_bytes, file.block_crc32c) == sums.columns()
    assert Path(host.id(), file.name).read_bytes() == data


@pytest.mark.parametrize("size", [1, 4096, BLOCK_BYTES, SIZE])
def test_the_receipt_gets_the_checksums_of_what_was_uploaded(host: Host, size: int) -> None:
    host.start()
    data = os.urandom(size)
    with ingested(host, data) as (trainer, context, files):
        check(host, context, data)
        # Sent once more, as after an answer that was lost.
        hand_over(trainer, context, files)


def test_it_is_ingested_before_anything_is_read(host: Host) -> None:
    host.start(store=stalled)
    with ingested(host, os.urandom(SIZE)) as (_, context, _):
        rank = host.sidecar.saves.find(context)
        assert rank is not None
        (file,) = rank.files.values()
        assert file.complete
        assert not file.is_checked
        assert rank.receipt is not None
        assert not rank.receipt.files[0].HasField("crc32c")


def test_a_restarted_sidecar_takes_the_checksums_in_its_own_pass(host: Host) -> None:
    host.start(store=stalled)
    data = os.urandom(SIZE)
    with ingested(host, data) as (trainer, context, _):
        trainer.die()
    host.end()
    before = len(host.coordinator.reports)
    host.start()
    host.coordinator.await_phase(context, DURABLE, after=before)
    check(host, context, data)
    host.end()
    # And they are in the journal then.
    host.start()
    check(host, context, data)


def test_what_was_not_uploaded_before_the_host_was_started_again_fails_by_name(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start(store=stalled)
    with ingested(host, os.urandom(SIZE)) as (trainer, context, _):
        trainer.die()
    host.end()
    monkeypatch.setattr(boot_clock, "boot_id", lambda: "another boot")
    before = len(host.coordinator.reports)
    host.start()
    report = host.coordinator.await_phase(context, FAILED, after=before)
    assert report.failure.kind == save_pb2.FAILURE_KIND_INTEGRITY
    assert "was staged before this host was started again" in report.failure.message
