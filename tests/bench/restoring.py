"""How long a load takes: against ``dcp.load`` of the same checkpoint, and a copy of the same bytes.

One rank loads into tensors that were touched before, as a restarted loop's are: from the spool of
its sidecar, or, without a sidecar, from local files in the page cache or from a bucket. torch reads the
same checkpoint from storage; from a bucket, the GCS server of the tests on the same cores, with its ``FsspecReader``.
"""

import contextlib
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed.checkpoint as dcp
from tests.bench.blocking import SMALL
from tests.bench.embedded import Place, prefix
from tests.bench.parts import MIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio, timed
from tests.bench.training import Copies, State, make_state
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader

from support.storage.gcs_server import GcsServer

ALLOWED_OF_TORCH: Final = {"spool": 0.6, "local": 0.6, "gcs": 0.5}
ALLOWED_OF_COPY: Final = {"spool": 1.3, "local": 2.0}
ALLOWED_OF_SMALL_COPIES: Final = 2.0
WHERE: Final = {"spool": "the own spool", "local": "local files", "gcs": "the GCS server"}
ALLOWED_MEMORY: Final = 64 * MIB


def resident(field: str) -> int:
    """Bytes of a field of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_of(action: Callable[[], object]) -> int:
    """Bytes by which this process's memory grew while the action ran."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return resident("VmHWM") - before


def measure(state: State, options: Any, directory: Path) -> dict[str, Any]:
    """Seconds of both and of the copy, by turns, and the peaks of memory."""
    from pannier import client

    copies = Copies(state)
    ours: list[float] = []
    theirs: list[float] = []
    copied: list[float] = []
    peaks: dict[str, list[int]] = {"ours": [], "torch": []}
    with contextlib.ExitStack() as stack:
        storage = {}
        if options.source == "gcs":
            storage = stack.enter_context(GcsServer(directory, ["bucket"])).env
        place = stack.enter_context(Place(options.transport, storage=storage))
        target = "gs://bucket/step" if storage else str(place.disk / "step")
        client.save(state, checkpoint_id=target)
        source = "own spool" if options.source == "spool" else "bucket"
        if source == "bucket":
            client.close()
            place.end_daemons()
        else:
            place.settle()

        def load_by_us() -> None:
            result = client.load(state, checkpoint_id=target, no_dist=True)
            assert list(result.files) == [source], result

        def load_by_torch() -> None:
            reader = FsspecReader(target) if storage else FileSystemReader(target)
            dcp.load(state, storage_reader=reader, no_dist=True)

        expected = [float(tensor[-1]) for tensor in state.values()]
        for number in range(WARM_UP + options.saves):
            for load, times, kind in (
                (load_by_torch, theirs, "torch"),
                (load_by_us, ours, "ours"),
            ):
                for tensor in state.values():
                    tensor.fill_(-1)
                if number < WARM_UP:
                    peaks[kind].append(peak_of(load))
                else:
                    times.append(timed(load)[0])
                assert [float(tensor[-1]) for tensor in state.values()] == expected
            if number >= WARM_UP:
                copied.append(timed(copies.copy)[0])
    return {
        "loaded_s": ours,
        "torch_s": theirs,
        "copied_s": copied,
        # The first load also imports what it needs.
        "peak_bytes": {kind: found[-1] for kind, found in peaks.items()},
    }


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """Time and memory."""
    ours, theirs, copy = (
        statistics.median(found[each]) for each in ("loaded_s", "torch_s", "copied_s")
    )
    what = f"{options.tensors:,} tensors of {sized(options.bytes / options.tensors)}"
    where = WHERE[options.source]
    allowed = ALLOWED_OF_TORCH[options.source]
    peak = found["peak_bytes"]["ours"]
    result = [
        Row(
            f"`client.load` from {where}, {what}",
            f"≤ {allowed} × `dcp.load`",
            str(ratio(found["loaded_s"], found["torch_s"])),
            ours <= allowed * theirs,
            f"{ours:.3f} s, torch {theirs:.3f} s",
        )
    ]
    if options.source in ALLOWED_OF_COPY:
        most = ALLOWED_OF_SMALL_COPIES if options.small else ALLOWED_OF_COPY[options.source]
        result += [
            Row(
                f"the same against a loop of `copy_`, {what}",
                f"≤ {most} ×",
                str(ratio(found["loaded_s"], found["copied_s"])),
                ours <= most * copy,
                f"loop {copy:.3f} s",
            ),
            Row(
                f"peak memory of the same above the tensors, {what}",
                f"≤ {sized(ALLOWED_MEMORY)}",
                sized(peak),
                peak <= ALLOWED_MEMORY,
                f"torch {sized(found['peak_bytes']['torch'])}",
            ),
        ]
    return result


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = arguments(__doc__)
    parser.add_argument("--source", choices=tuple(ALLOWED_OF_TORCH), default="local")
    parser.add_argument("--small", action="store_true", help="10,000 tensors of 4 KiB instead")
    options = parsed(parser)
    if options.small:
        options.bytes, options.tensors = SMALL[0] * SMALL[1], SMALL[0]
    say(f"restoring from {options.source}, {sized(options.bytes)} in {options.tensors} tensors")
    state = make_state(options.bytes, options.tensors)
    with tempfile.TemporaryDirectory(prefix=prefix()) as directory:
        found = measure(state, options, Path(directory))
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
