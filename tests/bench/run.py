"""``make bench``: every part, one after another, each in a process of its own.

Prints the table, writes ``bench-results/bench.json`` and ``bench.md``, and with ``--write`` the
README's table. A part that fails is a row that says why, and the exit status is 1.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from tests.bench import embedded, parts, report
from tests.bench.parts import Row, say, table

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Part:
    """One call of a module."""

    module: str
    arguments: tuple[str, ...] = ()
    own_rows: bool = True
    """False: it prints figures of its own form."""

    @property
    def name(self) -> str:
        return " ".join((self.module, *self.arguments))


def planned(options: argparse.Namespace) -> list[Part]:
    """The parts in the order in which they run; those that aren't there are left out."""
    found = []
    usual = ["64M"] if options.quick else [size for size in options.sizes if fits(size)]
    for transport in embedded.transports():
        way = ("--transport", transport)
        # A streamed save is in memory twice, and isn't what the targets are about.
        mapped = transport == "mapped"
        sizes = usual if mapped or options.full else usual[:1]
        found += [Part("blocking", (*way, "--bytes", size)) for size in sizes]
        found.append(Part("blocking", (*way, "--small")))
        large = sizes if options.full else sizes[:1]
        found += [Part("steps", (*way, "--bytes", size)) for size in large]
        if mapped or not options.quick:
            found += [Part("durable", (*way, "--bytes", size)) for size in sizes]
            found += [Part("memory", (*way, "--bytes", size)) for size in sizes]
        if mapped or options.full:
            found += [Part("uploading", (*way, "--bytes", size)) for size in large]
            found.append(Part("memory", (*way, "--leaks")))
    best = ("--transport", embedded.transports()[0], "--bytes", usual[0])
    found.append(Part("peers", best))
    if options.full:
        found.append(Part("peers", (*best, "--to", "gcs")))
    # These have sizes of their own.
    found += [Part("planning"), Part("device")]
    few = str(parts.megabytes(usual[0]))
    found.append(Part("streaming", ("--bytes", few), own_rows=False))
    found.append(Part("recovery", ("--bytes", few), own_rows=False))
    chosen = options.parts or [part.module for part in found]
    return [
        part
        for part in found
        if part.module in chosen
        and part.module not in options.without
        and importlib.util.find_spec(f"tests.bench.{part.module}")
    ]


def fits(size: str) -> bool:
    """Whether the host has the memory: a state, a copy of it, two arenas, and room to breathe."""
    return 4.5 * parts.megabytes(size) <= psutil.virtual_memory().available


def measured(part: Part, options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """The rows and figures of a part. Raises RuntimeError with the end of its output."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.bench.{part.module}", *part.arguments]
    if part.own_rows:
        command += ["--json", *(["--quick"] if options.quick else [])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            told, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            # It ends its own daemons then.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"not done after {TIMEOUT_S} s") from error
            raise
    lines = told.splitlines()
    if process.returncode or not lines:
        raise RuntimeError(f"exit status {process.returncode}; see above")
    answer = json.loads(lines[-1])
    if not part.own_rows:
        return ROWS[part.module](answer), answer
    return [Row(**row) for row in answer["rows"]], answer["figures"]


def streaming_rows(found: dict[str, Any]) -> list[Row]:
    """Where the time of a streamed hand-over goes."""
    rows = []
    for way, figures in found.items():
        cpu = ", ".join(f"{value:.2f} {kind}" for kind, value in figures["cpu_s_per_gib"].items())
        rows.append(
            Row(
                f"streaming profile: {way}",
                "",
                f"{figures['gib_per_s']:.2f} GiB/s",
                detail=f"CPU s per GiB: {cpu}",
            )
        )
    return rows


def recovery_rows(found: dict[str, Any]) -> list[Row]:
    """From a kill until work goes on."""
    half = f"sidecar killed, {found['bytes'] / (1 << 30):g} GiB half uploaded"
    waiting = f"coordinator killed, {found['ranks']} ranks waiting"
    return [
        Row(
            what,
            "",
            ", ".join(f"{name.removesuffix('_s')} after {s:.1f} s" for name, s in times.items()),
        )
        for what, times in ((half, found["sidecar"]), (waiting, found["coordinator"]))
    ]


ROWS = {"streaming": streaming_rows, "recovery": recovery_rows}


def main() -> int:
    """Runs the parts and tells what they found; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes, small sizes: a trial")
    parser.add_argument("--full", action="store_true", help="large sizes and buckets everywhere")
    parser.add_argument("--sizes", nargs="+", default=["1G", "4G"], help="of the state, per rank")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these modules")
    parser.add_argument("--without", nargs="+", metavar="PART", default=[])
    parser.add_argument("--list", action="store_true", help="tell the parts and leave")
    parser.add_argument("--write", action="store_true", help="the README's table")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args()
    chosen = planned(options)
    if options.list:
        print("\n".join(part.name for part in chosen))
        return 0
    found = report.machine()
    rows = [
        Row(f"{size} per rank", "", "skipped: there is no memory for four times as much")
        for size in ([] if options.quick else options.sizes)
        if not fits(size)
    ]
    figures: dict[str, Any] = {}
    failed = False
    begun, run = time.monotonic(), uuid.uuid4().hex[:6]
    os.environ[embedded.RUN] = run
    try:
        for number, part in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {part.name}")
            started = time.monotonic()
            try:
                more, figures[part.name] = measured(part, options)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                # If it crashed, what it has left would disturb the next.
                embedded.sweep(run)
                more, failed = [Row(part.name, "", f"failed: {error}", False)], True
            figures[f"{part.name}: seconds"] = time.monotonic() - started
            rows += more
            write(options.output, found, rows, figures)
    finally:
        embedded.sweep(run)
    Console(width=150).print(table(rows, report.about(found)))
    say(f"{time.monotonic() - begun:.0f} s in all")
    if options.write:
        report.put_in(ROOT / "README.md", report.markdown(found, rows))
    return 1 if failed else 0


def write(output: Path, found: dict[str, Any], rows: list[Row], figures: dict[str, Any]) -> None:
    """What is known so far: a run that is broken off isn't lost."""
    output.mkdir(exist_ok=True)
    together = {"machine": found, "rows": [row.__dict__ for row in rows], "figures": figures}
    (output / "bench.json").write_text(json.dumps(together, indent=2) + "\n")
    (output / "bench.md").write_text(report.markdown(found, rows))


if __name__ == "__main__":
    sys.exit(main())
