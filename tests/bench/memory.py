"""Host memory while two saves are in flight, and whether anything leaks over 200 saves.

Memory is measured as Pss, so that a page that trainer and sidecar share counts once: what the trainer
has more than before its first big save, and the spool's files whether they are mapped or not.
The checkpoints go to a disk; its page cache isn't counted.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tests.bench.embedded import Place, Ways, find, rest
from tests.bench.parts import GIB, MIB, Row, arguments, finish, parsed, say, sized
from tests.bench.training import State, change, make_state

ALLOWED_RATIO = 2.05
ALLOWED_OWN = 250 * 1000 * 1000
"""Bytes of the sidecar's own anonymous memory."""
ALLOWED_GROWTH = 5 * MIB
"""Bytes of Pss that a process may grow by between the 50th and the 200th save."""
SMALL = 8 * MIB
MARKS = (50, 200)


def rollup(pid: int) -> dict[str, int]:
    """Bytes by field of ``/proc/PID/smaps_rollup``."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {
        name: int(value) * 1024 for name, value in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)
    }


def blocks(paths: Iterator[Path]) -> dict[tuple[int, int], int]:
    """Bytes that files take, by device and inode."""
    found = {}
    for path in paths:
        with suppress(OSError):
            info = path.stat()
            found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return found


def in_files(spool: Path, processes: list[int]) -> int:
    """Bytes of the spool's files, and of memory files that a process holds open (memfd, unlinked)."""
    found = blocks(path for path in spool.rglob("*") if path.is_file())
    for pid in processes:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    name = os.readlink(descriptor)
                    if name.startswith(("/memfd:", "/dev/shm/")):
                        found |= blocks(iter([descriptor]))
    return sum(found.values())


class Watch(threading.Thread):
    """Samples memory every 50 ms until it is stopped; keeps the peaks."""

    def __init__(self, place: Place) -> None:
        super().__init__(daemon=True)
        self._own, self._sidecar = os.getpid(), place.sidecar.pid
        self._spool = place.spool
        self._ended = threading.Event()
        self._before = rollup(self._own)["Pss_Anon"]
        self.together = 0
        """Arenas and spool."""
        self.arenas = 0
        """Of these, the trainer's own memory."""
        self.sidecar = 0
        """The sidecar's anonymous memory."""

    def run(self) -> None:
        while not self._ended.wait(0.05):
            self.sample()

    def sample(self) -> None:
        arenas = max(0, rollup(self._own)["Pss_Anon"] - self._before)
        together = arenas + in_files(self._spool, [self._own, self._sidecar])
        self.arenas = max(self.arenas, arenas)
        self.together = max(self.together, together)
        self.sidecar = max(self.sidecar, rollup(self._sidecar)["Pss_Anon"])

    def stop(self) -> None:
        self._ended.set()
        self.join()


def two_in_flight(state: State, transport: str, rounds: int, disk: str | None) -> dict[str, Any]:
    """Peaks in bytes over ``rounds`` of two saves that are begun at once."""
    from pannier import client

    ways = Ways()
    size = sum(tensor.nbytes for tensor in state.values())
    overlapped = 0
    with Place(transport, disk=disk) as place:
        # Starts the daemons, and loads what the client needs.
        with place.checkpoint("warm") as target:
            client.save({"a": next(iter(state.values()))[:1].clone()}, checkpoint_id=target)
        watch = Watch(place)
        watch.start()
        try:
            for number in range(rounds):
                with place.checkpoint(f"a-{number}") as one, place.checkpoint(f"b-{number}") as two:
                    change(state)
                    # At once: a slow machine has the first one committed soon.
                    handles = [client.async_save(state, checkpoint_id=name) for name in (one, two)]
                    overlapped += not handles[0].done()
                    for handle in handles:
                        ways.add(handle)
                        handle.result()
        finally:
            watch.stop()
        rest(1.0)
        kept = in_files(place.spool, [os.getpid(), place.sidecar.pid])
    return {
        "note": ways.note(transport)
        + ("" if overlapped else "; the first was always over before the second began"),
        "state_bytes": size,
        "together_bytes": watch.together,
        "arenas_bytes": watch.arenas,
        "sidecar_bytes": watch.sidecar,
        "kept_bytes": kept,
    }


def standing(processes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Pss (without the spool's files, which are counted by themselves), descriptors and threads of each process now."""
    found = {}
    for name, pid in processes.items():
        process = psutil.Process(pid)
        found[name] = {
            "pss_bytes": (now := rollup(pid))["Pss"] - now["Pss_Shmem"],
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }
    return found


def leaks(transport: str, marks: tuple[int, int]) -> dict[str, Any]:
    """How the processes stand after so many saves."""
    from pannier import client

    state = make_state(SMALL, 20)
    found: dict[str, Any] = {}
    with Place(transport) as place:
        for number in range(1, marks[1] + 1):
            change(state)
            with place.checkpoint(f"step-{number}") as target:
                client.save(state, checkpoint_id=target)
            if number in marks:
                rest(1.0)
                pids = {name: find(place.runtime, name).pid for name in ("sidecar", "coordinator")}
                found[str(number)] = {
                    **standing({"trainer": os.getpid(), **pids}),
                    "spool": {"pss_bytes": in_files(place.spool, [])},
                }
    return found


def row_of_leaks(found: dict[str, Any], marks: tuple[int, int], transport: str) -> Row:
    early, late = (found[str(mark)] for mark in marks)
    grown = {
        name: {what: late[name][what] - early[name][what] for what in early[name]} for name in late
    }
    worst = max(values["pss_bytes"] for values in grown.values())
    more = max(v["descriptors"] for v in grown.values() if "descriptors" in v)
    growth = ", ".join(
        f"{name} {values['pss_bytes'] / MIB:+.1f} MiB of {late[name]['pss_bytes'] / MIB:.0f}"
        for name, values in grown.items()
    )
    return Row(
        f"growth from save {marks[0]} to save {marks[1]}, {transport}, {sized(SMALL)} each",
        f"no leak: ≤ {sized(ALLOWED_GROWTH)} of any process, no descriptors",
        f"at most {worst / MIB:+.1f} MiB, {more:+d} descriptors",
        worst <= ALLOWED_GROWTH and more <= 0,
        growth,
    )


def rows_of_memory(found: dict[str, Any], transport: str) -> list[Row]:
    size = found["state_bytes"]
    judged = transport == "mapped"
    times = found["together_bytes"] / size
    return [
        Row(
            f"memory for arenas and spool, two saves of {sized(size)} in flight, {transport}",
            f"≤ {ALLOWED_RATIO} × the state" if judged else "",
            f"{times:.2f} ×",
            times <= ALLOWED_RATIO if judged else None,
            f"peak {found['together_bytes'] / GIB:.2f} GiB, of it the trainer's own "
            f"{found['arenas_bytes'] / GIB:.2f} GiB; in the spool afterwards "
            f"{found['kept_bytes'] / GIB:.2f} GiB{found['note']}",
        ),
        Row(
            f"the sidecar's own anonymous memory, {transport}, {sized(size)}",
            "≤ 250 MB",
            f"{found['sidecar_bytes'] / 1e6:.0f} MB",
            found["sidecar_bytes"] <= ALLOWED_OWN,
        ),
    ]


def main() -> None:
    parser = arguments(__doc__, saves=2)
    parser.add_argument("--directory", help="on a disk (default: a temporary one)")
    parser.add_argument("--leaks", action="store_true", help="the 200 small saves instead")
    options = parsed(parser)
    if options.leaks:
        marks = (10, 30) if options.quick else MARKS
        say(f"leaks, {options.transport}, {marks[1]} saves")
        found = leaks(options.transport, marks)
        rows = [row_of_leaks(found, marks, options.transport)]
    else:
        say(f"memory, {options.transport}, {sized(options.bytes)}")
        state = make_state(options.bytes, options.tensors)
        found = two_in_flight(state, options.transport, options.saves, options.directory)
        rows = rows_of_memory(found, options.transport)
    finish(options, rows, found)


if __name__ == "__main__":
    main()
