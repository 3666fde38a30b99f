"""How long until a save is durable on the local disk: against ``cp`` and fsync of the same files.

Save and copy take turns; the disk is at rest (``sync``) before each. ``cp`` reads what the save
has just written, from the page cache, and may not share blocks with it. The sidecar's CPU time is compared
with that of ``dd``, from the same memory to the same disk past the page cache, and of one checksum of the bytes.
"""

import os
import resource
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import crc32c
from tests.bench.embedded import Place, Ways, cpu_seconds, rest
from tests.bench.parts import GIB, MIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ratio, timed
from tests.bench.training import State, change, make_state

ALLOWED_RATIO = 1.2
ALLOWED_OF_BARE = 2.2
_PIECE = 256 << 10


def copy_and_sync(source: Path, target: Path) -> None:
    """``cp -r``, then fsync of every file and directory."""
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for path in [*target.rglob("*"), target, target.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def bare_cpu_s(source: Path, target: Path) -> float:
    """CPU seconds of ``dd`` and of a checksum."""

    def children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = children()
    subprocess.run(
        ["dd", f"if={source}", f"of={target}", "bs=1M", "oflag=direct", "status=none"], check=True
    )
    used = children() - before
    target.unlink()
    piece = memoryview(bytearray(_PIECE))
    begin = time.process_time()
    for _ in range(source.stat().st_size // _PIECE):
        crc32c.crc32c(piece)
    return used + time.process_time() - begin


def measure(state: State, transport: str, saves: int, disk: str | None) -> dict[str, Any]:
    """Seconds until durable, and of the copies; CPU seconds of the sidecar per GiB."""
    from pannier import client

    saved: list[float] = []
    copied: list[float] = []
    used: list[float] = []
    bare: list[float] = []
    ways = Ways()

    def save(target: str) -> None:
        handle = client.async_save(state, checkpoint_id=target)
        ways.add(handle)
        handle.result()

    size = sum(tensor.nbytes for tensor in state.values())
    with Place(transport, disk=disk) as place:
        place.spool.mkdir()
        memory = place.spool / "bare"
        memory.write_bytes(os.urandom(MIB) * (size // MIB))
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
                bare.append(bare_cpu_s(memory, place.disk / "bare") * GIB / size)
            place.settle() if number == WARM_UP - 1 else rest()
    return {
        "note": ways.note(transport),
        "saved_s": saved[WARM_UP:],
        "copied_s": copied[WARM_UP:],
        "sidecar_cpu_s_per_gib": used[WARM_UP:],
        "bare_cpu_s_per_gib": bare[WARM_UP:],
    }


def rows(found: dict[str, Any], options: Any) -> list[Row]:
    """Time, and the sidecar's CPU time."""
    save, copy = statistics.median(found["saved_s"]), statistics.median(found["copied_s"])
    judged = options.transport == "mapped"
    used, bare = (statistics.median(found[f"{each}_cpu_s_per_gib"]) for each in ("sidecar", "bare"))
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
            f"≤ {ALLOWED_OF_BARE} × `dd` and a checksum" if judged else "",
            f"{used / bare:.2f} ×",
            used <= ALLOWED_OF_BARE * bare if judged else None,
            f"{used:.2f} s per GiB, `dd oflag=direct bs=1M` and one crc32c pass {bare:.2f} s",
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
