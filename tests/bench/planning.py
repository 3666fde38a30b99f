"""Planning at scale: what a coordinator needs for a job's plan, its metadata, and a save that goes by it.

A simulation: a real coordinator process gets the messages that the sidecars of so many ranks send,
over a unix socket; there are no trainers, and no data files are written. Each rank holds a shard of
every tensor, sharded over all ranks or over a quarter of them (4 replicas). Beside it, in the same
run, torch's ``DefaultSavePlanner.create_global_plan`` for the same state, in a process of its own.

CPU seconds are the coordinator's own; wall-clock times include the played sidecars', which run on
the same cores. The time of a cold plan is the whole of it: from the first plan that is sent until the
last rank has its answer, with everything that goes through gRPC and the manifest in storage. Of the
ranks' part only their plans are serialised beforehand, as each rank does that on a host of its own.
torch's call begins with all plans as objects in its memory, and ends when those of all ranks are.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.parts import Row, finish, say
from tests.bench.simulated_ranks import Cast, local_plans

from pannier.v1 import save_pb2
from support.processes.daemons import Daemon, clean_environment, memory_directory, short_directory

RANKS: Final = (8, 64, 512, 1024, 4096)
QUICK: Final = (8, 64)
PEER_RANKS: Final = 1024
"""The largest size at which torch's planner is run, by default."""
TENSORS: Final = 500
REPLICAS: Final = (1, 4)
SAVES: Final = 3
"""Steady-state saves that are counted: the median."""

COLD_RATIO: Final = 10.0
WHOLE_RATIO: Final = 4.0
STEADY_CPU_S: Final = 0.2
MEMORY: Final = 2e9


@dataclass
class Figures:
    """Of one size. Seconds and bytes."""

    ranks: int
    tensors: int
    replicas: int
    cold_s: float = 0.0
    """From the first plan sent until every rank is answered."""
    cold_cpu_s: float = 0.0
    first_metadata_s: float = 0.0
    """From the last receipt until the first save is committed."""
    first_metadata_cpu_s: float = 0.0
    metadata_bytes: int = 0
    manifest_bytes: int = 0
    steady_s: float = 0.0
    """From the first report until the last sidecar knows that the plan is confirmed."""
    steady_cpu_s: float = 0.0
    """Of all that a save costs, up to the last receipt."""
    metadata_s: float = 0.0
    metadata_cpu_s: float = 0.0
    peak_bytes: int = 0
    peer_s: float | None = None
    peer_metadata_s: float | None = None
    peer_peak_bytes: int | None = None


@contextmanager
def coordinator(directory: Path) -> Iterator[Daemon]:
    """A real one, as ``pannier coordinator`` is."""
    sockets = short_directory()
    try:
        address = f"unix://{sockets}/c.sock"
        arguments = ["coordinator", "--address", address]
        daemon = Daemon("coordinator", address, arguments, clean_environment(), directory)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.close()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def cpu_s(pid: int) -> float:
    """CPU time of a process's living threads; to the nanosecond, unlike ``/proc/<pid>/stat``."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def peak_bytes(pid: int) -> int:
    """Most resident memory so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


async def play(daemon: Daemon, root: Path, figures: Figures, saves: int) -> None:
    """One job: a save that is planned, and ``saves`` that claim its plan."""
    plans = local_plans(figures.ranks, figures.tensors, figures.replicas)
    pid = daemon.pid
    async with Cast(daemon.address, root, plans) as cast:
        del plans
        begun = cpu_s(pid)
        figures.cold_s = await cast.plan(1)
        figures.cold_cpu_s = cpu_s(pid) - begun
        figures.first_metadata_s, figures.first_metadata_cpu_s = await end(cast, pid, 1)
        figures.metadata_bytes = (cast.place(1) / ".metadata").stat().st_size
        manifest = cast.place(1) / ".pannier" / cast.attempt(1) / "manifest"
        figures.manifest_bytes = manifest.stat().st_size
        measured = []
        for number in range(2, 2 + saves):
            shutil.rmtree(cast.place(number - 1))
            begun = cpu_s(pid)
            confirmed_s = await cast.claim(number)
            await reach_last(cast, number)
            steady = cpu_s(pid) - begun
            measured.append((confirmed_s, steady, *await finish_last(cast, pid, number)))
        middle = [sorted(each)[len(measured) // 2] for each in zip(*measured, strict=True)]
        figures.steady_s, figures.steady_cpu_s = middle[0], middle[1]
        figures.metadata_s, figures.metadata_cpu_s = middle[2], middle[3]
    figures.peak_bytes = peak_bytes(pid)


async def reach_last(cast: Cast, number: int) -> None:
    """All reports of a save's sidecars, but the last one's receipts."""
    await cast.send(number, save_pb2.RANK_PHASE_INGESTED)
    late = cast.sidecars[-1]
    await cast.send(number, save_pb2.RANK_PHASE_DURABLE, sidecars=cast.sidecars[:-1])
    wanted = {played.rank for played in late.ranks}
    await late.await_status(number, lambda status: set(status.waiting_on.ranks) == wanted)


async def finish_last(cast: Cast, pid: int, number: int) -> tuple[float, float]:
    """The last receipts; seconds and CPU seconds until the save is committed."""
    late = cast.sidecars[-1]
    begun, begin = cpu_s(pid), time.monotonic()
    await cast.send(number, save_pb2.RANK_PHASE_DURABLE, sidecars=[late])
    await late.await_status(number, lambda status: status.state == save_pb2.SAVE_STATE_COMMITTED)
    return time.monotonic() - begin, cpu_s(pid) - begun


async def end(cast: Cast, pid: int, number: int) -> tuple[float, float]:
    """All ranks become durable; as :func:`finish_last`."""
    await reach_last(cast, number)
    return await finish_last(cast, pid, number)


def measure(ranks: int, tensors: int, replicas: int, *, saves: int, peer: bool) -> Figures:
    """One size, in processes of its own."""
    figures = Figures(ranks, tensors, replicas)
    root = memory_directory()
    try:
        with tempfile.TemporaryDirectory() as logs, coordinator(Path(logs)) as daemon:
            try:
                asyncio.run(play(daemon, root / "root", figures, saves))
            except BaseException:
                print(daemon.log()[-2000:], file=sys.stderr)
                raise
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if peer:
        words = [sys.executable, "-W", "ignore", "-m", "tests.bench.planning", "--peer"]
        words += ["--ranks", str(ranks), "--replicas", str(replicas), "--tensors", str(tensors)]
        process = subprocess.run(words, check=True, capture_output=True, text=True, timeout=1200)
        answer = json.loads(process.stdout.splitlines()[-1])
        figures.peer_s, figures.peer_metadata_s = answer["plan_s"], answer["metadata_s"]
        figures.peer_peak_bytes = answer["peak_bytes"]
    return figures


def run_peer(ranks: int, tensors: int, replicas: int) -> dict[str, float]:
    """torch's planner on the same plans, in this process."""
    import os
    import pickle

    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    from pannier.wire.plan_codec import decode_items
    from pannier.wire.plan_columns import decode_mappings, parse_mappings

    local = [
        SavePlan(
            decode_items(plan.items), planner_data=decode_mappings(parse_mappings(plan.mappings))
        )
        for plan in local_plans(ranks, tensors, replicas)
    ]
    planner = DefaultSavePlanner()
    begin = time.monotonic()
    _, metadata = planner.create_global_plan(local)
    planned = time.monotonic()
    pickle.dumps(metadata)
    ended = time.monotonic()
    return {
        "plan_s": planned - begin,
        "metadata_s": ended - planned,
        "peak_bytes": peak_bytes(os.getpid()),
    }


def rows(
    sizes: Sequence[int] = RANKS,
    *,
    tensors: int = TENSORS,
    replicas: Sequence[int] = REPLICAS,
    saves: int = SAVES,
    peer_ranks: int = PEER_RANKS,
) -> tuple[list[Row], list[Figures]]:
    """Rows for the table, and all figures, one after another."""
    found = []
    for copies in replicas:
        for ranks in sizes:
            figures = measure(ranks, tensors, copies, saves=saves, peer=ranks <= peer_ranks)
            say(f"{figures}")
            found.append(figures)
    return [row for figures in found for row in _rows(figures)], found


def _rows(figures: Figures) -> list[Row]:
    kind = f"{figures.replicas} replicas" if figures.replicas > 1 else "sharded"
    name = f"planning {figures.ranks} ranks × {figures.tensors} tensors, {kind}"
    large = figures.ranks >= PEER_RANKS
    out = []
    if figures.peer_s is not None and figures.peer_metadata_s is not None:
        ratio = figures.peer_s / figures.cold_s
        whole = figures.peer_s / (figures.cold_s + figures.first_metadata_s)
        out += [
            Row(
                f"{name}: cold, until every rank is answered",
                f"at least {COLD_RATIO:g} × faster than create_global_plan" if large else "",
                f"{ratio:.1f} ×",
                ratio >= COLD_RATIO if large else None,
                f"{figures.cold_s:.2f} s against {figures.peer_s:.2f} s",
            ),
            Row(
                f"{name}: cold, with .metadata",
                f"at least {WHOLE_RATIO:g} × faster" if large else "",
                f"{whole:.1f} ×",
                whole >= WHOLE_RATIO if large else None,
                f"{figures.cold_s + figures.first_metadata_s:.2f} s; torch's pickle takes "
                f"{figures.peer_metadata_s:.2f} s more",
            ),
        ]
    limited = figures.ranks == 1024
    out.append(
        Row(
            f"{name}: steady-state save, coordinator's CPU up to the last receipt",
            f"under {STEADY_CPU_S * 1000:.0f} ms" if limited else "",
            f"{figures.steady_cpu_s * 1000:.0f} ms",
            figures.steady_cpu_s < STEADY_CPU_S if limited else None,
            f".metadata ({figures.metadata_bytes / 1e6:.0f} MB) from its template and the commit: "
            f"{figures.metadata_cpu_s * 1000:.0f} ms CPU, {figures.metadata_s * 1000:.0f} ms",
        )
    )
    largest = figures.ranks == 4096
    out.append(
        Row(
            f"{name}: coordinator's memory",
            f"under {MEMORY / 1e9:g} GB" if largest else "",
            f"{figures.peak_bytes / 1e9:.2f} GB",
            figures.peak_bytes < MEMORY if largest else None,
            f"torch's planner: {figures.peer_peak_bytes / 1e9:.2f} GB"
            if figures.peer_peak_bytes
            else "",
        )
    )
    return out


def markdown(found: Sequence[Figures]) -> str:
    """All sizes, one in a line."""
    head = (
        "| ranks × tensors | cold plan | torch | × | first `.metadata` | × with it | steady CPU | "
        "`.metadata` CPU | its size | memory |"
    )
    lines = [head, "|---" * 10 + "|"]
    for figures in found:
        kind = f", {figures.replicas} replicas" if figures.replicas > 1 else ""
        both = figures.cold_s + figures.first_metadata_s
        peer = (
            [f"{figures.peer_s:.2f} s", f"{figures.peer_s / figures.cold_s:.1f}"]
            if figures.peer_s
            else "––"
        )
        whole = f"{figures.peer_s / both:.1f}" if figures.peer_s else "–"
        cells = [
            f"{figures.ranks} × {figures.tensors}{kind}",
            f"{figures.cold_s:.2f} s",
            *peer,
            f"{figures.first_metadata_s:.2f} s",
            whole,
            f"{figures.steady_cpu_s * 1000:.0f} ms",
            f"{figures.metadata_cpu_s * 1000:.0f} ms",
            f"{figures.metadata_bytes / 1e6:.1f} MB",
            f"{figures.peak_bytes / 1e9:.2f} GB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object in the last line")
    parser.add_argument("--quick", action="store_true", help="small sizes, for development")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"default {RANKS}")
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS))
    parser.add_argument("--saves", type=int, default=SAVES, help="in the steady state")
    parser.add_argument(
        "--peer-ranks", type=int, default=PEER_RANKS, help="most ranks for torch's planner"
    )
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args(words)
    sizes = options.ranks or (QUICK if options.quick else RANKS)
    if options.peer:
        print(json.dumps(run_peer(sizes[0], options.tensors, options.replicas[0])))
        return
    table_rows, found = rows(
        sizes,
        tensors=options.tensors,
        replicas=options.replicas,
        saves=options.saves,
        peer_ranks=options.peer_ranks,
    )
    if not options.json:
        print(markdown(found))
    finish(options, table_rows, {"planning": [asdict(each) for each in found]})


if __name__ == "__main__":
    main()
