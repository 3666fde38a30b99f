"""The table of a whole run: the machine, the rows, as markdown; and its place in docs/benchmarks.md."""

import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from tests.bench.parts import Row, met_text

BEGIN = "<!-- bench: begin (written by `make bench ARGS=--write`) -->"
END = "<!-- bench: end -->"


def machine() -> dict[str, Any]:
    """What ran, and on what."""
    versions = {}
    for name in ("pannier", "torch", "grpcio", "fsspec", "gcsfs"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": processor(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        **versions,
    }


def processor() -> str:
    """The model, as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def about(found: dict[str, Any]) -> str:
    """The machine in a line."""
    quiet = found["load_before"] < 0.5
    return (
        f"{found['date']}: {found['cores']} cores of {found['processor']}, "
        f"{found['memory_bytes'] / (1 << 30):.0f} GiB, Linux {found['kernel']}, "
        f"Python {found['python']}, torch {found['torch']}, grpcio {found['grpcio']}, "
        f"gcsfs {found['gcsfs']}"
        + ("." if quiet else f"; **the machine was busy** (load {found['load_before']:.1f}).")
    )


def markdown(found: dict[str, Any], rows: Sequence[Row]) -> str:
    """The machine and the table."""
    lines = [about(found), "", "| what | target | result | |", "|---|---|---|---|"]
    for row in rows:
        result = f"{row.result}<br>{row.detail}" if row.detail else row.result
        cells = [cell.replace("|", "\\|") for cell in (row.what, row.target, result, met_text(row))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def put_in(page: Path, text: str) -> None:
    """Replaces what lies between the markers. Raises ValueError when they aren't there."""
    whole = page.read_text()
    if BEGIN not in whole or END not in whole:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r} to write the table between")
    before, _, rest = whole.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
