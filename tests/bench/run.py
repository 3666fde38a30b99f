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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.bench import embedded, report
from tests.bench.parts import Row, say, table

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200


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
    sizes = ["64M", "256M"] if options.quick else options.sizes
    for transport in embedded.transports():
        way = ("--transport", transport)
        # A streamed save is in memory twice: the larger sizes are for mapped ones.
        for size in sizes if transport == "mapped" else sizes[:1]:
            found.append(Part("blocking", (*way, "--bytes", size)))
        found.append(Part("blocking", (*way, "--small")))
        found.append(Part("steps", (*way, "--bytes", sizes[0])))
        for size in sizes if transport == "mapped" else sizes[:1]:
            found.append(Part("durable", (*way, "--bytes", size)))
        for size in sizes if options.full and transport == "mapped" else sizes[:1]:
            found.append(Part("uploading", (*way, "--bytes", size)))
        for size in sizes if transport == "mapped" else sizes[:1]:
            found.append(Part("memory", (*way, "--bytes", size)))
        found.append(Part("memory", (*way, "--leaks")))
    best = ("--transport", embedded.transports()[0], "--bytes", sizes[0])
    found.append(Part("peers", best))
    if options.full:
        found.append(Part("peers", (*best, "--to", "gcs")))
    # Several hosts, a first one of several sizes, no trainers: these have their own sizes.
    found += [Part("planning"), Part("device")]
    few = str((64 if options.quick else 1024) << 20)
    found.append(Part("streaming", ("--bytes", few), own_rows=False))
    found.append(Part("recovery", ("--bytes", few), own_rows=False))
    chosen = options.parts or [part.module for part in found]
    return [
        part
        for part in found
        if part.module in chosen and importlib.util.find_spec(f"tests.bench.{part.module}")
    ]


def measured(part: Part, options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """The rows and figures of a part. Raises RuntimeError with the end of its output."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.bench.{part.module}", *part.arguments]
    if part.own_rows:
        command += ["--json", *(["--quick"] if options.quick else [])]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            told, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            # It ends its own daemons then.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
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
    parser.add_argument("--list", action="store_true", help="tell the parts and leave")
    parser.add_argument("--write", action="store_true", help="the README's table")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args()
    parts = planned(options)
    if options.list:
        print("\n".join(part.name for part in parts))
        return 0
    found = report.machine()
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    failed = False
    begun = time.monotonic()
    for number, part in enumerate(parts, 1):
        say(f"[{number}/{len(parts)}] {part.name}")
        started = time.monotonic()
        try:
            more, figures[part.name] = measured(part, options)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            more, failed = [Row(part.name, "", f"failed: {error}", False)], True
        figures[f"{part.name}: seconds"] = time.monotonic() - started
        rows += more
        write(options.output, found, rows, figures)
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
