"""File systems that don't answer: their calls are abandoned by name, and everything else continues."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from pannier.client.loading import filesystem
from pannier.common import timeouts
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_service import Backlog, DaemonInfo
from pannier.storage import ConflictError, DeniedError, StorageError, io_threads, open_store
from pannier.storage.base import Store
from pannier.storage.io_threads import MOST_HUNG, HungError, Threads, threads_of
from pannier.storage.local import atomic_file
from pannier.storage.local import store as local
from pannier.storage.url import check_allowed_in_time
from pannier.wire.errors import UnavailableError
from support.actors.hosts import running_host
from support.actors.nodes import node_host
from support.actors.ranks_by_hand import context, coordinator, local_plan, tensor
from support.actors.scripted_sidecar import wait_until
from support.processes.cli import pannier
from support.processes.stretch import BOUND_S
from support.storage.sources import FileSource, some_bytes


class DeadMount:
    """Calls below a directory wait until it answers again."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.answers = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def waits(path: Any, *arguments: Any, **more: Any) -> Any:
            place = str(path[0] if isinstance(path, tuple) else getattr(path, "path", path))
            if place.startswith(self.directory):
                with self._lock:
                    self.waiting += 1
                self.answers.wait()
            return function(path, *arguments, **more)

        waits.__name__ = function.__name__
        return waits


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadMount]:
    mount = DeadMount(tmp_path / "dead")
    Path(mount.directory).mkdir()
    monkeypatch.setattr(timeouts, "HUNG_CALL_S", 0.05)
    monkeypatch.setitem(io_threads.Threads.__init__.__kwdefaults__, "patience_s", 0.05)
    monkeypatch.setattr(local, "_read", mount.wrap(local._read))
    yield mount
    mount.answers.set()
    wait_until(lambda: io_threads.abandoned() == 0)


def store_at(directory: Path | str, deadline_s: float = 0.05) -> Store:
    return open_store(str(directory), deadline_s=deadline_s)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition)


def abandoned() -> float:
    daemon_info = DaemonInfo("node-0", backlog=lambda: Backlog())
    text = generate_latest(Metrics("sidecar", daemon_info).registry).decode()
    (line,) = [
        each for each in text.splitlines() if each.startswith("pannier_storage_abandoned_threads ")
    ]
    return float(line.split()[1])


def test_calls_that_hang_are_abandoned_by_name_and_others_go_on(
    dead: DeadMount, tmp_path: Path
) -> None:
    (tmp_path / "well" / "step").mkdir(parents=True)

    async def scenario() -> None:
        hung = store_at(f"{dead.directory}/run/step")
        before = io_threads.abandoned()
        turn = 0
        while abandoned() < before + MOST_HUNG:
            # On a busy machine some of them are late before a thread has taken them.
            left = int(before + MOST_HUNG - abandoned())
            reads = [hung.read(".metadata") for _ in range(min(io_threads._THREADS, left))]
            answers = await asyncio.gather(*reads, return_exceptions=True)
            assert all(isinstance(each, HungError) for each in answers)
            if turn == 0:
                named = f"{dead.directory}/run: read has not returned for"
                assert any(named in str(each) for each in answers)
                assert abandoned() <= before + io_threads._THREADS
            turn += 1
            # Another root, and the same process's set-up, don't notice.
            well = store_at(tmp_path / "well" / "step", 10)
            await well.create(f"{turn}", b"data")
            assert await well.read(f"{turn}") == b"data"
            assert await io_threads.setup_threads.run(lambda: 7) == 7
        assert abandoned() == before + MOST_HUNG
        # No more of them: it fails at once, also where it might take long.
        with pytest.raises(HungError, match=rf"{MOST_HUNG} calls to {dead.directory}/run hang"):
            await store_at(f"{dead.directory}/run/other", 3600).read("x")
        dead.answers.set()
        await until(lambda: io_threads.abandoned() <= before)
        # It is used again.
        await store_at(f"{dead.directory}/run/step", 10).create("x", b"back")
        assert await store_at(f"{dead.directory}/run/step", 10).read("x") == b"back"

    asyncio.run(scenario())
    assert dead.waiting == MOST_HUNG + 1


def test_cancelled_callers_of_a_dead_file_system_are_free_soon(dead: DeadMount) -> None:
    """Those whose calls wait in the queue at once, the others when their calls are abandoned."""

    async def scenario() -> None:
        store = store_at(f"{dead.directory}/cancelled/step", 3600)
        tasks = [asyncio.create_task(store.read("x")) for _ in range(3 * io_threads._THREADS)]
        await until(lambda: dead.waiting == io_threads._THREADS)
        queued = tasks[io_threads._THREADS :]
        for task in queued:
            task.cancel()
        await asyncio.wait(queued)
        assert all(task.cancelled() for task in queued)
        assert io_threads.abandoned() == 0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert threads_of(f"{dead.directory}/cancelled").hung == io_threads._THREADS

    asyncio.run(scenario())
    assert dead.waiting == io_threads._THREADS


def test_an_upload_that_hangs_closes_its_file_only_when_the_write_returns(
    dead: DeadMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its descriptor would be another file's by then."""
    events: list[str] = []
    close = atomic_file.Draft.close

    def closed(self: atomic_file.Draft) -> None:
        events.append("closed")
        close(self)

    def write(self: atomic_file.Draft, *arguments: Any) -> None:
        events.append("writes")
        dead.answers.wait()
        os.fstat(self._fd)
        events.append("written")

    monkeypatch.setattr(atomic_file.Draft, "close", closed)
    monkeypatch.setattr(atomic_file.Draft, "write", write)
    source = FileSource(tmp_path / "source", some_bytes(100_000))

    async def scenario() -> None:
        store = store_at(f"{dead.directory}/uploads/step", 3600)
        task = asyncio.create_task(
            store.upload(
                "data",
                source,
                progress=lambda held: None,
                retried=lambda reason: None,
            )
        )
        await until(lambda: bool(events))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert events == ["writes"]
        dead.answers.set()
        await until(lambda: len(events) == 3)

    asyncio.run(scenario())
    assert events == ["writes", "written", "closed"]


def test_a_replacement_that_hangs_keeps_the_lock_until_it_has_ended(
    dead: DeadMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would replace what others have put there since."""
    directory = Path(dead.directory, "run", "step")
    began = threading.Event()
    replace = atomic_file.Draft.replace

    def slow(self: atomic_file.Draft) -> None:
        if not began.is_set():
            began.set()
            dead.answers.wait()
        replace(self)

    async def scenario() -> None:
        store = store_at(directory, 3600)
        first = await store.create("x", b"1")
        monkeypatch.setattr(atomic_file.Draft, "replace", slow)
        task = asyncio.create_task(store.replace("x", b"2", expected=first.generation))
        await asyncio.to_thread(began.wait)
        task.cancel()
        await asyncio.wait({task})
        # The lock itself answers, however busy this host is.
        monkeypatch.setattr(timeouts, "HUNG_CALL_S", BOUND_S)
        with pytest.raises(StorageError, match="was held by another process"):
            await store_at(directory).replace("x", b"3", expected=first.generation)
        dead.answers.set()
        with pytest.raises(ConflictError):
            await store_at(directory, 10).replace("x", b"3", expected=first.generation)
        assert (directory / "x").read_bytes() == b"2"
        assert sorted(os.listdir(directory)) == ["x"]

    asyncio.run(scenario())


def test_what_a_call_makes_whose_caller_is_gone_is_undone() -> None:
    made: list[str] = []

    async def scenario() -> None:
        pool = Threads("nowhere", patience_s=0.0)
        gate, begun = threading.Event(), threading.Event()

        def make() -> str:
            begun.set()
            gate.wait()
            return "made"

        task = asyncio.create_task(pool.run(make, undo=made.append))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait({task})
        assert pool.hung == 1
        assert not made
        gate.set()
        await until(lambda: not pool.hung)

    asyncio.run(scenario())
    assert made == ["made"]


def test_reads_of_the_spool_are_waited_for_however_long_they_take() -> None:
    """A file of the spool goes to no other save while one runs."""

    async def scenario() -> None:
        gate, begun = threading.Event(), threading.Event()

        def read() -> None:
            begun.set()
            gate.wait()

        task = asyncio.create_task(io_threads.spool_threads.run(read))
        await asyncio.to_thread(begun.wait)
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0.02)
        assert not task.done()
        gate.set()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(scenario())


def test_the_check_of_a_path_on_a_dead_mount_is_abandoned_by_name(
    dead: DeadMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "realpath", dead.wrap(os.path.realpath))
    named = f"{dead.directory}/run: check_allowed has not returned for"
    with pytest.raises(UnavailableError, match=named):
        asyncio.run(check_allowed_in_time(f"{dead.directory}/run/step", [dead.directory]))
    # A busy machine may have withdrawn it before a thread took it.
    assert dead.waiting <= 1


@pytest.mark.parametrize("jobs", [False, True], ids=["--allow", "--jobs"])
def test_a_dead_mount_below_an_allowed_root_delays_no_other_call_of_a_sidecar(
    dead: DeadMount, monkeypatch: pytest.MonkeyPatch, jobs: bool
) -> None:
    monkeypatch.setattr(timeouts, "HUNG_CALL_S", BOUND_S)
    monkeypatch.setattr(os.path, "realpath", dead.wrap(os.path.realpath))
    made: Any = node_host() if jobs else running_host()
    with made as host, ThreadPoolExecutor(1) as threads:
        allow = [dead.directory, str(host.root)]
        if jobs:
            host.job("a", allow=allow)
            host.start()
            trainer = host.trainer("a")
        else:
            host.start(allow=tuple(allow))
            trainer = host.trainer()
        try:
            hung = threads.submit(
                trainer.plan, trainer.context(f"{dead.directory}/run/step-1", number=1)
            )
            wait_until(lambda: dead.waiting == 1)
            trainer.plan(trainer.context(f"{host.root}/step-2", number=2))
            assert not hung.done()
        finally:
            dead.answers.set()
        hung.result(BOUND_S)


def test_a_dead_mount_below_an_allowed_root_delays_no_other_save_of_a_coordinator(
    dead: DeadMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "HUNG_CALL_S", BOUND_S)
    monkeypatch.setattr(os.path, "realpath", dead.wrap(os.path.realpath))
    ended, plan = threading.Event(), local_plan([tensor("x", 2)])
    lone = partial(context, 0, ranks=(0,))

    async def scenario() -> None:
        async with coordinator(tmp_path, allow=(dead.directory, str(tmp_path / "well"))) as client:
            hung = asyncio.create_task(
                client.plan(lone(f"{dead.directory}/run/step-1", incarnation="bb"), plan)
            )
            await until(lambda: dead.waiting > 0)
            planned = await client.plan(lone(f"{tmp_path}/well/step-1"), plan)
            assert planned.plan_id
            assert not hung.done()
            ended.set()
            dead.answers.set()
            hung.cancel()

    async def calls() -> None:
        await asyncio.wait_for(scenario(), BOUND_S)

    # In a thread, so that a loop that stands still is found.
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(asyncio.run, calls())
        try:
            wait_until(lambda: ended.is_set() or running.done())
        finally:
            dead.answers.set()
        running.result(BOUND_S)


def test_a_process_ends_though_calls_hang() -> None:
    program = (
        "import asyncio, threading, sys\n"
        "from pannier.storage import io_threads\n"
        "pool = io_threads.Threads('/dead', patience_s=0.05)\n"
        "begun = threading.Event()\n"
        "def hang():\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "async def main():\n"
        "    task = asyncio.create_task(pool.run(hang))\n"
        "    await asyncio.to_thread(begun.wait)\n"
        "asyncio.run(main())\n"
        "print('ended', pool.hung)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=True,
    )
    assert ended.stdout == "ended 1\n"


# Pipes and the like.


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    """A directory of checkpoints whose files are pipes that nothing writes to."""
    root = tmp_path / "root"
    for step in range(io_threads._THREADS + 1):
        (root / f"step-{step}").mkdir(parents=True)
        os.mkfifo(root / f"step-{step}" / ".metadata")
    return root


def test_a_store_never_waits_for_a_pipe(pipes: Path) -> None:
    async def scenario() -> None:
        for step in range(io_threads._THREADS + 1):
            store = store_at(pipes / f"step-{step}", 3600)
            for call in (store.read(".metadata"), store.stat(".metadata")):
                with pytest.raises(StorageError, match="is not a regular file"):
                    await call
            with pytest.raises(StorageError, match="is not a regular file"):
                await store.replace(".metadata", b"x", expected="0" * 16)
            assert await store.list() == []
        assert io_threads.abandoned() == 0

    asyncio.run(scenario())


def test_a_client_never_waits_for_a_pipe(pipes: Path) -> None:
    place = filesystem.open_dir(pipes / "step-0")
    with pytest.raises(StorageError, match="is not a regular file"):
        place.read(".metadata")
    with pytest.raises(StorageError, match="is not a regular file"):
        place.read_into(".metadata", 0, memoryview(bytearray(8)))


def test_a_directory_below_a_link_is_read_and_linked_files_in_it_by_clients_alone(
    tmp_path: Path,
) -> None:
    real = tmp_path / "real"
    (real / "step").mkdir(parents=True)
    (real / "step" / "x").write_bytes(b"data")
    (real / "step" / "y").symlink_to("x")
    (tmp_path / "root").symlink_to(real)

    async def scenario() -> None:
        store = store_at(tmp_path / "root" / "step", 10)
        await store.create("z", b"more")
        assert [await store.read(key) for key in "xz"] == [b"data", b"more"]
        with pytest.raises(DeniedError, match=r"step/y: a symbolic link is in the way"):
            await store.read("y")

    asyncio.run(scenario())
    place = filesystem.open_dir(tmp_path / "root" / "step")
    assert [place.read(name) for name in "xyz"] == [b"data", b"data", b"more"]


READING = """
import sys
import torch
from pannier import client

root = sys.argv[1]
for call in (
    lambda: client.load({"w": torch.zeros(1)}, checkpoint_id=f"{root}/step-0", no_dist=True),
    lambda: client.latest(root),
    lambda: client.list(root),
):
    try:
        print("got", call())
    except client.PannierError as error:
        print("error", error)
"""


def test_reading_functions_and_commands_name_a_pipe(pipes: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", READING, str(pipes)],
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=True,
    )
    assert "is not a regular file" in ended.stdout.splitlines()[0]
    assert "no checkpoints below" in pannier("ls", str(pipes)).err
    assert "is not a regular file" in pannier("verify", str(pipes / "step-0")).err


def test_what_releases_is_done_though_its_caller_is_cancelled_first() -> None:
    pool = io_threads.Threads("/busy", patience_s=0.05, threads=1)
    busy, released = threading.Event(), threading.Event()

    async def scenario() -> None:
        until = time.monotonic() + BOUND_S
        first = asyncio.create_task(pool.run(busy.wait, until=until))
        await asyncio.sleep(0)
        release = asyncio.create_task(pool.run(released.set, until=until, closing=True))
        await asyncio.sleep(0)
        release.cancel()
        with pytest.raises(asyncio.CancelledError):
            await release
        busy.set()
        await first
        assert await asyncio.to_thread(released.wait, BOUND_S)

    asyncio.run(scenario())


class Refused:
    """A thread that the operating system doesn't start."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_calls_fail_that_wait_for_a_thread_that_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        pool = Threads("/dead", patience_s=0.0, threads=1)
        gate, begun = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            gate.wait()

        hanging = asyncio.create_task(pool.run(hang))
        await asyncio.to_thread(begun.wait)
        queued = asyncio.create_task(pool.run(lambda: 7))
        await asyncio.sleep(0)
        with monkeypatch.context() as patched:
            patched.setattr(io_threads, "Thread", Refused)
            hanging.cancel()
            await asyncio.wait({hanging})
        assert hanging.cancelled()
        with pytest.raises(StorageError, match="no thread for /dead can be started: can't start"):
            await queued
        # Other calls get a thread as soon as one can be started.
        assert await pool.run(lambda: 7) == 7
        gate.set()
        await until(lambda: not pool.hung)

    asyncio.run(scenario())
