"""Claims about the spool's files that aren't true: each is refused by name, and harms nothing."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import BusyError, InvalidRequestError, PannierError
from pannier.wire.file_layout import STAMP_BYTES
from support.actors.lease_holder import (
    LeasedFile,
    LeaseHolder,
    Mapped,
    hand_over,
    spool_files,
    staged,
)
from support.actors.scripted import ScriptedCoordinator, Trainer, attempt_of
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemon, clean_environment, memory_directory, short_directory
from support.processes.stretch import BOUND_S

MIB = 1 << 20
BUDGET = 32 * MIB
DURABLE = save_pb2.RANK_PHASE_DURABLE
FAILED = save_pb2.RANK_PHASE_FAILED
COMMITTED = save_pb2.SAVE_STATE_COMMITTED
ABORTED = save_pb2.SAVE_STATE_ABORTED


class Host:
    """A real sidecar, whose coordinator says what the test wants."""

    def __init__(self, logs: Path, sockets: Path, memory: Path) -> None:
        self.coordinator = ScriptedCoordinator(f"unix://{sockets}/c.sock")
        self.root, self.spool = memory / "root", memory / "spool"
        self.address = f"unix://{sockets}/s.sock"
        self.sidecar = Daemon(
            "sidecar",
            self.address,
            [
                *("sidecar", "--address", self.address, "--host", "node-0"),
                *("--coordinator", self.coordinator.address, "--spool", str(self.spool)),
                *("--spool-budget", str(BUDGET), "--grace", "1"),
            ],
            clean_environment(),
            logs,
        )
        self._saves = 0

    def context(self, trainer: Trainer) -> sidecar_pb2.SaveContext:
        """Of one more save."""
        self._saves += 1
        return trainer.context(f"{self.root}/step-{self._saves}", self._saves)

    def save(self, trainer: Trainer, leased: LeasedFile, data: bytes) -> None:
        """One that is honest, and ends well."""
        context = self.context(trainer)
        file = staged(leased, name(context), data)
        hand_over(trainer, context, [file])
        self.end_well(trainer, context, data)

    def end_well(self, trainer: Trainer, context: sidecar_pb2.SaveContext, data: bytes) -> None:
        self.coordinator.await_phase(context, DURABLE)
        assert Path(context.checkpoint_id, name(context)).read_bytes() == data
        self.coordinator.decide(context, COMMITTED)
        trainer.await_state(context, COMMITTED)


def name(context: sidecar_pb2.SaveContext, middle: str = "0") -> str:
    return f"__{attempt_of(context.save)}_{context.rank}_{middle}.distcp"


@contextmanager
def running(logs: Path) -> Iterator[Host]:
    """A host, and that its sidecar lives at the end."""
    sockets, memory = short_directory(), memory_directory()
    made = Host(logs, sockets, memory)
    try:
        with made.coordinator:
            made.sidecar.start()
            yield made
            assert made.sidecar.process.returncode is None
    finally:
        made.sidecar.close()
        shutil.rmtree(sockets)
        shutil.rmtree(memory)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with running(tmp_path_factory.mktemp("host")) as made:
        yield made


@pytest.fixture
def trainer(host: Host) -> Iterator[Trainer]:
    # A job for each test: what it leaves behind doesn't help the others.
    with Trainer(host.address, job=uuid.uuid4().hex) as made:
        yield made


@pytest.fixture
def holder(host: Host, trainer: Trainer) -> Iterator[LeaseHolder]:
    with LeaseHolder(trainer, host.address) as made:
        yield made


def test_what_is_staged_into_the_spool_is_stored_and_the_file_is_used_again(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    (leased,) = holder.lease(4 * MIB)
    for _ in range(3):
        host.save(trainer, leased, os.urandom(4 * MIB - 7))


def test_a_file_of_another_rank_is_refused(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    (ours,) = holder.lease(MIB)
    data = os.urandom(MIB)
    os.pwrite(ours.fd, data, 0)
    for who in (
        {"job": "stranger"},
        {"job": trainer.job, "incarnation": "inc2"},
        {"job": trainer.job, "rank": 1, "ranks": (0, 1)},
    ):
        with Trainer(host.address, **who) as other:  # type: ignore[arg-type]
            context = host.context(other)
            with pytest.raises(
                InvalidRequestError, match=f"'{ours.spool_file}' is no spool file that"
            ):
                hand_over(other, context, [Mapped(name(context), MIB, ours.spool_file)])
            # Nor can it be given back by others.
            with LeaseHolder(other, host.address) as thief:
                thief.leased = [LeasedFile(ours.spool_file, MIB, os.dup(ours.fd))]
                thief.release(thief.leased[0])
    assert os.pread(ours.fd, MIB, 0) == data
    host.save(trainer, ours, data)


@pytest.mark.parametrize(
    "spool_file", ["", "00000001.data", "../journal", "/etc/passwd", "x" * 128, "\0", "ä-1-0"]
)
def test_a_name_that_was_never_leased_is_refused(
    host: Host, trainer: Trainer, holder: LeaseHolder, spool_file: str
) -> None:
    (leased,) = holder.lease(MIB)
    context = host.context(trainer)
    with pytest.raises(InvalidRequestError, match="is no spool file that the rank has leased"):
        hand_over(trainer, context, [Mapped(name(context), MIB, spool_file)])
    host.save(trainer, leased, os.urandom(MIB))


def test_a_file_that_holds_a_save_under_way_is_refused_a_second_time(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    """Twice in one hand-over, or in the next while the first save isn't decided."""
    leased, other = holder.lease(MIB, MIB)
    data = os.urandom(MIB)
    context = host.context(trainer)
    twice = [
        staged(leased, name(context), data),
        Mapped(name(context, "1"), MIB, leased.spool_file),
    ]
    with pytest.raises(InvalidRequestError, match=f"{leased.spool_file} already holds a data file"):
        hand_over(trainer, context, twice)
    # It says so better.
    right = [twice[0], staged(other, name(context, "1"), data)]
    hand_over(trainer, context, right)
    following = host.context(trainer)
    with pytest.raises(InvalidRequestError, match=f"{leased.spool_file} already holds a data file"):
        hand_over(trainer, following, [Mapped(name(following), MIB, leased.spool_file)])
    host.end_well(trainer, context, data)
    hand_over(trainer, following, [staged(leased, name(following), data)])
    host.end_well(trainer, following, data)


def test_more_bytes_than_were_leased_are_refused(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    (leased,) = holder.lease(MIB)
    for size in (leased.capacity + 1, 1 << 62):
        context = host.context(trainer)
        with pytest.raises(InvalidRequestError, match=rf"{size} bytes .* has {leased.capacity}"):
            hand_over(trainer, context, [Mapped(name(context), size, leased.spool_file)])
    host.save(trainer, leased, os.urandom(MIB))


def test_a_file_that_is_released_or_whose_holder_has_disconnected_is_refused(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    (leased,) = holder.lease(MIB)
    holder.release(leased)
    with LeaseHolder(trainer, host.address) as late:
        (gone,) = late.lease(MIB)
    for spool_file in (leased.spool_file, gone.spool_file):

        def refused(spool_file: str = spool_file) -> bool:
            context = host.context(trainer)
            try:
                hand_over(trainer, context, [Mapped(name(context), MIB, spool_file)])
            except InvalidRequestError as error:
                return "is no spool file that" in str(error)
            return False

        wait_until(refused)


def test_a_token_that_isnt_one_or_was_used_gets_nothing(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    answer = holder.reserve(MIB, MIB)
    with LeaseHolder(trainer, host.address) as other:
        for token in (bytes(16), b"\xff" * 16, answer.token[:15] + b"\0", os.urandom(16)):
            assert other.fetch(token, 1) == []
    fds = holder.fetch(answer.token, 2)
    assert len({os.fstat(fd).st_ino for fd in fds}) == 2
    for fd in fds:
        os.close(fd)
    assert holder.fetch(answer.token, 1) == []
    with LeaseHolder(trainer, host.address) as other:
        assert other.fetch(answer.token, 1) == []
    # In pieces, and with a half one at the end.
    more = holder.reserve(MIB)
    holder.connection.sendall(more.token[:5])
    (fd,) = holder.fetch(more.token[5:], 1)
    os.close(fd)
    holder.connection.sendall(b"half")


@pytest.mark.parametrize("sizes", [[], [0], [MIB] * ((1 << 14) + 1), [BUDGET + 1], [1 << 63]])
def test_a_reservation_that_makes_no_sense_is_refused(
    host: Host, trainer: Trainer, holder: LeaseHolder, sizes: list[int]
) -> None:
    before = spool_files(host.spool)
    with pytest.raises(InvalidRequestError):
        holder.reserve(*sizes)
    assert spool_files(host.spool) == before


def test_a_reservation_for_which_there_is_no_room_takes_none(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    """A part of it isn't kept, and idle files of others are asked for."""
    held = holder.lease(BUDGET // 2)
    with (
        Trainer(host.address, job=trainer.job, incarnation="inc2", client="c2") as other,
        LeaseHolder(other, host.address) as needy,
    ):
        with pytest.raises(BusyError, match="is full"):
            needy.reserve(BUDGET // 4, BUDGET // 4, BUDGET // 4)
        while not trainer.events.get(timeout=BOUND_S).HasField("room"):
            pass
        holder.release(*held)

        def reserved() -> bool:
            # The leases of the tests before us may be ending.
            with suppress(BusyError):
                return len(needy.lease(BUDGET // 4, BUDGET // 4, BUDGET // 4)) == 3
            return False

        wait_until(reserved)


def test_a_file_that_its_trainer_cuts_fails_that_save_and_is_leased_to_no_other(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    (leased,) = holder.lease(8 * MIB)
    inode = leased.inode
    context = host.context(trainer)
    file = staged(leased, name(context), os.urandom(8 * MIB))
    os.ftruncate(leased.fd, 3 * MIB)
    with pytest.raises(PannierError, match="the trainer has truncated it"):
        hand_over(trainer, context, [file])
    failed = host.coordinator.await_phase(context, FAILED)
    assert "the trainer has truncated it" in failed.failure.message
    host.coordinator.decide(context, ABORTED)
    trainer.await_state(context, ABORTED)
    holder.close()
    # The job's next files: a process that maps the cut one would get SIGBUS.
    with LeaseHolder(trainer, host.address) as other:
        for each in other.lease(8 * MIB, 8 * MIB):
            assert each.inode != inode
            assert os.fstat(each.fd).st_size == each.capacity + STAMP_BYTES
            host.save(trainer, each, os.urandom(8 * MIB))


def test_a_file_that_its_trainer_enlarges_takes_no_room_once_it_is_given_back(
    host: Host, trainer: Trainer, holder: LeaseHolder
) -> None:
    (leased,) = holder.lease(MIB)
    inode = leased.inode
    os.ftruncate(leased.fd, 64 * MIB)
    holder.release(leased)
    wait_until(lambda: inode not in spool_files(host.spool))


def test_what_an_earlier_sidecar_leased_is_refused_and_can_be_streamed(tmp_path: Path) -> None:
    data = os.urandom(MIB)
    with running(tmp_path) as host, Trainer(host.address) as trainer:
        context = host.context(trainer)
        with LeaseHolder(trainer, host.address) as holder:
            (leased,) = holder.lease(MIB)
            file = staged(leased, name(context), data)
            host.sidecar.kill()
            host.sidecar.start()
            trainer.connect()
            with pytest.raises(InvalidRequestError, match="leased since this sidecar started"):
                hand_over(trainer, context, [file])
            # Names of the new one's leases differ, and what we still hold belongs to no other process.
            with LeaseHolder(trainer, host.address) as later:
                (other,) = later.lease(MIB)
                assert other.spool_file != leased.spool_file
                assert other.inode != leased.inode
        trainer.hand_over(context, trainer.write(context, "0", data))
        host.end_well(trainer, context, data)
