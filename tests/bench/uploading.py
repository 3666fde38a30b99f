"""How long until a save is durable in a bucket: against torch's ``FsspecWriter``.

Both write to the GCS server of the tests, on the same cores. Torch saves synchronously, by one
rank, with the number of threads that is best here (tried first); both take turns. A third one
only sends as many bytes through bare sockets, without a checksum and without reading them from
anywhere: no client can take less than that from this server.
"""

import json
import os
import socket
import statistics
import tempfile
import threading
import urllib.request
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.embedded import Place, Ways, cpu_seconds, prefix, rest
from tests.bench.parts import GIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio, timed
from tests.bench.training import State, change, make_state, start_rank
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save

from support.storage.bucket import listed, remove
from support.storage.gcs_server import GcsServer

ALLOWED_RATIO = 0.7
THREADS = (1, 2, 4, 8)
SOCKETS = 4
PIECE = 256 << 10
BUCKET = "bucket"


def save_by_torch(state: State, target: str, threads: int) -> None:
    """Returns when torch says that it is saved.

    With ``sync_files`` it would call ``os.sync()`` for each object, which syncs this host's disks.
    """
    writer = FsspecWriter(target, thread_count=threads, sync_files=False)
    save(state, storage_writer=writer)


def send_bare(server: GcsServer, name: str, size: int) -> None:
    """``size`` bytes as :data:`SOCKETS` resumable uploads, each in one request, at once."""

    def upload(object_name: str) -> None:
        begin = urllib.request.Request(
            f"{server.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable",
            data=json.dumps({"name": object_name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(begin, timeout=60) as answer:
            session = urlsplit(answer.headers["Location"])
        piece, length = bytes(PIECE), size // SOCKETS // PIECE * PIECE
        with socket.create_connection((session.hostname, session.port), 60) as connection:
            connection.sendall(
                f"PUT {session.path}?{session.query} HTTP/1.1\r\nHost: {session.netloc}\r\n"
                f"Content-Length: {length}\r\n"
                f"Content-Range: bytes 0-{length - 1}/{length}\r\n\r\n".encode()
            )
            for _ in range(length // PIECE):
                connection.sendall(piece)
            status = connection.recv(4096).split(b"\r\n")[0]
        if b" 200 " not in status:
            errors.append(f"{object_name}: {status!r}")

    errors: list[str] = []
    names = [f"{name}/{number}" for number in range(SOCKETS)]
    threads = [threading.Thread(target=upload, args=(each,)) for each in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    missing = set(names) - set(listed(server, name))
    if errors or missing:
        raise RuntimeError(f"bare uploads failed: {errors or missing}")


def best_threads(state: State, server: GcsServer, tries: int) -> dict[int, float]:
    """Seconds by number of threads: the median of ``tries``."""
    found = {}
    for threads in THREADS:
        taken = []
        for number in range(tries):
            name = f"tried-{threads}-{number}"
            taken.append(timed(save_by_torch, state, f"gs://{BUCKET}/{name}", threads)[0])
            remove(server, name)
        found[threads] = statistics.median(taken)
    return found


def measure(state: State, options: Any, directory: Path) -> dict[str, Any]:
    """Seconds of both, by turns, and CPU seconds of the sidecar per GiB."""
    from pannier import client

    ways = Ways()

    def save_by_us(target: str) -> None:
        handle = client.async_save(state, checkpoint_id=target)
        ways.add(handle)
        handle.result()

    size = sum(tensor.nbytes for tensor in state.values())
    ours: list[float] = []
    theirs: list[float] = []
    bare: list[float] = []
    used: list[float] = []
    with (
        GcsServer(directory, [BUCKET]) as server,
        Place(options.transport, storage=server.env) as place,
    ):
        # Each number once more than the first, which also loads what torch needs.
        save_by_torch(state, f"gs://{BUCKET}/first", 1)
        remove(server, "first")
        tried = best_threads(state, server, 1 if options.quick else 2)
        threads = min(tried, key=lambda number: tried[number])
        for number in range(WARM_UP + options.saves):
            change(state)
            name = f"ours-{number}"
            before = cpu_seconds(place.sidecar) if number else 0.0
            ours.append(timed(save_by_us, f"gs://{BUCKET}/{name}")[0])
            used.append((cpu_seconds(place.sidecar) - before) * GIB / size)
            assert f"{name}/.metadata" in listed(server, name)
            remove(server, name)
            os.sync()
            rest()
            if number >= WARM_UP:
                name = f"theirs-{number}"
                target = f"gs://{BUCKET}/{name}"
                theirs.append(timed(save_by_torch, state, target, threads)[0])
                remove(server, name)
                os.sync()
                rest()
                bare.append(timed(send_bare, server, f"bare-{number}", size)[0])
                remove(server, f"bare-{number}")
                os.sync()
                rest()
    return {
        "note": ways.note(options.transport),
        "saved_s": ours[WARM_UP:],
        "torch_s": theirs,
        "bare_s": bare,
        "torch_s_by_threads": tried,
        "threads": threads,
        "sidecar_cpu_s_per_gib": used[WARM_UP:],
    }


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """Time, and the sidecar's CPU time."""
    ours, theirs = statistics.median(found["saved_s"]), statistics.median(found["torch_s"])
    judged = options.transport == "mapped"
    of = f"{options.transport}, {sized(options.bytes)}"
    tried = ", ".join(f"{n}: {s:.2f} s" for n, s in found["torch_s_by_threads"].items())
    return [
        Row(
            f"time until durable on the GCS server, {of}",
            f"≤ {ALLOWED_RATIO} × `FsspecWriter`" if judged else "",
            str(ratio(found["saved_s"], found["torch_s"])),
            ours <= ALLOWED_RATIO * theirs if judged else None,
            f"{ours:.2f} s, torch with {found['threads']} threads {theirs:.2f} s (tried: {tried})"
            f"{found['note']}",
        ),
        Row(
            f"the same bytes to the GCS server through {SOCKETS} bare sockets, {sized(options.bytes)}",
            "",
            str(ratio(found["bare_s"], found["torch_s"])),
            None,
            f"{statistics.median(found['bare_s']):.2f} s; the limit of this server",
        ),
        Row(
            f"CPU of the sidecar, to the GCS server, {of}",
            "",
            f"{statistics.median(found['sidecar_cpu_s_per_gib']):.2f} s per GiB",
        ),
    ]


def main() -> None:
    warnings.filterwarnings("ignore")
    options = parsed(arguments(__doc__))
    say(f"durable in a bucket, {options.transport}, {sized(options.bytes)}")
    start_rank()
    state = make_state(options.bytes, options.tensors)
    with tempfile.TemporaryDirectory(prefix=prefix()) as directory:
        found = measure(state, options, Path(directory))
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
