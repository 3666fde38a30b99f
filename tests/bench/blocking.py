"""How long ``async_save`` keeps the training loop, against a warm copy of the same tensors; and what the
process spends on the save afterwards.

Save and copy take turns in one process, on the same tensors. The copy is a loop of ``copy_`` on
torch's default number of threads, into memory that was touched before.
"""

import statistics
from typing import Any

from tests.bench.embedded import Place, Ways, rest
from tests.bench.parts import GIB, WARM_UP, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import ThreadCpu, milliseconds, ratio, timed
from tests.bench.training import Copies, State, change, make_state

ALLOWED_RATIO = 1.15
ALLOWED_MORE_S = 0.010
SMALL = (10_000, 4096)
"""Tensors, and bytes of each."""
ALLOWED_SMALL = 1.5
ALLOWED_FIRST = 1.5
ALLOWED_CPU_S = 0.010
"""Of this process, from the return of the call until the commit."""
ALLOWED_INGEST_S = 0.020
"""From the end of the staging."""


def measure(state: State, transport: str, saves: int) -> dict[str, Any]:
    """Seconds of the call and of the copy, by turns; of the first call; and of what follows each call."""
    from pannier import client

    copies = Copies(state)
    called: list[float] = []
    copied: list[float] = []
    after: list[float] = []
    threads: list[dict[str, float]] = []
    ingested: list[float] = []
    ways, prepared = Ways(), 0.0
    with Place(transport) as place:
        if hasattr(client, "prepare"):
            prepared = timed(client.prepare, state, str(place.disk))[0]
        for number in range(WARM_UP + saves):
            with place.checkpoint(f"step-{number}") as target:
                change(state)
                copied.append(timed(copies.copy)[0])
                change(state)
                spent, handle = timed(client.async_save, state, checkpoint_id=target)
                called.append(spent)
                cpu = ThreadCpu()
                ways.add(handle)
                ingested.append(handle.result().seconds["ingest"])
                spent, by_thread = cpu.stop()
                after.append(spent)
                threads.append(by_thread)
            place.settle() if number == WARM_UP - 1 else rest()
    return {
        "prepared_s": prepared,
        "note": ways.note(transport),
        "first_s": called[0],
        "called_s": called[WARM_UP:],
        "copied_s": copied[WARM_UP:],
        "cpu_after_s": after[WARM_UP:],
        "cpu_after_by_thread_s": threads[WARM_UP:],
        "ingested_s": ingested[WARM_UP:],
    }


def row_of_large(found: dict[str, Any], options: Any, transport: str) -> Row:
    """The row of large tensors."""
    call, copy = statistics.median(found["called_s"]), statistics.median(found["copied_s"])
    times = ratio(found["called_s"], found["copied_s"])
    allowed = ALLOWED_RATIO * copy + ALLOWED_MORE_S
    met = call <= allowed if transport == "mapped" else None
    return Row(
        f"blocking time of `async_save`, {transport}, {sized(options.bytes)} in "
        f"{options.tensors} tensors",
        f"≤ {ALLOWED_RATIO} × memcpy + {ALLOWED_MORE_S * 1e3:.0f} ms" if met is not None else "",
        str(times),
        met,
        f"{milliseconds(call)}, "
        + (f"allowed {milliseconds(allowed)}, " if transport == "mapped" else "")
        + f"memcpy {milliseconds(copy)} "
        f"({options.bytes / GIB / copy:.1f} GiB/s){found['note']}",
    )


def rows_of_after(found: dict[str, Any], options: Any, transport: str) -> list[Row]:
    """What a save costs the process after the call, and how soon it may die."""
    judged = transport == "mapped"
    cpu, ingested = (statistics.median(found[name]) for name in ("cpu_after_s", "ingested_s"))
    names = {name for each in found["cpu_after_by_thread_s"] for name in each}
    medians = {
        name: statistics.median(each.get(name, 0.0) for each in found["cpu_after_by_thread_s"])
        for name in names
    }
    shares = ", ".join(
        f"{name} {milliseconds(spent)}"
        for name, spent in sorted(medians.items(), key=lambda pair: -pair[1])
        if spent >= 0.0002
    )

    def spread(name: str) -> str:
        return f"({milliseconds(min(found[name]))} to {milliseconds(max(found[name]))})"

    of = f"{transport}, {sized(options.bytes)}"
    return [
        Row(
            f"the trainer's own CPU after `async_save` has returned, {of}",
            f"≤ {milliseconds(ALLOWED_CPU_S)}" if judged else "",
            f"{milliseconds(cpu)} {spread('cpu_after_s')}",
            cpu <= ALLOWED_CPU_S if judged else None,
            f"by thread: {shares}",
        ),
        Row(
            f"from the end of the staging until ingested, {of}",
            f"≤ {milliseconds(ALLOWED_INGEST_S)}" if judged else "",
            f"{milliseconds(ingested)} {spread('ingested_s')}",
            ingested <= ALLOWED_INGEST_S if judged else None,
            "sealed, handed over, journalled, and the plan confirmed",
        ),
    ]


def row_of_first(found: dict[str, Any], options: Any, transport: str) -> Row:
    """What the first save costs, after ``client.prepare``."""
    call, first = statistics.median(found["called_s"]), found["first_s"]
    prepared = found["prepared_s"]
    judged = transport == "mapped" and prepared > 0
    return Row(
        f"blocking time of the first save{' after `client.prepare`' if prepared else ''}, "
        f"{transport}, {sized(options.bytes)}",
        f"≤ {ALLOWED_FIRST} × a later one" if judged else "",
        f"{first / call:.2f} ×",
        first <= ALLOWED_FIRST * call if judged else None,
        f"{milliseconds(first)}"
        + (f"; `prepare`, with the daemons' start, took {prepared:.1f} s" if prepared else ""),
    )


def row_of_small(found: dict[str, Any], transport: str) -> Row:
    """The row of small tensors."""
    call, copy = statistics.median(found["called_s"]), statistics.median(found["copied_s"])
    return Row(
        f"the same, {transport}, {SMALL[0]:,} tensors of {sized(SMALL[1])}",
        f"≤ {ALLOWED_SMALL} × a loop of `copy_`" if transport == "mapped" else "",
        str(ratio(found["called_s"], found["copied_s"])),
        call <= ALLOWED_SMALL * copy if transport == "mapped" else None,
        f"{milliseconds(call)}, loop {milliseconds(copy)}{found['note']}",
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="10,000 tensors of 4 KiB instead")
    options = parsed(parser)
    if options.small:
        say(f"blocking, {options.transport}, small tensors")
        state = make_state(SMALL[0] * SMALL[1], SMALL[0])
        found = measure(state, options.transport, options.saves)
        rows = [row_of_small(found, options.transport)]
    else:
        say(f"blocking, {options.transport}, {sized(options.bytes)}")
        state = make_state(options.bytes, options.tensors)
        found = measure(state, options.transport, options.saves)
        rows = [
            row_of_large(found, options, options.transport),
            row_of_first(found, options, options.transport),
            *rows_of_after(found, options, options.transport),
        ]
    finish(options, rows, found)


if __name__ == "__main__":
    main()
