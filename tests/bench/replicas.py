"""How several ranks with one state load it from a bucket: what leaves the bucket, and how long it takes.

Four ranks of one host, whose sidecar has nothing of the checkpoint in its spool: they share what they read.
``dcp.load`` with torch's ``FsspecReader`` reads the same bytes on each rank, from the same server, by
turns in the same processes. The server, the daemons and all ranks share the cores.
"""

import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.bench.parts import MIB, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.storage.bucket import data_bytes
from support.storage.gcs_server import GcsServer

ALLOWED_BYTES: Final = 1.05
ALLOWED_TIME: Final = 0.3
ALLOWED_MEMORY: Final = 64 * MIB
OURS: Final = "gs://bucket/ours/step"
THEIRS: Final = "gs://bucket/theirs/step"

STATE = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from pannier import client

SIZE, COUNT = int(os.environ["BYTES"]), int(os.environ["TENSORS"])
state = {f"layer.{i}": torch.full((SIZE // COUNT // 4,), i + 0.5) for i in range(COUNT)}
"""
SAVE = (
    STATE
    + """
for place in os.environ["PLACES"].split():
    client.save(state, checkpoint_id=place, no_dist=True)
client.close()
"""
)
LOAD = (
    STATE
    + """
dist.init_process_group("gloo")
want = {name: float(tensor[-1]) for name, tensor in state.items()}
ours, theirs = os.environ["PLACES"].split()

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))

def measured(load):
    for tensor in state.values():
        tensor.fill_(-1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    dist.barrier()
    began = time.perf_counter()
    result = load()
    seconds = time.perf_counter() - began
    assert {name: float(tensor[-1]) for name, tensor in state.items()} == want
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (seconds, resident("VmHWM") - before))
    return max(each for each, _ in found), max(each for _, each in found), result

figures = {"ours_s": [], "torch_s": [], "peak_bytes": {}}
for number in range(1 + int(os.environ["LOADS"])):
    for kind, load in (
        ("torch", lambda: dcp.load(state, storage_reader=FsspecReader(theirs))),
        ("ours", lambda: client.load(state, checkpoint_id=ours)),
    ):
        seconds, peak, result = measured(load)
        # The first one also imports what it needs.
        if number:
            figures[f"{kind}_s"].append(seconds)
            figures["peak_bytes"][kind] = peak
figures["result"] = str(result)
if not dist.get_rank():
    print("FIGURES", json.dumps(figures), flush=True)
dist.destroy_process_group()
"""
)


def measure(options: Any, directory: Path) -> dict[str, Any]:
    """Seconds of both, bytes that the ranks' loads asked the bucket for, and the peaks of memory."""
    with (
        GcsServer(directory / "gcs", ["bucket"]) as server,
        Daemons(directory, sidecars=2, environment=server.env) as daemons,
    ):
        common = {
            **server.env,
            "PLACES": f"{OURS} {THEIRS}",
            "BYTES": str(options.bytes),
            "TENSORS": str(options.tensors),
            "LOADS": str(options.saves),
        }
        run_ranks(SAVE, 1, daemons.env(**common), torchrun=False).check()
        environment = daemons.env(1, **common)
        output = (
            run_ranks(LOAD, options.ranks, environment, torchrun=False, timeout=1500)
            .check()
            .outputs[0]
        )
        found: dict[str, Any] = json.loads(re.findall(r"^FIGURES (.*)$", output, re.MULTILINE)[0])
        found["bytes_read"] = data_bytes(server, "ours/step") / (1 + options.saves)
    return found


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """Bytes, time and memory."""
    ours, theirs = statistics.median(found["ours_s"]), statistics.median(found["torch_s"])
    what = f"{options.ranks} replicas, {sized(options.bytes)} each"
    read = found["bytes_read"] / options.bytes
    peak = found["peak_bytes"]["ours"]
    return [
        Row(
            f"`client.load` from the GCS server, {what}",
            f"≤ {ALLOWED_TIME} × `dcp.load` with `FsspecReader`",
            str(ratio(found["ours_s"], found["torch_s"])),
            ours <= ALLOWED_TIME * theirs,
            f"{ours:.2f} s, torch {theirs:.2f} s",
        ),
        Row(
            f"bytes that it reads from the bucket, {what}",
            f"≤ {ALLOWED_BYTES} × the unique bytes",
            f"{read:.2f} ×",
            read <= ALLOWED_BYTES,
            found["result"],
        ),
        Row(
            f"peak memory of a rank above the tensors, {what}",
            f"≤ {sized(ALLOWED_MEMORY)}",
            sized(peak),
            peak <= ALLOWED_MEMORY,
            f"torch {sized(found['peak_bytes']['torch'])}",
        ),
    ]


def main() -> None:
    parser = arguments(__doc__, size=512 * MIB, quick=64 * MIB, saves=3)
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.set_defaults(tensors=100)
    options = parsed(parser)
    say(f"{options.ranks} replicas load {sized(options.bytes)} in {options.tensors} tensors")
    with tempfile.TemporaryDirectory(prefix="pannier-bench-") as directory:
        found = measure(options, Path(directory))
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
