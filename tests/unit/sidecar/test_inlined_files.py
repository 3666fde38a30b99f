"""Small files come with the hand-over of mapped ones: one call, and the same promises as for a stream."""

import os
from collections.abc import Iterator
from pathlib import Path

import crc32c
import pytest

from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors
from pannier.wire.limits import MAX_FILES, MAX_INLINED_BYTES
from support.actors.hosts import Host, running_host
from support.actors.lease_holder import LeaseHolder, staged
from support.actors.scripted import PLAN_ID, Trainer, attempt_of, data_file

DURABLE, FAILED = save_pb2.RANK_PHASE_DURABLE, save_pb2.RANK_PHASE_FAILED
MAPPED, SMALL = os.urandom(8192), os.urandom(3000)


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


def request_of(
    trainer: Trainer, holder: LeaseHolder, context: sidecar_pb2.SaveContext, small: bytes = SMALL
) -> sidecar_pb2.HandOverRequest:
    """One mapped file, and one that comes with the request."""
    (leased,) = holder.lease(len(MAPPED))
    mapped = staged(leased, trainer.header(context, "0", 0).name, MAPPED)
    objects = trainer.header(context, "objects", 0).name
    return sidecar_pb2.HandOverRequest(
        context=context,
        attempt=attempt_of(context.save),
        plan_id=PLAN_ID,
        files=[records_pb2.DataFile(name=mapped.name, size=mapped.size), data_file(objects, small)],
        mapped=[
            sidecar_pb2.MappedFile(
                name=mapped.name, spool_file=mapped.spool_file, stamp=mapped.stamp
            )
        ],
        inlined=[sidecar_pb2.InlinedFile(name=objects, data=small)],
    )


@pytest.mark.parametrize("small", [b"", b"x", SMALL, bytes(MAX_INLINED_BYTES)])
def test_one_call_hands_a_rank_over(host: Host, small: bytes) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        request = request_of(trainer, holder, context, small)
        trainer.call("HandOver", request)
        # Sent once more, as after an answer that was lost.
        trainer.call("HandOver", request)
        host.coordinator.await_phase(context, DURABLE)
    stored = [Path(host.id(), file.name).read_bytes() for file in request.files]
    assert stored == [MAPPED, small]


def test_a_restarted_sidecar_has_it_from_its_journal(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        request = request_of(trainer, holder, context)
        trainer.call("HandOver", request)
        trainer.die()
    host.end()
    before = len(host.coordinator.reports)
    host.start()
    host.coordinator.await_phase(context, DURABLE, after=before)
    assert Path(host.id(), request.files[1].name).read_bytes() == SMALL


def test_other_bytes_than_announced_fail_the_save(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        request = request_of(trainer, holder, context)
        request.files[1].crc32c = crc32c.crc32c(b"others")
        with pytest.raises(errors.IntegrityError, match="crc32c"):
            trainer.call("HandOver", request)
    report = host.coordinator.await_phase(context, FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_INTEGRITY


def test_what_is_malformed_is_refused_and_the_rank_may_go_on(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with LeaseHolder(trainer, host.address) as holder:
        request = request_of(trainer, holder, context)
        bads = [sidecar_pb2.HandOverRequest() for _ in range(4)]
        for each in bads:
            each.CopyFrom(request)
        bads[0].inlined[0].data = bytes(MAX_INLINED_BYTES + 1)
        bads[1].inlined[0].name = "../objects"
        del bads[2].files[1]
        bads[3].inlined.extend([request.inlined[0]] * MAX_FILES)
        says = ["bytes of inlined", "objects", "isn't handed over", "inlined files"]
        for bad, match in zip(bads, says, strict=True):
            with pytest.raises(errors.InvalidRequestError, match=match):
                trainer.call("HandOver", bad)
        trainer.call("HandOver", request)
        host.coordinator.await_phase(context, DURABLE)
