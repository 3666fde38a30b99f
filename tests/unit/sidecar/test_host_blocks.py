"""The blocks of one host, without daemons: which loads are served, and to whom."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.restore import host_blocks
from pannier.sidecar.restore.host_blocks import HostBlocks
from pannier.sidecar.restore.local_copies import LocalFile
from pannier.sidecar.rpc.peer_servicer import PeerServicer
from pannier.storage import StorageError, open_store
from pannier.v1 import restore_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import ConfigurationError, InvalidRequestError, VersionMismatchError
from pannier.wire.version import WIRE_VERSION
from support.actors.block_reader import whole_blocks
from support.processes.stretch import until

NAME = "__0_0.distcp"
DATA = whole_blocks(2)


class NoCopies:
    """A spool without local copies."""

    def find(self, attempt: str, name: str) -> None:
        return None


@asynccontextmanager
async def serving(root: Path, *, may_fetch: bool = True) -> AsyncIterator[HostBlocks]:
    """The blocks of a sidecar that may read below ``root``."""
    (root / "step-1").mkdir(exist_ok=True)
    (root / "step-1" / NAME).write_bytes(DATA)
    config = SidecarConfig(
        coordinator="host:1", spool=Path("/spool"), host="node-0", allow=(str(root),)
    )
    copies: Any = NoCopies()
    blocks = HostBlocks.of(
        config, copies, partial(open_store, allow=config.allow), lambda: may_fetch
    )
    try:
        yield blocks
    finally:
        await blocks.close()


def announced(root: Path, load: str = "load") -> restore_pb2.LocateRequest:
    return restore_pb2.LocateRequest(load=load, checkpoint_id=f"{root}/step-1")


def wanted(root: Path, **fields: Any) -> restore_pb2.ReadBlockRequest:
    return restore_pb2.ReadBlockRequest(
        **{
            "load": "load",
            "checkpoint_id": f"{root}/step-1",
            "file": NAME,
            "file_size": len(DATA),
            "host": "node-1",
            "wire_version": WIRE_VERSION,
            **fields,
        }
    )


def test_peers_are_served_for_loads_that_were_announced_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_blocks, "MOST_LOADS", 2)

    async def main() -> None:
        async with serving(tmp_path) as blocks:
            with pytest.raises(ConfigurationError, match=r"node-1 .*no rank of host node-0"):
                await blocks.check_peer(wanted(tmp_path))
            blocks.announce(announced(tmp_path))
            blocks.announce(announced(tmp_path, ""))
            await blocks.check_peer(wanted(tmp_path))
            with pytest.raises(VersionMismatchError, match="node-1 speaks wire version 1"):
                await blocks.check_peer(wanted(tmp_path, wire_version=1))
            # The load of one checkpoint is no right to read another.
            with pytest.raises(ConfigurationError):
                await blocks.check_peer(wanted(tmp_path, checkpoint_id=f"{tmp_path}/step-2"))
            blocks.announce(announced(Path("/elsewhere"), "other"))
            with pytest.raises(InvalidRequestError, match="is not below an allowed root"):
                await blocks.check_peer(wanted(Path("/elsewhere"), load="other"))
            # Of many loads the newest are known.
            for load in ("second", "load", "third"):
                blocks.announce(announced(tmp_path, load))
            await blocks.check_peer(wanted(tmp_path))
            with pytest.raises(ConfigurationError):
                await blocks.check_peer(wanted(tmp_path, load="second"))
            monkeypatch.setattr(timeouts, "LOAD_KNOWN_S", -1.0)
            blocks.cache.enter("third")
            await blocks.tick()
            await blocks.check_peer(wanted(tmp_path, load="third"))
            with pytest.raises(ConfigurationError):
                await blocks.check_peer(wanted(tmp_path))

    asyncio.run(main())


def test_a_load_that_peers_read_stays_known_and_another_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(host_blocks, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        async with serving(tmp_path) as blocks:
            for load in ("load", "unread"):
                blocks.announce(announced(tmp_path, load))
            for _ in range(5):
                now += 0.6 * timeouts.LOAD_KNOWN_S
                await blocks.check_peer(wanted(tmp_path))
                await blocks.tick()
            with pytest.raises(ConfigurationError, match="no rank of host node-0"):
                await blocks.check_peer(wanted(tmp_path, load="unread"))

    asyncio.run(main())


def test_what_can_not_be_fetched_here_has_no_budget(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as blocks:
            assert await blocks.budget_for(f"{tmp_path}/step-1") == 256 << 20
            for place in ("", "/elsewhere/step-1", "memory://x/step-1", "nonsense"):
                assert await blocks.budget_for(place) == 0
        async with serving(tmp_path, may_fetch=False) as blocks:
            assert await blocks.budget_for(f"{tmp_path}/step-1") == 0
            start = restore_pb2.FetchStart(checkpoint_id=f"{tmp_path}/step-1")
            with pytest.raises(ConfigurationError, match="no unix socket"):
                await blocks.check_start(start)

    asyncio.run(main())


def test_the_memory_is_passed_once_for_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as blocks:
            token = blocks.offer()
            (descriptor,) = blocks.open_memory(token)
            os.close(descriptor)
            assert blocks.open_memory(token) == []
            late = blocks.offer()
            monkeypatch.setattr(timeouts, "DESCRIPTORS_FETCH_S", -1.0)
            await blocks.tick()
            assert blocks.open_memory(late) == []

    asyncio.run(main())


def test_many_peers_get_a_block_that_is_read_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as blocks:
            blocks.announce(announced(tmp_path))
            replicas: Any = None
            servicer = PeerServicer(blocks, replicas)

            async def read(block: int) -> bytes:
                request = wanted(tmp_path, block=block, readers=8)
                responses = [each async for each in servicer.ReadBlock(request, None)]
                assert responses[-1].HasField("crc32c")
                assert max(len(each.data) for each in responses) <= 1 << 20
                return b"".join(each.data for each in responses)

            found = await asyncio.gather(*(read(number % 2) for number in range(16)))
            assert {*found} == {DATA[:BLOCK_BYTES], DATA[BLOCK_BYTES:]}
            assert blocks.sent == 8 * len(DATA)
            assert blocks.cache.used == 0, "each was read as often as announced"

    asyncio.run(main())


def test_a_spool_that_no_receipt_can_refute_is_not_read(tmp_path: Path) -> None:
    """Of a checkpoint whose receipts are gone, only storage is read: by own ranks, and by peers."""
    spool = tmp_path / "spool file"
    spool.write_bytes(bytes(len(DATA)))
    with spool.open("rb") as file:
        spool_file: Any = SimpleNamespace(path=spool, fd=file.fileno())
        copy = LocalFile(NAME, len(DATA), spool_file, b"")

        async def main() -> None:
            async with serving(tmp_path) as blocks:
                patched: Any = SimpleNamespace(find=lambda *_: copy)
                blocks.copies = patched
                request = wanted(tmp_path, attempt="attempt")
                assert blocks.read_spool(request) is None
                held = blocks.request_for_peer(request)
                await held.arrive()
                found = held.hold()
                assert found is not None
                assert blocks.cache.memory.read(found.slot, 0, found.size) == DATA[:BLOCK_BYTES]
                held.release()

        asyncio.run(main())


def test_a_link_to_what_may_not_be_read_here_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(DATA)
    root = tmp_path / "root"
    root.mkdir()

    async def main() -> None:
        async with serving(root) as blocks:
            (root / "step-1" / "leak").symlink_to(tmp_path / "secret")
            blocks.announce(announced(root))
            replicas: Any = None
            servicer = PeerServicer(blocks, replicas)
            request = wanted(root, file="leak", readers=1)
            with pytest.raises(StorageError, match="a symbolic link is in the way"):
                [each async for each in servicer.ReadBlock(request, None)]

    asyncio.run(main())


def test_a_file_that_becomes_a_link_just_before_it_is_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(DATA)
    root = tmp_path / "root"
    root.mkdir()
    replaced: list[Path] = []
    original = os.open

    def replace_and_open(path: Any, *arguments: Any, **named: Any) -> int:
        if path == NAME:
            file = root / "step-1" / NAME
            file.unlink()
            file.symlink_to(tmp_path / "secret")
            replaced.append(file)
        return original(path, *arguments, **named)

    async def main() -> None:
        async with serving(root) as blocks:
            monkeypatch.setattr(os, "open", replace_and_open)
            blocks.announce(announced(root))
            replicas: Any = None
            servicer = PeerServicer(blocks, replicas)
            with pytest.raises(StorageError, match="a symbolic link is in the way"):
                [each async for each in servicer.ReadBlock(wanted(root, readers=1), None)]

    asyncio.run(main())
    assert replaced


def test_a_peer_that_does_not_receive_loses_its_turn_and_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as blocks:
            blocks.announce(announced(tmp_path))
            replicas: Any = None
            servicer = PeerServicer(blocks, replicas)

            async def stuck() -> None:
                async for _ in servicer.ReadBlock(wanted(tmp_path, readers=1), None):
                    await asyncio.Event().wait()

            with monkeypatch.context() as impatient:
                impatient.setattr(timeouts, "BLOCK_SEND_S", 0.05)
                task = asyncio.ensure_future(stuck())
                await asyncio.wait([task])
            assert task.cancelled()
            await until(lambda: not blocks.cache.used)
            request = wanted(tmp_path, block=1)
            responses = [each async for each in servicer.ReadBlock(request, None)]
            assert b"".join(each.data for each in responses) == DATA[BLOCK_BYTES:]

    asyncio.run(main())
