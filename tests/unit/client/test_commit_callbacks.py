"""What a user has done after a commit: once, in a thread of its own, waited for, and never unnoticed."""

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from pannier.client import (
    Client,
    CommitCallbackError,
    DeadlineError,
    InDoubtError,
    PannierError,
    SaveAbortedError,
    SaveResult,
)
from pannier.client.config import Settings
from pannier.client.handle import (
    CommitCallbacks,
    Outcome,
    Resolver,
    SaveHandle,
    UnretrievedErrors,
)
from pannier.client.saves.outcome import skipped
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire.errors import InvalidRequestError, SaveSkippedError
from support.actors.scripted_sidecar import ScriptedSidecar
from support.processes.stretch import BOUND_S

RESULT = SaveResult("/x/y", "a1", 3, 3, {})


@pytest.fixture
def client(sidecar: ScriptedSidecar) -> Iterator[Client]:
    made = Client(Settings(sidecar=sidecar.address))
    yield made
    with suppress(PannierError):
        made.close()


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(10)}


def test_it_is_called_once_with_the_result_also_when_it_comes_late(client: Client) -> None:
    seen: list[tuple[SaveResult, str]] = []

    def note(result: SaveResult) -> None:
        seen.append((result, threading.current_thread().name))

    handle = client.async_save(state(), checkpoint_id="/x/y", on_commit=note)
    result = handle.result(BOUND_S)
    handle.add_commit_callback(note)
    client.wait_all(BOUND_S)
    assert seen == [(result, "pannier-commit")] * 2


def test_a_save_that_fails_or_is_skipped_calls_nothing() -> None:
    calls: list[SaveResult] = []
    handle = SaveHandle("a save", "/x/y")
    handle.add_commit_callback(calls.append)
    Resolver(handle).fail(SaveAbortedError("aborted"))
    skipped("a save", "/x/y", SaveSkippedError("skipped")).add_commit_callback(calls.append)
    assert not calls
    # It asked for no error, either.
    assert not handle._outcome.retrieved


def test_wait_all_waits_for_it(client: Client) -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(_: SaveResult) -> None:
        begun.set()
        go.wait(BOUND_S)
        ended.set()

    client.async_save(state(), checkpoint_id="/x/y", on_commit=slow).result(BOUND_S)
    assert begun.wait(BOUND_S)
    with pytest.raises(DeadlineError, match="a commit callback has not returned"):
        client.wait_all(1.0)
    go.set()
    client.wait_all(BOUND_S)
    assert ended.is_set()


def test_what_it_raises_is_the_next_calls_error_and_the_save_stands(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: SaveResult) -> None:
        raise OSError(28, "No space left on device")

    handle = client.async_save(state(), checkpoint_id="/x/y", on_commit=broken)
    assert handle.result(BOUND_S).checkpoint_id == "/x/y"
    with pytest.raises(
        CommitCallbackError, match=r"broken of /x/y, which is committed, failed: .*No space"
    ):
        client.wait_all(BOUND_S)
    assert "No space left on device" in caplog.text
    client.save(state(), checkpoint_id="/x/z")


def test_it_may_wait_for_all_other_saves(client: Client) -> None:
    waited = threading.Event()

    def wait(_: SaveResult) -> None:
        client.wait_all(BOUND_S)
        waited.set()

    client.async_save(state(), checkpoint_id="/x/y", on_commit=wait)
    client.wait_all(BOUND_S)
    assert waited.is_set()


def test_each_may_wait_for_all_saves_while_later_ones_have_yet_to_run(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = False
    waited: list[SaveResult] = []

    def wait(result: SaveResult) -> None:
        client.wait_all(BOUND_S)
        waited.append(result)

    for name in ("y", "z"):
        client.async_save(state(), checkpoint_id=f"/x/{name}", on_commit=wait)
    sidecar.wait_for(lambda: len(sidecar.asked(sidecar_pb2.HandOverRequest)) == 2)
    for request in sidecar.asked(sidecar_pb2.HandOverRequest):
        sidecar.send_status(request.context.save, save_pb2.SAVE_STATE_COMMITTED)
    client.wait_all(BOUND_S)
    assert len(waited) == 2


def test_a_done_callback_may_not_wait_for_what_its_thread_ends(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = False
    handle = client.async_save(state(), checkpoint_id="/x/y")
    refused: list[str] = []

    def call(_: object) -> None:
        for function in (client.wait_all, client.close, lambda: client.save(state(), "/x/z")):
            with pytest.raises(InvalidRequestError, match="use add_commit_callback") as raised:
                function()
            refused.append(str(raised.value))
        # Ends only itself.
        sys.exit(1)

    handle.add_done_callback(call)
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)))
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    sidecar.send_status(request.context.save, save_pb2.SAVE_STATE_COMMITTED)
    client.wait_all(BOUND_S)
    assert len(refused) == 3
    sidecar.commit = True
    client.save(state(), checkpoint_id="/x/z")


@pytest.mark.parametrize(
    ("others", "kind"),
    [
        ((), CommitCallbackError),
        ((SaveAbortedError("aborted"),), SaveAbortedError),
        ((SaveAbortedError("aborted"), InDoubtError("in doubt")), InDoubtError),
    ],
)
def test_its_error_hides_no_failed_save(
    others: tuple[PannierError, ...], kind: type[PannierError]
) -> None:
    unretrieved = UnretrievedErrors()
    for error in (CommitCallbackError("no room for meta.pt"), *others):
        outcome = Outcome()
        outcome.fail(error)
        unretrieved.add(outcome)
    with pytest.raises(kind, match=r"no room for meta\.pt") as raised:
        unretrieved.raise_all()
    assert type(raised.value) is kind
    assert all(str(error) in str(raised.value) for error in others)


def test_callbacks_run_in_the_order_of_the_commits() -> None:
    callbacks = CommitCallbacks(UnretrievedErrors())
    begun, go_on = threading.Event(), threading.Event()
    order: list[int] = []

    def first(_: SaveResult) -> None:
        begun.set()
        assert go_on.wait(BOUND_S)
        order.append(0)

    callbacks.start(first, RESULT)
    assert begun.wait(BOUND_S)
    for number in range(1, 20):
        callbacks.start(lambda _, number=number: order.append(number), RESULT)
    assert not order
    go_on.set()
    assert callbacks.wait(BOUND_S)
    assert order == list(range(20))
