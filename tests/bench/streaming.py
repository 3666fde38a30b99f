"""What a streamed hand-over costs above a mapped one: against a bare gRPC stream of as many bytes.

A rank saves to the local disk through the embedded sidecar, first mapped, then streamed; the difference of the CPU
time of trainer and sidecar is the stream's. The yardsticks are two processes with a Unix socket between
them: gRPC streams of messages of the same size with nothing done to them, in turns with the streamed saves, and plain
bytes.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import crc32c
import grpc
import psutil
from tests.bench.embedded import Place, Ways, cpu_seconds, prefix, rest
from tests.bench.parts import GIB, MIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.training import State, change, make_state

from pannier.wire.addresses import channel_options
from pannier.wire.chunk_codec import CHUNK_BYTES

METHOD: Final = "/bench.Bench/Take"
_TAKE: Final = "--take"
_SIDES: Final = ("sidecar", "trainer")


def save(transport: str, state: State, saves: int, directory: str | None) -> dict[str, Any]:
    """CPU seconds per GiB of each process, and seconds until ingested; streamed, with a bare stream after each."""
    from pannier import client

    size = sum(tensor.nbytes for tensor in state.values())
    used: dict[str, list[float]] = {side: [] for side in _SIDES}
    ingested: list[float] = []
    streams: list[dict[str, float]] = []
    ways = Ways()
    with Place(transport, disk=directory) as place:
        for number in range(WARM_UP + saves):
            change(state)
            with place.checkpoint(f"step-{number}") as target:
                # The first save starts the daemons.
                before = _cpu_s(place) if number else dict.fromkeys(_SIDES, 0.0)
                handle = client.async_save(state, checkpoint_id=target)
                ingested.append(handle.result().seconds["ingest"])
                after = _cpu_s(place)
                for side in _SIDES:
                    used[side].append((after[side] - before[side]) * GIB / size)
                ways.add(handle)
            if transport == "streamed":
                streams.append(bare("grpc", size))
            rest()
    return {
        "note": ways.note(transport),
        "ingested_s": ingested[WARM_UP:],
        "cpu_s_per_gib": {side: values[WARM_UP:] for side, values in used.items()},
        "bare": streams[WARM_UP:],
    }


def _cpu_s(place: Place) -> dict[str, float]:
    return {"sidecar": cpu_seconds(place.sidecar), "trainer": cpu_seconds(psutil.Process())}


def bare(way: str, size: int) -> dict[str, float]:
    """Seconds, and CPU seconds per GiB, of ``socket`` or ``grpc``, to a process that only takes the bytes."""
    with tempfile.TemporaryDirectory(prefix=prefix()) as directory:
        address = f"{directory}/s"
        command = [sys.executable, "-m", "tests.bench.streaming", _TAKE, way, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taker:
            assert taker.stdout is not None
            try:
                taker.stdout.readline()  # it listens
                data = memoryview(os.urandom(MIB) * (size // MIB))
                processes = (psutil.Process(), psutil.Process(taker.pid))
                before = [cpu_seconds(each) for each in processes]
                begun = time.perf_counter()
                send = _send_by_socket if way == "socket" else _send_by_grpc
                send(address, (data[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)))
                seconds = time.perf_counter() - begun
                sender, other = (
                    (cpu_seconds(each) - earlier) * GIB / size
                    for each, earlier in zip(processes, before, strict=True)
                )
            finally:
                taker.kill()
    return {"seconds": seconds, "sender": sender, "taker": other}


def _send_by_socket(address: str, pieces: Iterator[memoryview]) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(address)
        for piece in pieces:
            stream.sendall(piece)
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1)


def _send_by_grpc(address: str, pieces: Iterator[memoryview]) -> None:
    with grpc.insecure_channel(f"unix://{address}", options=channel_options()) as channel:
        call: Any = channel.stream_unary(METHOD, request_serializer=bytes)
        call(pieces)


def take(way: str, address: str) -> None:
    """The other process of a yardstick; ends when it is killed."""
    if way == "grpc":
        asyncio.run(_take_by_grpc(address))
        return
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("listening", flush=True)
        stream, _ = listening.accept()
        room = bytearray(CHUNK_BYTES)
        with stream:
            while stream.recv_into(room):
                pass
            stream.sendall(b"x")


async def _take_by_grpc(address: str) -> None:
    async def handle(messages: Any, context: Any) -> bytes:
        async for _ in messages:
            pass
        return b"x"

    handler: Any = grpc.stream_unary_rpc_method_handler(handle)
    server = grpc.aio.server(options=channel_options())
    service, _, method = METHOD[1:].partition("/")
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: handler})]
    )
    server.add_insecure_port(f"unix://{address}")
    await server.start()
    print("listening", flush=True)
    await server.wait_for_termination()


def checksum_s(size: int) -> float:
    """Seconds of one crc32c pass over as many bytes, which are in the cache."""
    piece = bytes(256 << 10)
    begun = time.perf_counter()
    for _ in range(size // len(piece)):
        crc32c.crc32c(piece)
    return time.perf_counter() - begun


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """CPU time, and throughput."""
    streamed, mapped, plain = found["streamed"], found["mapped"], found["socket"]
    extra = {
        side: statistics.median(streamed["cpu_s_per_gib"][side])
        - statistics.median(mapped["cpu_s_per_gib"][side])
        for side in _SIDES
    }
    bare_s, sender, taker = (
        statistics.median(each[name] for each in streamed["bare"])
        for name in ("seconds", "sender", "taker")
    )
    ingested_s = statistics.median(streamed["ingested_s"])
    gib = options.bytes / GIB
    of = sized(options.bytes)
    return [
        Row(
            f"CPU that streaming adds to a mapped save, {of}",
            "",
            f"{sum(extra.values()) / (sender + taker):.2f} × a bare gRPC stream",
            detail=f"{extra['sidecar']:.2f} s per GiB in the sidecar and {extra['trainer']:.2f} in the trainer; bare "
            f"{taker:.2f} to receive and {sender:.2f} to send, by a plain socket "
            f"{plain['taker']:.2f} and {plain['sender']:.2f}; crc32c on one side "
            f"{found['crc32c_s'] / gib:.2f}{mapped['note'] or streamed['note']}",
        ),
        Row(
            f"throughput until ingested, streamed, {of}",
            "",
            f"{bare_s / ingested_s:.2f} × a bare gRPC stream",
            detail=f"{gib / ingested_s:.2f} GiB/s, with the upload beside it; bare {gib / bare_s:.2f} GiB/s, a plain "
            f"socket {gib / plain['seconds']:.2f}",
        ),
    ]


def main() -> None:
    if sys.argv[1:2] == [_TAKE]:
        take(*sys.argv[2:])
        return
    parser = arguments(__doc__)
    parser.add_argument("--directory", help="on the disk to save to (default: a temporary one)")
    options = parsed(parser)
    say(f"streaming, {sized(options.bytes)}")
    state = make_state(options.bytes, options.tensors)
    found: dict[str, Any] = {
        transport: save(transport, state, options.saves, options.directory)
        for transport in ("mapped", "streamed")
    }
    found |= {"socket": bare("socket", options.bytes), "crc32c_s": checksum_s(options.bytes)}
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
