"""What each job of a host has for itself, beside the sidecars of others."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.v1 import (
    save_pb2,
    sidecar_pb2,
)
from pannier.wire import auth_token
from pannier.wire.errors import InvalidRequestError, PannierError, UnauthenticatedError
from pannier.wire.file_layout import STAMP_BYTES
from support.actors.hosts import await_true
from support.actors.lease_holder import Mapped, hand_over, staged
from support.actors.nodes import (
    NodeHost,
    TokenLeaseHolder,
    TokenTrainer,
    inodes,
    node_host,
    raw_connection,
)
from support.actors.scripted import attempt_of
from support.processes.stretch import BOUND_S

COMMITTED = save_pb2.SAVE_STATE_COMMITTED
MIB = 1 << 20
OTHERS = "job b has this"


def mapped(
    trainer: TokenTrainer,
    holder: TokenLeaseHolder,
    context: sidecar_pb2.SaveContext,
    content: bytes,
) -> None:
    """A save of one file that lies in the spool."""
    (leased,) = holder.lease(len(content))
    name = f"__{attempt_of(context.save)}_0_0.distcp"
    hand_over(trainer, context, [staged(leased, name, content)])


# Leases.


def test_descriptors_are_passed_to_who_shows_the_jobs_token(two: NodeHost) -> None:
    a, b = two.trainer("a"), two.trainer("b")
    for digest in (auth_token.digest(two.files.tokens["b"]), bytes(32), b"x" * 32):
        with pytest.raises(PermissionError):
            TokenLeaseHolder(a, two.socket("a"), digest).__enter__()
    with (
        TokenLeaseHolder(a, two.socket("a")) as own,
        TokenLeaseHolder(b, two.socket("b")) as others,
    ):
        lease = others.reserve(MIB)
        # The token of b's lease is none of a's sidecar.
        assert own.fetch(lease.token, 1) == []
        (fd,) = others.fetch(lease.token, 1)
        assert os.readlink(f"/proc/self/fd/{fd}").startswith(f"{two.spool}/b/")
        os.close(fd)


def test_another_job_gets_no_descriptor_by_a_leases_token(two: NodeHost) -> None:
    a = two.trainer("a")
    with TokenLeaseHolder(a, two.socket("a")) as own:
        lease = own.reserve(MIB)
        with raw_connection(two.socket("a")) as stranger:
            # Before a job's token these are but the beginning of a wrong one.
            stranger.sendall(lease.token + lease.token)
            said, fds, _, _ = socket.recv_fds(stranger, 1, 64)
            assert (said, fds) == (b"\0", [])
            assert stranger.recv(1) == b""
        (fd,) = own.fetch(lease.token, 1)
        os.close(fd)


def test_a_lease_of_one_job_is_no_other_jobs(two: NodeHost) -> None:
    a, b = two.trainer("a"), two.trainer("b")
    with (
        TokenLeaseHolder(a, two.socket("a")) as own,
        TokenLeaseHolder(b, two.socket("b")) as others,
    ):
        (leased,) = others.lease(MIB)
        staged(leased, "x", OTHERS.encode())
        context = a.context(two.id("a"))
        two.coordinator.files[0] = {"0": len(OTHERS)}
        a.plan(context)
        name = f"__{attempt_of(context.save)}_0_0.distcp"
        with pytest.raises(InvalidRequestError, match="is no spool file"):
            hand_over(a, context, [Mapped(name, len(OTHERS), leased.spool_file)])
        # Given back by the wrong one, it stays leased.
        a.call(
            "Release",
            sidecar_pb2.ReleaseRequest(
                job="a", incarnation="inc1", rank=0, client="c-b", spool_files=[leased.spool_file]
            ),
        )
        context = b.context(two.id("b"))
        b.plan(context)
        hand_over(b, context, [staged(leased, name, OTHERS.encode())])
        two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        assert own.leased == []


def test_files_that_are_used_again_stay_within_their_job(two: NodeHost) -> None:
    secret = b"only for a " * (MIB // 11)
    a = two.trainer("a")
    with TokenLeaseHolder(a, two.socket("a")) as holder:
        context = a.context(two.id("a"))
        two.coordinator.files[0] = {"0": len(secret)}
        a.plan(context)
        mapped(a, holder, context, secret)
        two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        two.coordinator.decide(context, COMMITTED)
        a.await_state(context, COMMITTED)
    used = inodes(two.spool / "a")
    b = two.trainer("b")
    with TokenLeaseHolder(b, two.socket("b")) as holder:
        for leased in holder.lease(*[len(secret)] * 4):
            assert leased.inode not in used
            assert os.pread(leased.fd, leased.capacity, 0) == bytes(leased.capacity)
            assert os.readlink(f"/proc/self/fd/{leased.fd}").startswith(f"{two.spool}/b/")


# Room.


def test_a_job_has_no_more_than_its_budget(host: NodeHost) -> None:
    host.job("a", spool_budget=4 * MIB)
    host.job("b")
    host.start()
    a, b = host.trainer("a"), host.trainer("b")
    with (
        TokenLeaseHolder(a, host.socket("a")) as own,
        TokenLeaseHolder(b, host.socket("b")) as others,
    ):
        own.lease(4 * MIB - STAMP_BYTES)
        with pytest.raises(PannierError, match=r"budget of 4194304|is full"):
            own.reserve(MIB)
        with pytest.raises(InvalidRequestError, match="too small"):
            own.reserve(5 * MIB)
        others.lease(12 * MIB - STAMP_BYTES)


# Tokens.


def test_a_token_is_replaced_while_the_job_saves(two: NodeHost) -> None:
    a = two.trainer("a")
    old, new = two.files.tokens["a"], "9" * 32
    context = a.context(two.id("a"))
    two.job("a", tokens=[new, old])
    two.tick("a")
    for token in (old, new):
        a.token = token
        a.call("Ping", sidecar_pb2.PingRequest(job="a", incarnation="inc1", client="c-a"))
    two.job("a", tokens=[new])
    two.tick("a")
    two.coordinator.files[0] = {"0": 3}
    a.plan(context)
    a.token = old
    with pytest.raises(UnauthenticatedError):
        a.write(context, "0", b"abc")
    a.token = new
    a.hand_over(context, a.write(context, "0", b"abc"))
    two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    two.coordinator.decide(context, COMMITTED)
    # Over the stream that was opened with the old one.
    a.await_state(context, COMMITTED)


def test_a_file_that_is_damaged_or_missing_leaves_the_tokens_as_they_are(two: NodeHost) -> None:
    a = two.trainer("a")
    two.files.write("a", "{")
    two.tick("a")
    a.call("Ping", sidecar_pb2.PingRequest(job="a", incarnation="inc1", client="c-a"))
    two.files.remove("a")
    two.tick("a")
    a.call("Ping", sidecar_pb2.PingRequest(job="a", incarnation="inc1", client="c-a"))


# Restarts.


def test_a_new_life_takes_up_what_each_job_had(
    host: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "TRAINER_RETURN_S", BOUND_S)
    host.job("a")
    host.job("b")
    host.start()
    begun = {}
    for job in "ab":
        trainer = host.trainer(job)
        context = trainer.context(host.id(job))
        host.coordinator.files[0] = {"0": 2 * MIB}
        trainer.plan(context)
        with trainer.stream(trainer.header(context, "0", 2 * MIB)) as stream:
            stream.committed()
            stream.send(job.encode() * MIB, 0)
            await_true(
                lambda job=job: any(  # type: ignore[misc]
                    file.held == MIB
                    for save in host.sidecars[job].saves.undecided()
                    for rank in save.ranks.values()
                    for file in rank.files.values()
                ),
                "a MiB is held",
            )
        begun[job] = context
    host.end_trainers()
    host.stop()
    assert (host.spool / "a" / "journal").exists()
    host.start()
    for job, context in begun.items():
        trainer = host.trainer(job)
        data = trainer.write(context, "0", job.encode() * 2 * MIB)
        trainer.hand_over(context, data)
        host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)


def test_the_coordinator_knows_which_job_a_sidecar_serves(two: NodeHost) -> None:
    """Else a coordinator of both jobs would take one for the other's successor."""

    def attached() -> dict[str, str]:
        return {each.job: each.sidecar for each in list(two.coordinator.requests) if each.sidecar}

    await_true(lambda: attached().keys() == {"a", "b"}, "both are attached")
    assert len(set(attached().values())) == 2


# Room.


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_trainer_that_makes_its_file_longer_fills_only_its_jobs_own_file_system() -> None:
    """The descriptor of a lease is writable: the sidecar's budget alone doesn't bind it."""
    with node_host() as host, own_file_system(host.spool / "a", 64 * MIB):
        host.job("a", spool_budget="32MiB")
        host.job("b", spool_budget="32MiB")
        host.start()
        a, b = host.trainer("a"), host.trainer("b")
        with (
            TokenLeaseHolder(a, host.socket("a")) as hostile,
            TokenLeaseHolder(b, host.socket("b")) as other,
        ):
            (leased,) = hostile.lease(MIB)
            with pytest.raises(OSError, match="No space left"):
                os.posix_fallocate(leased.fd, 0, 512 * MIB)
            for place in range(0, 512 * MIB, MIB):
                with suppress(OSError):
                    os.pwrite(leased.fd, bytes(MIB), place)
            used = sum(path.stat().st_blocks * 512 for path in (host.spool / "a").iterdir())
            assert used <= 64 * MIB
            (mine,) = other.lease(30 * MIB)
            context = b.context(host.id("b"))
            host.coordinator.files[0] = {"0": 30 * MIB}
            b.plan(context)
            name = f"__{attempt_of(context.save)}_0_0.distcp"
            hand_over(b, context, [staged(mine, name, bytes(30 * MIB))])
        host.end_trainers()
        host.stop()


@contextmanager
def own_file_system(place: Path, size: int) -> Iterator[None]:
    """A tmpfs of ``size`` bytes."""
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    options = f"size={size},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)
