"""An exception of a signal handler leaves no lock held, at whatever moment it comes."""

import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pannier.client import interrupts
from pannier.client.client import Client
from pannier.client.config import Settings
from pannier.client.console import Wait
from pannier.client.interrupts import Call, Condition, Event, SafeFuture, aside
from pannier.client.saves.save import Save
from pannier.client.staging.host_copy import HostCopies
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import UnavailableError
from support.actors.scripted_sidecar import ScriptedSidecar
from support.processes.cli import Result, run_python
from support.processes.daemons import clean_environment
from support.processes.interrupted import InterruptedByTestError, interrupted, moments

BOUND_S = 60.0
"""By far enough for what takes milliseconds, beside busy neighbours."""


@pytest.fixture(autouse=True)
def grad() -> Iterator[None]:
    """An interruption in the exit of ``torch.no_grad`` leaves gradients off in this process."""
    yield
    torch.set_grad_enabled(True)


def in_another_thread(call: Callable[[], Any]) -> Any:
    """Its answer; fails when a lock that it needs is held for ever."""
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), daemon=True).start()
    return answer.get(timeout=BOUND_S)


# Each primitive, at each moment.


def test_a_condition_is_free_after_an_interruption() -> None:
    def use(condition: Condition) -> None:
        with condition:
            condition.wait_for(lambda: False, 0.001)
            condition.notify_all()

    def notify(condition: Condition) -> bool:
        with condition:
            condition.notify_all()
        return True

    for moment in range(1, moments(lambda: use(Condition())) + 1):
        condition = Condition()
        interrupted(lambda: use(condition), moment)  # noqa: B023
        assert in_another_thread(lambda: notify(condition))  # noqa: B023


def test_events_and_futures_resolve_after_an_interruption() -> None:
    for moment in range(1, moments(lambda: Event().wait(0.001)) + 1):
        event = Event()
        interrupted(lambda: event.wait(0.001), moment)  # noqa: B023
        in_another_thread(event.set)
        assert event.wait(BOUND_S)

    def ask(future: SafeFuture[int]) -> None:
        future.done()
        with pytest.raises(TimeoutError):
            future.result(0.001)

    for moment in range(1, moments(lambda: ask(SafeFuture())) + 1):
        future: SafeFuture[int] = SafeFuture()
        interrupted(lambda: ask(future), moment)  # noqa: B023
        in_another_thread(lambda: future.set_result(5))  # noqa: B023
        assert future.result(BOUND_S) == 5


def test_a_condition_is_one() -> None:
    condition, seen = Condition(), []

    def wait() -> None:
        with condition:
            seen.append(condition.wait_for(lambda: len(seen) > 5, BOUND_S))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(6):
        with condition:
            seen.append(bool(number))
            condition.notify_all()
    for thread in threads:
        thread.join(BOUND_S)
    assert seen[-3:] == [True] * 3
    with condition:
        assert not condition.wait(0.01)
    with pytest.raises(RuntimeError):
        condition.release()


def test_what_is_done_aside_ends_with_its_result_its_error_or_the_callers_interruption() -> None:
    assert aside(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        aside(lambda: 1 / 0)
    ended = threading.Event()

    def handler(*_: Any) -> None:
        raise InterruptedByTestError

    before = signal.signal(signal.SIGUSR1, handler)
    try:

        def work() -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.05)
            ended.set()

        with pytest.raises(InterruptedByTestError):
            aside(work)
        assert ended.wait(BOUND_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_call_aside_is_served_where_only_one_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(interrupts, "_idle", queue.SimpleQueue())
    monkeypatch.setattr(threading.Thread, "start", refuses)
    # Call, as it has a time limit; aside starts the same thread.
    assert Call(lambda: 5).result(BOUND_S) == 5
    assert aside(lambda: 6) == 6
    monkeypatch.undo()


def test_copies_end_with_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pannier.client.staging.host_copy.threads", lambda: 3)
    source, target = torch.ones(4 << 20), torch.zeros(4 << 20)

    def copy() -> None:
        copies = HostCopies()
        copies.add(target.data_ptr(), source.data_ptr(), source.nbytes, source)
        copies.run()

    for moment in range(1, moments(copy) + 1, 3):
        interrupted(copy, moment)
    target.zero_()
    copy()
    assert torch.equal(source, target)


# A save, interrupted at any moment.


@pytest.mark.parametrize("call", ["first save", "save", "result", "close"])
def test_the_next_save_works_after_an_interruption(sidecar: ScriptedSidecar, call: str) -> None:
    state = {"w": torch.ones(300_000), "note": {"a": [1, 2]}, "step": 3}

    def fresh() -> Client:
        return Client(Settings(sidecar=sidecar.address, transport="streamed"))

    def save(client: Client) -> None:
        client.save(state, checkpoint_id="/x/y")

    calls: dict[str, tuple[Callable[[Client], Any], Callable[[Client], Any]]] = {
        "first save": (lambda client: None, save),
        "save": (save, save),
        "result": (
            lambda client: client.async_save(state, checkpoint_id="/x/y"),
            lambda client: client.wait_all(BOUND_S),
        ),
        "close": (
            lambda client: client.async_save(state, checkpoint_id="/x/y"),
            lambda client: client.close(BOUND_S),
        ),
    }
    before, interrupted_call = calls[call]
    first = fresh()
    before(first)
    count = moments(lambda: interrupted_call(first))
    in_another_thread(lambda: first.close(BOUND_S))
    chosen = random.Random(call)
    for moment in sorted(chosen.sample(range(1, count + 1), min(count, 40))):
        client = fresh()
        in_another_thread(lambda: before(client))  # noqa: B023
        interrupted(lambda: interrupted_call(client), moment)  # noqa: B023
        if call == "close":
            client = fresh()
        in_another_thread(lambda: client.save(state, checkpoint_id="/x/z"))  # noqa: B023
        in_another_thread(lambda: client.close(BOUND_S))  # noqa: B023


def test_an_interruption_after_the_save_is_staged_is_its_only_error(
    sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = 0
    end = Wait.end

    def interrupted_end(wait: Wait) -> None:
        nonlocal ended
        end(wait)
        ended += 1
        if ended == 1:
            raise InterruptedByTestError

    client = Client(Settings(sidecar=sidecar.address, transport="streamed"))
    with monkeypatch.context() as patch:
        patch.setattr(Wait, "end", interrupted_end)
        with pytest.raises(InterruptedByTestError):
            client.async_save({"w": torch.ones(300_000)}, checkpoint_id="/x/y")
    (failed,) = sidecar.asked(sidecar_pb2.FailRequest)
    assert "InterruptedByTestError" in failed.failure.message
    client.wait_all(BOUND_S)
    client.save({"w": torch.ones(300_000)}, checkpoint_id="/x/z")
    client.close()


def test_a_second_interruption_that_ends_the_clean_up_leaves_no_save_behind(
    sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(300_000)}

    def interrupted_call(*_: Any) -> Any:
        raise InterruptedByTestError

    end_call = Save.end_call

    def interrupted_clean_up(save: Save, error: BaseException | None = None) -> None:
        if threading.current_thread() is threading.main_thread():
            raise InterruptedByTestError
        end_call(save, error)

    client = Client(Settings(sidecar=sidecar.address, transport="streamed"))
    with monkeypatch.context() as patch:
        patch.setattr("pannier.client.saves.caller.plan_cache.resolve_plan", interrupted_call)
        patch.setattr(Save, "end_call", interrupted_clean_up)
        ended = False
        try:
            client.async_save(state, checkpoint_id="/x/y")
        except InterruptedByTestError:
            ended = True
    assert ended
    in_another_thread(lambda: client.wait_all(BOUND_S))
    client.save(state, checkpoint_id="/x/z")
    client.close(BOUND_S)


class NoneIdle:
    """Gives no thread; those that become idle are kept."""

    def __init__(self, idle: "queue.SimpleQueue[Any]") -> None:
        self.put = idle.put

    def get_nowait(self) -> None:
        raise queue.Empty


def test_a_save_for_which_no_thread_can_be_started_ends(
    sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def fails(*_: Any) -> None:
        raise UnavailableError("no sidecar")

    client = Client(Settings(sidecar=sidecar.address, transport="streamed", max_in_flight=1))
    client.save({"w": torch.ones(3)}, checkpoint_id="/x/w")
    with monkeypatch.context() as patch:
        patch.setattr(timeouts, "CALL_S", 0.2)
        patch.setattr(interrupts, "_idle", NoneIdle(interrupts._idle))
        patch.setattr(interrupts._thread, "start_new_thread", refuses)
        # No ABORT comes: nothing else ends the save.
        patch.setattr(SidecarClient, "fail", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            client.async_save({"w": torch.ones(3)}, checkpoint_id="/x/y", timeout=100 * BOUND_S)
    client.wait_all(BOUND_S)
    assert not client.saves
    assert client.saves.idle == 1
    client.save({"w": torch.ones(3)}, checkpoint_id="/x/z")
    client.close(BOUND_S)


# Real signals, in a process that must always end.

TRAINER = """
import faulthandler, random, signal, sys, torch
from pannier.client import default_client

class Preempted(BaseException):
    pass

chance = random.Random(int(sys.argv[2]))
armed = True

def handler(number, frame):
    if not armed:
        return
    if sys.argv[1] == "go on":
        raise Preempted
    sys.exit(143)

faulthandler.dump_traceback_later(100, exit=True)
signal.signal(signal.SIGALRM, handler)
client = default_client()
state = {"w": torch.ones(200_000), "note": {"a": [1, 2]}, "step": 3}
client.save(state, checkpoint_id="/x/first")
raised = 0
for step in range(int(sys.argv[3])):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 4e-3), chance.uniform(1e-4, 1e-2))
            client.async_save(state, checkpoint_id=f"/x/{step}").result()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Preempted:
        raised += 1
    except Exception as error:
        # What an interrupted call has left to be raised.
        print(type(error).__name__, error, file=sys.stderr)
armed = False
try:
    client.wait_all()
except Exception as error:
    print(type(error).__name__, error, file=sys.stderr)
client.save(state, checkpoint_id="/x/last")
client.close()
print("raised", raised)
"""


def run(sidecar: ScriptedSidecar, how: str, seed: int, saves: int) -> Result:
    environment = clean_environment({"PANNIER_SIDECAR": sidecar.address})
    return run_python(TRAINER, how, str(seed), str(saves), env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_goes_on_after_any_number_of_interruptions(
    sidecar: ScriptedSidecar, seed: int
) -> None:
    done = run(sidecar, "go on", seed, 150)
    assert done.code == 0, done.err[-6000:]
    assert int(done.out.split()[-1]) > 20


@pytest.mark.slow
def test_a_trainer_always_ends_by_a_handler_that_raises(sidecar: ScriptedSidecar) -> None:
    for seed in range(8):
        done = run(sidecar, "exit", seed, 10_000)
        assert done.code == 143, done.err[-6000:]


IMPATIENT = """
import signal, sys, time, torch
from pannier.client import default_client
from pannier.common import timeouts
timeouts.WAIT_WARNING_S = 0.1
if sys.argv[1] == "SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
else:
    # A shell's background job has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
client = default_client()
client.async_save({"w": torch.ones(200_000)}, checkpoint_id="/x/y")
print("saving", flush=True)
if sys.argv[2] == "close":
    client.close()
# Not one long wait, which a signal that came just before would not end.
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("SIGINT", "loop"),
        ("SIGTERM", "close"),
        pytest.param("SIGINT", "close", marks=pytest.mark.extended),
        pytest.param("SIGTERM", "loop", marks=pytest.mark.extended),
    ],
)
def test_the_second_signal_ends_the_wait_and_names_what_was_not_handed_over(
    sidecar: ScriptedSidecar, name: str, where: str
) -> None:
    go_on = threading.Event()
    sidecar.on["HandOver"] = lambda _: go_on.wait(BOUND_S)  # type: ignore[assignment]
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, name, where],
        env=clean_environment({"PANNIER_SIDECAR": sidecar.address}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "saving\n"
        sidecar.wait_for(lambda: bool(sidecar.asked(sidecar_pb2.HandOverRequest)), BOUND_S)
        process.send_signal(signal.Signals[name])
        # The exit waits until the save is handed over.
        said = ""
        while "the exit has waited" not in said:
            said += (line := process.stderr.readline())
            assert line, said
        process.send_signal(signal.Signals[name])
        said += process.stderr.read()
        process.wait(BOUND_S)
    finally:
        go_on.set()
        process.kill()
    assert "/x/y" in said
    assert "not handed over to the sidecar" in said
    assert process.returncode == (143 if name == "SIGTERM" else -signal.SIGINT)
