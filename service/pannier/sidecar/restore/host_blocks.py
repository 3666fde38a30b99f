"""The blocks that this host fetches for loads: for its own ranks, and for other hosts.

In: which loads run here, and the blocks that their ranks and peers request. Out: blocks in memory, each
from the nearest source: this host's spool, a peer's, the host that owns it, storage. Peers are served for
loads that a rank of this host takes part in. On the event loop.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from pannier.common import timeouts
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.restore.block_cache import (
    BlockCache,
    BlockKey,
    BlockRequest,
    Fetched,
    WantedBlock,
)
from pannier.sidecar.restore.block_fetcher import BlockFetcher, BlockSource
from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.sidecar.restore.peers import PeerBlock, Peers
from pannier.sidecar.restore.spool_blocks import SpoolBlock
from pannier.sidecar.restore.stored_blocks import StoredBlock, StoredBlocks
from pannier.sidecar.spool.mapped_files import TOKEN_BYTES
from pannier.storage import Store
from pannier.v1 import records_pb2, restore_pb2
from pannier.wire.chunk_codec import BLOCK_BYTES
from pannier.wire.errors import ConfigurationError, InvalidRequestError, check_wire_version
from pannier.wire.records import parse_blocks
from pannier.wire.version import WIRE_VERSION

MOST_LOADS: Final = 1024
"""Loads that are known at a time; the oldest is forgotten first."""


@dataclass
class LoadFiles:
    """What one rank loads."""

    start: restore_pb2.FetchStart
    files: list[records_pb2.DataFile] = field(default_factory=list)
    sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Checksums of blocks, by index of the file."""

    @cached_property
    def reader(self) -> str:
        """The rank, for messages."""
        return f"rank {self.start.rank}"

    def add(self, files: restore_pb2.FetchFiles) -> None:
        """Appends files to those of the start message."""
        self.files.extend(files.files)

    def bounds(self, request: restore_pb2.BlockRequest) -> tuple[records_pb2.DataFile, int, int]:
        """File, offset and size of a block. Raises InvalidRequestError."""
        if request.file >= len(self.files):
            raise InvalidRequestError(
                f"{self.reader} requests a block of file {request.file}, and has named {len(self.files)}"
            )
        file = self.files[request.file]
        return (file, *block_bounds(file.name, file.size, request.block))

    def expected(self, request: restore_pb2.BlockRequest) -> int | None:
        """The block's crc32c by the receipt; None: not known."""
        file = self.files[request.file]
        known = self.sums.get(request.file)
        if known is None:
            if file.block_bytes == BLOCK_BYTES:
                known = parse_blocks(file)
            elif file.size <= BLOCK_BYTES and file.crc32c:
                known = (file.crc32c,)
            self.sums[request.file] = known = known or ()
        return known[request.block] if request.block < len(known) else None

    def hosts(self, indices: Sequence[int]) -> list[restore_pb2.FetchHost]:
        """Other hosts, by their indices. Raises InvalidRequestError."""
        most = len(self.start.hosts)
        if any(index >= most for index in indices):
            raise InvalidRequestError(
                f"{self.reader} names host {max(indices)} as a source, and has named {most}"
            )
        return [self.start.hosts[index] for index in indices if index != self.start.own]


class _Load(NamedTuple):
    """A load that a rank of this host takes part in."""

    id: str
    checkpoint_id: str
    attempt: str


def _load_of(
    request: restore_pb2.LocateRequest | restore_pb2.FetchStart | restore_pb2.ReadBlockRequest,
) -> _Load:
    return _Load(request.load, request.checkpoint_id, request.attempt)


def block_bounds(name: str, file_size: int, block: int) -> tuple[int, int]:
    """Offset and size of a block of a file. Raises InvalidRequestError: the file has no such block."""
    offset = block * BLOCK_BYTES
    if offset >= file_size:
        raise InvalidRequestError(f"{name} has {file_size} bytes, and so no block {block}")
    return offset, min(BLOCK_BYTES, file_size - offset)


class HostBlocks:
    """See the module.

    Args:
        copies: the files of this host's spool.
        host: name of this host.
        budget: see :class:`BlockCache`.
        may_fetch: whether ranks can map what is fetched.
    """

    def __init__(
        self,
        copies: LocalCopies,
        stored: StoredBlocks,
        peers: Peers,
        *,
        host: str,
        budget: int,
        may_fetch: Callable[[], bool],
    ) -> None:
        self.host = host
        self.cache = BlockCache(budget)
        self._budget = budget
        self.copies = copies
        self._stored = stored
        self._peers = peers
        self._may_fetch = may_fetch
        self._fetcher = BlockFetcher(self.cache.spare)
        self._known: dict[_Load, float] = {}
        """Loads of this host's ranks, and when each was last announced or read by a peer; newest last."""
        self._offers: dict[bytes, float] = {}
        """Tokens for the memory, and since when."""
        self._used_at = 0.0
        """When a rank or a peer last read something here; monotonic."""
        self.sent = 0
        """Bytes of blocks that peers have received."""

    @staticmethod
    def of(
        config: SidecarConfig,
        copies: LocalCopies,
        open_store: Callable[[str], Store],
        may_fetch: Callable[[], bool],
    ) -> "HostBlocks":
        """The blocks of a sidecar with these settings."""
        return HostBlocks(
            copies,
            StoredBlocks(open_store, config.allow),
            Peers.of(config),
            host=config.host,
            budget=config.restore_budget,
            may_fetch=may_fetch,
        )

    def idle_s(self) -> float:
        """Seconds since a load has last read something here."""
        return 0.0 if self.cache.readers else time.monotonic() - self._used_at

    # Loads.

    def announce(self, request: restore_pb2.LocateRequest | restore_pb2.FetchStart) -> None:
        """A rank of this host takes part in a load, so that peers may read its blocks here."""
        self._used_at = time.monotonic()
        if not request.load:
            return
        self._refresh(_load_of(request))
        if len(self._known) > MOST_LOADS:
            del self._known[next(iter(self._known))]

    async def budget_for(self, checkpoint_id: str) -> int:
        """Bytes of blocks of a checkpoint that can be fetched here; 0: none."""
        if not (checkpoint_id and self._may_fetch() and await self._stored.may_read(checkpoint_id)):
            return 0
        return self._budget

    async def check_start(self, start: restore_pb2.FetchStart) -> None:
        """Raises PannierError unless blocks of the checkpoint can be fetched for this rank."""
        await self._stored.check(start.checkpoint_id)
        if not self._may_fetch():
            raise ConfigurationError(
                "blocks are passed by a unix socket's descriptors only, and this sidecar has no "
                "unix socket at --address"
            )

    async def check_peer(self, request: restore_pb2.ReadBlockRequest) -> None:
        """Raises PannierError unless a peer may read that block here."""
        self._used_at = time.monotonic()
        peer = request.host or "a peer"
        check_wire_version(peer, request.wire_version, f"the sidecar of {self.host}")
        load = _load_of(request)
        if load not in self._known:
            raise ConfigurationError(
                f"{peer} requests a block of {request.checkpoint_id} for a load that no rank of host "
                f"{self.host} takes part in: is it of another job, or was the sidecar restarted "
                "meanwhile?"
            )
        # The load's ranks here may only read their own spool, and announce nothing any more.
        self._refresh(load)
        if not request.spool_only:
            await self._stored.check(request.checkpoint_id)

    def offer(self) -> bytes:
        """A token for a descriptor of the memory."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = time.monotonic()
        return token

    def open_memory(self, token: bytes) -> list[int]:
        """A descriptor of the memory, which the caller closes; none: the token isn't known."""
        if self._offers.pop(token, None) is None:
            return []
        return [self.cache.memory.open_for_reading()]

    # Blocks.

    def request(self, load: LoadFiles, request: restore_pb2.BlockRequest) -> BlockRequest:
        """Begins to fetch a block for a rank. Raises InvalidRequestError."""
        start = load.start
        file, offset, size = load.bounds(request)
        expected = load.expected(request)
        wanted = restore_pb2.ReadBlockRequest(
            load=start.load,
            checkpoint_id=start.checkpoint_id,
            attempt=start.attempt,
            file=file.name,
            file_size=file.size,
            block=request.block,
            crc32c=expected,
            host=self.host,
            wire_version=WIRE_VERSION,
        )
        sources: list[BlockSource] = []
        # A spool's bytes are only used where the committed receipt can refute them.
        for holder in load.hosts(request.holders if expected is not None else []):
            if self._peers.is_usable(holder):
                in_spool = restore_pb2.ReadBlockRequest()
                in_spool.CopyFrom(wanted)
                in_spool.spool_only = True
                sources.append(PeerBlock(self._peers, holder, in_spool))
        for owner in load.hosts([request.owner] if request.HasField("owner") else []):
            if self._peers.is_usable(owner):
                wanted.readers = request.owner_readers
                sources.append(PeerBlock(self._peers, owner, wanted))
        return self._request(wanted, sources, offset, size, request.readers, load.reader)

    def request_for_peer(self, request: restore_pb2.ReadBlockRequest) -> BlockRequest:
        """Begins to read a block that this host owns, for another one. Raises InvalidRequestError."""
        offset, size = block_bounds(request.file, request.file_size, request.block)
        reader = f"host {request.host}"
        return self._request(request, [], offset, size, request.readers, reader)

    def read_spool(
        self, request: restore_pb2.ReadBlockRequest
    ) -> AsyncGenerator[bytes, None] | None:
        """A block of a local copy, in pieces; None: its file isn't here, or the reader has no checksum of it.

        Raises InvalidRequestError.
        """
        if not self._is_in_spool(request):
            return None
        return self._in_spool(
            request, *block_bounds(request.file, request.file_size, request.block)
        ).pieces()

    async def tick(self) -> None:
        """Forgets ended loads and unused tokens, frees memory and connections. Every second or so."""
        now = time.monotonic()
        for load, since in list(self._known.items()):
            if self.cache.is_read(load.id):
                self._known[load] = self._used_at = now
            elif now - since > timeouts.LOAD_KNOWN_S:
                del self._known[load]
        for token, since in list(self._offers.items()):
            if now - since > timeouts.DESCRIPTORS_FETCH_S:
                del self._offers[token]
        self.cache.tick()
        await self._peers.tick()
        await self._stored.tick()

    async def close(self) -> None:
        """Ends all fetches."""
        await self.cache.close()
        await self._peers.close()
        await self._stored.close()

    def _refresh(self, load: _Load) -> None:
        self._known.pop(load, None)
        self._known[load] = time.monotonic()

    def _is_in_spool(self, request: restore_pb2.ReadBlockRequest) -> bool:
        """Whether a local copy has the file, and its bytes can be compared with the committed receipt."""
        copy = self.copies.find(request.attempt, request.file)
        return copy is not None and request.HasField("crc32c")

    def _in_spool(
        self, request: restore_pb2.ReadBlockRequest, offset: int, size: int
    ) -> SpoolBlock:
        return SpoolBlock(self.copies, self.host, request.attempt, request.file, offset, size)

    def _request(
        self,
        request: restore_pb2.ReadBlockRequest,
        peers: Sequence[BlockSource],
        offset: int,
        size: int,
        readers: int,
        reader: str,
    ) -> BlockRequest:
        own: list[BlockSource] = []
        if self._is_in_spool(request):
            own.append(self._in_spool(request, offset, size))
        stored = StoredBlock(self._stored, request.checkpoint_id, request.file, offset, size)
        sources = [*own, *peers, stored]
        expected = request.crc32c if request.HasField("crc32c") else None
        what = f"block {request.block} of {request.checkpoint_id}/{request.file}"

        async def fetch() -> Fetched:
            return await self._fetcher.fetch(sources, size, expected, what)

        key = BlockKey(
            request.load,
            request.checkpoint_id,
            request.attempt,
            request.file,
            request.block,
            size,
            expected,
        )
        wanted = WantedBlock(key, size, readers, fetch, remote=bool(peers) and not own)
        return self.cache.request(wanted, reader)
