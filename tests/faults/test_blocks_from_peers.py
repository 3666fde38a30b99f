"""Blocks that sidecars fetch for loads: once per job, from the nearest host, whatever fails on the way."""

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest
import torch

from pannier.client import Client
from pannier.client.config import load_settings
from pannier.storage import open_store
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.addresses import channel_options
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.version import WIRE_VERSION
from support.actors.block_reader import (
    BlockReader,
    Checkpoint,
    committed,
    data_file,
    whole_blocks,
)
from support.actors.scripted_sidecar import wait_until
from support.network.certificates import Authority, Files
from support.processes.daemons import Daemon, Daemons, await_serving
from support.processes.ranks import reserved_port
from support.processes.stretch import BOUND_S
from support.storage.bucket import data_reads, listed
from support.storage.gcs_server import GcsServer

ATTEMPT = "i1-a1-g00000000-s1"
NAME = "__0_0.distcp"
_STALLS = ("BLOCK_STALL_S", "BLOCK_FIRST_STALL_S", "BLOCK_SLOW_S", "BLOCK_S", "BLOCK_SEND_S")
_numbers = itertools.count(1)


class Hosts:
    """Two hosts' sidecars, which serve each other over TLS.

    Args:
        patient: they take no source for stalled: a machine that stalls isn't a peer that does.
    """

    def __init__(
        self, directory: Path, server: GcsServer, *arguments: str, patient: bool = True
    ) -> None:
        self.server = server
        self.tls = Authority(directory / "ca").issue("sidecar")
        self.daemons = Daemons(directory, sidecars=2, environment=server.env, start=False)
        self._reserved = [reserved_port() for _ in range(2)]
        ports = [port.getsockname()[1] for port in self._reserved]
        self.peers = [(f"node-{n}", f"127.0.0.1:{port}") for n, port in enumerate(ports)]
        for daemon, (_, address) in zip(self.daemons.sidecars, self.peers, strict=True):
            daemon.arguments += ["--peers", address, *self.tls.flags, *arguments]
            for name in _STALLS if patient else ():
                daemon.constants[f"pannier.common.timeouts.{name}"] = 10 * BOUND_S

    def close(self) -> None:
        for port in self._reserved:
            port.close()

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

    def log(self, host: int) -> str:
        return self.daemons.sidecars[host].log()

    def reads(self, checkpoint: Checkpoint) -> int:
        return len(data_reads(self.server, checkpoint.id.removeprefix("gs://bucket/")))


@contextmanager
def running(made: Hosts) -> Iterator[Hosts]:
    with closing(made), made.daemons:
        made.start()
        yield made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, server: GcsServer) -> Iterator[Hosts]:
    with running(Hosts(tmp_path_factory.mktemp("hosts"), server)) as made:
        yield made


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, server: GcsServer) -> Iterator[Hosts]:
    """Sidecars that soon take a source for stalled; on a slow machine also one that isn't."""
    with running(Hosts(tmp_path_factory.mktemp("hasty"), server, patient=False)) as made:
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


def saved(hosts: Hosts) -> Checkpoint:
    """A checkpoint whose files are in the spool of the first host, too."""
    number = next(_numbers)
    checkpoint_id = f"gs://bucket/peers/step-{number}"
    settings = load_settings(sidecar=hosts.daemons.sidecar_address, job=f"saved-{number}")
    with Client(settings) as client:
        state = {"w": torch.arange(5 << 20, dtype=torch.int32)}
        client.save(state, checkpoint_id=checkpoint_id, no_dist=True)
    (name,) = {
        name.rpartition("/")[2]
        for name in listed(hosts.server, f"peers/step-{number}")
        if name.endswith("_0.distcp")
    }
    attempt = re.fullmatch(r"__(.*)_0_0\.distcp", name)
    assert attempt is not None
    options = {"endpoint_url": hosts.server.url, "token": "anon"}
    files = committed(checkpoint_id, attempt[1], [name], options)
    made = Checkpoint(checkpoint_id, attempt[1], files, f"load-{number}")
    reader = BlockReader(hosts.daemons.sidecar_address, made)
    wait_until(lambda: len(reader.locate([name]).files) == 1)
    (located,) = reader.locate([name]).files
    assert located.size == files[0].size > 2 * BLOCK_BYTES
    return made


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


@pytest.mark.parametrize("changed", [False, True], ids=["intact", "changed"])
def test_a_block_in_a_peers_spool_comes_from_there_unless_it_is_wrong(
    hosts: Hosts, changed: bool
) -> None:
    checkpoint = saved(hosts)
    if changed:
        newest = max((hosts.daemons.spool / "0").glob("*.data"), key=os.path.getmtime)
        with newest.open("r+b") as file:
            file.seek(BLOCK_BYTES + 17)
            file.write(b"changed!")
    hosts.reader(0, checkpoint).locate()
    with hosts.reader(1, checkpoint) as reader:
        for block in range(3):
            reader.request(block, holders=[0])
        blocks = reader.blocks(3)
        contents = [reader.take(block) for block in blocks]
    assert sum(map(len, contents)) == checkpoint.files[0].size
    expected = [("node-0", 0), ("", 1) if changed else ("node-0", 0), ("node-0", 0)]
    assert [(block.source, block.rejected) for block in blocks] == expected
    assert hosts.reads(checkpoint) == changed
    if changed:
        wrong = (
            "blocks that the sidecar of node-0 at .* has are read elsewhere for now: .* has crc32c"
        )
        assert re.search(wrong, hosts.log(1))


def test_storage_that_asks_for_less_load_delays_a_block_and_is_asked_by_no_other_host(
    hosts: Hosts, server: GcsServer
) -> None:
    checkpoint = stored(server, whole_blocks(1))
    path = checkpoint.id.rpartition("/")[2]
    server.fault(kind="status", method="GET", path=path, status=429, times=3)
    try:
        with hosts.reader(0, checkpoint), hosts.reader(1, checkpoint) as reader:
            reader.request(0, owner=0)
            block = reader.next()
            reader.content(block)
    finally:
        server.clear()
    assert (block.source, block.failed, block.hedged) == ("node-0", 0, 0)
    assert hosts.reads(checkpoint) == 4


def test_a_read_of_storage_that_hangs_is_made_a_second_time(
    hasty: Hosts, server: GcsServer
) -> None:
    data = whole_blocks(7)
    checkpoint = stored(server, data)
    with hasty.reader(0, checkpoint) as reader:
        # So that it is known how long one takes.
        assert reader.read(6) == data[: 6 * BLOCK_BYTES]
        path = checkpoint.id.rpartition("/")[2]
        server.fault(kind="delay", method="GET", path=path, seconds=BOUND_S)
        try:
            reader.request(6)
            block = reader.next()
        finally:
            server.clear()
            server.release()
        assert reader.content(block) == data[6 * BLOCK_BYTES :]
    assert block.hedged >= 1
    assert reader.alive
    assert hasty.reads(checkpoint) >= 8


def test_what_storage_does_not_have_is_an_error_of_that_block_alone(
    hosts: Hosts, server: GcsServer
) -> None:
    data = whole_blocks(2)
    checkpoint = stored(server, data)
    missing = data_file("missing.distcp", data)
    wrong = data_file(NAME, data[:-1] + b"!")
    files = [*checkpoint.files, missing, wrong]
    checkpoint = Checkpoint(checkpoint.id, checkpoint.attempt, files, checkpoint.load)
    with hosts.reader(0, checkpoint) as reader:
        for file in range(3):
            reader.request(1, file=file)
        first, second, third = reader.blocks(3)
        assert reader.content(first) == data[BLOCK_BYTES:]
        assert re.search(r"missing\.distcp could not be read: .*No such object", second.error)
        assert "from storage, the receipt has" in third.error


def refused(hosts: Hosts, tls: Files | None, **fields: object) -> grpc.RpcError:
    """The error of a peer that requests a block of the first host."""
    request = restore_pb2.ReadBlockRequest(
        **{
            "load": "unknown",
            "checkpoint_id": "gs://bucket/peers/step-0",
            "attempt": ATTEMPT,
            "file": NAME,
            "file_size": 100,
            "host": "node-7",
            "wire_version": WIRE_VERSION,
            **fields,
        }
    )
    address = hosts.peers[0][1]
    if tls is None:
        channel = grpc.insecure_channel(address, options=channel_options())
    else:
        credentials = grpc.ssl_channel_credentials(
            tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
        )
        channel = grpc.secure_channel(address, credentials, options=channel_options())
    with channel, pytest.raises(grpc.RpcError) as caught:
        list(restore_pb2_grpc.PeerStub(channel).ReadBlock(request, timeout=BOUND_S))
    return caught.value


def test_peers_of_another_job_or_version_and_strangers_are_refused(
    hosts: Hosts, server: GcsServer, tmp_path: Path
) -> None:
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    error = refused(hosts, hosts.tls)
    assert error.code() is precondition
    assert re.search("node-7 .* no rank of host node-0 takes part in", error.details())
    error = refused(hosts, hosts.tls, wire_version=WIRE_VERSION + 1)
    assert error.code() is precondition
    assert f"node-7 speaks wire version {WIRE_VERSION + 1}" in error.details()
    checkpoint = stored(server, whole_blocks(1))
    hosts.reader(0, checkpoint)
    known = {"load": checkpoint.load, "checkpoint_id": checkpoint.id}
    error = refused(hosts, hosts.tls, **known, spool_only=True)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "isn't in the spool of node-0" in error.details()
    for field, value in (("checkpoint_id", checkpoint.id + "1"), ("attempt", "i2-a1-g00000000-s1")):
        error = refused(hosts, hosts.tls, **{**known, field: value})
        assert "no rank of host node-0 takes part in" in error.details()
    error = refused(hosts, hosts.tls, **known, block=1)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for name in ("../secret", "/etc/passwd"):
        error = refused(hosts, hosts.tls, **known, file=name)
        assert "is not a name below a checkpoint" in error.details()
    stranger = Authority(tmp_path / "other", "another CA").issue("stranger")
    for files in (None, stranger, Files(stranger.cert, stranger.key, hosts.tls.ca)):
        assert refused(hosts, files, **known).code() is grpc.StatusCode.UNAVAILABLE


def test_a_rank_that_sends_nonsense_loses_its_stream_alone(hosts: Hosts, server: GcsServer) -> None:
    data = whole_blocks(1)
    checkpoint = stored(server, data)
    nonsense = ({"block": 1}, {"block": 0, "file": 1}, {"block": 0, "holders": [2]})
    with hosts.reader(0, checkpoint) as healthy:
        for each in nonsense:
            with hosts.reader(0, checkpoint, rank=1) as reader:
                reader.request(**each)
                with pytest.raises(grpc.RpcError, match=r"rank 1|has no|and so no block"):
                    reader.next()
        assert healthy.read(1) == data


def test_a_stopped_owner_delays_a_block_and_is_not_asked_again_for_a_while(
    hasty: Hosts, server: GcsServer
) -> None:
    data = whole_blocks(4)
    checkpoint = stored(server, data)
    owner = hasty.daemons.sidecars[0]
    with hasty.reader(0, checkpoint), hasty.reader(1, checkpoint) as reader:
        # So that it is connected.
        reader.request(3, owner=0)
        first = reader.next()
        owner.pause()
        try:
            for block in range(3):
                reader.request(block, owner=0)
            blocks = reader.blocks(3)
            assert b"".join(map(reader.take, blocks)) == data[: 3 * BLOCK_BYTES]
        finally:
            owner.resume()
    assert [block.source for block in blocks] == [""] * 3
    # An owner that was slow before is avoided.
    assert sum(block.hedged for block in (first, *blocks)) >= 1
    assert re.search("of node-0 .* are read elsewhere for now: it doesn't", hasty.log(1))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, server: GcsServer) -> Iterator[Hosts]:
    """Sidecars that keep one block."""
    made = Hosts(tmp_path_factory.mktemp("small"), server, "--restore-budget", "8MiB")
    with running(made):
        yield made


def test_room_for_one_block_serves_many_ranks_also_after_one_has_died(
    small: Hosts, server: GcsServer
) -> None:
    data = whole_blocks(12)
    checkpoint = stored(server, data)
    sidecar = small.daemons.sidecar
    with ThreadPoolExecutor(16) as pool, ExitStack() as stack:
        with small.reader(0, checkpoint, rank=9) as killed:
            killed.request(0)
            killed.content(killed.next())
            before = most_memory(sidecar)
            # Its stream ends with a block that it never released.
        readers = [
            stack.enter_context(small.reader(0, checkpoint, rank=rank)) for rank in range(16)
        ]
        for content in pool.map(lambda reader: reader.read(12, readers=16), readers):
            assert content == data
        for reader in readers:
            assert reader.memory is not None
            assert reader.memory.size() == BLOCK_BYTES
    # Less than the file: a block, those under way, and their copies on the way.
    assert most_memory(sidecar) - before < 64 << 20


def most_memory(daemon: Daemon) -> int:
    """The most bytes of memory that it had so far."""
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kib) << 10


# The last one: that sidecar stays dead.
def test_a_dead_owner_costs_one_failed_request(small: Hosts, server: GcsServer) -> None:
    data = whole_blocks(3)
    checkpoint = stored(server, data)
    with small.reader(0, checkpoint), small.reader(1, checkpoint) as reader:
        reader.request(2, owner=0)
        first = reader.next()
        assert first.source == "node-0"
        reader.take(first)
        small.daemons.sidecars[0].kill()
        for block in range(2):
            reader.request(block, owner=0)
        found = {}
        failed = 0
        for _ in range(2):
            block = reader.next()
            assert block.source == ""
            failed += block.failed
            found[block.id] = reader.take(block)
        assert found[2] + found[3] == data[: 2 * BLOCK_BYTES]
    assert failed >= 1
    log = small.log(1)
    assert len(re.findall("of node-0 .* are read elsewhere for now: .* can't be reached", log)) == 1
