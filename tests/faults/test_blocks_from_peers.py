"""Blocks that sidecars fetch for loads: once per job, from the nearest host, whatever fails on the way."""

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.storage import open_store
from support.actors.block_reader import BlockReader, Checkpoint, data_file, whole_blocks
from support.network.certificates import Authority
from support.processes.daemons import Daemons, await_serving
from support.processes.ranks import free_port
from support.storage.bucket import data_reads
from support.storage.gcs_server import GcsServer

ATTEMPT = "i1-a1-g00000000-s1"
NAME = "__0_0.distcp"
_numbers = itertools.count(1)


class Hosts:
    """Two hosts' sidecars, which serve each other over TLS."""

    def __init__(self, directory: Path, server: GcsServer, *arguments: str) -> None:
        self.server = server
        files = Authority(directory / "ca").issue("sidecar")
        self.daemons = Daemons(directory, sidecars=2, environment=server.env, start=False)
        self.peers = [(f"node-{n}", f"127.0.0.1:{free_port()}") for n in range(2)]
        for daemon, (_, address) in zip(self.daemons.sidecars, self.peers, strict=True):
            daemon.arguments += ["--peers", address, *files.flags, *arguments]
            # A machine that stalls isn't a peer that does.
            daemon.environment["PANNIER_TIME_SCALE"] = str(4 * timeouts.SCALE)

    def start(self) -> None:
        for daemon in (self.daemons.coordinator, *self.daemons.sidecars):
            daemon.start(ready=False)
        for daemon in (self.daemons.coordinator, *self.daemons.sidecars):
            await_serving(daemon.address, process=daemon.process)

    def reader(self, host: int, checkpoint: Checkpoint, *, rank: int = 0) -> BlockReader:
        reader = BlockReader(
            self.daemons.sidecars[host].address,
            checkpoint,
            rank=rank,
            hosts=self.peers,
            own=host,
        )
        located = reader.locate()
        assert located.restore_budget
        assert (located.host, located.peer_address) == self.peers[host]
        return reader

    def reads(self, checkpoint: Checkpoint) -> int:
        return len(data_reads(self.server, checkpoint.id.removeprefix("gs://bucket/")))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, server: GcsServer) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"), server)
    with made.daemons:
        made.start()
        yield made


def stored(server: GcsServer, data: bytes, *, receipt: bool = True) -> Checkpoint:
    """A checkpoint of one data file in the bucket."""
    number = next(_numbers)
    checkpoint_id = f"gs://bucket/peers/step-{number}"

    async def write() -> None:
        options = {"endpoint_url": server.url, "token": "anon"}
        store = open_store(checkpoint_id, storage_options=options)
        try:
            await store.create(NAME, data)
        finally:
            await store.close()

    asyncio.run(write())
    files = [data_file(NAME, data, receipt=receipt)]
    return Checkpoint(checkpoint_id, ATTEMPT, files, f"load-{number}")


@pytest.mark.parametrize("receipt", [True, False], ids=["receipt", "plain dcp.save"])
def test_each_block_is_read_from_the_bucket_once_for_all_ranks_of_all_hosts(
    hosts: Hosts, server: GcsServer, receipt: bool
) -> None:
    data = whole_blocks(6)
    checkpoint = stored(server, data, receipt=receipt)
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        readers = [
            hosts.reader(host, checkpoint, rank=4 * host + rank)
            for host in range(2)
            for rank in range(4)
        ]
        for reader in readers:
            stack.enter_context(reader)

        def sweep(number: int) -> bytes:
            found = {}
            for block in range(6):
                owner = block % 2
                own = readers[number]
                key = own.request(
                    block, owner=owner, readers=5 if owner == number // 4 else 4, owner_readers=5
                )
                found[key] = b""
            for _ in range(6):
                answer = readers[number].next()
                assert answer.source in ("", f"node-{1 - number // 4}")
                found[answer.id] = readers[number].take(answer)
            return b"".join(found.values())

        for content in pool.map(sweep, range(8)):
            assert content == data
    assert hosts.reads(checkpoint) == 6
