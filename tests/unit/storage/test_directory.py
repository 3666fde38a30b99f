"""Symbolic links in a directory of checkpoints lead nowhere, whichever calls the kernel has."""

import asyncio
import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pannier.storage import DeniedError, StorageError, open_store
from pannier.storage.base import Store, Unfinished
from pannier.storage.local import directory
from support.processes.stretch import BOUND_S
from support.storage.directories import files_below
from support.storage.sources import FileSource, some_bytes


@pytest.fixture(params=["openat2", "one step at a time"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "openat2":
        assert directory.has_openat2()
    else:
        monkeypatch.setattr(directory, "has_openat2", lambda: False)


@pytest.fixture
def root(tmp_path: Path, kernel: None) -> Path:
    """A root whose checkpoint has links to ``elsewhere``, which looks like a part of a checkpoint."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for name in ("secret", ".pannier-lock", ".pannier-left.tmp", ".pannier/a/receipts/0", "sub/x"):
        file = elsewhere / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"theirs")
    (elsewhere / "empty").mkdir()
    (root / "step-1").mkdir(parents=True)
    (root / "step-1" / "own").write_bytes(b"ours")
    (root / "step-1" / "rng").symlink_to(elsewhere)
    (root / "step-1" / "file").symlink_to(elsewhere / "secret")
    return root


async def upload(store: Store, key: str) -> None:
    source = FileSource(Path(store.url).parent.parent / "spool", some_bytes(10_000))
    await store.upload(key, source, progress=lambda held: None, retried=lambda reason: None)


ACCESSES: dict[str, Callable[[Store], Awaitable[object]]] = {
    "upload": lambda store: upload(store, "rng/new"),
    "upload in a new directory": lambda store: upload(store, "rng/a/b/new"),
    "create": lambda store: store.create("rng/authorized_keys", b"mine"),
    "create over a link": lambda store: store.create("file", b"mine"),
    "replace": lambda store: store.replace("rng/secret", b"mine", expected="0" * 16),
    "replace a link": lambda store: store.replace("file", b"mine", expected="0" * 16),
    "read": lambda store: store.read("rng/secret"),
    "read a link": lambda store: store.read("file"),
    "stat": lambda store: store.stat("rng/secret"),
    "stat of a link": lambda store: store.stat("file"),
    "list": lambda store: store.list("rng/"),
    "list directories": lambda store: store.list_directories("rng"),
    "delete": lambda store: store.delete("rng/secret"),
    "discard a file": lambda store: discard(store, "rng/.pannier-left.tmp"),
    "discard a lock": lambda store: discard(store, "rng/.pannier-lock"),
    "discard a directory": lambda store: discard(store, "rng/empty"),
}


async def discard(store: Store, key: str) -> None:
    await store.discard(Unfinished(key, 0, 0.0, key))


@pytest.mark.parametrize("access", ACCESSES)
def test_no_access_leaves_the_checkpoint_by_a_link_in_it(root: Path, access: str) -> None:
    before = {**tree(root), **tree(root.parent / "elsewhere")}
    store = open_store(str(root / "step-1"), allow=[str(root)], deadline_s=1)
    with pytest.raises(StorageError, match=r"symbolic link|not a regular file"):
        asyncio.run(ACCESSES[access](store))
    assert {**tree(root), **tree(root.parent / "elsewhere")} == before


def tree(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in place.rglob("*")}


def test_listings_leave_links_out(root: Path) -> None:
    async def main() -> None:
        store = open_store(str(root))
        assert [info.key for info in await store.list()] == ["step-1/own"]
        assert await store.list_directories() == ["step-1"]
        assert await store.list_directories("step-1/") == []
        assert await store.list_unfinished() == []

    asyncio.run(main())


def test_a_removed_link_is_removed_itself(root: Path) -> None:
    async def main() -> None:
        store = open_store(str(root / "step-1"))
        await store.delete("file")
        await store.delete("rng")

    asyncio.run(main())
    assert sorted(os.listdir(root / "step-1")) == ["own"]
    assert "secret" in files_below(root.parent / "elsewhere")


def test_a_checkpoint_that_becomes_a_link_after_it_was_checked_leads_nowhere(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    before = tree(elsewhere)

    async def main() -> None:
        store = open_store(str(root / "step-2"), allow=[str(root)])
        await store.create("first", b"1")
        (root / "step-2").rename(root / "moved")
        (root / "step-2").symlink_to(elsewhere)
        with pytest.raises(DeniedError, match="symbolic link"):
            await upload(store, "data")
        with pytest.raises(DeniedError, match="symbolic link"):
            await store.delete("secret")
        assert not await store.remove_directory()
        # One that is opened now finds the link before its first access.
        with pytest.raises(DeniedError, match=r"not below an allowed root \(.*/root\)"):
            await open_store(str(root / "step-2"), allow=[str(root)]).create("x", b"1")

    asyncio.run(main())
    assert tree(elsewhere) == before


def test_a_root_that_is_reached_by_links_is_used_where_they_lead(root: Path) -> None:
    real = root.parent / "disk" / "run"
    real.mkdir(parents=True)
    (root.parent / "home").symlink_to(real.parent)

    async def main() -> None:
        for allowed in ([], [str(real)], [str(root.parent / "home" / "run")]):
            store = open_store(str(root.parent / "home" / "run" / "step-1"), allow=allowed)
            await store.probe()
            seen = await store.create("a/b", b"1")
            await store.replace("a/b", b"2", expected=seen.generation)
            assert await store.read("a/b") == b"2"
            assert [info.key for info in await store.list("a/")] == ["a/b"]
            await store.delete("a/b")
            assert await store.remove_directory()

    asyncio.run(main())
    assert os.listdir(real) == []


REFUSING = """
import asyncio, ctypes, os, sys
from pathlib import Path
from pannier.storage import DeniedError, open_store
from pannier.storage.local import directory

libc = ctypes.CDLL(None, use_errno=True)
program = ctypes.create_string_buffer(bytes.fromhex(sys.argv[1]))
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
given = Program(len(program) // 8, ctypes.addressof(program))
assert libc.prctl(22, 2, ctypes.byref(given)) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

async def main():
    store = open_store(sys.argv[2])
    await store.probe()
    await store.create("a/b", b"1")
    os.symlink("/tmp", os.path.join(sys.argv[2], "link"))
    try:
        await store.create("link/x", b"1")
    except DeniedError:
        print("refused", directory.has_openat2())

asyncio.run(main())
"""


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_container_that_refuses_openat2_is_served_without_it(tmp_path: Path, code: int) -> None:
    """Docker's filter answers EPERM before version 20.10.0, and kernels before 5.6 answer ENOSYS."""
    filters = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, directory._OPENAT2),
        (0x06, 0, 0, 0x00050000 | code),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    program = b"".join(struct.pack("HBBI", *each) for each in filters)
    ended = subprocess.run(
        [sys.executable, "-c", REFUSING, program.hex(), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
    )
    assert ended.stdout == "refused False\n", ended
    assert ctypes.sizeof(directory._OpenHow) == 24
