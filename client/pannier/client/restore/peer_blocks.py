"""Blocks that a rank without a sidecar reads from the sidecars of other hosts.

In: the blocks of the rank's plan, and the job's TLS files. Out: their bytes, checked. Hosts with the file in
their spools are asked first, then the block's owner. A host that fails or shows no sign of life is not asked
again in this load. Owned by the load; has threads of its own, each with a buffer for one block. Thread-safe.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import crc32c
import grpc
import numpy as np

from pannier.client.restore.restore_plan import BlockTable, Credentials, Host, LoadName, SharedBlock
from pannier.client.restore.shared_blocks import FetchedBlock
from pannier.common import timeouts
from pannier.v1 import restore_pb2, restore_pb2_grpc
from pannier.wire.addresses import channel_options, keepalive_options
from pannier.wire.errors import (
    ConfigurationError,
    IntegrityError,
    PannierError,
    UnavailableError,
    from_rpc_error,
)
from pannier.wire.tls import Tls, channel_to
from pannier.wire.version import WIRE_VERSION

_log = logging.getLogger(__name__)

_THREADS: Final = 4
"""Blocks at a time."""


class PeerBlocks:
    """See the module.

    Args:
        table: the blocks.
        load: whose they are.
        host: name of this one.
        tls: for the connections to hosts that require it; None: these are not asked.
    """

    def __init__(
        self, table: BlockTable, load: LoadName, host: str, tls: Tls | Credentials | None
    ) -> None:
        self._table = table
        self._load = load
        self._host = host
        self._tls = tls
        self._lock = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}
        self._calls: dict[Any, int] = {}
        """Calls under way, and the number of checks since the last message of each."""
        self._watch: threading.Thread | None = None
        self._ended = threading.Event()
        self._avoided: set[int] = set()
        self._messages = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pannier-peer")

    def has(self, name: str) -> bool:
        """Whether blocks of this file are shared."""
        return name in self._table.names

    def find(self, name: str, block: int) -> SharedBlock | None:
        """A block of a file; None: it isn't shared."""
        return self._table.blocks.get((name, block))

    def first_source(self, name: str, block: int) -> str:
        """The source that is asked first for a block of a shared file."""
        return self._table.first_source(name, block)

    def message_count(self) -> int:
        """Number of messages that have arrived from all hosts."""
        return self._messages

    def request(self, name: str, block: int) -> "Future[FetchedBlock]":
        """The block, later; UnavailableError: no host has sent it."""
        try:
            return self._pool.submit(self._read, self._table.blocks[name, block])
        except RuntimeError as error:  # it was closed meanwhile, or the interpreter is ending
            failed: Future[FetchedBlock] = Future()
            failed.set_exception(UnavailableError(f"no more blocks are read: {error}"))
            return failed

    def close(self) -> None:
        """Ends all requests."""
        with self._lock:
            self._ended.set()
            calls, channels = list(self._calls), list(self._channels.values())
        for call in calls:
            call.cancel()
        # Without cancel_futures, which wakes no thread that waits for them: queued reads end by themselves.
        self._pool.shutdown()
        for channel in channels:
            channel.close()

    def _read(self, block: SharedBlock) -> FetchedBlock:
        problems = []
        for number, from_spool in _sources(block):
            if self._ended.is_set():
                break
            if number in self._avoided:
                continue
            try:
                return self._read_from(number, block, from_spool)
            except PannierError as error:
                if self._ended.is_set():
                    break
                problems.append(f"{self._table.hosts[number].name}: {error}")
                if not isinstance(error, IntegrityError) and _is_lasting(error):
                    self._avoid(number, error)
        if self._ended.is_set():
            raise UnavailableError("the load has ended")
        raise UnavailableError("; ".join(problems) or "all hosts that have it have failed before")

    def _avoid(self, number: int, error: PannierError) -> None:
        host = self._table.hosts[number]
        with self._lock:
            first = number not in self._avoided
            self._avoided.add(number)
        if first:
            _log.warning(
                "no more blocks are read from %s at %s in this load: %s",
                *(host.name, host.address, error),
            )

    def _read_from(self, number: int, block: SharedBlock, from_spool: bool) -> "_ReadBlock":
        host, record = self._table.hosts[number], self._table.files[block.file]
        request = restore_pb2.ReadBlockRequest(
            load=self._load.load,
            checkpoint_id=self._load.checkpoint_id,
            attempt=self._load.attempt,
            file=record.name,
            file_size=record.size,
            block=block.number,
            crc32c=block.crc32c,
            readers=block.source.owner_readers,
            spool_only=from_spool,
            host=self._host,
            wire_version=WIRE_VERSION,
        )
        stub: Any = restore_pb2_grpc.PeerStub(self._channel(number, host))
        call = stub.ReadBlock(request, timeout=timeouts.FETCH_SLOW_S)
        with self._lock:
            self._calls[call] = 0
            if self._ended.is_set():
                call.cancel()
            if self._watch is None:
                self._watch = threading.Thread(
                    target=self._end_stalled, name="pannier-peer-watch", daemon=True
                )
                self._watch.start()
        content = np.empty(block.size, np.uint8).data
        done, sent = 0, None
        try:
            for response in call:
                with self._lock:
                    self._messages += 1
                    self._calls[call] = 0
                data = response.data
                if done + len(data) > block.size:
                    raise IntegrityError(f"{host.name} sent more bytes than the block has")
                content[done : done + len(data)] = data
                done += len(data)
                if response.HasField("crc32c"):
                    sent = response.crc32c
        except grpc.RpcError as error:
            where = f"sidecar of {host.name} at {host.address}"
            if error.code() is grpc.StatusCode.CANCELLED:
                raise UnavailableError(f"the {where} shows no sign of life") from error
            raise from_rpc_error(error, peer=where) from error
        finally:
            call.cancel()
            with self._lock:
                del self._calls[call]
        expected = sent if block.crc32c is None else block.crc32c
        crc = crc32c.crc32c(content[:done])
        if done != block.size or crc != expected:
            raise IntegrityError(
                f"block {block.number} of {record.name} came from {host.name} with {done} of {block.size} "
                f"bytes and crc32c {crc:08x}, saved was {'none' if expected is None else f'{expected:08x}'}"
            )
        return _ReadBlock(content, host.name)

    def _end_stalled(self) -> None:
        """Cancels calls whose hosts show no sign of life."""
        # Checks are counted, not seconds: this process may have been stopped meanwhile.
        while not self._ended.wait(timeouts.FETCH_POLL_S):
            with self._lock:
                for call in self._calls:
                    self._calls[call] += 1
                stalled = [
                    call
                    for call, looks in self._calls.items()
                    if looks * timeouts.FETCH_POLL_S >= timeouts.FETCH_STALL_S
                ]
            for call in stalled:
                call.cancel()

    def _channel(self, number: int, host: Host) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get(number)
            if channel is None:
                options: list[tuple[str, Any]] = [*channel_options(), *keepalive_options()]
                if host.certified_name:
                    options.append(("grpc.ssl_target_name_override", host.certified_name))
                channel = self._channels[number] = self._open(host, options)
            return channel

    def _open(self, host: Host, options: list[tuple[str, Any]]) -> grpc.Channel:
        if not host.requires_tls:
            return channel_to(host.address, options, None)
        if isinstance(self._tls, Tls):
            credentials = self._tls.channel_credentials()
        elif self._tls is not None:
            credentials = grpc.ssl_channel_credentials(self._tls.ca, self._tls.key, self._tls.cert)
        else:
            raise ConfigurationError(f"{host.name} requires TLS, and PANNIER_TLS_CERT is not set")
        return channel_to(host.address, options, credentials)


class _ReadBlock:
    """A block that was received and checked."""

    def __init__(self, content: memoryview, source: str) -> None:
        self._content = content
        self._source = source

    def copy(self, memory: memoryview) -> str:
        """See :class:`~pannier.client.restore.shared_blocks.FetchedBlock`."""
        memory[:] = self._content
        return self._source

    def release(self) -> None:
        """See :class:`~pannier.client.restore.shared_blocks.FetchedBlock`."""


def _sources(block: SharedBlock) -> Iterator[tuple[int, bool]]:
    """Hosts that can send the block, and whether from their spools."""
    yield from ((holder, True) for holder in block.source.holders)
    if block.source.owner is not None:
        yield block.source.owner, False


def _is_lasting(error: PannierError) -> bool:
    """Whether the host would fail for other blocks, too."""
    cause = error.__cause__
    return not (isinstance(cause, grpc.RpcError) and cause.code() is grpc.StatusCode.NOT_FOUND)
