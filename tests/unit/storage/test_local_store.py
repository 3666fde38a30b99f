"""What a directory of a file system adds: durability's order, locks, and other writers."""

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pannier.storage import ConflictError, DeniedError, NotFoundError, StorageError, open_store
from pannier.storage.base import ObjectInfo, Store
from pannier.storage.io_threads import threads_of
from pannier.storage.local import atomic_file, lock
from pannier.storage.local.directory import Directory
from support.processes.stretch import BOUND_S
from support.storage.sources import FileSource, some_bytes


def store_at(directory: Path, deadline_s: float = 10) -> Store:
    return open_store(str(directory), deadline_s=deadline_s)


async def upload(store: Store, key: str, source: FileSource) -> ObjectInfo:
    return await store.upload(key, source, progress=lambda held: None, retried=lambda reason: None)


def files(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


class Refusals:
    """Makes calls of the operating system fail as on other file systems."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def open_with(self, flag: int, code: int) -> None:
        real = os.open

        def refusing(path: object, flags: int, *rest: object, **more: object) -> int:
            if flags & flag == flag:
                raise OSError(code, os.strerror(code))
            return real(path, flags, *rest, **more)  # type: ignore[arg-type]

        self._patch.setattr(atomic_file.os, "open", refusing)

    def links(self, code: int) -> None:
        def refusing(*arguments: object, **more: object) -> None:
            raise OSError(code, os.strerror(code))

        self._patch.setattr(atomic_file.os, "link", refusing)

    def direct_writes(self) -> None:
        real = os.pwrite

        def refusing(fd: int, data: memoryview, offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, data, offset)

        self._patch.setattr(atomic_file.os, "pwrite", refusing)


@pytest.fixture(
    params=["all", "no O_TMPFILE", "no O_DIRECT", "no direct writes", "no links", "nothing"]
)
def capable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that can less than this machine's."""
    refusals = Refusals(monkeypatch)
    if request.param == "no O_TMPFILE":
        refusals.open_with(os.O_TMPFILE, errno.EOPNOTSUPP)
    if request.param == "no O_DIRECT":
        refusals.open_with(os.O_DIRECT, errno.EINVAL)
    if request.param == "no direct writes":
        refusals.direct_writes()
    if request.param in ("no links", "nothing"):
        refusals.links(errno.EPERM)
        refusals.open_with(os.O_TMPFILE, errno.EOPNOTSUPP)
    if request.param == "nothing":
        refusals.direct_writes()
    return str(request.param)


def test_any_file_system_will_do(tmp_path: Path, capable: str) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "store")
        await store.probe()
        data = some_bytes((9 << 20) + 77)
        source = FileSource(tmp_path / "spool", data)
        info = await upload(store, "a/file", source)
        assert await store.read("a/file") == data
        assert (await upload(store, "a/file", source)).generation == info.generation
        with pytest.raises(ConflictError):
            await upload(store, "a/file", FileSource(tmp_path / "other", some_bytes(5000)))
        tries = [store.create("one", f"{i}".encode()) for i in range(8)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(not isinstance(result, Exception) for result in results) == 1
        seen = await store.stat("one")
        assert seen is not None
        await store.replace("one", b"new", expected=seen.generation)
        assert await store.read("one") == b"new"

    asyncio.run(main())
    assert files(tmp_path / "store") == ["a/file", "one"]


def test_published_means_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content first, then the name, then the directory."""
    calls: list[str] = []
    real_sync, real_link, real_rename = os.fsync, os.link, os.rename

    def sync(fd: int) -> None:
        real_sync(fd)
        target = os.readlink(f"/proc/self/fd/{fd}")
        calls.append("sync directory" if os.path.isdir(target) else "sync file")

    def link(*arguments: str, **more: int) -> None:
        real_link(*arguments, **more)
        calls.append("link")

    def rename(*arguments: str, **more: int) -> None:
        real_rename(*arguments, **more)
        calls.append("rename")

    monkeypatch.setattr(atomic_file.os, "fsync", sync)
    monkeypatch.setattr(atomic_file.os, "link", link)
    monkeypatch.setattr(atomic_file.os, "rename", rename)

    async def main() -> None:
        store = store_at(tmp_path)
        await upload(store, "file", FileSource(tmp_path / "spool", some_bytes(10_000)))
        assert calls == ["sync file", "link", "sync directory"]
        calls.clear()
        first = await store.create("small", b"1")
        assert calls == ["sync file", "link", "sync directory"]
        calls.clear()
        await store.replace("small", b"2", expected=first.generation)
        assert calls == ["sync file", "link", "rename", "sync directory"]
        calls.clear()
        await store.create("new/dirs/small", b"1")
        assert calls[:2] == ["sync directory", "sync directory"]

    asyncio.run(main())


def test_a_killed_upload_leaves_no_file(tmp_path: Path) -> None:
    script = """
import asyncio, os, signal, sys
from pathlib import Path
from pannier.storage import open_store
from support.storage.sources import FileSource, some_bytes

async def main():
    source = FileSource(Path(sys.argv[2]), some_bytes(9 << 20), held=5 << 20)
    def progress(held):
        os.kill(os.getpid(), signal.SIGKILL)
    async def grow():
        await source.grow((9 << 20) - 1)
    task = asyncio.create_task(grow())
    await open_store(sys.argv[1]).upload("file", source, progress=progress, retried=print)

asyncio.run(main())
"""
    target = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-c", script, str(target), str(tmp_path / "spool")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=2 * BOUND_S,
    )
    assert done.returncode == -9
    assert target.is_dir()
    assert files(target) == []


def test_replaces_of_several_processes_lose_no_update(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from pannier.storage import ConflictError, open_store

async def main():
    store = open_store(sys.argv[1])
    done = 0
    while done < 25:
        seen = await store.stat("count")
        value = int((await store.read("count")).split()[0])
        if (await store.stat("count")).generation != seen.generation:
            continue
        try:
            await store.replace(
                "count", f"{value + 1} {sys.argv[2]}".encode(), expected=seen.generation
            )
            done += 1
        except ConflictError:
            pass

asyncio.run(main())
"""
    asyncio.run(store_at(tmp_path).create("count", b"0 none"))
    racers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(i)]) for i in range(3)
    ]
    assert [racer.wait(BOUND_S) for racer in racers] == [0, 0, 0]
    assert (tmp_path / "count").read_bytes().split()[0] == b"75"
    assert files(tmp_path) == ["count"]


def test_a_lock_that_is_held_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path, deadline_s=0.3)
        seen = await store.create(".metadata", b"1")
        lock = os.open(tmp_path / ".pannier-lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="held by another process"):
            await store.replace(".metadata", b"2", expected=seen.generation)
        assert [info.key for info in await store.list()] == [".metadata"]
        os.close(lock)
        # The holder died without removing its file.
        await store.replace(".metadata", b"2", expected=seen.generation)

    asyncio.run(main())
    assert files(tmp_path) == [".metadata"]


def test_a_file_that_others_changed_is_another_generation(tmp_path: Path) -> None:
    async def main() -> None:
        store = store_at(tmp_path)
        seen = await store.create(".metadata", b"ours")
        (tmp_path / ".metadata.tmp").write_bytes(b"them")
        (tmp_path / ".metadata.tmp").rename(tmp_path / ".metadata")
        with pytest.raises(ConflictError):
            await store.replace(".metadata", b"next", expected=seen.generation)

    asyncio.run(main())


def test_what_the_system_refuses_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(tmp_path)

    def failing(code: int) -> None:
        def fail(*arguments: object, **more: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(atomic_file.os, "pwrite", fail)

    source_path = tmp_path / "spool"
    for code, kind, text in (
        (errno.EACCES, DeniedError, "owner and mode"),
        (errno.EROFS, DeniedError, "Read-only"),
        (errno.ENOSPC, StorageError, r"No space left.*B are free"),
        (errno.EIO, StorageError, "Input/output error"),
    ):
        failing(code)
        with pytest.raises(kind, match=text):
            asyncio.run(store.create("a", b"1"))

        async def main() -> None:
            await upload(store, "b", FileSource(source_path, some_bytes(100_000)))

        with pytest.raises(kind, match=text):
            asyncio.run(main())
    assert files(tmp_path) == ["spool"]


def test_a_path_through_a_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")

    async def main() -> None:
        store = store_at(tmp_path / "file" / "below")
        with pytest.raises(NotFoundError, match=f"{tmp_path}/file is not a directory"):
            await store.probe()
        assert await store.stat("a") is None
        assert await store.list() == []
        await store.delete("a")

    asyncio.run(main())
    assert files(tmp_path) == ["file"]


def test_a_cancelled_wait_for_the_lock_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    take = lock._try
    directory, threads = Directory(str(tmp_path)), threads_of(str(tmp_path))

    def late(*arguments: Any) -> Any:
        began.set()
        assert go_on.wait(BOUND_S)
        return take(*arguments)

    async def scenario() -> None:
        async def hold() -> None:
            async with lock.locked(directory, "", time.monotonic() + 10, threads):
                raise AssertionError("it was cancelled before")

        with monkeypatch.context() as patch:
            patch.setattr(lock, "_try", late)
            holding = asyncio.create_task(hold())
            await asyncio.to_thread(began.wait, 10)
            holding.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await holding
        async with lock.locked(directory, "", time.monotonic() + 1, threads):
            return

    asyncio.run(scenario())


def remove_open(directory: int) -> Path:
    path = Path(os.readlink(f"/proc/self/fd/{directory}"))
    path.rmdir()
    return path


class Prunes:
    """Another process that removes directories while they are empty, right before a file is published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        self.done: list[Path] = []
        real = os.link

        def link(source: str, target: str, **more: int) -> None:
            if len(self.done) < times:
                self.done.append(remove_open(more["dst_dir_fd"]))
            real(source, target, **more)

        monkeypatch.setattr(atomic_file.os, "link", link)


@pytest.mark.parametrize("times", [1, 3])
def test_a_file_is_published_though_its_empty_directory_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "store")
        with monkeypatch.context() as patch:
            prunes = Prunes(patch, times)
            await store.create("a/b/small", b"1")
            assert len(prunes.done) == times
        data = some_bytes(10_000)
        with monkeypatch.context() as patch:
            prunes = Prunes(patch, times)
            await upload(store, "c/large", FileSource(tmp_path / "spool", data))
            assert len(prunes.done) == times
        assert await store.read("c/large") == data

    asyncio.run(main())
    assert files(tmp_path / "store") == ["a/b/small", "c/large"]


def test_a_directory_that_is_removed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = os.mkdir, []

    def mkdir(name: str, *, dir_fd: int) -> None:
        if name == "b" and not made:
            made.append(remove_open(dir_fd))
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    asyncio.run(store_at(tmp_path / "store").create("a/b/file", b"1"))
    assert made
    assert files(tmp_path / "store") == ["a/b/file"]


def test_a_create_that_lost_to_a_file_which_was_removed_since_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pannier.common.timeouts.RETRY_S", 0.01)
    real, lost = os.link, []

    def link(source: str, target: str, **more: int) -> None:
        if len(lost) < 2:
            # The second time, its directory doesn't exist, either.
            if lost:
                remove_open(more["dst_dir_fd"])
            lost.append(target)
            raise FileExistsError(errno.EEXIST, "exists", target)
        real(source, target, **more)

    monkeypatch.setattr(atomic_file.os, "link", link)
    asyncio.run(store_at(tmp_path / "store").create("a/file", b"1"))
    assert files(tmp_path / "store") == ["a/file"]


def test_an_expected_generation_whose_directory_is_gone_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = store_at(tmp_path / "store")
        seen = await store.create("a/file", b"1")
        await store.delete("a/file")
        real = os.open

        def late(path: str, flags: int, *rest: int, **more: int) -> int:
            if path == lock._NAME:
                remove_open(more["dir_fd"])
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(lock.os, "open", late)
        with pytest.raises(ConflictError) as error:
            await store.replace("a/file", b"2", expected=seen.generation)
        assert error.value.current is None

    asyncio.run(main())


def test_directories_that_a_killed_removal_left_empty_are_found_and_discarded(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = store_at(tmp_path)
        await store.create("step/.pannier/a/receipts/0", b"1")
        (tmp_path / "step/.pannier/a/receipts/0").unlink()
        (tmp_path / "step/.pannier/b").mkdir()
        await store.create("step/.pannier/b/file", b"1")
        (tmp_path / "a user's" / "own").mkdir(parents=True)
        (found,) = await store.list_unfinished()
        assert found.key == "step/.pannier/a/receipts"
        await store.discard(found)
        await store.discard(found)
        assert await store.list_unfinished() == []

    asyncio.run(main())
    assert (tmp_path / "a user's" / "own").is_dir()
    assert not (tmp_path / "step/.pannier/a").exists()
    assert files(tmp_path) == ["step/.pannier/b/file"]


def test_a_file_system_without_locks_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    async def main() -> None:
        store = store_at(tmp_path)
        try:
            await store.create("a", b"1")
            monkeypatch.setattr(lock.fcntl, "flock", refusing)
            with pytest.raises(StorageError, match=r"can't be locked.*Lustre"):
                await store.delete("a")
        finally:
            await store.close()

    asyncio.run(main())
