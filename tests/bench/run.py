"""``make bench``: every part, one after another, each in a process of its own.

Prints the table, writes ``bench-results/bench.json`` and ``bench.md``, and with ``--write`` the
table of docs/benchmarks.md. A part that fails is a row that says why, and the exit status is 1.
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
from dataclasses import asdict, dataclass
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
    usual = usual or options.sizes[:1]
    for transport in embedded.transports():
        way = ("--transport", transport)
        # A streamed save is in memory twice; and the targets are for mapped ones.
        mapped = transport == "mapped"
        sizes = usual if mapped or options.full else usual[:1]
        found += [Part("blocking", (*way, "--bytes", size)) for size in sizes]
        found.append(Part("blocking", (*way, "--small")))
        large = sizes if options.full else sizes[:1]
        found += [Part("steps", (*way, "--bytes", size)) for size in large]
        if mapped and len(os.sched_getaffinity(0)) > 1:
            found += [Part("steps", (*way, "--bytes", size, "--spare")) for size in large]
        if mapped or options.full:
            found += [Part("durable", (*way, "--bytes", size)) for size in sizes]
            found += [Part("memory", (*way, "--bytes", size)) for size in sizes]
            found += [Part("uploading", (*way, "--bytes", size)) for size in large]
            found += [Part("uploading", (*way, "--bytes", size, "--tls")) for size in large]
            found.append(Part("memory", (*way, "--leaks")))
    best = ("--transport", embedded.transports()[0], "--bytes", usual[0])
    found += [Part("peers", (*best, "--tensors", str(count))) for count in tensor_counts(usual[0])]
    if options.full:
        found.append(Part("peers", (*best, "--to", "gcs")))
    found += [Part("restoring", arguments) for arguments in restored(options.quick)]
    found.append(Part("upload_cores", ("--bytes", "64M" if options.quick else "1G")))
    # These have sizes of their own.
    found += [Part("first_save"), Part("replicas"), Part("planning"), Part("device")]
    few = str(parts.megabytes(usual[0]))
    found.append(Part("streaming", ("--bytes", few)))
    found.append(Part("recovery", ("--bytes", few), own_rows=False))
    chosen = options.parts or [part.module for part in found]
    return [
        part
        for part in found
        if part.module in chosen
        and part.module not in options.without
        and importlib.util.find_spec(f"tests.bench.{part.module}")
    ]


def tensor_counts(size: str) -> list[int]:
    """Of states with tensors of 5 MiB, 64 KiB and 256 MiB, or less where the state has less."""
    total = parts.megabytes(size)
    return sorted({max(1, total // each) for each in (5 * parts.MIB, 64 << 10, 256 * parts.MIB)})


def restored(quick: bool) -> list[tuple[str, ...]]:
    """Arguments of the states that are loaded."""
    if quick:
        return [("--source", source) for source in ("spool", "local", "gcs")]
    sizes = [
        ("--bytes", "1000M", "--tensors", "200"),
        ("--bytes", "1G", "--tensors", "16"),
        *([("--bytes", "2G", "--tensors", "1")] if fits("2G") else []),
        ("--small",),
    ]
    return [
        *(("--source", source, *size) for source in ("spool", "local") for size in sizes),
        ("--source", "gcs", "--bytes", "1000M", "--tensors", "200"),
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
            output, _ = process.communicate(timeout=TIMEOUT_S)
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
    lines = output.splitlines()
    if process.returncode or not lines:
        raise RuntimeError(f"exit status {process.returncode}; see above")
    answer = json.loads(lines[-1])
    if not part.own_rows:
        return ROWS[part.module](answer), answer
    return [Row(**row) for row in answer["rows"]], answer["figures"]


def recovery_rows(found: dict[str, Any]) -> list[Row]:
    """From a kill until work goes on."""
    half = f"sidecar killed, {parts.sized(found['bytes'])} half uploaded"
    waiting = f"coordinator killed, {found['ranks']} ranks waiting"
    return [
        Row(
            what,
            "",
            ", ".join(f"{name.removesuffix('_s')} after {s:.1f} s" for name, s in times.items()),
        )
        for what, times in ((half, found["sidecar"]), (waiting, found["coordinator"]))
    ]


ROWS = {"recovery": recovery_rows}


def all_rows(answers: dict[str, dict[str, Any]], *, briefly: bool = False) -> list[Row]:
    """All rows, by part; ``briefly`` without those of ``planning`` that have no target."""
    return [
        row
        for name, answer in answers.items()
        for row in (Row(**each) for each in answer["rows"])
        if not (briefly and name.startswith("planning") and row.met is None)
    ]


def measure_all(options: argparse.Namespace, chosen: list[Part]) -> dict[str, Any]:
    """Runs the parts, and writes what is known after each: a run that is broken off isn't lost."""
    run = uuid.uuid4().hex[:6]
    os.environ[embedded.RUN] = run
    found: dict[str, Any] = {"machine": report.machine(), "parts": {}}
    if options.add:
        found["parts"] = load(options.output)["parts"]
    elif not options.quick:
        for size in options.sizes:
            if not fits(size):
                row = Row(
                    f"{size} per rank", "", "skipped: four times as much don't fit into memory"
                )
                found["parts"][f"size {size}"] = {"rows": [asdict(row)], "figures": {}}
    try:
        for number, part in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {part.name}")
            started = time.monotonic()
            try:
                rows, figures = measured(part, options)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                # If it crashed, what it has left would disturb the next.
                embedded.sweep(run)
                rows, figures = [Row(part.name, "", f"failed: {error}", False)], {"failed": True}
            found["parts"][part.name] = {
                "rows": [asdict(row) for row in rows],
                "figures": figures,
                "seconds": time.monotonic() - started,
            }
            save(options.output, found)
    finally:
        embedded.sweep(run)
    return found


def load(output: Path) -> dict[str, Any]:
    """What an earlier run wrote. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads((output / "bench.json").read_text())
    return found


def save(output: Path, found: dict[str, Any]) -> None:
    """Writes ``bench.json`` and ``bench.md``."""
    output.mkdir(exist_ok=True)
    (output / "bench.json").write_text(json.dumps(found, indent=2) + "\n")
    (output / "bench.md").write_text(report.markdown(found["machine"], all_rows(found["parts"])))


def main() -> int:
    """Runs the parts and prints their results; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes, small sizes: a trial")
    parser.add_argument("--full", action="store_true", help="large sizes and buckets everywhere")
    parser.add_argument("--sizes", nargs="+", default=["1G", "4G"], help="of the state, per rank")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these modules")
    parser.add_argument("--without", nargs="+", metavar="PART", default=[])
    parser.add_argument("--add", action="store_true", help="keep the other parts' last results")
    parser.add_argument("--show", action="store_true", help="the last results; measure nothing")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--write", action="store_true", help="the table of docs/benchmarks.md")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args()
    chosen = planned(options)
    if options.list:
        print("\n".join(part.name for part in chosen))
        return 0
    begun = time.monotonic()
    found = load(options.output) if options.show else measure_all(options, chosen)
    Console(width=150).print(table(all_rows(found["parts"]), report.about(found["machine"])))
    say(f"{time.monotonic() - begun:.0f} s in all")
    if options.write:
        text = report.markdown(found["machine"], all_rows(found["parts"], briefly=True))
        report.put_in(ROOT / "docs/benchmarks.md", text)
    return 1 if any("failed" in each["figures"] for each in found["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
