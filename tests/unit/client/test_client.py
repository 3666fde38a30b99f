"""The client's promises to the training loop, against a scripted sidecar."""

import importlib
import inspect
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import pannier.client as client_package
from pannier.client import default as process
from pannier.client.client import Client
from pannier.client.config import Settings
from pannier.client.dcp.storage_writer import StorageWriter
from pannier.client.engine import engine
from pannier.client.identity import Group, World
from pannier.client.saves.call import SaveCall
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.v1 import save_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    BusyError,
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    PannierError,
    SaveAbortedError,
    SaveSkippedError,
    UnavailableError,
)
from support.actors.scripted_sidecar import ScriptedSidecar, wait_until
from support.processes.cli import Result, run_python
from support.processes.daemons import clean_environment
from support.processes.stretch import BOUND_S


@pytest.fixture
def client(sidecar: ScriptedSidecar) -> Iterator[Client]:
    made = Client(Settings(sidecar=sidecar.address))
    yield made
    sidecar.stall_at.clear()
    with suppress(PannierError):
        made.close()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of two; the sidecar answers for the other."""
    monkeypatch.setattr(World, "group", lambda self, _: Group((0, 1), 0))


def state(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((size,), value), "step": torch.tensor(3), "note": {"a": [1, 2]}}


def held(sidecar: ScriptedSidecar) -> bytes:
    return b"".join(bytes(spool.data) for _, spool in sorted(sidecar.files.items()))


def failures(sidecar: ScriptedSidecar) -> list[save_pb2.Failure]:
    return [request.failure for request in sidecar.asked(sidecar_pb2.FailRequest)]


def numbers(sidecar: ScriptedSidecar, kind: type[Any]) -> list[int]:
    return [request.context.save.number for request in sidecar.asked(kind)]


class BrokenPlanner(DefaultSavePlanner):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def create_local_plan(self) -> Any:
        if self._where == "create_local_plan":
            raise RuntimeError("no plan today")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        if self._where == "resolve_data":
            raise RuntimeError("no data today")
        return super().resolve_data(write_item)


# Saving.


def test_the_loop_may_change_everything_when_the_call_has_returned(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    values = state(1.25)
    handle = client.async_save(values, checkpoint_id="/x/step-1")
    values["w"].fill_(7)
    values["note"]["a"].append("later")
    assert handle.staging_completion.done()
    result = handle.result(BOUND_S)
    assert torch.full((1000,), 1.25).numpy().tobytes() in held(sidecar)
    assert b"later" not in held(sidecar)
    assert result.checkpoint_id == "/x/step-1"
    assert set(result.seconds) == {"plan", "stage", "ingest", "commit"}


def test_the_first_save_plans_while_the_sidecar_is_looked_for(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = threading.Event()
    plans = 0

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            nonlocal plans
            plans += 1
            planned.set()
            return super().create_local_plan()

    connect = SidecarClient.connect

    def connect_after_plan(*arguments: Any, **named: Any) -> SidecarClient:
        assert planned.wait(BOUND_S), "the plan waits for the sidecar"
        return connect(*arguments, **named)

    monkeypatch.setattr(SidecarClient, "connect", connect_after_plan)
    client.save(state(), checkpoint_id="/x/step-1", planner=Planner())
    assert plans == 1


def test_what_a_planner_raises_while_the_sidecar_is_looked_for_ends_the_first_save_alone(
    client: Client, sidecar: ScriptedSidecar, two_ranks: None
) -> None:
    with pytest.raises(RuntimeError, match="no plan today"):
        client.async_save(
            state(), checkpoint_id="/x/step-1", planner=BrokenPlanner("create_local_plan")
        )
    assert "no plan today" in failures(sidecar)[0].message
    client.save(state(), checkpoint_id="/x/step-2")


def test_save_waits_for_the_commit(client: Client) -> None:
    assert client.save(state(), checkpoint_id="/x/step-1").bytes > 4000


def test_advice_is_by_the_committed_saves_and_the_slowest_rank(
    client: Client, sidecar: ScriptedSidecar, two_ranks: None
) -> None:
    assert client.advice(mtbf=3600) is None
    with pytest.raises(InvalidRequestError, match="mean time between failures of 0 s"):
        client.advice(mtbf=timedelta())
    with pytest.raises(InvalidRequestError, match="mtbf='6h': give seconds or a timedelta"):
        client.advice(mtbf="6h")  # type: ignore[arg-type]
    client.save(state(), checkpoint_id="/x/step-1")
    first = client.advice()
    assert first is not None
    assert 0 < first.cost.stalled_s < first.cost.ingested_s <= first.cost.durable_s < BOUND_S
    assert (first.saves, first.interval_s) == (1, None)
    sidecar.commit = False
    for step, stalled_s in ((2, 11.0), (3, 12.0)):
        handle = client.async_save(state(), checkpoint_id=f"/x/step-{step}")
        sidecar.wait_for(lambda: len(sidecar.asked(sidecar_pb2.HandOverRequest)) == step)  # noqa: B023
        sidecar.send_status(
            sidecar.asked(sidecar_pb2.HandOverRequest)[-1].context.save,
            save_pb2.SAVE_STATE_COMMITTED,
            ranks=[save_pb2.RankStatus(rank=1, stalled_s=stalled_s)],
        )
        handle.result(BOUND_S)
    found = client.advice(mtbf=timedelta(hours=6))
    assert found is not None
    assert (found.saves, found.mtbf_s, found.cost.stalled_s) == (3, 21600, 11.0)


def test_saves_are_numbered_from_one(client: Client, sidecar: ScriptedSidecar) -> None:
    for step in range(3):
        client.save(state(), checkpoint_id=f"/x/step-{step}")
    assert numbers(sidecar, sidecar_pb2.PlanRequest) == [1]
    assert numbers(sidecar, sidecar_pb2.HandOverRequest) == [1, 2, 3]


def test_arenas_are_used_again(client: Client) -> None:
    kept = []
    for step in range(3):
        client.save(state(), checkpoint_id=f"/x/step-{step}")
        kept.append({mapping.address for mapping in client.saves.pool._free})
    assert kept[0] == kept[1] == kept[2] != set()


def test_a_relative_path_is_the_trainers(client: Client) -> None:
    result = client.save(state(), checkpoint_id="runs/step-1")
    assert result.checkpoint_id == os.path.abspath("runs/step-1")


def test_the_processs_state_is_left_alone(client: Client) -> None:
    torch.manual_seed(5)
    before = (
        torch.get_rng_state(),
        torch.get_num_threads(),
        torch.serialization.get_crc32_options(),
        torch.get_default_dtype(),
        threading.excepthook,
        [signal.getsignal(number) for number in signal.valid_signals()],
    )
    client.save(state(), checkpoint_id="/x/y")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (
        torch.get_num_threads(),
        torch.serialization.get_crc32_options(),
        torch.get_default_dtype(),
        threading.excepthook,
        [signal.getsignal(number) for number in signal.valid_signals()],
    ) == before[1:]


def test_the_functions_take_torchs_keywords_and_the_clients() -> None:
    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters) - {"self"}

    assert names(dcp.async_save) <= names(client_package.async_save)
    assert names(client_package.async_save) == names(Client.async_save)
    assert names(dcp.save) <= names(client_package.save)
    assert names(client_package.save) <= names(Client.async_save)
    for function in (client_package.async_save, client_package.save, client_package.load):
        second = list(inspect.signature(function).parameters.values())[1]
        assert second.name == (
            "storage_reader" if function.__name__ == "load" else "storage_writer"
        )
        assert second.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    # Also when the modules of these names were imported.
    load = importlib.import_module("pannier.client").load
    assert inspect.isfunction(load)
    # As for a process that is spawned.
    assert pickle.loads(pickle.dumps(load)) is load
    assert all(hasattr(client_package, name) for name in client_package.__all__)


def test_extra_files_are_streamed_beside_the_state(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    content = bytearray(b"meta")
    handle = client.async_save(
        state(), checkpoint_id="/x/1", extra_files={"meta.pt": content, "rng/0": b"", "b": b"b"}
    )
    content[:] = b"late"
    handle.result(BOUND_S)
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    name = object_names.extra_file(request.attempt, 0)
    assert [(each.name, each.file, each.offset, each.size) for each in request.extra_files] == [
        ("meta.pt", name, 0, 4),
        ("rng/0", "", 0, 0),
        ("b", name, 4, 1),
    ]
    assert bytes(sidecar.files[name].data) == b"metab"
    assert request.files[-1].name == name
    client.save(state(), checkpoint_id="/x/2")
    assert not sidecar.asked(sidecar_pb2.HandOverRequest)[1].extra_files


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"async_stager": object()}, "async_stager"),
        ({"async_checkpointer_type": AsyncCheckpointerType.PROCESS}, "async_checkpointer_type"),
        ({"use_collectives": False}, "use_collectives"),
        ({"overwrite": "yes"}, "None, True or False"),
        ({"extra_files": ["meta.pt"]}, "extra_files is a list"),
        ({"extra_files": {"meta.pt": "text"}}, r"extra_files\['meta.pt'\] is a str"),
        ({"extra_files": {"../meta.pt": b""}}, r"'../meta.pt' can't be the name"),
        ({"extra_files": {"large": bytes((32 << 20) + 1)}}, "33554433 bytes together, at most"),
        ({"on_busy": "panic"}, "'wait', 'skip' or 'raise'"),
        ({"timeout": 0}, "seconds above 0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": "60"}, "timeout='60': give seconds"),
        ({"timeout": float("inf")}, "7 days"),
        ({"timeout": 7 * 86400 + 1}, "7 days"),
        ({"checkpoint_id": None}, "checkpoint_id is missing"),
        ({"checkpoint_id": ""}, "neither a path nor a URL"),
        ({"checkpoint_id": "gs://bucket"}, "not an absolute path or a URL"),
        ({"checkpoint_id": "gs://bucket/../y"}, "contains '..'"),
        ({"checkpoint_id": "/x/y", "storage_writer": object()}, "client.StorageWriter"),
        ({"storage_writer": FileSystemWriter("/x/y")}, "FileSystemWriter.*client.StorageWriter"),
        ({"storage_writer": "/x/y"}, "storage_writer='/x/y' is a path: give checkpoint_id='/x/y'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    client: Client, sidecar: ScriptedSidecar, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        client.async_save(state(), **{"checkpoint_id": "/x/y", **arguments})
    assert isinstance(raised.value, InvalidRequestError)
    # The number is taken, and the next save works.
    client.save(state(), checkpoint_id="/x/z")
    assert numbers(sidecar, sidecar_pb2.PlanRequest) == [2]


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("default", [True, False])
def test_a_writer_may_be_given_by_position(
    client: Client, monkeypatch: pytest.MonkeyPatch, call: str, default: bool
) -> None:
    monkeypatch.setattr(process, "_default", client)
    save = getattr(client_package if default else client, call)
    ended = save(state(), StorageWriter("/x/step-1", client=client))
    result = ended if call == "save" else ended.result(BOUND_S)
    assert result.checkpoint_id == "/x/step-1"
    for path in ("/x/step-2", Path("/x/step-2")):
        with pytest.raises(InvalidRequestError, match="is a path: give checkpoint_id='/x/step-2'"):
            save(state(), path)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 7 * 86400 + 1, "60"])
def test_a_writers_timeout_is_as_limited(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="7 days"):
        StorageWriter("/x/y", timeout=timeout)


def test_torchs_defaults_are_fine(client: Client) -> None:
    client.async_save(
        state(),
        checkpoint_id="/x/y",
        async_checkpointer_type=AsyncCheckpointerType.THREAD,
        async_stager=None,
        use_collectives=True,
        storage_writer=None,
    ).result(BOUND_S)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("where", ["create_local_plan", "resolve_data"])
def test_a_planner_that_raises_ends_the_save_on_all_ranks(
    client: Client, sidecar: ScriptedSidecar, where: str
) -> None:
    with pytest.raises(Exception, match="today"):
        client.async_save(state(), checkpoint_id="/x/y", planner=BrokenPlanner(where))
    (failure,) = failures(sidecar)
    assert failure.kind == save_pb2.FAILURE_KIND_CLIENT
    assert "today" in failure.message
    # No handle was returned, so nothing is left to be raised.
    client.wait_all(BOUND_S)
    client.save(state(), checkpoint_id="/x/z")
    assert numbers(sidecar, sidecar_pb2.HandOverRequest) == [2]


class OwnError(Exception):
    """One that can't be copied."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Runs:
    """A ``Stateful``, a pickled object or a planner's method: it raises what it has."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Pickled:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        raise self._error


class Planned(DefaultSavePlanner):
    def __init__(self, method: str, error: Exception) -> None:
        super().__init__()
        self._error = error
        setattr(self, method, self._raise)

    def _raise(self, *_: Any) -> Any:
        raise self._error


OWN_CODE = {
    "state_dict": (
        lambda error: {"state_dict": {"model": Runs(error)}},
        r"state_dict\(\) of 'model'",
    ),
    "pickling": (lambda error: {"state_dict": {"note": Pickled(error)}}, "'note' can't be saved"),
    **{
        method: (
            lambda error, method=method: {
                "state_dict": state(),
                "planner": Planned(method, error),
            },
            f"planner .*Planned: {method}",
        )
        for method in ("set_up_planner", "create_local_plan", "finish_plan")
    },
    "resolve_data": (
        lambda error: {"state_dict": state(), "planner": Planned("resolve_data", error)},
        "'w' can't be saved",
    ),
}


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), OwnError(1, 2)], ids=repr)
@pytest.mark.parametrize("where", OWN_CODE)
def test_what_the_callers_own_code_raises_reaches_it_as_it_is(
    client: Client, sidecar: ScriptedSidecar, where: str, error: Exception
) -> None:
    make, says = OWN_CODE[where]
    error.__notes__ = []  # type: ignore[attr-defined]
    with pytest.raises(type(error), match=says) as raised:
        client.async_save(checkpoint_id="/x/y", **make(error))  # type: ignore[no-untyped-call]
    assert raised.value is error
    assert any("/x/y, which it ended on all ranks" in note for note in error.__notes__)
    # The other ranks get the error's text.
    (failure,) = failures(sidecar)
    assert f"{type(error).__name__}: {error}" in failure.message
    assert re.search(says, failure.message)
    client.save(state(), checkpoint_id="/x/z")


@pytest.mark.usefixtures("two_ranks")
def test_it_does_when_the_plan_is_known(client: Client, sidecar: ScriptedSidecar) -> None:
    client.save({**state(), "note": {"a": 1}}, checkpoint_id="/x/x")
    error = MemoryError("no room")
    with pytest.raises(MemoryError, match=r"'note\.a' can't be saved") as raised:
        client.async_save({**state(), "note": {"a": Pickled(error)}}, checkpoint_id="/x/y")
    assert raised.value is error


def test_a_single_rank_has_no_other_to_notify(
    client: Client, sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Any) -> None:
        raise InvalidRequestError("no such scheme")

    sidecar.on.update({"Plan": refuse, "Fail": refuse})
    with pytest.raises(InvalidRequestError, match="no such scheme"):
        client.async_save(state(), checkpoint_id="gs://x/y")
    assert not [each for each in caplog.records if "has waited" not in each.getMessage()]


@pytest.mark.usefixtures("two_ranks")
def test_a_wrong_argument_on_one_rank_is_reported_to_the_others(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    with pytest.raises(InvalidRequestError):
        client.async_save(state(), checkpoint_id="/x/y", use_collectives=False)
    (request,) = sidecar.asked(sidecar_pb2.FailRequest)
    assert request.context.save.number == 1
    assert "use_collectives" in request.failure.message


@pytest.mark.usefixtures("two_ranks")
def test_an_abort_while_planning_is_raised_from_the_call(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    def abort(_: Any) -> None:
        raise SaveAbortedError("save was aborted", [save_pb2.Failure(rank=1, message="left")])

    def abort_with_status_first(request: Any) -> None:
        sidecar.abort(request.context, save_pb2.Failure(rank=1, message="left"))
        time.sleep(0.2)
        abort(request)

    for root, hook in (("/x", abort), ("/y", abort_with_status_first)):
        sidecar.on["Plan"] = hook
        with pytest.raises(SaveAbortedError) as raised:
            client.async_save(state(), checkpoint_id=f"{root}/y")
        assert raised.value.failures[1].message == "left"
        assert not failures(sidecar)
        del sidecar.on["Plan"]
        # It was raised once: neither now nor by the next call again.
        client.save(state(), checkpoint_id=f"{root}/y")


def test_no_sidecar_is_an_error_from_the_call() -> None:
    with (
        Client(Settings(sidecar="unix:///tmp/there-is-none.sock")) as client,
        pytest.raises(UnavailableError, match=r"there-is-none\.sock"),
    ):
        client.async_save(state(), checkpoint_id="/x/y")


def test_a_save_of_torch_ends_when_the_client_is_closed_meanwhile(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "ABORT_S", 2.0)
    begun = sidecar_pb2.BeginResponse(attempt=sidecar.attempt)

    async def begin(*_: Any) -> sidecar_pb2.BeginResponse:
        return begun

    def fails(*_: Any) -> None:
        raise PannierError("disk full")

    async def refuse(*_: Any) -> None:
        fails()

    monkeypatch.setattr(SidecarClient, "begin", begin)
    # No ABORT comes: the save ends after ABORT_S, by itself.
    sidecar.on["HandOver"] = fails
    monkeypatch.setattr(SidecarClient, "fail", refuse)
    raised: list[BaseException] = []

    def save() -> None:
        writer = StorageWriter("/x/y", client=client)
        try:
            dcp.save(state(), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raised.append(error)

    saving = threading.Thread(target=save, daemon=True)
    saving.start()
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)))
    client.close(BOUND_S)
    saving.join(BOUND_S)
    assert not saving.is_alive()
    assert "is in doubt: disk full" in str(raised[0])


def test_close_waits_for_torch_to_finish_what_is_ingested(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = sidecar_pb2.BeginResponse(attempt="i1-a1-g00000000-s1")
    finishing, may_finish = threading.Event(), threading.Event()
    closed: list[bool] = []

    async def begin(*_: Any) -> sidecar_pb2.BeginResponse:
        return begun

    async def finish(session: SidecarClient, *_: Any) -> None:
        finishing.set()
        await engine().in_thread(lambda: may_finish.wait(BOUND_S))
        closed.append(session.is_closed)

    monkeypatch.setattr(SidecarClient, "begin", begin)
    monkeypatch.setattr(SidecarClient, "finish", finish)
    writer = StorageWriter("/x/y", client=client)
    saving = threading.Thread(
        target=lambda: dcp.save(state(), storage_writer=writer, no_dist=True), daemon=True
    )
    saving.start()
    assert finishing.wait(BOUND_S)
    with pytest.raises(DeadlineError, match=r"a dcp\.save with this client has not ended"):
        client.close(0.2)
    may_finish.set()
    client.close(BOUND_S)
    saving.join(BOUND_S)
    assert closed == [False]


def test_the_connection_of_an_earlier_process_group_ends_with_its_last_save(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar.commit = False
    first = client.async_save(state(), checkpoint_id="/x/step-1")
    member = client.memberships._current[True]
    old = member.sidecar()
    monkeypatch.setattr(member.world, "is_current", lambda: False)
    second = client.async_save(state(), checkpoint_id="/x/step-2")
    sidecar.wait_for(lambda: len(sidecar.asked(sidecar_pb2.HandOverRequest)) == 2)
    assert not old.is_closed
    for request in sidecar.asked(sidecar_pb2.HandOverRequest):
        sidecar.send_status(request.context.save, save_pb2.SAVE_STATE_COMMITTED)
    first.result(BOUND_S)
    second.result(BOUND_S)
    wait_until(lambda: old.is_closed)
    assert not client.memberships._current[True].sidecar().is_closed


# Several processes without a group.


def save_by_a_writer(client: Client, **arguments: Any) -> None:
    path = arguments.pop("checkpoint_id")
    StorageWriter(path, client=client, **arguments).storage_meta()


CALLS_OF_A_SAVE = {
    "async_save": lambda client, **more: client.async_save(state(), **more),
    "save": lambda client, **more: client.save(state(), **more),
    "prepare": lambda client, checkpoint_id, **more: client.prepare(state(), checkpoint_id, **more),
    "StorageWriter": save_by_a_writer,
}


@pytest.mark.parametrize("call", CALLS_OF_A_SAVE)
def test_ranks_of_a_launcher_without_a_group_are_not_each_a_world_of_one(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save = CALLS_OF_A_SAVE[call]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        InvalidRequestError, match=r"rank 1 of 4 .*init_process_group.*no_dist=True"
    ):
        save(client, checkpoint_id="/x/y")
    assert not sidecar.requests
    save(client, checkpoint_id="/x/y", no_dist=True)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4"},
        {"RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": ""},
    ],
    ids=str,
)
def test_a_process_alone_is_not_refused_for_stray_variables(
    client: Client, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client.save(state(), checkpoint_id="/x/y")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_of_a_launcher_without_a_group_may_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    newest = client_package.latest(tmp_path)
    assert newest == str(tmp_path / "step-1")
    loaded = {"w": torch.zeros(3)}
    client_package.load(loaded, checkpoint_id=newest)
    assert torch.equal(loaded["w"], torch.ones(3))


# Unretrieved errors.


def fail_one(client: Client, sidecar: ScriptedSidecar) -> Any:
    sidecar.commit = False
    handle = client.async_save(state(), checkpoint_id="/x/y")
    (request,) = sidecar.asked(sidecar_pb2.PlanRequest)[-1:]
    sidecar.abort(request.context, save_pb2.Failure(rank=1, host="b", message="disk full"))
    assert handle.wait(BOUND_S)
    wait_until(lambda: not client.saves)
    sidecar.commit = True
    return handle


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("call", ["async_save", "save", "prepare"])
def test_an_unretrieved_error_is_raised_once_by_the_next_call_which_saves_nevertheless(
    client: Client, sidecar: ScriptedSidecar, call: str
) -> None:
    fail_one(client, sidecar)
    where = {"checkpoint_root": "/x"} if call == "prepare" else {"checkpoint_id": "/x/z"}
    with pytest.raises(SaveAbortedError, match="disk full") as raised:
        getattr(client, call)(state(), **where)
    assert "whose own save is made all the same" in raised.value.__notes__[0]
    client.wait_all(BOUND_S)
    assert not failures(sidecar)
    client.save(state(), checkpoint_id="/x/z")
    made = [3] if call == "prepare" else [2, 3]
    assert numbers(sidecar, sidecar_pb2.HandOverRequest)[-len(made) :] == made


@pytest.mark.usefixtures("two_ranks")
def test_an_unretrieved_error_stays_for_the_next_call_where_this_one_raises_its_own(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    fail_one(client, sidecar)
    with pytest.raises(InvalidRequestError, match="on_busy"):
        client.async_save(state(), checkpoint_id="/x/z", on_busy="never")
    with pytest.raises(SaveAbortedError, match="disk full"):
        client.async_save(state(), checkpoint_id="/x/z")
    client.wait_all(BOUND_S)


@pytest.mark.usefixtures("two_ranks")
def test_what_is_no_function_is_refused_as_commit_callback_at_the_call(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="on_commit=5"):
        client.async_save(state(), checkpoint_id="/x/z", on_commit=5)  # type: ignore[arg-type]


def test_an_unasked_error_is_raised_by_wait_all_and_close(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    fail_one(client, sidecar)
    with pytest.raises(SaveAbortedError, match="disk full") as raised:
        client.wait_all(BOUND_S)
    assert raised.value.failures[1].host == "b"
    client.wait_all(BOUND_S)

    sidecar.commit = False
    handles = [client.async_save(state(), checkpoint_id=f"/x/{name}") for name in "ab"]

    # They are handed over in any order.
    def asked() -> list[sidecar_pb2.HandOverRequest]:
        return [r for r in sidecar.asked(sidecar_pb2.HandOverRequest) if r.HasField("claim")]

    sidecar.wait_for(lambda: len(asked()) == 2)
    requests = sorted(asked(), key=lambda request: request.context.save.number)
    for handle, request in zip(handles, requests, strict=True):
        sidecar.abort(request.context, save_pb2.Failure(rank=1, message="disk full"))
        assert handle.wait(BOUND_S)
    wait_until(lambda: not client.saves)
    with pytest.raises(SaveAbortedError, match=r"/x/a .*; and .*/x/b "):
        client.close()
    client.close()


@pytest.mark.parametrize("call", ["load", "latest", "list"])
@pytest.mark.parametrize("default", [True, False])
def test_an_unasked_error_is_raised_by_reading_before_it_reads(
    client: Client,
    sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    call: str,
    default: bool,
) -> None:
    values = {"w": torch.zeros(3)}
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    arguments: dict[str, Any] = {"root": tmp_path}
    if call == "load":
        arguments = {"state_dict": values, "checkpoint_id": tmp_path / "step-1"}
    if default:
        monkeypatch.setattr(process, "_default", client)
    read = getattr(client_package if default else client, call)
    fail_one(client, sidecar)
    with pytest.raises(SaveAbortedError, match="disk full"):
        read(**arguments)
    assert not values["w"].any()
    found = read(**arguments)
    assert values["w"].all() if call == "load" else "step-1" in str(found)


def test_reading_makes_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_default", None)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (found,) = client_package.list(tmp_path)
    assert client_package.latest(tmp_path) == found.checkpoint_id
    values = {"w": torch.zeros(3)}
    client_package.load(values, checkpoint_id=found.checkpoint_id)
    assert values["w"].all()
    assert process._default is None


def test_an_error_that_was_asked_for_is_not_raised_again(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    handle = fail_one(client, sidecar)
    for _ in range(2):
        with pytest.raises(SaveAbortedError, match="disk full"):
            handle.result()
    client.wait_all(BOUND_S)


# Busy.


@pytest.fixture
def busy(sidecar: ScriptedSidecar) -> Iterator[Client]:
    """A client whose only arena is not ingested until the sidecar goes on."""
    made = Client(Settings(sidecar=sidecar.address, max_in_flight=1))
    hold = threading.Event()
    sidecar.on["HandOver"] = lambda _: hold.wait(BOUND_S)
    made.hold = hold  # type: ignore[attr-defined]
    made.async_save(state(), checkpoint_id="/x/first")
    yield made
    hold.set()
    with suppress(PannierError):
        made.close()


@pytest.mark.usefixtures("two_ranks")
def test_skip_gives_a_handle_that_says_so_and_notifies_the_others(
    busy: Client, sidecar: ScriptedSidecar
) -> None:
    handle = busy.async_save(state(), checkpoint_id="/x/second", on_busy="skip")
    skipped = sidecar.asked(sidecar_pb2.FailRequest)[0].context.save
    assert handle.status().id == object_names.save_text(skipped)
    assert handle.status().state == "SKIPPED"
    with pytest.raises(SaveSkippedError, match="hold their staging memory"):
        handle.result(0)
    assert [failure.kind for failure in failures(sidecar)] == [save_pb2.FAILURE_KIND_SKIPPED]
    assert sidecar.asked(sidecar_pb2.FailRequest)[0].context.save.number == 2
    busy.hold.set()  # type: ignore[attr-defined]
    busy.wait_all(BOUND_S)
    busy.save(state(), checkpoint_id="/x/third")


def test_raise_raises(busy: Client) -> None:
    with pytest.raises(BusyError, match="PANNIER_MAX_IN_FLIGHT"):
        busy.async_save(state(), checkpoint_id="/x/second", on_busy="raise")


def test_wait_waits(busy: Client) -> None:
    began = time.monotonic()
    threading.Timer(0.3, busy.hold.set).start()  # type: ignore[attr-defined]
    busy.async_save(state(), checkpoint_id="/x/second").result(BOUND_S)
    assert time.monotonic() - began > 0.25


def test_a_save_that_waits_for_room_says_so(
    busy: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "WAIT_WARNING_S", 0.1)

    def make_room() -> None:
        wait_until(lambda: "for room" in caplog.text)
        busy.hold.set()  # type: ignore[attr-defined]

    thread = threading.Thread(target=make_room)
    thread.start()
    with caplog.at_level("INFO", "pannier"):
        handle = busy.async_save(state(), checkpoint_id="/x/second")
        handle.result(BOUND_S)
    thread.join()
    waits = [r.message for r in caplog.records if "async_save to /x/second has waited" in r.message]
    # The first may be for the sidecar.
    waits = [each for each in waits if "PANNIER_MAX_IN_FLIGHT" in each]
    assert "/x/first" in waits[0]
    (line,) = [r.message for r in caplog.records if r.message.startswith("saved /x/second, ")]
    # The wait is part of the stall.
    stalled = re.search(r"from 1 rank, stalled ([0-9.]+) (m?s), durable after ", line)
    assert stalled is not None
    assert float(stalled[1]) >= (100 if stalled[2] == "ms" else 0.1)


def test_what_a_save_waited_for_room_counts(busy: Client, sidecar: ScriptedSidecar) -> None:
    threading.Timer(1.5, busy.hold.set).start()  # type: ignore[attr-defined]
    busy.async_save(state(), checkpoint_id="/x/second", timeout=20).result(BOUND_S)
    request = sidecar.asked(sidecar_pb2.HandOverRequest)[-1]
    assert request.claim.timeout_s < 19
    assert request.save_timeout_s < 19


def test_wait_has_a_deadline(busy: Client) -> None:
    with pytest.raises(DeadlineError, match=r"no staging memory became free within .*/x/first"):
        busy.async_save(state(), checkpoint_id="/x/second", timeout=0.2)


@pytest.mark.usefixtures("two_ranks")
def test_a_skip_elsewhere_skips_here(client: Client, sidecar: ScriptedSidecar) -> None:
    def skip(_: Any) -> None:
        raise SaveSkippedError("rank 1 skipped", [save_pb2.Failure(rank=1)])

    sidecar.on["Plan"] = skip
    handle = client.async_save(state(), checkpoint_id="/x/y", on_busy="skip")
    with pytest.raises(SaveSkippedError, match="rank 1 skipped"):
        handle.result(0)
    with pytest.raises(SaveSkippedError):
        client.async_save(state(), checkpoint_id="/x/y")
    client.wait_all(BOUND_S)


# Ending.


def test_wait_all_has_a_deadline_that_names_the_saves(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = False
    client.async_save(state(), checkpoint_id="/x/y")
    with pytest.raises(DeadlineError, match="to /x/y"):
        client.wait_all(0.2)


def test_close_waits_until_ingested_and_handles_still_resolve(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    sidecar.commit = False
    with client:
        handle = client.async_save(state(size=5_000_000), checkpoint_id="/x/y")
    (request,) = sidecar.asked(sidecar_pb2.HandOverRequest)
    assert not handle.done()
    sidecar.send_status(request.context.save, save_pb2.SAVE_STATE_COMMITTED)
    handle.result(BOUND_S)
    session = client.memberships._current[True]._sidecar
    assert session is not None
    wait_until(lambda: session.is_closed)
    with pytest.raises(InvalidRequestError, match="closed"):
        client.async_save(state(), checkpoint_id="/x/y")


def test_a_close_waits_for_a_save_that_is_still_planned_or_staged(
    client: Client, sidecar: ScriptedSidecar
) -> None:
    go_on = threading.Event()
    sidecar.on["Plan"] = lambda _: go_on.wait(BOUND_S)  # type: ignore[assignment]
    handles: list[Any] = []

    def save() -> None:
        handles.append(client.async_save(state(), checkpoint_id="/x/y"))

    saving, closing = threading.Thread(target=save), threading.Thread(target=client.close)
    saving.start()
    sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.PlanRequest)))
    closing.start()
    wait_until(lambda: is_refused(client))
    go_on.set()
    saving.join(BOUND_S)
    closing.join(BOUND_S)
    (handle,) = handles
    assert handle.result(BOUND_S).checkpoint_id == "/x/y"


def is_refused(client: Client) -> bool:
    """Whether a close has begun, which refuses saves to come."""
    try:
        client._ending.check_open()
    except InvalidRequestError:
        return True
    return False


def test_a_save_that_a_close_overtakes_is_refused(
    client: Client, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would use a connection that a closed client no longer has."""
    client.save(state(), checkpoint_id="/x/step-1")
    context = SaveCall.context

    def overtaken(call: SaveCall, *arguments: Any) -> Any:
        client.close(BOUND_S)
        return context(call, *arguments)

    monkeypatch.setattr(SaveCall, "context", overtaken)
    with pytest.raises(InvalidRequestError, match="the client is closed"):
        client.async_save(state(), checkpoint_id="/x/step-2")
    assert not client.saves


def test_the_blocks_own_error_goes_first(client: Client, sidecar: ScriptedSidecar) -> None:
    def loop() -> None:
        with client:
            fail_one(client, sidecar)
            raise KeyError("loop")

    with pytest.raises(KeyError, match="loop"):
        loop()


def test_a_close_after_one_that_timed_out_waits_again(busy: Client) -> None:
    for _ in range(2):
        with pytest.raises(DeadlineError, match=r"after 0\.05 s; not yet ingested: .*/x/first"):
            busy.close(0.05)
    with pytest.raises(InvalidRequestError, match=r"is closed: .* after another close\(\)"):
        busy.async_save(state(), checkpoint_id="/x/second")
    busy.hold.set()  # type: ignore[attr-defined]
    busy.close(BOUND_S)
    with pytest.raises(InvalidRequestError, match=r"is closed: make a new one$"):
        busy.async_save(state(), checkpoint_id="/x/second")
    busy.close(0)


def test_the_default_client_stays_until_it_is_closed(
    busy: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_default", busy)
    with pytest.raises(DeadlineError, match="not yet ingested"):
        process.close(0.05)
    with pytest.raises(DeadlineError, match="still in progress"):
        process.default_client().wait_all(0.05)
    with pytest.raises(InvalidRequestError, match="is closed"):
        process.default_client().async_save(state(), checkpoint_id="/x/second")
    with pytest.raises(DeadlineError, match="not yet ingested"):
        process.close(0.05)
    busy.hold.set()  # type: ignore[attr-defined]
    process.close(BOUND_S)
    assert process._default is None


def test_configure_comes_first(monkeypatch: pytest.MonkeyPatch, sidecar: ScriptedSidecar) -> None:
    monkeypatch.setattr(process, "_overrides", {})
    process.configure(sidecar=sidecar.address, job="mine")
    with pytest.raises(ConfigurationError, match="max_in_flight"):
        process.configure(max_in_flight=-1)
    made = process.default_client()
    assert made.settings.job == "mine"
    assert made.settings.max_in_flight == 2
    with pytest.raises(ConfigurationError, match="before the first use"):
        process.configure(job="other")
    process.close()
    assert process.default_client() is not made
    process.close()


def run(sidecar: ScriptedSidecar, code: str) -> Result:
    head = (
        "import os, sys, torch\n"
        "from pannier.client import default_client\n"
        "client = default_client()\n"
        "state = {'w': torch.ones(20_000_000)}\n"
    )
    return run_python(head + code, env=clean_environment({"PANNIER_SIDECAR": sidecar.address}))


def test_a_normal_exit_waits_until_ingested(sidecar: ScriptedSidecar) -> None:
    done = run(sidecar, "client.async_save(state, checkpoint_id='/x/y')")
    assert done.code == 0, done.err
    # Whether it is committed by then depends on the sidecar, and what takes long on the machine.
    says = (
        r"pannier: (saved /x/y, 76.3 MiB from 1 rank, |handed over y; the daemons commit it$|"
        r"(the exit|async_save to /x/y) has waited )"
    )
    assert all(re.match(says, line) for line in done.err.splitlines()), done.err
    assert len(sidecar.asked(sidecar_pb2.HandOverRequest)) == 1
    assert sum(len(spool.data) for spool in sidecar.files.values()) > 80_000_000


def test_an_exit_that_waits_says_for_what(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    sidecar.on["HandOver"] = lambda _: wait_until(seen.exists)
    done = run(
        sidecar,
        "from pannier.common import timeouts; timeouts.WAIT_WARNING_S = 0.2\n"
        "class Stderr:\n"
        "    def write(self, text):\n"
        "        sys.__stderr__.write(text)\n"
        f"        if 'the exit' in text: open({str(seen)!r}, 'w')\n"
        "    def flush(self): pass\n"
        "sys.stderr = Stderr()\n"
        "client.async_save(state, checkpoint_id='/x/y')\n",
    )
    assert done.code == 0, done.err
    text = r"pannier: the exit has waited \d+ s: for 1 save to be handed over, [\d.]+ \w+ left: save .* to /x/y: "
    assert re.search(text, done.err)


def test_an_error_at_exit_is_seen(sidecar: ScriptedSidecar) -> None:
    def refuse(_: Any) -> None:
        raise SaveAbortedError("rank 1 died")

    sidecar.on["HandOver"] = refuse
    done = run(
        sidecar,
        "from pannier.common import timeouts; timeouts.ABORT_S = 0.1\n"
        "h = client.async_save(state, checkpoint_id='/x/y'); h.wait(60)",
    )
    assert "rank 1 died" in done.err
    # Also where logs go nowhere, and to the process' error reporting.
    quiet = run(
        sidecar,
        "import logging; logging.disable()\n"
        "sys.excepthook = lambda kind, error, _: print('HOOK', kind.__name__, error)\n"
        "from pannier.common import timeouts; timeouts.ABORT_S = 0.1\n"
        "h = client.async_save(state, checkpoint_id='/x/y'); h.wait(60)",
    )
    assert "HOOK SaveAbortedError rank 1 died" in quiet.out


def test_an_error_after_close_is_seen_at_exit_or_by_the_next_close(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    sidecar.commit = False
    closed = tmp_path / "closed"

    def abort(request: sidecar_pb2.HandOverRequest) -> None:
        def later() -> None:
            wait_until(closed.exists)
            sidecar.abort(request.context, save_pb2.Failure(rank=1, message="disk full"))

        threading.Thread(target=later).start()

    sidecar.on["HandOver"] = abort
    for after in ("del c", "try: c.close()\nexcept Exception as e: print('RAISED', e)"):
        closed.unlink(missing_ok=True)
        done = run(
            sidecar,
            "import gc\n"
            "from pannier.client import Client\n"
            "c = Client()\n"
            "handle = c.async_save(state, checkpoint_id='/x/y')\n"
            "c.close()\n"
            f"open({str(closed)!r}, 'w').close()\n"
            "assert handle.wait(60)\n"
            "del handle\n"
            f"{after}\n"
            "gc.collect()\n",
        )
        assert "disk full" in (done.err if after == "del c" else done.out), done


def test_a_forked_child_may_not_save_and_ends_at_once(sidecar: ScriptedSidecar) -> None:
    done = run(
        sidecar,
        "client.async_save(state, checkpoint_id='/x/y').result()\n"
        "sys.stdout.flush()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: client.async_save(state, checkpoint_id='/x/z')\n"
        "    except ValueError as error: print(error); sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
    )
    assert done.code == 0, done.err
    assert "spawn" in done.out
    assert done.out.splitlines()[-1] == "5"


def test_descriptors_are_close_on_exec(sidecar: ScriptedSidecar) -> None:
    # In a process of its own: a gloo group of another test leaves inheritable ones behind.
    done = run(
        sidecar,
        "client.save(state, checkpoint_id='/x/y')\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: inherited = int(name) > 2 and os.get_inheritable(int(name))\n"
        "    except OSError: continue\n"
        "    if inherited: print(os.readlink(f'/proc/self/fd/{name}'))\n",
    )
    assert done.code == 0, done.err
    assert not [line for line in done.out.splitlines() if line.startswith(("socket", "anon"))]
