"""What every store promises: pannier.storage.base.

On each kind of store, the doubles of buckets among them; or on the store of ``make test-store URL=...``.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pannier.storage import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    StorageError,
    Store,
    open_store,
)
from pannier.storage.base import limited
from pannier.storage.gcs.http import GcsConnection
from pannier.storage.s3.client import S3Connection
from pannier.wire.errors import InvalidRequestError, SaveAbortedError
from support.processes.stretch import BOUND_S
from support.storage import given_store
from support.storage.gcs_server import GcsServer
from support.storage.s3_server import S3Server
from support.storage.sources import FileSource, some_bytes

BIG = (17 << 20) + 4321
"""More than two chunks, and no multiple of anything."""
SIZES = [0, 1, 4096, 70_001, BIG, *([12 * BIG] if given_store.URL else [])]


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GcsServer | S3Server]]:
    """By scheme; none when a store is given."""
    with ExitStack() as stack:
        if given_store.URL:
            yield {}
            return
        gcs = stack.enter_context(GcsServer(tmp_path_factory.mktemp("gcs")))
        yield {"gs": gcs, "s3": stack.enter_context(S3Server())}


Body = Callable[[Store], Coroutine[Any, Any, None]]


KINDS = ["given"] if given_store.URL else ["local", "memory", "gs", "s3"]
PAGED = ["given"] if given_store.URL else ["gs", "s3"]


@pytest.fixture(params=KINDS)
def run(
    request: pytest.FixtureRequest, tmp_path: Path, doubles: dict[str, GcsServer | S3Server]
) -> Iterator[Callable[[Body], None]]:
    """Runs a coroutine with an empty store of each kind."""
    place = uuid.uuid4().hex
    double = doubles.get(request.param)
    if request.param == "given":
        with given_store.new_directory() as url:
            yield _runner(url, given_store.options())
    elif double is None:
        local = request.param == "local"
        yield _runner(str(tmp_path / "store" / place) if local else f"memory://tests/{place}", {})
    else:
        options = double.options if isinstance(double, S3Server) else {"endpoint_url": double.url}
        yield _runner(f"{request.param}://bucket/{place}", options)
        assert double.sessions() == []


def _runner(url: str, options: dict[str, Any]) -> Callable[[Body], None]:
    def runner(body: Body) -> None:
        async def main() -> None:
            store = open_store(url, storage_options=options, deadline_s=20)
            try:
                await body(store)
            finally:
                await store.close()

        asyncio.run(main())

    return runner


class Notes:
    """Progress and retries of an upload."""

    def __init__(self) -> None:
        self.progress: list[int] = []
        self.retries: list[str] = []
        self.begun = asyncio.Event()

    def _progress(self, held: int) -> None:
        self.progress.append(held)
        self.begun.set()

    async def upload(self, store: Store, key: str, source: FileSource) -> Any:
        return await store.upload(key, source, progress=self._progress, retried=self.retries.append)


def test_create_has_one_winner_among_many(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        tries = [store.create("decision", f"by {i}".encode()) for i in range(12)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        winners = [i for i, result in enumerate(results) if not isinstance(result, BaseException)]
        assert len(winners) == 1
        losers = [r for r in results if isinstance(r, BaseException)]
        assert all(isinstance(r, ConflictError) for r in losers), losers
        assert await store.read("decision") == f"by {winners[0]}".encode()
        there = await store.stat("decision")
        assert there is not None
        for error in losers:
            assert isinstance(error, ConflictError)
            assert error.current is not None
            assert error.current.generation == there.generation

    run(body)


def test_create_again_with_the_same_content_is_the_lost_answer(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        first = await store.create("a/b", b"unique")
        assert (await store.create("a/b", b"unique")).generation == first.generation
        with pytest.raises(ConflictError):
            await store.create("a/b", b"uniqu3")

    run(body)


def test_replace_takes_exactly_the_generation_that_was_seen(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        with pytest.raises(ConflictError) as nothing:
            await store.replace(".metadata", b"zero", expected="12345")
        assert nothing.value.current is None
        first = await store.replace(".metadata", b"one", expected=None)
        with pytest.raises(ConflictError):
            await store.replace(".metadata", b"two", expected=None)
        second = await store.replace(".metadata", b"three", expected=first.generation)
        assert second.generation != first.generation
        with pytest.raises(ConflictError) as stale:
            await store.replace(".metadata", b"four", expected=first.generation)
        assert stale.value.current is not None
        assert stale.value.current.generation == second.generation
        assert await store.read(".metadata") == b"three"
        # The answer to this very request got lost.
        again = await store.replace(".metadata", b"three", expected=first.generation)
        assert again.generation == second.generation

    run(body)


def test_racing_replaces_have_one_winner_and_readers_see_whole_contents(
    run: Callable[[Body], None],
) -> None:
    async def body(store: Store) -> None:
        seen = await store.create(".metadata", b"old" * 1000)
        contents = [f"{i:03}".encode() * 1000 for i in range(8)]
        ended = asyncio.Event()

        async def read() -> int:
            count = 0
            while not ended.is_set():
                assert await store.read(".metadata") in (b"old" * 1000, *contents)
                count += 1
                await asyncio.sleep(0)
            return count

        reader = asyncio.create_task(read())
        tries = [store.replace(".metadata", c, expected=seen.generation) for c in contents]
        results = await asyncio.gather(*tries, return_exceptions=True)
        ended.set()
        assert await reader > 0
        winners = [
            c for c, r in zip(contents, results, strict=True) if not isinstance(r, Exception)
        ]
        assert len(winners) == 1, results
        assert all(isinstance(r, ConflictError) for r in results if isinstance(r, Exception))
        assert await store.read(".metadata") == winners[0]

    run(body)


@pytest.mark.parametrize("size", SIZES)
def test_upload_confirms_size_and_checksum(
    run: Callable[[Body], None], tmp_path: Path, size: int
) -> None:
    async def body(store: Store) -> None:
        data = some_bytes(size)
        source, notes = FileSource(tmp_path / "spool", data), Notes()
        info = await notes.upload(store, "__a_0_0.distcp", source)
        assert (info.key, info.size, info.crc32c) == ("__a_0_0.distcp", size, source.crc)
        assert await store.read("__a_0_0.distcp") == data
        assert notes.progress == sorted(notes.progress)
        assert not size or notes.progress[-1] == size
        assert notes.retries == []
        there = await store.stat("__a_0_0.distcp")
        assert there is not None
        assert there.generation == info.generation

    run(body)


def test_upload_goes_on_while_the_file_grows(run: Callable[[Body], None], tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        data, held = some_bytes(BIG), 9 << 20
        source, notes = FileSource(tmp_path / "spool", data, held=held), Notes()
        upload = asyncio.create_task(notes.upload(store, "file", source))
        await asyncio.wait_for(notes.begun.wait(), BOUND_S)
        assert not upload.done()
        assert await store.stat("file") is None, "seen before it is whole"
        for end in (10 << 20, 13 << 20, BIG - 1, BIG):
            await source.grow(end)
            await asyncio.sleep(0.01)
        info = await upload
        assert (info.size, info.crc32c) == (BIG, source.crc)
        assert await store.read("file") == data

    run(body)


@pytest.mark.parametrize("how", ["cancelled", "aborted"])
def test_an_upload_that_ends_early_leaves_nothing(
    run: Callable[[Body], None], tmp_path: Path, how: str
) -> None:
    async def body(store: Store) -> None:
        source = FileSource(tmp_path / "spool", some_bytes(BIG), held=BIG - 1)
        notes = Notes()
        upload = asyncio.create_task(notes.upload(store, "sub/file", source))
        await asyncio.wait_for(notes.begun.wait(), BOUND_S)
        if how == "cancelled":
            upload.cancel()
            with pytest.raises(asyncio.CancelledError):
                await upload
        else:
            await source.fail()
            with pytest.raises(SaveAbortedError):
                await upload
        assert await store.list() == []
        # Some list an upload by its exact key only.
        assert [*await store.list_unfinished(), *await store.list_unfinished_of("sub/file")] == []

    run(body)
    left = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert left == []


def test_an_upload_that_was_made_before_is_recognised(
    run: Callable[[Body], None], tmp_path: Path
) -> None:
    async def body(store: Store) -> None:
        for size in (1000, BIG):
            key, source = f"file-{size}", FileSource(tmp_path / "spool", some_bytes(size))
            first = await Notes().upload(store, key, source)
            again = await Notes().upload(store, key, source)
            assert (again.generation, again.crc32c) == (first.generation, source.crc)
            other = FileSource(tmp_path / "other", some_bytes(size, seed=1))
            with pytest.raises(ConflictError):
                await Notes().upload(store, key, other)
            assert await store.read(key) == some_bytes(size)

    run(body)


def test_a_spool_file_that_differs_from_its_checksum_is_never_published(
    run: Callable[[Body], None], tmp_path: Path
) -> None:
    async def body(store: Store) -> None:
        for size in (1000, BIG):
            source, notes = FileSource(tmp_path / "spool", some_bytes(size)), Notes()
            source.crc ^= 1
            with pytest.raises(IntegrityError, match=f"{source.crc:08x}"):
                await notes.upload(store, "file", source)
            assert len(notes.retries) == 1, "tried again once"
            assert await store.list() == []

    run(body)


def test_read_gives_ranges(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        await store.create("digits", b"0123456789")
        await store.create("empty", b"")
        assert await store.read("digits") == b"0123456789"
        assert await store.read("digits", 3) == b"3456789"
        assert await store.read("digits", 3, 4) == b"3456"
        assert await store.read("digits", 8, 10) == b"89"
        assert await store.read("digits", 10, 1) == b""
        assert await store.read("digits", 2, 0) == b""
        assert await store.read("empty") == b""
        with pytest.raises(NotFoundError):
            await store.read("nothing")
        with pytest.raises(NotFoundError):
            await store.read("digits/below")

    run(body)


def test_directories_are_listed_by_name(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        assert list(await store.list_directories()) == []
        for key in (".metadata", ".pannier/i1/a/0", ".pannier/i2/b", ".pannier/file", "b c/ü/x"):
            await store.create(key, b"")
        assert list(await store.list_directories()) == [".pannier", "b c"]
        assert list(await store.list_directories(".pannier/")) == ["i1", "i2"]
        assert list(await store.list_directories("b c/")) == ["ü"]
        assert list(await store.list_directories("nothing/")) == []
        assert list(await store.list_directories(".pannier/file/")) == []

    run(body)


@pytest.mark.parametrize("run", PAGED, indirect=True)
def test_listings_follow_pages(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, call = GcsConnection.request, S3Connection.call

    async def short_request(self: Any, *arguments: Any, **options: Any) -> Any:
        if "delimiter" in (options.get("params") or {}):
            options["params"]["maxResults"] = "2"
        return await request(self, *arguments, **options)

    async def short_call(self: Any, name: str, **options: Any) -> Any:
        if name == "list_objects_v2":
            options["MaxKeys"] = 2
        return await call(self, name, **options)

    monkeypatch.setattr(GcsConnection, "request", short_request)
    monkeypatch.setattr(S3Connection, "call", short_call)

    async def body(store: Store) -> None:
        names = ["a", "b", "c", "d", "e"]
        for name in names:
            await store.create(f"{name}/x", b"")
        assert list(await store.list_directories()) == names
        assert [info.key for info in await store.list()] == [f"{name}/x" for name in names]

    run(body)


def test_list_is_recursive_sorted_and_by_prefix(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        assert await store.list() == []
        keys = [".metadata", ".pannier/i1/receipts/0", ".pannier/i1/receipts/10", "b", "b c/ü+%2F"]
        for key in reversed(keys):
            await store.create(key, key.encode())
        assert [info.key for info in await store.list()] == sorted(keys)
        assert [info.key for info in await store.list(".pannier/i1/receipts/1")] == [keys[2]]
        assert [info.key for info in await store.list("b")] == ["b", "b c/ü+%2F"]
        assert await store.list("nothing/") == []
        assert await store.read("b c/ü+%2F") == "b c/ü+%2F".encode()
        for info in await store.list():
            there = await store.stat(info.key)
            assert there is not None
            assert (there.size, there.generation) == (info.size, info.generation)
            assert info.crc32c in (None, there.crc32c)

    run(body)


def test_delete_removes_only_the_generation_that_was_meant(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        old = await store.create("a/b/c", b"old")
        new = await store.replace("a/b/c", b"new", expected=old.generation)
        await store.delete("a/b/c", generation=old.generation)
        assert await store.read("a/b/c") == b"new"
        await store.delete("a/b/c", generation=new.generation)
        assert await store.stat("a/b/c") is None
        await store.delete("a/b/c", generation=new.generation)
        await store.delete("a/b/c")
        await store.create("a/b/c", b"again")
        await store.delete("a/b/c")
        assert await store.list() == []

    run(body)


def test_probe_leaves_nothing_behind(run: Callable[[Body], None], tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        await store.probe()
        assert await store.list() == []

    run(body)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("key", ["", "/a", "../a", "a/../b", "a//b", "./a", "a/"])
def test_keys_stay_below_the_store(run: Callable[[Body], None], key: str) -> None:
    async def body(store: Store) -> None:
        with pytest.raises(InvalidRequestError):
            await store.create(key, b"x")
        with pytest.raises(InvalidRequestError):
            await store.read(key)

    run(body)


def test_nothing_begins_when_the_time_is_up(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        info = await store.create("there", b"1")
        with limited(until=time.monotonic):
            for operation in (
                store.read("there"),
                store.stat("there"),
                store.list(),
                store.create("new", b"1"),
                store.replace("there", b"2", expected=info.generation),
            ):
                with pytest.raises(StorageError):
                    await operation
        assert [each.key for each in await store.list()] == ["there"]
        assert await store.read("there") == b"1"

    run(body)
