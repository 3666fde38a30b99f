"""How long until a save is durable in a bucket: against torch's ``FsspecWriter``; and the sidecar's CPU time.

Both write to the GCS server of the tests, on the same cores. Torch saves synchronously, by one
rank, with the number of threads that is best here (tried first); both take turns. A third one
only reads as many bytes from memory, checksums and sends them through bare sockets: no client can take less
than that from this server, and its CPU time is what the sidecar's is compared with. With ``--tls``
the server is one over TLS, and torch is left out.
"""

import os
import ssl
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import bare_sockets
from tests.bench.bare_sockets import BUCKET
from tests.bench.embedded import Place, Ways, cpu_seconds, prefix, rest
from tests.bench.parts import GIB, MIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio, timed
from tests.bench.training import State, change, make_state, start_rank
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save

from support.network.certificates import Authority
from support.storage.bucket import listed, remove
from support.storage.gcs_server import GcsServer

ALLOWED_RATIO = 0.7
ALLOWED_OF_SOCKETS = 1.08
ALLOWED_OF_BARE = 1.3
ALLOWED_OF_BARE_TLS = 1.2
THREADS = (1, 2, 4, 8)
SOCKETS = 4


def save_by_torch(state: State, target: str, threads: int) -> None:
    """Returns when torch says that it is saved.

    With ``sync_files`` it would call ``os.sync()`` for each object, which syncs this host's disks.
    """
    writer = FsspecWriter(target, thread_count=threads, sync_files=False)
    save(state, storage_writer=writer)


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


class Bucket:
    """Saves to a server, each to a place of its own, and what they took.

    Args:
        memory: a file there with the bytes that are sent without us.
    """

    def __init__(self, server: GcsServer, place: Place, size: int, memory: Path) -> None:
        self._server, self._place, self._size = server, place, size
        self._memory = memory
        self._ways = Ways()
        self._number = 0
        self.figures: dict[str, list[float]] = {
            name: [] for name in ("saved_s", "torch_s", "bare_s", "sidecar_cpu_s", "bare_cpu_s")
        }
        memory.write_bytes(os.urandom(MIB) * (size // MIB))

    def note(self, transport: str) -> str:
        return self._ways.note(transport)

    def save(self, state: State, *, counts: bool) -> None:
        """By a trainer and its sidecar."""
        from pannier import client

        def save_by_us(name: str) -> None:
            handle = client.async_save(state, checkpoint_id=f"gs://{BUCKET}/{name}")
            self._ways.add(handle)
            handle.result()
            assert f"{name}/.metadata" in listed(self._server, name)

        change(state)
        # The first starts it.
        before = cpu_seconds(self._place.sidecar) if self._number else 0.0
        taken = self._place_of(save_by_us)
        if counts:
            used = cpu_seconds(self._place.sidecar) - before
            self.figures["saved_s"].append(taken)
            self.figures["sidecar_cpu_s"].append(used * GIB / self._size)

    def save_by_torch(self, state: State, threads: int) -> None:
        self.figures["torch_s"].append(
            self._place_of(lambda name: save_by_torch(state, f"gs://{BUCKET}/{name}", threads))
        )

    def send_bare(self, tls: ssl.SSLContext | None) -> None:
        before = time.process_time()
        url = self._server.url
        taken = self._place_of(
            lambda name: bare_sockets.send_all(url, name, self._memory, SOCKETS, tls)
        )
        self.figures["bare_s"].append(taken)
        used = time.process_time() - before
        self.figures["bare_cpu_s"].append(used * GIB / self._size)

    def _place_of(self, action: Callable[[str], None]) -> float:
        """Seconds that it takes; the server and its disk are at rest afterwards."""
        self._number += 1
        name = f"save-{self._number}"
        taken, _ = timed(action, name)
        remove(self._server, name)
        os.sync()
        rest()
        return taken


def measure(state: State, options: Any, directory: Path) -> dict[str, Any]:
    """Seconds, and CPU seconds per GiB, by turns."""
    tls = Authority(directory / "tls").issue("store") if options.tls else None
    size = sum(tensor.nbytes for tensor in state.values())
    tried: dict[int, float] = {}
    with (
        GcsServer(directory, [BUCKET], tls=tls) as server,
        Place(options.transport, storage=server.env) as place,
    ):
        place.spool.mkdir()
        bucket = Bucket(server, place, size, place.spool / "bare")
        if tls is None:
            # Each number once more than the first, which also loads what torch needs.
            save_by_torch(state, f"gs://{BUCKET}/first", 1)
            remove(server, "first")
            tried = best_threads(state, server, 1 if options.quick else 2)
        for number in range(WARM_UP + options.saves):
            bucket.save(state, counts=number >= WARM_UP)
            if number == WARM_UP - 1:
                place.settle()
            if number >= WARM_UP:
                if tried:
                    bucket.save_by_torch(state, min(tried, key=lambda number: tried[number]))
                bucket.send_bare(server.context)
        return {
            "note": bucket.note(options.transport),
            "torch_s_by_threads": tried,
            **bucket.figures,
        }


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """Time, and the sidecar's CPU time."""
    judged = options.transport == "mapped"
    of = f"{options.transport}, {sized(options.bytes)}"
    cpu = ratio(found["sidecar_cpu_s"], found["bare_cpu_s"])
    allowed = ALLOWED_OF_BARE_TLS if options.tls else ALLOWED_OF_BARE
    used, least = (statistics.median(found[f"{name}_cpu_s"]) for name in ("sidecar", "bare"))
    last = Row(
        f"CPU of the sidecar, to the GCS server{' over TLS' if options.tls else ''}, {of}",
        f"≤ {allowed} × bare sockets with crc32c" if judged else "",
        str(cpu),
        cpu.value <= allowed if judged else None,
        f"{used:.2f} s per GiB, bare {'`ssl` ' if options.tls else ''}sockets {least:.2f} s{found['note']}",
    )
    if options.tls:
        return [last]
    ours, theirs = statistics.median(found["saved_s"]), statistics.median(found["torch_s"])
    bare = ratio(found["saved_s"], found["bare_s"])
    tried = {int(number): seconds for number, seconds in found["torch_s_by_threads"].items()}
    best = min(tried, key=lambda number: tried[number])
    text = ", ".join(f"{number}: {seconds:.2f} s" for number, seconds in tried.items())
    return [
        Row(
            f"time until durable on the GCS server, {of}",
            f"≤ {ALLOWED_RATIO} × `FsspecWriter`" if judged else "",
            str(ratio(found["saved_s"], found["torch_s"])),
            ours <= ALLOWED_RATIO * theirs if judged else None,
            f"{ours:.2f} s, torch with {best} threads {theirs:.2f} s (tried: {text}){found['note']}",
        ),
        Row(
            f"the same against as many bytes through {SOCKETS} bare sockets, {of}",
            f"≤ {ALLOWED_OF_SOCKETS} × bare sockets with crc32c" if judged else "",
            str(bare),
            bare.value <= ALLOWED_OF_SOCKETS if judged else None,
            f"bare sockets {statistics.median(found['bare_s']):.2f} s, "
            f"{ratio(found['bare_s'], found['torch_s'])} `FsspecWriter`: the limit of this server",
        ),
        last,
    ]


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = arguments(__doc__)
    parser.add_argument("--tls", action="store_true", help="to a server over TLS, without torch")
    options = parsed(parser)
    say(f"durable in a bucket, {options.transport}, {sized(options.bytes)}")
    start_rank()
    state = make_state(options.bytes, options.tensors)
    with tempfile.TemporaryDirectory(prefix=prefix()) as directory:
        found = measure(state, options, Path(directory))
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
