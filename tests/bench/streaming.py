"""Where the time of a streamed hand-over goes: its rate beside bare ways over the same socket.

Part of ``make bench``; ``streaming.py [--bytes N]`` alone prints JSON. One rank hands saves to
the embedded sidecar, without a training loop. The yardsticks are two processes with a
Unix socket between them: plain bytes, and gRPC streams of messages of the same size with nothing
done to them. CPU time is given by process and kind of thread, in seconds per GiB.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import crc32c
import grpc
import psutil
import torch

from pannier.wire.addresses import channel_options

MESSAGE: Final = 1 << 20
METHOD: Final = "/bench.Bench/Take"
GIB: Final = 1 << 30


def cpu_of_threads(pid: int, names: dict[int, str]) -> dict[str, float]:
    """CPU seconds so far of a process's threads, by kind; ``names`` knows Python's own."""
    ticks = os.sysconf("SC_CLK_TCK")
    found: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except FileNotFoundError:
            continue  # it has ended
        comm = stat[stat.index("(") + 1 : stat.rindex(")")]
        user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
        tid = int(task.name)
        kind = names.get(tid) or ("main" if tid == pid else comm)
        kind = "gRPC" if kind in ("event_engine", "grpc_global_tim", "lifeguard") else kind
        found[kind.rstrip("0123456789-_/")] += (int(user) + int(system)) / ticks
    return found


def _own_threads() -> dict[int, str]:
    return {
        thread.native_id: thread.name if thread.name.startswith("pannier") else "Python's, of gRPC"
        for thread in threading.enumerate()
        if thread.native_id is not None and thread is not threading.main_thread()
    }


def hand_over(size: int, saves: int) -> dict[str, Any]:
    """Through the client and the embedded daemons, to a directory that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="pannier-bench-", dir="/dev/shm") as directory:
        os.environ["PANNIER_RUNTIME_DIR"] = f"{directory}/run"
        os.environ["PANNIER_SPOOL"] = f"{directory}/spool"
        os.environ["PANNIER_TRANSPORT"] = "streamed"
        from pannier import client

        state = {f"layer.{i}": torch.randn(size // 64 // 4) for i in range(64)}
        seconds, alive = [], _own_threads()
        stop = threading.Event()

        def watch() -> None:
            # Threads of one save end with it: what they took is read while they live.
            while not stop.wait(0.01):
                alive.update(_own_threads())

        threading.Thread(target=watch, daemon=True).start()
        client.save(state, checkpoint_id=f"{directory}/warm")
        root = psutil.Process(int(Path(f"{directory}/run/up.pid").read_text()))
        (sidecar,) = (child for child in root.children() if "sidecar" in child.cmdline())

        def all_threads() -> dict[str, float]:
            own = {**alive, **_own_threads()}
            kinds = {f"trainer: {k}": v for k, v in cpu_of_threads(os.getpid(), own).items()}
            kinds |= {f"sidecar: {k}": v for k, v in cpu_of_threads(sidecar.pid, {}).items()}
            return kinds

        process_before = _process_cpu(sidecar)
        before = all_threads()
        for number in range(saves):
            result = client.save(state, checkpoint_id=f"{directory}/step-{number}")
            seconds.append(result.seconds["ingest"])
        after = all_threads()
        process_after = _process_cpu(sidecar)
        stop.set()
        client.close()
        for process in (root, *root.children()):
            process.terminate()
        psutil.wait_procs([root], timeout=10)
    total = size * saves / GIB
    kinds = {kind: (after[kind] - before.get(kind, 0.0)) / total for kind in after}
    whole = {k: (process_after[k] - process_before[k]) / total for k in process_after}
    for name in ("trainer", "sidecar"):
        counted = sum(v for kind, v in kinds.items() if kind.startswith(name))
        kinds[f"{name}: threads that have ended"] = max(0.0, whole[name] - counted)
    return {
        "gib_per_s": size / GIB / statistics.median(seconds),
        "cpu_s_per_gib": {kind: value for kind, value in sorted(kinds.items()) if value > 0.005},
    }


def _process_cpu(sidecar: psutil.Process) -> dict[str, float]:
    found = {}
    for name, process in (("trainer", psutil.Process()), ("sidecar", sidecar)):
        times = process.cpu_times()
        found[name] = times.user + times.system
    return found


def bare(way: str, size: int) -> dict[str, Any]:
    """Yardsticks: ``socket`` or ``grpc``, to a process that only takes the bytes."""
    with tempfile.TemporaryDirectory(prefix="pannier-bench-") as directory:
        address = f"{directory}/s"
        command = [sys.executable, __file__, "--take", way, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as taker:
            assert taker.stdout is not None
            try:
                taker.stdout.readline()  # it listens
                data = bytes(MESSAGE)
                own, other = psutil.Process(), psutil.Process(taker.pid)
                begun = [sum(p.cpu_times()[:2]) for p in (own, other)]
                started = time.perf_counter()
                send = _send_by_socket if way == "socket" else _send_by_grpc
                send(address, data, size // MESSAGE)
                seconds = time.perf_counter() - started
                cpu = [
                    (sum(p.cpu_times()[:2]) - b) * GIB / size
                    for p, b in zip((own, other), begun, strict=True)
                ]
            finally:
                taker.kill()
    return {
        "gib_per_s": size / GIB / seconds,
        "cpu_s_per_gib": {"sender": cpu[0], "taker": cpu[1]},
    }


def _send_by_socket(address: str, data: bytes, count: int) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(address)
        for _ in range(count):
            stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1)


def _send_by_grpc(address: str, data: bytes, count: int) -> None:
    def messages() -> Iterator[bytes]:
        for _ in range(count):
            yield data

    with grpc.insecure_channel(f"unix://{address}", options=channel_options()) as channel:
        call: Any = channel.stream_unary(METHOD)
        call(messages())


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
        room = bytearray(MESSAGE)
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


def checksum(size: int) -> dict[str, Any]:
    """crc32c of the same bytes, once; both sides take it."""
    data = bytes(MESSAGE)
    begun = time.perf_counter()
    for _ in range(size // MESSAGE):
        crc32c.crc32c(data)
    seconds = time.perf_counter() - begun
    return {"gib_per_s": size / GIB / seconds, "cpu_s_per_gib": {"one side": seconds * GIB / size}}


def measure(size: int, saves: int = 5) -> dict[str, Any]:
    """Rate and CPU time of each way."""
    return {
        "pannier": hand_over(size, saves),
        "bare gRPC": bare("grpc", size),
        "bare socket": bare("socket", size),
        "crc32c": checksum(size),
    }


def main() -> None:
    """Measures and prints, or takes what is sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=GIB)
    parser.add_argument("--take", nargs=2, metavar=("WAY", "ADDRESS"))
    options = parser.parse_args()
    if options.take:
        take(*options.take)
    else:
        print(json.dumps(measure(options.bytes)), flush=True)


if __name__ == "__main__":
    main()
