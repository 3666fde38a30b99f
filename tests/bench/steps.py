"""How much training steps slow down while a save is in flight.

Windows of steps come in pairs of equal length: one with a save in flight, from the return of
``async_save`` until the commit, and one without. As many pairs without any save in either half
are the noise floor: what the same figures are when nothing happens. Which half comes first
alternates. The sidecar runs at the lower priority that it gives itself.

``--spare``: the trainer has one core, and the daemons have the others, as on a machine with cores to spare.
"""

import itertools
import os
import statistics
from pathlib import Path
from typing import Any

from tests.bench.embedded import Place, Ways, rest
from tests.bench.parts import WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import percentile
from tests.bench.training import State, Training, change, make_state

ALLOWED = {"median": 1.03, "p99": 1.4}
ALLOWED_SPARE = {"median": 1.01, "p99": 1.1}


class Pairs:
    """Steps of both halves of all pairs, pooled; and each pair's ratio of medians."""

    def __init__(self) -> None:
        self.quiet: list[float] = []
        self.other: list[float] = []
        self._medians: list[float] = []

    def add(self, quiet: list[float], other: list[float]) -> None:
        self.quiet += quiet
        self.other += other
        self._medians.append(statistics.median(other) / statistics.median(quiet))

    def figures(self) -> dict[str, Any]:
        """Ratios of the pooled steps; seconds of the quiet ones."""

        def times(share: float) -> float:
            return percentile(self.other, share) / percentile(self.quiet, share)

        return {
            "median_ratio": times(0.5),
            "p99_ratio": times(0.99),
            "median_ratio_of_pairs": self._medians,
            "quiet_median_s": percentile(self.quiet, 0.5),
            "quiet_p99_s": percentile(self.quiet, 0.99),
            "steps": len(self.other),
        }


def slowest(steps: list[float], count: int = 5) -> list[dict[str, float]]:
    """Which steps took longest, and when they began: to find what held them up."""
    begun = list(itertools.accumulate(steps, initial=0.0))
    longest = sorted(range(len(steps)), key=lambda number: -steps[number])[:count]
    return [{"at_s": begun[number], "took_s": steps[number]} for number in longest]


def pin(process: int, cores: set[int]) -> None:
    """Lets all threads that a process has run on these cores only; those that it starts later inherit it."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def measure(state: State, transport: str, saves: int, *, spare: bool = False) -> dict[str, Any]:
    """Figures of the steps beside saves, of the noise floor, and the sidecar's niceness."""
    from pannier import client

    training = Training()
    beside, floor, ways = Pairs(), Pairs(), Ways()
    course: list[dict[str, Any]] = []
    length = 0
    with Place(transport) as place:

        def busy(target: str) -> list[float]:
            change(state)
            handle = client.async_save(state, checkpoint_id=target)
            ways.add(handle)
            steps = training.until(handle.done)
            course.append({"phases_s": dict(handle.result().seconds), "slowest": slowest(steps)})
            return steps

        for number in range(WARM_UP):
            with place.checkpoint(f"warm-{number}") as target:
                length = max(50, len(busy(target)))
        place.settle()
        niceness = place.niceness
        if spare:
            first_core, *others = sorted(os.sched_getaffinity(0))
            pin(os.getpid(), {first_core})
            for daemon in place.daemons():
                pin(daemon.pid, set(others))
        for number in range(saves):
            first = number % 2 == 0
            with place.checkpoint(f"step-{number}") as target:
                quiet = training.steps(length) if first else []
                other = busy(target)
                length = max(50, len(other))
                if not first:
                    rest()
                    quiet = training.steps(length)
            beside.add(quiet, other)
            rest()
            one, two = training.steps(length), training.steps(length)
            floor.add(*((one, two) if first else (two, one)))
    return {
        "beside": beside.figures(),
        "floor": floor.figures(),
        "nice": niceness,
        "course": course[WARM_UP:],
        "note": ways.note(transport),
    }


def rows(found: dict[str, Any], options: Any, transport: str) -> list[Row]:
    """Median and p99."""
    beside, floor = found["beside"], found["floor"]
    out = []
    cores = ", the daemons on cores of their own" if options.spare else ""
    for name, allowed in (ALLOWED_SPARE if options.spare else ALLOWED).items():
        value = beside[f"{name}_ratio"]
        judged = transport == "mapped"
        out.append(
            Row(
                f"{name} of training steps while a save is in flight, {transport}, "
                f"{sized(options.bytes)}, sidecar at nice {found['nice']}{cores}",
                f"≤ {allowed} ×" if judged else "",
                f"{value:.2f} × (noise floor {floor[f'{name}_ratio']:.2f} ×)",
                value <= allowed if judged else None,
                f"quiet {beside[f'quiet_{name}_s'] * 1e3:.2f} ms, {beside['steps']} steps"
                + (
                    f", pairs {min(beside['median_ratio_of_pairs']):.2f} to "
                    f"{max(beside['median_ratio_of_pairs']):.2f}, of the floor "
                    f"{min(floor['median_ratio_of_pairs']):.2f} to "
                    f"{max(floor['median_ratio_of_pairs']):.2f}"
                    if name == "median"
                    else ""
                )
                + found["note"],
            )
        )
    return out


def main() -> None:
    parser = arguments(__doc__, saves=9)
    parser.add_argument("--spare", action="store_true", help="a core for the trainer alone")
    options = parsed(parser)
    say(f"steps, {options.transport}, {sized(options.bytes)}")
    state = make_state(options.bytes, options.tensors)
    found = measure(state, options.transport, options.saves, spare=options.spare)
    finish(options, rows(found, options, options.transport), found)


if __name__ == "__main__":
    main()
