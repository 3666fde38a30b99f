"""One save of one rank, from its admission to its end, against a scripted sidecar."""

import ctypes
import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from pannier.client.config import Settings
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.dcp.writer_save import WriterSave
from pannier.client.engine import engine
from pannier.client.handle import Outcome, UnretrievedErrors
from pannier.client.identity import Group, Identity
from pannier.client.saves import save as save_module
from pannier.client.saves import sending
from pannier.client.saves.call import Options, SaveCall
from pannier.client.saves.save import Save
from pannier.client.saves.saves import Saves
from pannier.client.staging import arena as arena_module
from pannier.client.staging.arena import Arena, ArenaPool
from pannier.client.staging.deferred_copies import DeferredCopies
from pannier.client.transport.save_errors import aborted, fail_request
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts, tracing
from pannier.common.cgroup import MemoryLimit
from pannier.common.deadline import Deadline
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
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


class Member:
    """A rank of two, connected to ``sidecar``."""

    def __init__(self, sidecar: SidecarClient) -> None:
        self.world = self
        self.identity = sidecar.identity
        self.size = 2
        self.apart = False
        self.resumed: list[int] = []

    def next_number(self, group: Group) -> int:
        return 1

    def resume(self, group: Group, number: int) -> None:
        self.resumed.append(number)

    def seen_incarnation(self, checkpoint_id: str) -> None:
        return None


FILES = 5


def begin(
    session: SidecarClient,
    *,
    on_busy: str = "wait",
    timeout_s: float = 60,
    files: int = FILES,
    saves: Saves | None = None,
    sizes: Sequence[int] = (),
    part: Any = None,
) -> Save:
    """A save whose call has returned."""
    save = opened(session, Options(Deadline(timeout_s), on_busy), saves or Saves(1))
    arena = engine().call(lambda: save.acquire(ATTEMPT, "p1", sizes, part))
    save.staged(Staged([File(f"f{index}", 3 << 20) for index in range(files)], arena=arena))
    return save


def opened(session: SidecarClient, options: Options, saves: Saves) -> Save:
    member: Any = Member(session)
    save = Save(SaveCall(member, Group((0, 1), 0), "/x/y"), saves)
    save.call.accept("/x/y", options)
    save.connected(session, CONTEXT)
    engine().call(save.open)
    return save


def carry(save: Save) -> None:
    """Waits until it needs this process no more."""
    engine().call(save.sent)


def test_a_committed_save_returns_its_description(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    saving = begin(session)
    assert saving.handle.status().state == "STAGING"
    carry(saving)
    wait_until(lambda: saving._saves.idle == 1)
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
    saves = Saves(1)
    monkeypatch.setattr(saves, "log_committed", fail)
    saving = begin(session, files=0, saves=saves)
    if committed:
        assert saving.handle.result(BOUND_S).bytes == 0
    else:
        with pytest.raises(SaveAbortedError, match="disk full"):
            saving.handle.result(BOUND_S)
    saves.wait(BOUND_S)


def test_a_rank_without_files_hands_over_too(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    saving = begin(session, files=0)
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
    carry(saving)
    wait_until(lambda: saving._saves.idle == 1)
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
    carry(saving)
    wait_until(lambda: saving._saves.idle == 1)
    with pytest.raises(
        SaveAbortedError, match=r"rank 1 \(host node-1\): the process is gone"
    ) as raised:
        saving.handle.result(BOUND_S)
    assert raised.value.failures[1].kind == "LOST"
    assert not sidecar.asked(sidecar_pb2.FailRequest)


def bytes_changed(_: Any) -> None:
    """A sidecar's answer."""
    raise IntegrityError("bytes changed")


class Mapped:
    """A data file that was staged into the spool."""

    file, stamp = "spool-file", b"stamp"

    def seal(self) -> None:
        """Nothing is mapped here."""


def begin_mapped(
    session: SidecarClient,
    monkeypatch: pytest.MonkeyPatch,
    *sizes: int,
    on_busy: str = "wait",
) -> Save:
    """A save with one mapped file, and others of these sizes."""
    mapping: Any = Mapped()
    monkeypatch.setattr(sending, "mapped_files", lambda staged: {"f0": mapping})
    monkeypatch.setattr(save_module, "mapped_files", lambda staged: {"f0": mapping})
    save = opened(session, Options(Deadline(60), on_busy), Saves(1))
    arena = engine().call(lambda: save.acquire(ATTEMPT, "p1", []))
    files = [File(f"f{index}", size) for index, size in enumerate((3 << 20, *sizes))]
    save.staged(Staged(files, arena=arena))
    return save


def test_small_files_beside_mapped_ones_travel_with_the_hand_over(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_mapped(session, monkeypatch, 1000, 0, (1 << 20) - 1000).handle.result(BOUND_S)
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    assert [len(file.data) for file in request.inlined] == [1000, 0, (1 << 20) - 1000]
    assert not sidecar.asked(sidecar_pb2.FileHeader)


def test_what_is_larger_is_streamed(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_mapped(session, monkeypatch, 1, 1 << 20).handle.result(BOUND_S)
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    assert not request.inlined
    assert len(sidecar.asked(sidecar_pb2.FileHeader)) == 2


@pytest.mark.parametrize("error", [BusyError("full"), InvalidRequestError("forgot")])
def test_what_a_hand_over_could_not_bring_is_streamed(
    session: SidecarClient,
    sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    error: PannierError,
) -> None:
    def refuse(request: sidecar_pb2.HandOverRequest) -> None:
        if request.inlined:
            raise error

    sidecar.on["HandOver"] = refuse
    begin_mapped(session, monkeypatch, 1000).handle.result(BOUND_S)
    first, second = sidecar.asked(sidecar_pb2.HandOverRequest)
    assert (len(first.inlined), len(second.inlined)) == (1, 0)
    # A spool that is full has taken the mapped files nevertheless; one that has forgotten them gets them as bytes.
    assert len(second.mapped) == (1 if isinstance(error, BusyError) else 0)


def test_a_full_spool_leaves_no_doubt_whether_a_save_was_handed_over(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the coordinator, which can't be reached either, never decides it."""

    def full(_: Any) -> None:
        raise BusyError("spool full")

    async def lost(*_: Any) -> None:
        raise UnavailableError("no coordinator")

    sidecar.on.update({"HandOver": full, "Write": full})
    monkeypatch.setattr(SidecarClient, "fail", lost)
    monkeypatch.setattr(timeouts, "CAUSES_S", 0.2)
    with pytest.raises(SaveAbortedError, match="spool full"):
        begin_mapped(session, monkeypatch, 1000, on_busy="raise").handle.result(BOUND_S)


def test_a_file_that_cannot_be_sent_ends_the_save_on_all_ranks(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.on["Write"] = bytes_changed
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

    sidecar.on["HandOver"] = bytes_changed
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

    sidecar.on["Write"] = bytes_changed
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
    text = "waiting for room (the spool /s is full: 5 bytes needed, 3 free)"
    wait_until(lambda: text in str(saving.handle.status()))
    # A status update of the save doesn't hide it.
    update = save_pb2.SaveStatus(save=CONTEXT.save, state=save_pb2.SAVE_STATE_STAGING)
    update.waiting_on.text = "rank 0"
    engine().post(saving.on_status, update)
    wait_until(lambda: saving.handle.status().state == "STAGING")
    assert text in str(saving.handle.status())
    room.set()
    carry(saving)
    assert saving.handle.status().waiting_on == "rank 0"


def test_a_save_that_is_aborted_while_the_spool_is_full_says_so(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    def full(_: Any) -> None:
        raise BusyError("the spool /s is full")

    sidecar.on["Write"] = full
    saving = begin(session)
    wait_until(lambda: "the spool /s is full" in str(saving.handle.status()))
    sidecar.abort(CONTEXT)
    with pytest.raises(SaveAbortedError, match=r"was waiting for room \(the spool /s is full\)"):
        saving.handle.result(BOUND_S)


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
    assert saving.handle.outcome.retrieved is asked
    with pytest.raises(error, match="5 needed, 3 free"):
        saving.handle.result(BOUND_S)
    assert sidecar.asked(sidecar_pb2.FailRequest)[0].failure.kind == kind


def test_a_save_without_a_decision_ends_after_its_deadline(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DECISION_S", 0.2)
    sidecar.commit = False
    go = threading.Event()
    sidecar.on["HandOver"] = lambda _: go.wait(BOUND_S)
    saving = begin(session)
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)))
    saving.call.options = replace(saving.call.options, deadline=Deadline(1))
    began = time.monotonic()
    go.set()
    with pytest.raises(
        InDoubtError, match=r"job/abc/g1/1 to /x/y.*may still be committed.*pannier ls /x"
    ):
        saving.handle.result(BOUND_S)
    assert time.monotonic() - began >= 1.2


def test_a_save_whose_deadline_passes_before_it_is_handed_over_is_aborted(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "DECISION_S", 0.1)
    ended = threading.Event()
    sidecar.on["Write"] = lambda _: ended.wait(BOUND_S)
    saving = begin(session, timeout_s=0.5)
    try:
        with pytest.raises(SaveAbortedError, match="was not handed over") as raised:
            saving.handle.result(BOUND_S)
        assert raised.value.failures[0].kind == "DEADLINE"
    finally:
        ended.set()
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
    async def finish(*_: Any) -> None:
        raise error

    monkeypatch.setattr(session, "finish", finish)
    writer = StorageWriter("/x/y")
    member: Any = Member(session)
    saves = Saves(1)
    save = Save(SaveCall(member, Group((0, 1), 0), "/x/y"), saves)
    save.call.accept("/x/y", Options(Deadline(60), counts=False))
    writer._save = WriterSave(session, save, saves)
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
    go_on = threading.Event()
    sidecar.on["HandOver"] = lambda _: go_on.wait(BOUND_S)
    saving = begin(session)
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)))
    # As if it were mapped.
    engine().post(lambda: saving._handle_end.show(bytes_ingested=0))
    rank = save_pb2.RankStatus(rank=CONTEXT.rank, phase=save_pb2.RANK_PHASE_INGESTED)
    update = save_pb2.SaveStatus(
        save=CONTEXT.save, state=save_pb2.SAVE_STATE_INGESTED, attempt=ATTEMPT, ranks=[rank]
    )
    with sidecar.changed:
        sidecar._updates.append(update)
        sidecar.changed.notify_all()
    wait_until(lambda: saving.handle.status().state == "INGESTED")
    assert saving.handle.status().bytes_ingested == saving.handle.status().bytes > 0
    go_on.set()


def test_an_ended_save_leaves_nothing_behind(session: SidecarClient) -> None:
    gc.collect()
    gc.disable()
    try:
        saving = begin(session)
        carry(saving)
        saving.handle.result(BOUND_S)
        gone, handle_gone = weakref.ref(saving), weakref.ref(saving.handle)
        wait_until(lambda: not session._connection.followed)
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


SIZE = 1 << 20


def mark(save: Save) -> None:
    assert save.arena is not None
    save.arena.files[0].view[:4] = b"save"


def is_used_again(saves: Saves) -> bool:
    """Fresh pages are zeros."""
    return saves.pool.acquire([SIZE]).files[0].view[:4] == b"save"


@pytest.mark.parametrize(
    ("gave_files", "decision", "reused"),
    [
        (True, "committed", True),
        (True, "aborted", True),
        # It may still read them.
        (True, "none", False),
        # Never given to it: what the sidecar does is of no account.
        (False, "none", True),
    ],
)
def test_staging_memory_is_used_again_only_if_nothing_may_still_read_it(
    session: SidecarClient,
    sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    gave_files: bool,
    decision: str,
    reused: bool,
) -> None:
    monkeypatch.setattr(timeouts, "DECISION_S", 0.1)
    sidecar.commit = False
    saves = Saves(1)
    save = opened(session, Options(Deadline(1 if decision == "none" else BOUND_S)), saves)
    arena = engine().call(lambda: save.acquire(ATTEMPT, "p1", [SIZE]))
    mark(save)
    if gave_files:
        monkeypatch.setattr(Save, "_gave_files", True)
    save.staged(Staged([], arena=arena))
    carry(save)
    # Without a decision it may be over by now.
    assert decision == "none" or saves.idle == (0 if gave_files else 1)
    if decision == "committed":
        sidecar.send_status(CONTEXT.save, save_pb2.SAVE_STATE_COMMITTED, checkpoint_id="/x/y")
    if decision == "aborted":
        sidecar.abort(CONTEXT)
    assert save.handle.wait(BOUND_S)
    assert saves.idle == 1
    assert is_used_again(saves) is reused


def test_staging_memory_of_an_interrupted_call_is_given_back_once(
    session: SidecarClient,
) -> None:
    saves = Saves(1)
    save = opened(session, Options(Deadline(60)), saves)
    engine().call(lambda: save.acquire(ATTEMPT, "p1", [SIZE]))
    mark(save)
    assert saves.idle == 0
    for _ in range(2):
        engine().call(lambda: save.drop(None))
    saves.wait(BOUND_S)
    assert saves.idle == 1
    assert is_used_again(saves)


def test_an_interrupted_call_that_had_staged_gives_its_memory_back_after_it_is_sent(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    """As when an interrupt comes between the last step of the call and its return."""
    go_on = threading.Event()
    sidecar.on["HandOver"] = lambda _: go_on.wait(BOUND_S)
    saving = begin(session, sizes=[SIZE])
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)))
    engine().call(lambda: saving.drop(None))
    assert saving._saves.idle == 0
    go_on.set()
    carry(saving)
    wait_until(lambda: saving._saves.idle == 1)


def test_a_limit_of_threads_only_makes_a_save_slower(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name == "pannier-work" and len(started) > 1:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    saving = begin(session)
    saving.handle.result(BOUND_S)
    assert len(sidecar.files) == 5


def test_a_save_ends_once_though_its_abort_meets_a_failed_hand_over(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CAUSES_S", 0.05)
    sidecar.commit = False
    failures: list[str] = []
    done = threading.Event()

    def aborted_meanwhile(request: sidecar_pb2.HandOverRequest) -> None:
        sidecar.abort(
            request.context,
            save_pb2.Failure(rank=1, message="disk full", kind=save_pb2.FAILURE_KIND_INTERNAL),
        )
        done.wait(BOUND_S)
        raise SaveAbortedError("the save has ended")

    sidecar.on["HandOver"] = aborted_meanwhile
    saves = Saves(1)
    saving = opened(session, Options(Deadline(60)), saves)
    arena = engine().call(
        lambda: saving.acquire(ATTEMPT, "p1", [], drop_part=lambda: failures.append("once"))
    )
    saving.staged(Staged([], arena=arena))
    assert saving.handle.wait(BOUND_S)
    done.set()
    saves.wait(BOUND_S)
    # Longer than the causes of other ranks are waited for.
    time.sleep(0.2)
    assert failures == ["once"]
    with pytest.raises(SaveAbortedError, match="disk full"):
        saves.errors.raise_all()


# The part of the last plan, which the save claims.


class Part:
    """A cached plan, which the coordinator's plan equals."""

    def __init__(self) -> None:
        self.message = plan_pb2.LocalPlan()
        self.digest = "d"
        self.staged_positions = b"\1\3"
        self.confirmed: list[str] = []
        self.is_equal = True

    def claim(self) -> sidecar_pb2.CachedPlanClaim:
        return sidecar_pb2.CachedPlanClaim(part="p1", attempt=[*self.confirmed, ""][0])

    def confirm(self, checkpoint_id: str, attempt: str) -> None:
        self.confirmed.append(attempt)

    def equals(self, final: plan_pb2.FinalPlan, number: int) -> bool:
        return self.is_equal


def test_a_requested_local_plan_is_sent_once_and_confirms_the_part(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = sidecar.confirm = False
    part = Part()
    saving = begin(session, part=part)
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)))
    requested = save_pb2.PlanState(full_plan_requested=True)
    for _ in range(2):
        sidecar.send_status(CONTEXT.save, save_pb2.SAVE_STATE_PLANNING, plan=requested)
    assert saving.handle.ingest_completion.result(BOUND_S) is None
    (request,) = sidecar.asked(sidecar_pb2.PlanRequest)
    assert (request.digest, request.staged_positions) == ("d", b"\1\3")
    assert part.confirmed == [ATTEMPT]
    sidecar.send_status(CONTEXT.save, save_pb2.SAVE_STATE_COMMITTED)
    saving.handle.result(BOUND_S)


def test_a_save_claims_the_same_from_its_first_byte_to_its_hand_over(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    part = Part()
    # An earlier save's confirmation comes meanwhile.
    sidecar.on["Write"] = lambda _: part.confirm("/x/earlier", "earlier")
    saving = begin(session, part=part)
    saving.handle.result(BOUND_S)
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    assert (request.claim.part, request.claim.attempt) == ("p1", "")


def test_a_local_plan_that_another_one_is_made_of_fails_the_save_while_it_is_sent(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = sidecar.confirm = False
    sidecar.stall_at = [0, 0]
    part = Part()
    part.is_equal = False
    saving = begin(session, part=part)
    sidecar.wait_for(lambda: bool(sidecar.files))
    requested = save_pb2.PlanState(full_plan_requested=True)
    sidecar.send_status(CONTEXT.save, save_pb2.SAVE_STATE_PLANNING, plan=requested)
    with pytest.raises(SaveAbortedError, match="the part p1 of the last plan"):
        saving.handle.result(BOUND_S)
    (failed,) = sidecar.asked(sidecar_pb2.FailRequest)
    assert failed.failure.kind == save_pb2.FAILURE_KIND_PLAN_CHANGED


# How many saves hold staging memory at a time.


class Planned:
    """A save that holds staging memory, of a MiB of which ``room`` fit at a time."""

    def __init__(self, saves: Saves, on_busy: str = "wait", timeout_s: float = BOUND_S) -> None:
        self.options = Options(Deadline(timeout_s), on_busy)
        self.is_dropped = False
        self.arena: Arena | None = None
        self._saves = saves

    def admit(self) -> None:
        save: Any = self
        engine().call(lambda: self._saves.admit(save))

    def acquire(self, room: int) -> Arena:
        def acquire() -> Arena:
            if len(self._saves.pool._in_use) >= room:
                raise BusyError("no room for staging")
            return self._saves.pool.acquire([SIZE])

        save: Any = self
        self.arena = engine().call(lambda: self._saves.acquire(save, acquire))
        return self.arena

    def free(self) -> None:
        save: Any = self
        arena, self.arena = self.arena, None
        if arena is not None:
            self._saves.pool.release(arena)
        engine().post(self._saves.release, save)


def test_a_save_that_gets_no_staging_memory_in_time_names_those_that_hold_it() -> None:
    saves = Saves(2)
    for _ in range(2):
        Planned(saves).admit()
    with pytest.raises(DeadlineError) as caught:
        Planned(saves, timeout_s=0.2).admit()
    assert re.sub(r"within [\d.]+ s", "within 0.2 s", str(caught.value)) == (
        "no staging memory became free within 0.2 s: 2 saves hold it (PANNIER_MAX_IN_FLIGHT): "
        "; save less often or raise it"
    )


def test_a_save_waits_for_the_staging_memory_of_an_earlier_one_where_both_do_not_fit() -> None:
    saves = Saves(2)
    first, second = Planned(saves), Planned(saves)
    for each in (first, second):
        each.admit()
    address = first.acquire(1).files[0].address
    ended = threading.Timer(0.05, first.free)
    ended.start()
    assert second.acquire(1).files[0].address == address
    ended.join()


@pytest.mark.parametrize(
    ("on_busy", "error"),
    [("skip", SaveSkippedError), ("raise", BusyError), ("wait", DeadlineError)],
)
def test_staging_memory_that_an_earlier_save_holds_is_a_matter_of_on_busy(
    on_busy: str, error: type[Exception]
) -> None:
    saves = Saves(2)
    first, second = Planned(saves), Planned(saves, on_busy, 0.2)
    for each in (first, second):
        each.admit()
    first.acquire(1)
    with pytest.raises(error, match="no room for staging"):
        second.acquire(1)


def test_staging_memory_that_no_save_holds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "BUSY_AGAIN_S", 0.01)
    save = Planned(Saves(2), timeout_s=3600)
    save.admit()
    with pytest.raises(BusyError, match="no room for staging"):
        save.acquire(0)


def test_memory_beyond_the_limit_of_the_process_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = MemoryLimit(256 << 20, 192 << 20, "/job")
    monkeypatch.setattr(arena_module, "memory_limit", lambda: limit)
    with pytest.raises(BusyError) as caught:
        ArenaPool(2).acquire([1 << 20])
    assert str(caught.value) == (
        "no room for staging: 1048576 bytes needed, 0 free, since the memory limit of control group /job is "
        "256.0 MiB, 192.0 MiB of it in use: save less often, name a spool on a disk (PANNIER_SPOOL; a "
        "sidecar's --spool), or raise the limit"
    )
