"""The session and its streams, against a scripted sidecar on a real socket."""

import asyncio
import ctypes
import random
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import pytest

from pannier.client.config import Settings
from pannier.client.engine import Stop, engine
from pannier.client.identity import Identity
from pannier.client.transport.file_stream import FileSource, StoppedError
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import chunk_codec
from pannier.wire.chunk_codec import CHUNK_BYTES
from pannier.wire.errors import (
    DeadlineError,
    SaveAbortedError,
    UnavailableError,
    VersionMismatchError,
)
from pannier.wire.version import WIRE_VERSION
from support.actors.scripted_sidecar import ScriptedSidecar, wait_until
from support.processes.stretch import BOUND_S

SAVE = save_pb2.SaveId(job="job", incarnation="abc", group="g1", number=1)
CONTEXT = sidecar_pb2.SaveContext(
    save=SAVE, checkpoint_id="/x/y", ranks=[0, 1], world_size=2, rank=0, host="h"
)
WHO = Identity(job="job", incarnation="abc", rank=0, world_size=2, host="h", client="c1")


@dataclass
class InMemory:
    """A staged file over a buffer of its own."""

    name: str
    data: bytes

    def __post_init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(self.data, max(1, len(self.data)))
        self.size = len(self.data)
        self.address = ctypes.addressof(self._buffer)


@pytest.fixture
def sidecar(sockets: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(sockets) as scripted:
        yield scripted


@pytest.fixture
def session(sidecar: ScriptedSidecar) -> Iterator[SidecarClient]:
    connected = SidecarClient.connect(Settings(sidecar=sidecar.address), WHO)
    yield connected
    connected.close()


class Followed:
    """A save whose statuses are noted."""

    context = CONTEXT

    def __init__(self, updates: list[save_pb2.SaveStatus]) -> None:
        self.on_status = updates.append

    def on_unresponsive(self, problem: str) -> None:
        pass

    def pending(self) -> sidecar_pb2.PendingSave:
        return sidecar_pb2.PendingSave(context=CONTEXT)


def call(work: Coroutine[Any, Any, Any]) -> Any:
    """On the engine's loop, as a save would."""
    return engine().call(lambda: work)


def data(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 12345]
)
def test_a_file_arrives_whole_with_its_checksum(
    session: SidecarClient, sidecar: ScriptedSidecar, size: int
) -> None:
    content = data(size)
    file = InMemory("f", content)
    assert call(session.send(CONTEXT, "a", file)) == crc32c.crc32c(content)
    assert bytes(sidecar.files["__a_f"].data) == content


@pytest.mark.parametrize("start", [0, 17, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_checksum_of_a_file_is_right_wherever_its_stream_began(start: int) -> None:
    content = data(4 * CHUNK_BYTES + 99)
    source = FileSource(InMemory("f", content))
    sent = list(source.chunks(start))
    assert sum(chunk.size for chunk in sent) == len(content) - start
    for chunk in sent:
        part = content[chunk.offset : chunk.offset + chunk.size]
        assert chunk.crc32c == crc32c.crc32c(part)
    assert source.crc32c() == crc32c.crc32c(content)


def test_a_broken_stream_goes_on_where_it_was(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    content = data(8 * CHUNK_BYTES + 3)
    sidecar.cut_at = [2 * CHUNK_BYTES, 5 * CHUNK_BYTES]
    assert call(session.send(CONTEXT, "a", InMemory("f", content))) == crc32c.crc32c(content)
    spool = sidecar.files["__a_f"]
    assert bytes(spool.data) == content
    assert spool.offsets == [0, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES]


def test_a_sidecar_that_restarts_gets_the_rest(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    content = data(6 * CHUNK_BYTES)
    sidecar.stall_at = [3 * CHUNK_BYTES]
    sent: list[int] = []
    sender = threading.Thread(
        target=lambda: sent.append(call(session.send(CONTEXT, "a", InMemory("f", content))))
    )
    sender.start()
    sidecar.wait_for(lambda: "__a_f" in sidecar.files)
    wait_until(lambda: len(sidecar.files["__a_f"].data) >= 3 * CHUNK_BYTES)
    sidecar.stop()
    sidecar.start()
    sender.join(BOUND_S)
    assert sent == [crc32c.crc32c(content)]
    assert bytes(sidecar.files["__a_f"].data) == content
    sidecar.wait_for(lambda: len(sidecar.connects) >= 2)
    assert {connect.client for connect in sidecar.connects} == {"c1"}


def test_an_unresponsive_stream_is_begun_again(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session._sender, "_stall_s", 0.3)
    content = data(4 * CHUNK_BYTES)
    sidecar.stall_at = [CHUNK_BYTES]
    assert call(session.send(CONTEXT, "a", InMemory("f", content))) == crc32c.crc32c(content)
    assert bytes(sidecar.files["__a_f"].data) == content
    assert sidecar.files["__a_f"].streams >= 2


def test_progress_is_what_the_sidecar_holds(session: SidecarClient) -> None:
    reported: list[int] = []
    call(session.send(CONTEXT, "a", InMemory("f", data(3 * CHUNK_BYTES)), progress=reported.append))
    assert reported == [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]


def test_a_cancelled_stream_has_ended(session: SidecarClient, sidecar: ScriptedSidecar) -> None:
    sidecar.stall_at = [0]
    ended: list[int] = []

    async def send() -> None:
        try:
            await session.send(CONTEXT, "a", InMemory("f", data(64 * CHUNK_BYTES)))
        except asyncio.CancelledError:
            ended.append(threading.active_count())
            raise

    sending = engine().start(send)
    sidecar.wait_for(lambda: "__a_f" in sidecar.files)
    sending.cancel()
    wait_until(lambda: len(ended) == 1)


@pytest.mark.parametrize("end", ["stopped", "stalled", "closed", "cut"])
def test_memory_is_read_by_no_other_thread_and_not_after_a_stream_that_ended_early(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its owner stages the next save into it: the sidecar would get a mixture of both."""
    monkeypatch.setattr(session._sender, "_stall_s", 0.3 if end == "stalled" else BOUND_S)
    sidecar.stall_at = [0] if end != "cut" else []
    sidecar.cut_at = [CHUNK_BYTES] if end == "cut" else []
    readers: list[int] = []
    encode = chunk_codec.encode

    def noted(message: Any) -> bytes:
        readers.append(threading.get_ident())
        return encode(message)

    monkeypatch.setattr(chunk_codec, "encode", noted)
    stop = Stop()
    header = sidecar_pb2.FileHeader(context=CONTEXT, name="__a_f", size=64 * CHUNK_BYTES)
    source = FileSource(InMemory("f", bytes(64 * CHUNK_BYTES)))

    def send() -> int:
        with pytest.raises(StoppedError if end == "stopped" else UnavailableError):
            session._sender.stream(header, source, lambda _: None, stop)
        return threading.get_ident()

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        sidecar.wait_for(lambda: "__a_f" in sidecar.files)
        # The sidecar reads nothing more: soon the sender waits for room.
        wait_until(lambda: len(readers) > (3 if end != "cut" else 1))
        if end == "stopped":
            stop.set()
        elif end == "closed":
            session.close()
        assert set(readers) == {sending.result(BOUND_S)}


def test_a_refused_file_is_an_error_at_once(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    failure = save_pb2.Failure(rank=1, host="b", message="died")

    def refuse(_: object) -> None:
        raise SaveAbortedError("it is over", [failure])

    sidecar.on["Write"] = refuse
    with pytest.raises(SaveAbortedError, match="it is over") as raised:
        call(session.send(CONTEXT, "a", InMemory("f", data(10))))
    assert raised.value.failures[1].message == "died"
    assert len(sidecar.asked(sidecar_pb2.FileHeader)) == 1


def test_no_sidecar_is_an_error_that_names_the_address(sockets: Path) -> None:
    address = f"unix://{sockets}/none.sock"
    with pytest.raises(UnavailableError, match=r"none\.sock.*PANNIER_SIDECAR"):
        SidecarClient.connect(Settings(sidecar=address), WHO)


def test_a_sidecar_that_says_nothing_is_no_sidecar(sidecar: ScriptedSidecar) -> None:
    sidecar.unresponsive = True
    with pytest.raises(UnavailableError, match=r"s\.sock"):
        SidecarClient.connect(Settings(sidecar=sidecar.address), WHO)


def test_a_sidecar_that_answers_late_is_connected_to_again(
    sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", 0.2)
    monkeypatch.setattr(timeouts, "EMBEDDED_CONNECT_S", BOUND_S)
    sidecar.unresponsive = True
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(SidecarClient.connect, Settings(), WHO, address=sidecar.address)
        wait_until(lambda: len(sidecar.connects) >= 2 or connecting.done())
        sidecar.unresponsive = False
        connecting.result(BOUND_S).close()


def test_a_sidecar_of_another_version_is_refused_with_both_versions(
    sidecar: ScriptedSidecar,
) -> None:
    sidecar.wire_version = 99
    with pytest.raises(
        VersionMismatchError,
        match=rf"9\.9\) speaks wire version 99, .* {WIRE_VERSION}: run the same",
    ):
        SidecarClient.connect(Settings(sidecar=sidecar.address), WHO)


def test_a_sidecar_that_comes_back_as_another_version_gets_no_bytes(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    """It could misunderstand them: the save fails with both versions, not with what it makes of a message."""
    sidecar.stop()
    sidecar.wire_version = 99
    connects = len(sidecar.connects)
    sidecar.start()
    sidecar.wait_for(lambda: len(sidecar.connects) > connects + 1)
    with pytest.raises(VersionMismatchError, match="speaks wire version 99"):
        call(session.send(CONTEXT, "a", InMemory("f", b"x")))
    with pytest.raises(VersionMismatchError, match="speaks wire version 99"):
        call(session.hand_over(sidecar_pb2.HandOverRequest(context=CONTEXT)))


def test_updates_reach_their_save_only_and_also_after_a_restart(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    other = save_pb2.SaveId(job="job", incarnation="abc", group="g1", number=2)
    updates: list[save_pb2.SaveStatus] = []
    session.follow(Followed(updates))
    sidecar.send_status(other, save_pb2.SAVE_STATE_COMMITTED)
    sidecar.send_status(SAVE, save_pb2.SAVE_STATE_UPLOADING)
    wait_until(lambda: len(updates) == 1)
    sidecar.stop()
    sidecar._updates.clear()
    sidecar.start()
    sidecar.send_status(SAVE, save_pb2.SAVE_STATE_COMMITTED)
    wait_until(lambda: len(updates) == 2)
    assert [status.state for status in updates] == [
        save_pb2.SAVE_STATE_UPLOADING,
        save_pb2.SAVE_STATE_COMMITTED,
    ]


def test_daemons_that_cannot_be_started_at_once_are_started_later(sidecar: ScriptedSidecar) -> None:
    tries = []

    def restart() -> None:
        tries.append(None)
        if len(tries) == 1:
            raise OSError(24, "Too many open files")
        if len(tries) == 2:
            sidecar.start()

    settings = Settings(sidecar=sidecar.address)
    connected = SidecarClient.connect(settings, WHO, restart_daemons=restart)
    updates: list[save_pb2.SaveStatus] = []
    connected.follow(Followed(updates))
    sidecar.stop()
    wait_until(lambda: len(tries) >= 2)
    sidecar.send_status(SAVE, save_pb2.SAVE_STATE_COMMITTED)
    wait_until(lambda: bool(updates))
    connected.close()


def test_a_call_is_made_again_when_the_sidecar_restarts(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.stop()
    answers: list[sidecar_pb2.PlanResponse] = []
    request = sidecar_pb2.PlanRequest(context=CONTEXT, plan=plan_pb2.LocalPlan(), digest="d")
    asking = threading.Thread(target=lambda: answers.append(call(session.plan(request, BOUND_S))))
    asking.start()
    sidecar.start()
    asking.join(BOUND_S)
    assert answers[0].plan.plan_id == "p1"


def test_a_plan_gives_up_on_a_sidecar_that_stays_away(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_patience_s", 0.5)
    sidecar.stop()
    with pytest.raises(UnavailableError, match=r"s\.sock"):
        call(session.plan(sidecar_pb2.PlanRequest(context=CONTEXT), 60))


def test_errors_of_the_other_side_keep_their_type(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    def refuse(_: object) -> None:
        raise DeadlineError("waiting for ranks [1]", [save_pb2.Failure(rank=1)])

    sidecar.on["HandOver"] = refuse
    request = sidecar_pb2.HandOverRequest(context=CONTEXT, files=[records_pb2.DataFile()])
    with pytest.raises(DeadlineError, match=r"ranks \[1\]") as raised:
        call(session.hand_over(request))
    assert list(raised.value.failures) == [1]


def test_a_hand_over_that_is_not_answered_is_made_again(
    session: SidecarClient, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CALL_S", 0.2)
    asked: list[object] = []
    again = threading.Event()

    def answer_late_once(request: object) -> None:
        asked.append(request)
        if len(asked) == 1:
            assert again.wait(BOUND_S)
        again.set()

    sidecar.on["HandOver"] = answer_late_once
    call(session.hand_over(sidecar_pb2.HandOverRequest(context=CONTEXT)))
    assert len(asked) >= 2


def test_close_returns_at_once_and_ends_running_calls(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.stall_at = [0]
    errors: list[Exception] = []

    def send() -> None:
        try:
            call(session.send(CONTEXT, "a", InMemory("f", data(1000))))
        except UnavailableError as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    sidecar.wait_for(lambda: "__a_f" in sidecar.files)
    # The call that runs would never end by itself.
    session.close()
    sender.join()
    assert len(errors) == 1


def test_only_a_client_whose_process_continues_announces_its_end(sidecar: ScriptedSidecar) -> None:
    for announce in (False, True):
        leaving = SidecarClient.connect(Settings(sidecar=sidecar.address), WHO)
        ended = len(sidecar.ended)
        leaving.close(announce=announce)
        sidecar.wait_for(lambda ended=ended: len(sidecar.ended) > ended)
        assert [each.closing for each in sidecar.pings if each.closing] == [True] * announce


def test_a_sidecar_is_pinged_as_long_as_the_session_lives(
    session: SidecarClient, sidecar: ScriptedSidecar
) -> None:
    sidecar.wait_for(lambda: bool(sidecar.pings))
    first = sidecar.pings[0]
    assert (first.job, first.incarnation, first.rank, first.client) == ("job", "abc", 0, "c1")
    assert not first.closing
