"""Clients that lie to a sidecar: their own save may end by it, no wrong byte is taken, others go on."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.sidecar.spool.spool import Spool
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import errors, object_names
from support.actors.hosts import Host, await_true, running_host
from support.actors.scripted import PLAN_ID, Trainer, attempt_of, data_file
from support.network.other_user import OTHER_UID, needs_root

MIB = 1 << 20
FAILED, DURABLE = save_pb2.RANK_PHASE_FAILED, save_pb2.RANK_PHASE_DURABLE


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        yield made


def goes_on(host: Host, trainer: Trainer, number: int = 2) -> None:
    """The trainer's next save goes through, byte by byte."""
    context = trainer.context(host.id(number), number)
    data = os.urandom(MIB)
    trainer.hand_over(context, trainer.write(context, "0", data))
    host.coordinator.await_phase(context, DURABLE)
    name = trainer.header(context, "0", 0).name
    assert (Path(host.id(number)) / name).read_bytes() == data


def test_bytes_written_in_anothers_name_are_never_taken_for_its_own(host: Host) -> None:
    host.start()
    victim, liar = host.trainer(0, (0, 1)), host.trainer(1, (0, 1), client="c2")
    own = victim.context(host.id())
    true, false = b"t" * MIB, b"f" * MIB
    liar.write(own, "0", false)
    with victim.stream(victim.header(own, "0", MIB)) as stream:
        # The stream says that all is there; only the hand-over shows the difference.
        assert stream.committed() == MIB
    with pytest.raises(errors.IntegrityError, match="the trainer's is") as caught:
        victim.hand_over(own, data_file(victim.header(own, "0", 0).name, true))
    assert "rank 0 on node-0" in str(caught.value)
    report = host.coordinator.await_phase(own, FAILED)
    assert report.failure.kind == save_pb2.FAILURE_KIND_INTEGRITY
    assert not report.HasField("receipt")
    host.coordinator.decide(own, save_pb2.SAVE_STATE_ABORTED, report.failure)
    for trainer in (victim, liar):
        goes_on(host, trainer)


def test_a_stream_that_another_takes_over_loses_no_byte(host: Host) -> None:
    host.start()
    victim, liar = host.trainer(0, (0, 1)), host.trainer(1, (0, 1), client="c2")
    own = victim.context(host.id())
    data = os.urandom(3 * MIB)
    with victim.stream(victim.header(own, "0", len(data))) as stream:
        assert stream.committed() == 0
        stream.send(data[:MIB], 0)
        file = await_file(host, own)
        await_true(lambda: file.held == MIB, "the first chunk is there")
        with liar.stream(liar.header(own, "0", len(data))) as thief:
            assert thief.committed() == MIB
            with pytest.raises(errors.PannierError):
                stream.committed()
    victim.hand_over(own, victim.write(own, "0", data))
    host.coordinator.await_phase(own, DURABLE)
    name = victim.header(own, "0", 0).name
    assert (Path(host.id()) / name).read_bytes() == data


def await_file(host: Host, context: sidecar_pb2.SaveContext):  # type: ignore[no-untyped-def]
    rank = host.sidecar.saves.find(context)
    assert rank is not None
    return next(iter(rank.files.values()))


@pytest.mark.parametrize("offset", [0, MIB // 2, MIB + 1, 1 << 40, (1 << 64) - 1])
def test_gaps_and_overlaps_end_their_own_save(host: Host, offset: int) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    with trainer.stream(trainer.header(context, "0", 4 * MIB)) as stream:
        assert stream.committed() == 0
        stream.send(b"x" * MIB, 0)
        stream.send(b"y" * MIB, offset)
        with pytest.raises(errors.InvalidRequestError, match=f"starts at byte {offset}, but 1048"):
            stream.committed()
    host.coordinator.await_phase(context, FAILED)
    goes_on(host, trainer)


def test_a_hand_over_without_bytes_or_with_anothers_is_refused(host: Host) -> None:
    host.start()
    host.coordinator.files = {0: {"0": MIB}, 1: {"0": MIB}}
    liar = host.trainer(0, (0, 1), job="liars")
    honest = host.trainer(0, (0, 1), client="c2")
    for trainer in (liar, honest):
        trainer.plan(trainer.context(host.id()))
    data = os.urandom(MIB)
    theirs = honest.write(honest.context(host.id()), "0", data)
    own = liar.context(host.id())
    for files, said in (
        ((), "was planned but isn't handed over"),
        # By name, plan and attempt it is what the honest one has written: of another job.
        ((theirs,), "never streamed"),
        ((theirs, theirs), "hands a file over twice"),
    ):
        with pytest.raises(errors.InvalidRequestError, match=said):
            liar.hand_over(own, *files)
    honest.hand_over(honest.context(host.id()), theirs)
    host.coordinator.await_phase(honest.context(host.id()), DURABLE)


def test_a_varying_item_lies_within_what_was_handed_over(host: Host) -> None:
    host.start()
    trainer = host.trainer()
    context = trainer.context(host.id())
    file = trainer.write(context, "objects", b"x" * 100)
    for item in (
        records_pb2.VaryingItem(file=file.name, offset=50, length=51),
        records_pb2.VaryingItem(file=file.name, offset=(1 << 64) - 1, length=(1 << 64) - 1),
        records_pb2.VaryingItem(file="/etc/passwd", offset=0, length=1),
    ):
        request = sidecar_pb2.HandOverRequest(
            context=context,
            attempt=attempt_of(context.save),
            plan_id=PLAN_ID,
            files=[file],
            varying=[item],
        )
        with pytest.raises(errors.InvalidRequestError, match="where nothing was handed over"):
            trainer.call("HandOver", request)
    trainer.hand_over(context, file)


@pytest.mark.parametrize(
    "attempt",
    [
        "i1-inc1-g5feceb66-s2",
        "i1-inc1-g00000000-s1",
        "i2-inc1-g5feceb66-s1",
        "i1-inc2-g5feceb66-s1",
        "i1-g5feceb66-s1",
        "../../i1-inc1-g5feceb66-s1",
        "i1-inc1-g5feceb66-s1/..",
        "i01-inc1-g5feceb66-s1",
        "i1-inc1-g5feceb66-s1\n",
        "",
        "x" * 10**6,
    ],
)
def test_another_attempt_than_its_own_is_refused(host: Host, attempt: str) -> None:
    host.start()
    host.coordinator.files = {0: {"0": 10}}
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.plan(context)
    header = trainer.header(context, "0", 10)
    header.attempt = attempt
    header.name = header.name.replace(attempt_of(context.save), attempt[:200])
    with trainer.stream(header) as stream, pytest.raises(errors.InvalidRequestError) as caught:
        stream.committed()
    assert len(str(caught.value)) < 1000
    request = sidecar_pb2.HandOverRequest(context=context, attempt=attempt, plan_id=PLAN_ID)
    with pytest.raises(errors.InvalidRequestError):
        trainer.call("HandOver", request)
    assert {path.name for path in host.root.rglob("*")} == set()
    # It was a slip of one call: the rank itself may go on.
    trainer.hand_over(context, trainer.write(context, "0", b"x" * 10))


def test_another_incarnation_is_another_save(host: Host) -> None:
    host.start()
    honest = host.trainer()
    own = honest.context(host.id())
    file = honest.write(own, "0", b"x" * MIB)
    late = Trainer(host.address, incarnation="inc0", client="c0")
    host._trainers.append(late)
    with pytest.raises(errors.InvalidRequestError, match="never streamed"):
        late.hand_over(late.context(host.id()), file)
    late.call(
        "Fail",
        sidecar_pb2.FailRequest(
            context=late.context(host.id()),
            failure=save_pb2.Failure(kind=save_pb2.FAILURE_KIND_CLIENT, message="x" * 10**6),
        ),
    )
    forwarded = host.coordinator.fails[-1]
    assert forwarded.context.save.incarnation == "inc0"
    assert len(forwarded.failure.message) < 20_000
    honest.hand_over(own, file)
    host.coordinator.await_phase(own, DURABLE)


def test_a_ping_or_goodbye_in_anothers_name_ends_nothing(host: Host) -> None:
    host.start()
    honest, liar = host.trainer(0, (0, 1)), host.trainer(1, (0, 1), client="c2")
    own = honest.context(host.id())
    file = honest.write(own, "0", b"x" * MIB)
    for client in ("c2", ""):
        liar.call(
            "Ping",
            sidecar_pb2.PingRequest(
                job="job", incarnation="inc1", rank=0, client=client, closing=True
            ),
        )
    liar.die()
    honest.hand_over(own, file)
    host.coordinator.await_phase(own, DURABLE)


# What lies in the spool is its own user's.


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277, 0o777])
def test_modes_do_not_depend_on_the_umask(host: Host, mask: int) -> None:
    spool = host.spool.parent / "other"
    before = os.umask(mask)
    try:
        made = Spool(spool)
        file = made.take("job", MIB)
        try:
            assert stat.S_IMODE(spool.stat().st_mode) == 0o700
            assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
            host.spool.parent.chmod(0o700)
            host.start()
        finally:
            made.give(file)
            made.close()
    finally:
        os.umask(before)
    path = Path(host.address.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trainer = host.trainer()
    context = trainer.context(host.id())
    trainer.hand_over(context, trainer.write(context, "0", b"x"))
    for path in (host.spool, *host.spool.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert object_names.data_prefix(attempt_of(context.save)) not in os.listdir(host.spool)


@needs_root
def test_a_spool_of_another_user_is_refused(host: Host) -> None:
    host.spool.mkdir(mode=0o700, parents=True)
    os.chown(host.spool, OTHER_UID, OTHER_UID)
    with pytest.raises(
        errors.ConfigurationError, match=f"belongs to user {OTHER_UID} with mode 700"
    ):
        host.start()
    del host.sidecar
