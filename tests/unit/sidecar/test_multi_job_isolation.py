"""What each job of a sidecar has for itself, and how jobs come, change and go while others are served."""

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pannier.storage import ObjectInfo, Store, open_store
from pannier.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
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
    ingested,
    inodes,
    node_host,
    raw_connection,
)
from support.actors.scripted import TIMEOUT_S, ScriptedCoordinator, attempt_of
from support.storage.unreliable_store import UnreliableStore

COMMITTED = save_pb2.SAVE_STATE_COMMITTED
MIB = 1 << 20
OTHERS = "job b has this"


class Held(UnreliableStore):
    """Uploads nothing before the gate is open."""

    def __init__(self, inner: Store, gate: threading.Event) -> None:
        super().__init__(inner)
        self._gate = gate

    async def upload(self, key: str, source: Any, *, progress: Any, retried: Any) -> ObjectInfo:
        await asyncio.to_thread(self._gate.wait, TIMEOUT_S)
        return await self.inner.upload(key, source, progress=progress, retried=retried)


@pytest.fixture
def host() -> Iterator[NodeHost]:
    with node_host() as made:
        yield made


@pytest.fixture
def two(host: NodeHost) -> NodeHost:
    """Serves jobs ``a`` and ``b``."""
    host.job("a")
    host.job("b")
    host.start()
    return host


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


def test_a_job_has_no_more_than_its_share(host: NodeHost) -> None:
    host.job("a", spool_budget=4 * MIB)
    host.job("b")
    host.start(spool_budget=16 * MIB)
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
        with pytest.raises(PannierError, match="16777216 for all jobs"):
            others.reserve(MIB)


def test_room_that_one_job_does_not_use_is_the_others(host: NodeHost) -> None:
    host.job("a")
    host.job("b")
    host.start(spool_budget=8 * MIB)
    a, b = host.trainer("a"), host.trainer("b")
    with TokenLeaseHolder(b, host.socket("b")) as others:
        with TokenLeaseHolder(a, host.socket("a")) as own:
            (leased,) = own.lease(8 * MIB - STAMP_BYTES)
            with pytest.raises(PannierError, match="is full"):
                others.reserve(8 * MIB - STAMP_BYTES)
            host.tick()
            assert a.events.get(timeout=TIMEOUT_S).HasField("room")
            own.release(leased)
        # What a has given back is kept for it, until another job needs the room.
        assert inodes(host.spool / "a")
        (got,) = others.lease(8 * MIB - STAMP_BYTES)
        assert os.pread(got.fd, got.capacity, 0) == bytes(got.capacity)
        assert not list((host.spool / "a").glob("*.data"))


# Jobs that come, change and go.


def test_a_job_is_added_while_others_save(two: NodeHost) -> None:
    a = two.trainer("a")
    stream = a.stream(a.header(a.context(two.id("a")), "0", 2 * MIB))
    two.coordinator.files[0] = {"0": 2 * MIB}
    a.plan(a.context(two.id("a")))
    with stream:
        stream.committed()
        stream.send(bytes(MIB), 0)
        two.job("c")
        two.tick()
        c = two.trainer("c")
        two.coordinator.files[0] = {"0": 100}
        context = ingested(two, c, b"c" * 100)
        two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        stream.send(bytes(MIB), MIB)
        while stream.committed() < 2 * MIB:
            pass
    assert set(two.node.sidecars) == {"a", "b", "c"}
    assert a.events.empty() or not a.events.get().HasField("welcome")


def test_a_token_is_replaced_while_the_job_saves(two: NodeHost) -> None:
    a = two.trainer("a")
    old, new = two.files.tokens["a"], "9" * 32
    context = a.context(two.id("a"))
    two.job("a", tokens=[new, old])
    two.tick()
    for token in (old, new):
        a.token = token
        a.call("Ping", sidecar_pb2.PingRequest(job="a", incarnation="inc1", client="c-a"))
    two.job("a", tokens=[new])
    two.tick()
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


def test_what_a_removed_job_has_handed_over_is_brought_to_storage(host: NodeHost) -> None:
    two = host
    gate = threading.Event()
    for job in "ab":
        two.job(job)
    two.start(store=lambda id_: Held(open_store(id_), gate))
    a, b = two.trainer("a"), two.trainer("b")
    begun = a.context(two.id("a", 2), 2)
    two.coordinator.files[0] = {"0": MIB}
    a.plan(begun)
    done = ingested(two, a, b"1" * MIB)
    two.files.remove("a")
    two.tick()
    with pytest.raises(UnauthenticatedError, match="no longer served"):
        a.plan(a.context(two.id("a", 3), 3))
    with pytest.raises(PermissionError):
        TokenLeaseHolder(a, two.socket("a")).__enter__()
    failed = two.coordinator.await_phase(begun, save_pb2.RANK_PHASE_FAILED)
    assert "removed from --jobs on node-0" in failed.failure.message
    two.tick()
    assert "a" in two.node.sidecars, "it has uploads under way"
    gate.set()
    two.coordinator.await_phase(done, save_pb2.RANK_PHASE_DURABLE)

    def ended() -> bool:
        two.tick()
        return "a" not in two.node.sidecars

    await_true(ended, "the job is let go of")
    assert {name for name in two.objects("a") if not name.startswith(".")}
    assert not os.path.exists(two.socket("a").removeprefix("unix://"))
    # The other one hasn't noticed.
    context = ingested(two, b, b"b" * 100)
    two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    # And it may come back, with a new token.
    two.job("a")
    two.tick()
    a = two.trainer("a")
    context = ingested(two, a, b"2" * 100, 4)
    two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)


def test_another_setting_restarts_the_jobs_sidecar_and_loses_nothing(two: NodeHost) -> None:
    a = two.trainer("a")
    own = ScriptedCoordinator(f"unix://{two.sockets}/own.sock")
    b_before = two.node.sidecars["b"]
    context = ingested(two, a, b"kept" * 1000)
    with own:
        two.job("a", tokens=[two.files.tokens["a"]], coordinator=own.address)
        two.tick()
        # Its journal recorded what was ingested, which is reported to its own coordinator.
        own.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
        assert two.node.sidecars["b"] is b_before
        assert a.connect().coordinator == own.address


def test_a_job_that_cannot_be_served_harms_no_other(
    two: NodeHost, caplog: pytest.LogCaptureFixture
) -> None:
    two.files.write("bad", "{")
    two.job("nowhere", coordinator="unix:///" + "x" * 120)
    # Something else lies where the job's directory should be.
    (Path(two.socket("c").removeprefix("unix://")).parent).write_text("")
    two.job("c")
    two.tick()
    two.tick()
    assert set(two.node.sidecars) == {"a", "b"}
    problems = "\n".join(two.node.problems)
    for name in ("bad.json", "nowhere", "in the way of the job's sockets"):
        assert name in problems
    assert sum("in the way" in each.getMessage() for each in caplog.records) == 1
    with grpc.insecure_channel(two.address) as channel:
        stub: Any = diagnosis_pb2_grpc.DiagnosisStub(channel)
        checks = stub.Diagnose(diagnosis_pb2.DiagnoseRequest()).checks
    (of_jobs,) = (each for each in checks if each.name == "jobs")
    assert of_jobs.result == diagnosis_pb2.CHECK_RESULT_FAILED
    assert "bad.json" in of_jobs.found
    assert "a, b" in of_jobs.hint
    assert {each.found.split(":")[0] for each in checks if each.name == "spool"} == {
        "job a",
        "job b",
    }
    (Path(two.socket("c").removeprefix("unix://")).parent).unlink()
    two.tick()
    two.trainer("c")


def test_a_new_life_takes_up_what_each_job_had(host: NodeHost) -> None:
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
                    for save in host.node.sidecars[job].saves.undecided()
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


def test_all_links_of_a_node_are_one_sidecars(two: NodeHost) -> None:
    """Else a coordinator of both jobs would take one for the other's successor."""
    await_true(
        lambda: sum(bool(each.sidecar) for each in list(two.coordinator.requests)) >= 2,
        "both are attached",
    )
    lives = {each.sidecar for each in two.coordinator.requests if each.sidecar}
    assert len(lives) == 1


def test_a_spool_that_is_removed_under_one_job_is_made_again(two: NodeHost) -> None:
    b_before = two.node.sidecars["b"]
    shutil.rmtree(two.spool / "a")
    two.tick()
    assert two.node.sidecars["b"] is b_before
    a = two.trainer("a")
    context = ingested(two, a, b"a" * 100)
    two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert not two.node.problems


def test_a_fault_in_one_job_is_reported_and_leaves_the_others(
    two: NodeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault() -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patched:
        patched.setattr(two.node.sidecars["a"], "tick", fault)
        for _ in range(3):
            two.tick()
    assert any("a fault of ours" in each for each in two.node.problems)
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    b = two.trainer("b")
    context = ingested(two, b, b"b" * 100)
    two.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    two.tick()
    assert not two.node.problems
