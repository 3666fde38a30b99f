"""How long until a save is durable on the local disk: against ``cp`` and fsync of the same files.

Save and copy take turns; the disk is at rest (``sync``) before each. ``cp`` reads what the save
has just written, from the page cache, and may not share blocks with it.
"""

import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

from tests.bench.embedded import Place, Ways, cpu_seconds, rest
from tests.bench.parts import GIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio, timed
from tests.bench.training import State, change, make_state

ALLOWED_RATIO = 1.2


def copy_and_sync(source: Path, target: Path) -> None:
    """``cp -r``, then fsync of every file and directory."""
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for path in [*target.rglob("*"), target, target.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def measure(state: State, transport: str, saves: int, disk: str | None) -> dict[str, Any]:
    """Seconds until durable, and of the copies; CPU seconds of the sidecar per GiB."""
    from pannier import client

    saved: list[float] = []
    copied: list[float] = []
    used: list[float] = []
    ways = Ways()

    def save(target: str) -> None:
        handle = client.async_save(state, checkpoint_id=target)
        ways.add(handle)
        handle.result()

    size = sum(tensor.nbytes for tensor in state.values())
    with Place(transport, disk=disk) as place:
        for number in range(WARM_UP + saves):
            change(state)
            with place.checkpoint(f"step-{number}") as target:
                os.sync()
                before = cpu_seconds(place.sidecar) if number else 0.0
                saved.append(timed(save, target)[0])
                used.append((cpu_seconds(place.sidecar) - before) * GIB / size)
                os.sync()
                copy = place.disk / f"copy-{number}"
                copied.append(timed(copy_and_sync, Path(target), copy)[0])
                shutil.rmtree(copy)
            rest()
    return {
        "note": ways.note(transport),
        "saved_s": saved[WARM_UP:],
        "copied_s": copied[WARM_UP:],
        "sidecar_cpu_s_per_gib": used[WARM_UP:],
    }


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """Time, and the sidecar's CPU time."""
    save, copy = statistics.median(found["saved_s"]), statistics.median(found["copied_s"])
    judged = options.transport == "mapped"
    of = f"{options.transport}, {sized(options.bytes)}"
    return [
        Row(
            f"time until durable on local disk, {of}",
            f"≤ {ALLOWED_RATIO} × `cp` + fsync" if judged else "",
            str(ratio(found["saved_s"], found["copied_s"])),
            save <= ALLOWED_RATIO * copy if judged else None,
            f"{save:.2f} s, `cp` + fsync {copy:.2f} s{found['note']}",
        ),
        Row(
            f"CPU of the sidecar, to local disk, {of}",
            "",
            f"{statistics.median(found['sidecar_cpu_s_per_gib']):.2f} s per GiB",
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--directory", help="on the disk to measure (default: a temporary one)")
    options = parsed(parser)
    say(f"durable on disk, {options.transport}, {sized(options.bytes)}")
    state = make_state(options.bytes, options.tensors)
    found = measure(state, options.transport, options.saves, options.directory)
    finish(options, rows(found, options), found)


if __name__ == "__main__":
    main()
