"""How many more bytes per second go up on two cores than on one, over TLS, to a receiver that isn't the limit.

The upload threads of a sidecar send files from memory, each in one request and without daemons, to a server that
discards them. Bare ``ssl`` sockets do the same, one and two at a time. The receiver needs a part of the cores, too:
the CPU time of both ends says what so many cores allow.
"""

import asyncio
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
from tests.bench import bare_sockets
from tests.bench.embedded import cpu_seconds, prefix
from tests.bench.parts import GIB, MIB, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio, timed

from pannier.storage.http_body import FromSpool
from pannier.storage.http_sender import HttpSender
from pannier.storage.source_reader import SourceReader
from pannier.storage.upload_threads import UploadThreads
from support.network.certificates import Authority, Files

TARGET: Final = 1.6
FILES: Final = 4
"""That go up at the same time."""
ROOT = Path(__file__).parents[2]


class Source:
    """A complete file, as stores upload it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size

    async def wait_for(self, end: int) -> int:
        return self.size

    def confirm(self, found: object) -> None:
        """It was read."""


@contextmanager
def discarding_store(tls: Files) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and process."""
    command = [sys.executable, "-m", "tests.bench.discarding_store", str(tls.cert), str(tls.key)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.communicate()


def upload(address: str, cores: int, path: Path, tls: ssl.SSLContext) -> None:
    """Returns when all files are there."""

    async def main() -> None:
        threads = UploadThreads(cores)
        sender = HttpSender(threads, lambda: tls)

        async def put() -> None:
            source = Source(path)
            reader = SourceReader(source, threads)
            await reader.wait_for(source.size)
            body = FromSpool(reader, 0, source.size)
            response = await sender.send("PUT", f"{address}/file", {}, body)
            assert response.status == 200, response
            await reader.confirm()
            reader.close()

        await asyncio.gather(*(put() for _ in range(FILES)))
        sender.close()

    asyncio.run(main())


def upload_bare(address: str, sockets: int, path: Path, tls: ssl.SSLContext) -> None:
    """The same through so many bare sockets at a time, and by as many threads."""
    size = path.stat().st_size

    def send(count: int) -> None:
        for _ in range(count):
            bare_sockets.send(f"{address}/file", path, 0, size, tls)

    threads = [threading.Thread(target=send, args=(FILES // sockets,)) for _ in range(sockets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(options: Any, directory: Path) -> dict[str, list[float]]:
    """Seconds by how, in turns; and CPU seconds of both ends with two threads."""
    tls = Authority(directory / "tls").issue("store")
    context = ssl.create_default_context(cafile=str(tls.ca))
    path = directory / "file"
    path.write_bytes(os.urandom(MIB) * (options.bytes // FILES // MIB))
    found: dict[str, list[float]] = {}

    def used() -> float:
        return time.process_time() + cpu_seconds(receiver)

    with discarding_store(tls) as (address, receiver):
        ways = {
            **{f"threads_{n}_s": (upload, address, n, path, context) for n in (1, 2)},
            **{f"sockets_{n}_s": (upload_bare, address, n, path, context) for n in (1, 2)},
        }
        for number in range(options.saves + 1):
            for name, (action, *given) in ways.items():
                before = used()
                taken, _ = timed(action, *given)
                # The first also starts what is kept.
                if number:
                    found.setdefault(name, []).append(taken)
                    found.setdefault(name.replace("_s", "_cpu_s"), []).append(used() - before)
    return found


def rows(found: dict[str, list[float]], options: Any) -> list[Row]:
    """The gain of a second core."""
    cores = len(os.sched_getaffinity(0))

    def rate(name: str) -> str:
        return f"{options.bytes / GIB / statistics.median(found[name]):.2f} GiB/s"

    gain = ratio(found["threads_1_s"], found["threads_2_s"])
    bare = ratio(found["sockets_1_s"], found["sockets_2_s"])
    least_s = statistics.median(found["threads_2_cpu_s"]) / cores
    allowed = statistics.median(found["threads_1_s"]) / least_s
    return [
        Row(
            f"uploads over TLS on two cores, receiver discards, {sized(options.bytes)}",
            f"≥ {TARGET} × one core",
            str(gain),
            gain.value >= TARGET,
            f"{rate('threads_1_s')}, {rate('threads_2_s')}; bare `ssl` sockets {rate('sockets_1_s')}, "
            f"{rate('sockets_2_s')}: {bare}; {cores} cores allow {allowed:.2f} × at most, by the CPU time of both ends",
        )
    ]


def main() -> None:
    options = parsed(arguments(__doc__))
    say(f"uploads on several cores, {sized(options.bytes)}")
    with tempfile.TemporaryDirectory(prefix=prefix(), dir="/dev/shm") as directory:
        found = measure(options, Path(directory))
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
