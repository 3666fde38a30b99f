"""One save of one rank, from staged bytes to its end, against a scripted sidecar."""

import ctypes
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from pannier.client.config import Settings
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.dcp.writer_save import WriterSave
from pannier.client.handle import Outcome, UnretrievedErrors
from pannier.client.identity import Identity
from pannier.client.staging.arena import Arena
from pannier.client.staging.arena_pool import ArenaPool
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.staging.in_flight import ArenaUse, InFlightSaves
from pannier.client.transport.save_errors import aborted, fail_request
from pannier.client.transport.save_task import SaveTask
from pannier.client.transport.saves_in_progress import SavesInProgress
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts, tracing
from pannier.common.deadline import Deadline
from pannier.v1 import records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    BusyError,
    DeadlineError,
    InDoubtError,
    IntegrityError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    UnavailableError,
)
from support.actors.scripted_sidecar import ScriptedSidecar, wait_until
from support.processes.cli import run_python
from support.processes.daemons import clean_environment
from support.processes.stretch import BOUND_S

ATTEMPT = "i1-a1-g1-s1"
PREFIX = object_names.data_prefix(ATTEMPT)
CONTEXT = sidecar_pb2.SaveContext(
    save=save_pb2.SaveId(job="job", incarnation="abc", group="g1", number=1),
    checkpoint_id="/x/y",
    ranks=[0, 1],
    world_size=2,
    rank=0,
    host="node-0",
)


class File:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._buffer = ctypes.create_string_buffer(b"x" * size, size)
        self.address = ctypes.addressof(self._buffer)
        self.keepalive = self._buffer


@dataclass
class Staged:
    files: list[File]
    varying: list[records_pb2.VaryingItem] = field(default_factory=list)
    arena: Arena = field(default_factory=lambda: ArenaPool(1).acquire([]))
    deferred: DeferredCopies | None = None
    copy_description: str = ""
    extra: list[records_pb2.ExtraFile] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@pytest.fixture
def session(sidecar: ScriptedSidecar) -> Iterator[SidecarClient]:
    who = Identity(job="job", incarnation="abc", rank=0, world_size=2, host="h", client="c1")
    connected = SidecarClient.connect(Settings(sidecar=sidecar.address), who)
    yield connected
    connected.close()


def begin(session: SidecarClient, *, on_busy: str = "wait", timeout_s: float = 60) -> SaveTask:
    saving = SaveTask(session, CONTEXT, on_busy=on_busy, deadline=Deadline(timeout_s))
    saving.planned(ATTEMPT, "p1")
    saving.staged(Staged([File(f"f{index}", 3 << 20) for index in range(5)]))
    return saving


def carry(saving: SaveTask) -> list[str]:
    """Runs it to the end of this rank's part; what was let go."""
    slots = InFlightSaves(1)
    carrier = threading.Thread(target=saving.send, args=(slots.admit("raise", 0),))
    carrier.start()
    carrier.join(BOUND_S)
    assert not carrier.is_alive()
    return ["arena"] * slots.idle


def test_a_committed_save_returns_its_description(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    saving = begin(session)
    assert saving.handle.status().state == "STAGING"
    assert carry(saving) == ["arena"]
    result = saving.handle.result(BOUND_S)
    assert (result.checkpoint_id, result.bytes) == ("/x/y", 5 * (3 << 20))
    assert set(result.seconds) == {"plan", "stage", "ingest", "commit"}
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    assert [file.name for file in request.files] == [f"{PREFIX}f{index}" for index in range(5)]
    assert (request.attempt, request.plan_id) == (ATTEMPT, "p1")
    assert saving.handle.status().bytes_ingested == 5 * (3 << 20)


@pytest.mark.parametrize("committed", [True, False])
def test_who_waits_learns_the_outcome_though_its_log_line_fails(
    session: SidecarClient,
    sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("a filter of the program's log")

    monkeypatch.setattr(tracing, "export_rank", fail)
    if not committed:
        sidecar.commit = False
        sidecar.on["HandOver"] = lambda request: sidecar.abort(
            request.context, save_pb2.Failure(rank=1, message="disk full")
        )
    ended: list[object] = []
    saving = SaveTask(
        *(session, CONTEXT),
        on_busy="wait",
        deadline=Deadline(60),
        on_ended=ended.append,
        on_committed=fail,
    )
    saving.planned(ATTEMPT, "p1")
    saving.staged(Staged([]))
    carry(saving)
    if committed:
        assert saving.handle.result(BOUND_S).bytes == 0
    else:
        with pytest.raises(SaveAbortedError, match="disk full"):
            saving.handle.result(BOUND_S)
    wait_until(lambda: len(ended) == 1)


def test_a_rank_without_files_hands_over_too(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    saving = SaveTask(session, CONTEXT, on_busy="wait", deadline=Deadline(60))
    saving.planned(ATTEMPT, "p1")
    saving.staged(Staged([]))
    carry(saving)
    assert saving.handle.result(BOUND_S).bytes == 0
    assert len(sidecar.asked(sidecar_pb2.HandOverRequest)) == 1


def test_a_sidecar_that_has_forgotten_everything_gets_it_again(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    asked: list[int] = []

    def forget(_: Any) -> None:
        asked.append(len(sidecar.files))
        if len(asked) == 1:
            sidecar.files.clear()
            raise InvalidRequestError("f0 was never streamed since the sidecar was started")

    sidecar.on["HandOver"] = forget
    saving = begin(session)
    assert carry(saving) == ["arena"]
    assert saving.handle.result(BOUND_S).bytes == 5 * (3 << 20)
    assert asked == [5, 5]
    assert all(spool.offsets == [0] for spool in sidecar.files.values())


def test_a_hand_over_that_is_refused_though_all_is_held_fails(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    def refuse(_: Any) -> None:
        raise InvalidRequestError("handed over under another plan")

    sidecar.on["HandOver"] = refuse
    saving = begin(session)
    carry(saving)
    with pytest.raises(SaveAbortedError, match="under another plan"):
        saving.handle.result(BOUND_S)
    assert all(spool.offsets == [0, spool.size] for spool in sidecar.files.values())


def test_at_most_two_files_are_on_their_way(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    running: set[str] = set()
    most: list[int] = []

    def note(header: Any) -> None:
        held = {name for name, spool in sidecar.files.items() if len(spool.data) < spool.size}
        running.update({header.name})
        most.append(len(held | {header.name}))

    sidecar.on["Write"] = note
    saving = begin(session)
    carry(saving)
    saving.handle.result(BOUND_S)
    assert running == {f"{PREFIX}f{index}" for index in range(5)}
    assert max(most) <= 2


def test_an_abort_stops_the_streams_and_fails_the_handle(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.stall_at = [0, 0]
    saving = begin(session)
    failure = save_pb2.Failure(
        rank=1, host="node-1", kind=save_pb2.FAILURE_KIND_LOST, message="the process is gone"
    )
    threading.Timer(0.2, lambda: sidecar.abort(CONTEXT, failure)).start()
    assert carry(saving) == ["arena"]
    with pytest.raises(
        SaveAbortedError, match=r"rank 1 \(host node-1\): the process is gone"
    ) as raised:
        saving.handle.result(BOUND_S)
    assert raised.value.failures[1].kind == "LOST"
    assert not sidecar.asked(sidecar_pb2.FailRequest)


def test_a_file_that_cannot_be_sent_ends_the_save_on_all_ranks(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    def refuse(_: Any) -> None:
        raise IntegrityError("bytes changed")

    sidecar.on["Write"] = refuse
    saving = begin(session)
    carry(saving)
    with pytest.raises(SaveAbortedError, match="bytes changed"):
        saving.handle.result(BOUND_S)
    failures = {request.failure.kind for request in sidecar.asked(sidecar_pb2.FailRequest)}
    assert failures == {save_pb2.FAILURE_KIND_INTEGRITY}


def test_what_may_be_ingested_is_in_doubt_without_a_decision(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "ABORT_S", 0.2)
    monkeypatch.setattr(sidecar, "abort", lambda *_: None)

    def refuse(_: Any) -> None:
        raise IntegrityError("bytes changed")

    sidecar.on["HandOver"] = refuse
    saving = begin(session)
    carry(saving)
    with pytest.raises(InDoubtError, match="bytes changed") as raised:
        saving.handle.result(BOUND_S)
    # Whether the others have given up, too, is not known here.
    assert "may still be committed" in str(raised.value)
    assert "don't use or delete this checkpoint id" in str(raised.value)
    for way in ("`pannier status job/abc/g1/1`", "`pannier ls /x`", "client.latest('/x')"):
        assert way in str(raised.value)


def test_what_was_not_handed_over_is_aborted_without_a_decision(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CAUSES_S", 0.2)
    monkeypatch.setattr(sidecar, "abort", lambda *_: None)

    def refuse(_: Any) -> None:
        raise IntegrityError("bytes changed")

    sidecar.on["Write"] = refuse
    saving = begin(session)
    carry(saving)
    with pytest.raises(SaveAbortedError, match=r"can't be committed.*bytes changed") as raised:
        saving.handle.result(BOUND_S)
    assert raised.value.failures[0].kind == "INTEGRITY"
    assert not sidecar.asked(sidecar_pb2.HandOverRequest)


def test_a_full_spool_is_waited_for(session: SidecarClient, sidecar: ScriptedSidecar) -> None:
    times: list[float] = []

    def full(_: Any) -> None:
        times.append(time.monotonic())
        if len(times) < 3:
            raise BusyError("spool full")

    sidecar.on["Write"] = full
    saving = begin(session)
    carry(saving)
    assert saving.handle.result(BOUND_S).total_bytes == 5 * (3 << 20)


def test_a_full_spool_shows_in_the_status_while_it_is_waited_for(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    room = threading.Event()

    def full(_: Any) -> None:
        if not room.is_set():
            raise BusyError("the spool /s is full: 5 bytes needed, 3 free")

    sidecar.on["Write"] = full
    sidecar.commit = False
    saving = begin(session)
    carrier = threading.Thread(target=saving.send, args=(InFlightSaves(1).admit("raise", 0),))
    carrier.start()
    text = "waiting for room (the spool /s is full: 5 bytes needed, 3 free)"
    wait_until(lambda: text in str(saving.handle.status()))
    # A status update of the save doesn't hide it.
    update = save_pb2.SaveStatus(save=CONTEXT.save, state=save_pb2.SAVE_STATE_STAGING)
    update.waiting_on.text = "rank 0"
    saving.status._on_status(update)
    assert text in str(saving.handle.status())
    room.set()
    carrier.join(BOUND_S)
    assert saving.handle.status().waiting_on == "rank 0"
    saving.status.forget()


def test_a_save_that_is_aborted_while_the_spool_is_full_says_so(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    def full(_: Any) -> None:
        raise BusyError("the spool /s is full")

    sidecar.on["Write"] = full
    saving = begin(session)
    carrier = threading.Thread(target=saving.send, args=(InFlightSaves(1).admit("raise", 0),))
    carrier.start()
    wait_until(lambda: "the spool /s is full" in str(saving.handle.status()))
    sidecar.abort(CONTEXT)
    with pytest.raises(SaveAbortedError, match=r"was waiting for room \(the spool /s is full\)"):
        saving.handle.result(BOUND_S)
    carrier.join(BOUND_S)


def test_a_spool_that_stays_full_is_the_reason_at_the_deadline(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The deadline is near enough from the beginning, and far enough for a reason to be known.
    monkeypatch.setattr(timeouts, "BUSY_AGAIN_S", BOUND_S / 2)

    def full(_: Any) -> None:
        raise BusyError("the spool /s is full")

    sidecar.on["Write"] = full
    saving = begin(session, timeout_s=BOUND_S)
    carry(saving)
    with pytest.raises(SaveAbortedError, match="the spool /s is full"):
        saving.handle.result(BOUND_S)
    (failure,) = [request.failure for request in sidecar.asked(sidecar_pb2.FailRequest)]
    assert failure.kind == save_pb2.FAILURE_KIND_SPOOL


def test_a_full_spool_does_not_keep_a_process_from_ending(sidecar: ScriptedSidecar) -> None:
    def full(_: Any) -> None:
        raise BusyError("the spool /s is full")

    sidecar.on["Write"] = full
    trainer = (
        "import time, torch, pannier.client\n"
        "from pannier.common import timeouts\n"
        "timeouts.EXIT_S = 1.0\n"
        "save = pannier.client.async_save({'w': torch.ones(9)}, checkpoint_id='/x/y')\n"
        "while 'waiting for room' not in str(save.status()): time.sleep(0.01)\n"
    )
    environment = {"PANNIER_SIDECAR": sidecar.address, "PANNIER_JOB": "ending"}
    ended = run_python(trainer, env=clean_environment(environment))
    assert re.search(r"save ending/\S+ to /x/y is given up, .*: the spool /s is full", ended.err)
    (failure,) = [request.failure for request in sidecar.asked(sidecar_pb2.FailRequest)]
    assert failure.kind == save_pb2.FAILURE_KIND_SPOOL


@pytest.mark.parametrize(
    ("on_busy", "kind", "error", "asked"),
    [
        ("skip", save_pb2.FAILURE_KIND_SKIPPED, SaveSkippedError, True),
        ("raise", save_pb2.FAILURE_KIND_SPOOL, SaveAbortedError, False),
    ],
)
def test_a_full_spool_skips_or_fails_the_save(
    session: SidecarClient,
    sidecar: ScriptedSidecar,
    on_busy: str,
    kind: save_pb2.FailureKind,
    error: type[PannierError],
    asked: bool,
) -> None:
    def full(_: Any) -> None:
        raise BusyError("spool full: 5 needed, 3 free")

    sidecar.on["Write"] = full
    saving = begin(session, on_busy=on_busy)
    carry(saving)
    wait_until(saving.handle.done)
    assert saving.status.resolver.outcome.retrieved is asked
    with pytest.raises(error, match="5 needed, 3 free"):
        saving.handle.result(BOUND_S)
    assert sidecar.asked(sidecar_pb2.FailRequest)[0].failure.kind == kind


def test_a_save_without_a_status_update_ends_after_its_deadline(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []

    def set_timer(seconds: float, action: Callable[[], None]) -> object:
        timers.append((seconds, action))
        return SidecarClient.timer(session, float("inf"), action)

    monkeypatch.setattr(session, "timer", set_timer)
    sidecar.commit = False
    saving = begin(session, timeout_s=60)
    carry(saving)
    ((seconds, expire),) = timers
    assert 60 < seconds <= 60 + timeouts.DECISION_S
    expire()
    with pytest.raises(
        InDoubtError, match=r"job/abc/g1/1 to /x/y.*may still be committed.*pannier ls /x`"
    ):
        saving.handle.result(BOUND_S)


def test_a_save_whose_deadline_passes_before_it_is_handed_over_is_aborted(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DECISION_S", 0.1)
    ended = threading.Event()
    sidecar.on["Write"] = lambda _: ended.wait(BOUND_S)
    saving = begin(session, timeout_s=0.5)
    carrier = threading.Thread(target=saving.send, args=(InFlightSaves(1).admit("raise", 0),))
    carrier.start()
    try:
        with pytest.raises(SaveAbortedError, match="was not handed over") as raised:
            saving.handle.result(BOUND_S)
        assert raised.value.failures[0].kind == "DEADLINE"
    finally:
        ended.set()
        carrier.join(BOUND_S)
    assert not sidecar.asked(sidecar_pb2.HandOverRequest)


@pytest.mark.parametrize(
    "error", [DeadlineError("no answer for 60 s"), UnavailableError("can't be reached")]
)
def test_a_commit_by_torch_that_is_not_answered_is_in_doubt(
    error: PannierError,
    session: SidecarClient,
    sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def finish(*_: Any) -> None:
        raise error

    monkeypatch.setattr(session, "finish", finish)
    writer = StorageWriter("/x/y")
    writer._save = WriterSave(session, CONTEXT, 60, InFlightSaves(1), SavesInProgress(lambda: None))
    with pytest.raises(InDoubtError, match=f"{error}.*may still be committed"):
        writer.finish(Metadata({}), [])


def test_unretrieved_errors_are_in_doubt_together_when_one_is() -> None:
    unretrieved = UnretrievedErrors()
    for error in (SaveAbortedError("first"), InDoubtError("second")):
        outcome = Outcome()
        outcome.fail(error)
        unretrieved.add(outcome)
    with pytest.raises(InDoubtError, match="first; and second"):
        unretrieved.raise_all()


def test_a_timer_far_away_does_not_delay_the_others(session: SidecarClient) -> None:
    rung = threading.Event()
    session.timer(float("inf"), lambda: None)
    session.timer(0.05, rung.set)
    assert rung.wait(BOUND_S)
    rung.clear()
    # Nothing but the far one is left when the thread looks again.
    session.timer(0.05, rung.set)
    assert rung.wait(BOUND_S)


def test_status_follows_the_updates(session: SidecarClient, sidecar: ScriptedSidecar) -> None:
    sidecar.commit = False
    saving = begin(session)
    carry(saving)
    update = save_pb2.SaveStatus(
        save=CONTEXT.save,
        state=save_pb2.SAVE_STATE_UPLOADING,
        attempt=ATTEMPT,
        bytes_total=123,
        waiting_on=save_pb2.WaitingOn(ranks=[1], text="ranks [1] (host node-1)"),
    )
    with sidecar.changed:
        sidecar._updates.append(update)
        sidecar.changed.notify_all()
    wait_until(lambda: saving.handle.status().state == "UPLOADING")
    status = saving.handle.status()
    assert status.total_bytes == 123
    assert str(status) == (
        "save job/abc/g1/1 to /x/y: UPLOADING, waiting for ranks [1] (host node-1)"
    )


def test_what_is_ingested_is_all_of_it_before_the_hand_over_is_answered(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    saving = begin(session)
    assert saving.handle.status().bytes_ingested == 0
    rank = save_pb2.RankStatus(rank=CONTEXT.rank, phase=save_pb2.RANK_PHASE_INGESTED)
    update = save_pb2.SaveStatus(
        save=CONTEXT.save, state=save_pb2.SAVE_STATE_INGESTED, attempt=ATTEMPT, ranks=[rank]
    )
    with sidecar.changed:
        sidecar._updates.append(update)
        sidecar.changed.notify_all()
    wait_until(lambda: saving.handle.status().state == "INGESTED")
    assert saving.handle.status().bytes_ingested == saving.handle.status().bytes > 0


def test_an_ended_save_leaves_nothing_behind(session: SidecarClient) -> None:
    gc.collect()
    gc.disable()
    try:
        saving = begin(session)
        carry(saving)
        saving.handle.result(BOUND_S)
        gone, handle_gone = weakref.ref(saving), weakref.ref(saving.handle)
        wait_until(lambda: not session.followed)
        del saving
        wait_until(lambda: gone() is None and handle_gone() is None)
    finally:
        gc.enable()


def test_causes_become_kinds() -> None:
    error = ValueError("planner broke")
    request = fail_request(CONTEXT, error)
    assert request.failure.kind == save_pb2.FAILURE_KIND_CLIENT
    assert request.failure.message == "ValueError: planner broke"
    assert (request.failure.rank, request.failure.host) == (0, "node-0")


def test_an_abort_names_every_cause_up_to_four() -> None:
    failures = [save_pb2.Failure(rank=rank, host="h", message=f"m{rank}") for rank in range(6)]
    error = aborted(save_pb2.SaveStatus(save=CONTEXT.save, failures=failures))
    assert "m3" in str(error)
    assert "m4" not in str(error)
    assert "2 more" in str(error)
    assert list(error.failures) == list(range(6))


# What becomes of the staging memory.


@pytest.mark.parametrize("first", ["sent", "ended"])
@pytest.mark.parametrize(
    ("ended", "handed_over", "reused"),
    [
        (ArenaUse.UNUSED, True, True),
        (ArenaUse.READ_BY_SIDECAR, True, False),
        # Never handed over: what the sidecar does is of no account.
        (ArenaUse.READ_BY_SIDECAR, False, True),
    ],
)
def test_staging_memory_is_used_again_only_if_nothing_may_still_read_it(
    first: str, ended: ArenaUse, handed_over: bool, reused: bool
) -> None:
    slots = InFlightSaves(1)
    slot = slots.admit("raise", 0)
    slot.hold(slots.pool.acquire([1 << 20])).files[0].view[:4] = b"save"
    assert slot.begin_sending()
    if first == "ended":
        slot.ended(ended)
    assert slots.idle == 0
    slot.sent(handed_over=handed_over)
    if first == "sent":
        assert slots.idle == (0 if handed_over else 1)
        slot.ended(ended)
    assert slots.idle == 1
    # A second report changes nothing.
    slot.ended(ArenaUse.UNUSED)
    slot.free()
    assert slots.idle == 1
    # Fresh pages are zeros.
    assert (slots.pool.acquire([1 << 20]).files[0].view[:4] == b"save") is reused


def test_staging_memory_that_a_thread_sends_is_not_freed_under_it() -> None:
    """As when an interrupt comes between the start of that thread and the call's return."""
    slots = InFlightSaves(1)
    slot = slots.admit("raise", 0)
    slot.hold(slots.pool.acquire([1 << 20]))
    assert slot.begin_sending()
    slot.free()
    assert slots.idle == 0
    slot.sent(handed_over=False)
    assert slots.idle == 1
    late = slots.admit("raise", 0)
    late.free()
    assert not late.begin_sending()
    assert slots.idle == 1


def test_a_limit_of_threads_only_makes_a_save_slower(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("pannier-send-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    saving = begin(session)
    assert carry(saving) == ["arena"]
    saving.handle.result(BOUND_S)
    assert len(sidecar.files) == 5


def test_a_save_ends_once_though_its_abort_meets_a_failed_hand_over(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CAUSES_S", 0.05)
    sidecar.commit = False
    ended: list[object] = []
    saving = SaveTask(
        *(session, CONTEXT), on_busy="wait", deadline=Deadline(60), on_ended=ended.append
    )
    failures = []
    saving.planned(ATTEMPT, "p1")
    saving.status._on_failure = lambda _: failures.append("once")

    def aborted_meanwhile(request: sidecar_pb2.HandOverRequest) -> None:
        sidecar.abort(request.context, save_pb2.Failure(rank=1, message="disk full"))
        wait_until(saving.handle.done)
        raise SaveAbortedError("the save has ended")

    sidecar.on["HandOver"] = aborted_meanwhile
    saving.staged(Staged([]))
    carry(saving)
    # Longer than the causes of other ranks are waited for.
    time.sleep(0.2)
    assert len(ended) == 1
    assert failures == ["once"]
    errors = UnretrievedErrors()
    errors.add(saving.status.resolver.outcome)
    with pytest.raises(SaveAbortedError, match="disk full"):
        errors.raise_all()


def test_a_save_that_ends_before_it_is_registered_is_not_waited_for(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    saves = SavesInProgress(lambda: None)
    saving = SaveTask(
        *(session, CONTEXT), on_busy="wait", deadline=Deadline(60), on_ended=saves.end
    )
    saving.planned(ATTEMPT, "p1")
    sidecar.abort(CONTEXT, save_pb2.Failure(rank=1, message="disk full"))
    wait_until(saving.handle.done)
    saves.add(saving)
    assert not saves
    saves.wait(0)
