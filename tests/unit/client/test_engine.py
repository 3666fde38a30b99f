"""One event loop serves the whole client: what a caller is spared, and what ends with whom."""

import asyncio
import gc
import queue
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from pannier.client import engine as engine_module
from pannier.client.engine import Timer, engine
from pannier.common import timeouts
from support.actors.scripted_sidecar import wait_until
from support.processes.cli import run_python
from support.processes.daemons import clean_environment
from support.processes.interrupted import interrupted, moments
from support.processes.stretch import BOUND_S


class Thing:
    """May be referenced weakly."""


async def answer() -> int:
    await asyncio.sleep(0)
    return 5


def test_a_caller_gets_the_result_or_the_error() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    assert engine().call(answer) == 5
    with pytest.raises(ZeroDivisionError):
        engine().call(fail)


def test_all_of_the_process_use_one_thread() -> None:
    async def name() -> tuple[str, int]:
        return threading.current_thread().name, threading.get_ident()

    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(4):
        threading.Thread(target=lambda: seen.put(engine().call(name))).start()
    names = {seen.get(timeout=BOUND_S) for _ in range(4)}
    assert len(names) == 1
    assert names.pop()[0] == "pannier"


def test_the_loop_serves_others_after_a_call_that_was_interrupted_at_any_moment() -> None:
    for moment in range(1, moments(lambda: engine().call(answer)) + 1):
        interrupted(lambda: engine().call(answer), moment)
        assert engine().call(answer) == 5


def test_what_blocks_does_not_block_the_loop() -> None:
    go_on = threading.Event()

    async def wait() -> bool:
        return await engine().in_thread(lambda: go_on.wait(BOUND_S))

    waiting: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=lambda: waiting.put(engine().call(wait))).start()
    assert engine().call(answer) == 5
    go_on.set()
    assert waiting.get(timeout=BOUND_S)

    async def fail() -> None:
        await engine().in_thread(lambda: next(iter(())))

    with pytest.raises(RuntimeError, match="StopIteration"):
        engine().call(fail)


def test_a_timer_runs_once_unless_it_is_cancelled_or_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = now = time.monotonic()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    ran: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def look(*timers: Timer) -> None:
        for timer in timers:
            timer.wait()

    cancelled = engine().after(0.02, lambda: ran.put("cancelled"))
    cancelled.cancel()
    renewed = engine().after(0.02, lambda: ran.put("renewed"))
    now = began + 0.01
    renewed.renew()
    now = began + 0.025
    engine().after(0, lambda: ran.put("last"))
    assert ran.get(timeout=BOUND_S) == "last"
    engine().call(lambda: look(cancelled, renewed))
    assert ran.empty()
    now = began + 1
    assert ran.get(timeout=BOUND_S) == "renewed"
    engine().call(lambda: look(cancelled, renewed))
    assert ran.empty()


def test_a_cancelled_timer_keeps_nothing_alive() -> None:
    thing = Thing()
    freed = weakref.ref(thing)
    timer = engine().after(3600.0, lambda thing=thing: None)  # type: ignore[misc]
    timer.cancel()
    del thing
    gc.collect()
    assert freed() is None


def test_what_runs_periodically_ends_when_it_is_cancelled() -> None:
    ran: queue.SimpleQueue[None] = queue.SimpleQueue()
    started = threading.Event()

    def run() -> None:
        ran.put(None)
        if ran.qsize() == 3 and started.wait(BOUND_S):
            running.cancel()

    running = engine().every(0.01, run)
    started.set()
    wait_until(lambda: ran.qsize() == 3 and running not in engine().running)
    assert ran.qsize() == 3


def test_a_task_that_fails_is_logged_and_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    engine().start(fail)
    wait_until(lambda: "a task of the client failed" in caplog.text)
    assert engine().call(answer) == 5


def test_what_an_interrupted_call_held_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FREED_CHECK_S", 0.02)
    released = threading.Event()

    async def release() -> None:
        released.set()

    def call() -> None:
        frame = engine().at_end_of_call(release)  # noqa: F841 - freed with this call
        assert not released.wait(0.1)

    call()
    assert released.wait(BOUND_S)


def test_where_no_thread_can_be_started_the_next_use_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(engine_module, "_engine", None)
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            engine()
        patch.undo()
    assert engine().call(answer) == 5


FORKING = """
import asyncio, gc, os, queue, threading
from pannier.client.engine import engine
from pannier.wire.errors import InvalidRequestError

async def answer():
    await asyncio.sleep(0)
    return 5

parents = engine()
assert parents.call(answer) == 5
pid = os.fork()
if pid == 0:
    status = 1
    try:
        parents.post(os._exit, 2)
        gc.collect()
        try:
            parents.call(answer)
        except InvalidRequestError as error:
            assert "forked" in str(error)
            if engine() is not parents and engine().call(answer) == 5:
                status = 0
    finally:
        os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
# It waits without a time-out, so only its own wake-up ends that.
answered = queue.SimpleQueue()
threading.Thread(target=lambda: answered.put(parents.call(answer)), daemon=True).start()
assert answered.get(timeout=60) == 5
"""
"""In a process of its own: a child would also collect what other tests have left, gRPC's objects among it."""


def test_a_forked_child_has_a_loop_of_its_own_and_ends_without_touching_the_parents() -> None:
    done = run_python(FORKING, env=clean_environment())
    assert done.code == 0, done
