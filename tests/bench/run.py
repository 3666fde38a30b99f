"""``make bench``: Pannier beside torch's own asynchronous saves and a plain memcpy.

Every method saves the same bytes to the same place in a fresh process, one after
another in the same run; what counts are the ratios. Prints a table and writes
``bench-results/bench.json`` and ``bench.md`` (the README's table); then a second table,
where the time of a streamed hand-over goes (``streaming.py``), and a third, how long it takes until
work goes on after a daemon was killed (``recovery.py``).
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from pannier.wire.version import package_version
from support.gcs_server import GcsServer

WORKER = Path(__file__).with_name("worker.py")
STREAMING = Path(__file__).with_name("streaming.py")
RECOVERY = Path(__file__).with_name("recovery.py")
METHODS = ("pannier", "torch-thread", "torch-process")
BUCKET = "bench"


class SidecarMemory(threading.Thread):
    """Samples the anonymous memory of the sidecar below a runtime directory."""

    def __init__(self, runtime: Path) -> None:
        super().__init__(daemon=True)
        self._runtime = str(runtime)
        self._ended = threading.Event()
        self.peak = 0

    def run(self) -> None:
        """Until :meth:`stop`."""
        while not self._ended.wait(0.05):
            for process in _daemons(self._runtime):
                try:
                    if "sidecar" in process.cmdline():
                        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                        self.peak = max(self.peak, _anonymous(rollup))
                except (psutil.Error, OSError):
                    continue

    def stop(self) -> int:
        """Peak in bytes."""
        self._ended.set()
        self.join()
        return self.peak


def _anonymous(rollup: str) -> int:
    line = next(line for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


def _daemons(runtime: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                "pannier.cli" in process.cmdline()
                and process.environ().get("PANNIER_RUNTIME_DIR") == runtime
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def measure(method: str, target: str, options: argparse.Namespace, gcs: str) -> dict[str, Any]:
    """One method to one place, with daemons of its own; removes what it wrote."""
    with tempfile.TemporaryDirectory(prefix="pannier-bench-") as directory:
        runtime = Path(directory) / "run"
        spool = Path("/dev/shm") / Path(directory).name
        environment = dict(
            os.environ,
            PANNIER_RUNTIME_DIR=str(runtime),
            PANNIER_SPOOL=str(spool),
            STORAGE_EMULATOR_HOST=gcs,
            GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
            OMP_NUM_THREADS="1",
            PYTHONWARNINGS="ignore",
        )
        place = f"gs://{BUCKET}/{method}" if target == "gcs" else f"{options.directory}/{method}"
        memory = SidecarMemory(runtime)
        memory.start()
        command = [sys.executable, str(WORKER), method, place]
        command += [f"--bytes={options.bytes}", f"--tensors={options.tensors}"]
        command += [f"--saves={options.saves}"]
        try:
            finished = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=900
            )
            if finished.returncode:
                raise RuntimeError(f"{method} to {target} failed:\n{finished.stderr}")
            result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
        finally:
            peak = memory.stop()
            for process in _daemons(str(runtime)):
                process.terminate()
            psutil.wait_procs(_daemons(str(runtime)), timeout=10)
            shutil.rmtree(spool, ignore_errors=True)
            if target == "disk":
                shutil.rmtree(place, ignore_errors=True)
        return {"method": method, "target": target, "sidecar_peak_bytes": peak, **summary(result)}


def run_script(script: Path, size: int) -> dict[str, Any]:
    """What a script of its own measures, with so many bytes."""
    command = [sys.executable, "-W", "ignore", str(script), f"--bytes={size}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if finished.returncode:
        raise RuntimeError(f"{script.name} failed:\n{finished.stderr}")
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Medians over the saves from the third on; steps against the quiet ones of the same process."""
    quiet, busy = sorted(result["quiet_step_s"]), sorted(result["busy_step_s"])

    def p99(values: list[float]) -> float:
        return values[int(len(values) * 0.99)]

    return {
        "memcpy_s": result["memcpy_s"],
        "stall_first_s": result["stall_s"][0],
        "stall_s": statistics.median(result["stall_s"][2:]),
        "durable_s": statistics.median(result["durable_s"][2:]),
        "step_median_ratio": statistics.median(busy) / statistics.median(quiet),
        "step_p99_ratio": p99(busy) / p99(quiet),
        "trainer_growth_bytes": result["trainer_growth_bytes"],
    }


def main() -> None:
    """Runs every method against every place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of the state (default 1 GiB)")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--saves", type=int, default=7, help="the first two aren't counted")
    parser.add_argument("--targets", nargs="+", default=["disk", "gcs"], choices=["disk", "gcs"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--directory", help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--output", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    if options.saves < 3:
        parser.error("--saves must be at least 3: the first two aren't counted")
    console = Console(width=120)
    rows = []
    with tempfile.TemporaryDirectory(prefix="pannier-bench-", dir=options.directory) as directory:
        options.directory = directory
        with GcsServer(Path(directory) / "gcs", buckets=[BUCKET]) as server:
            for target in options.targets:
                for method in options.methods:
                    console.print(f"{time.strftime('%H:%M:%S')} {method} -> {target}")
                    rows.append(measure(method, target, options, server.url))
    console.print(f"{time.strftime('%H:%M:%S')} streaming")
    streaming = run_script(STREAMING, options.bytes)
    console.print(f"{time.strftime('%H:%M:%S')} recovery")
    recovery = run_script(RECOVERY, options.bytes)
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pannier": package_version(),
    }
    options.output.mkdir(exist_ok=True)
    report = {
        "machine": machine,
        "bytes": options.bytes,
        "tensors": options.tensors,
        "saves": options.saves,
        "rows": rows,
        "streaming": streaming,
        "recovery": recovery,
    }
    (options.output / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.output / "bench.md").write_text(markdown(report))
    console.print(table(report))
    console.print(streaming_table(streaming))
    console.print(recovery_table(recovery))


COLUMNS = (
    "to",
    "method",
    "stall",
    "÷ memcpy",
    "first stall",
    "durable",
    "step median",
    "step p99",
    "trainer grew",
    "sidecar peak",
)


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table, as text."""
    sidecar = f"{row['sidecar_peak_bytes'] / (1 << 20):.0f} MiB"
    return [
        row["target"],
        row["method"],
        f"{row['stall_s'] * 1e3:.0f} ms",
        f"{row['stall_s'] / row['memcpy_s']:.1f} ×",
        f"{row['stall_first_s']:.1f} s",
        f"{row['durable_s']:.2f} s",
        f"{row['step_median_ratio']:.2f} ×",
        f"{row['step_p99_ratio']:.1f} ×",
        f"{row['trainer_growth_bytes'] / (1 << 20):.0f} MiB",
        sidecar if row["method"] == "pannier" else "–",
    ]


def table(report: dict[str, Any]) -> Table:
    """The figures of one run, for a terminal."""
    gib = report["bytes"] / (1 << 30)
    out = Table(title=f"{gib:g} GiB in {report['tensors']} tensors, medians from the third save on")
    for number, column in enumerate(COLUMNS):
        out.add_column(column, justify="left" if number < 2 else "right")
    for row in report["rows"]:
        out.add_row(*cells(row))
    return out


def streaming_table(ways: dict[str, Any]) -> Table:
    """Where the time of a hand-over goes, for a terminal."""
    out = Table(title="the bytes of one rank, from process to process")
    for number, column in enumerate(("way", "GiB/s", "CPU seconds per GiB")):
        out.add_column(column, justify="right" if number == 1 else "left")
    for way, found in ways.items():
        cpu = "\n".join(f"{value:.2f} {kind}" for kind, value in found["cpu_s_per_gib"].items())
        out.add_row(way, f"{found['gib_per_s']:.2f}", cpu, end_section=True)
    return out


def recovery_table(found: dict[str, Any]) -> Table:
    """From a kill until work goes on, for a terminal."""
    out = Table(title="from the kill on")
    for column in ("killed", "until", "seconds"):
        out.add_column(column, justify="right" if column == "seconds" else "left")
    half = f"sidecar, {found['bytes'] / (1 << 30):g} GiB half uploaded"
    waiting = f"coordinator, {found['ranks']} ranks waiting"
    for name, killed in (("sidecar", half), ("coordinator", waiting)):
        for what, seconds in found[name].items():
            out.add_row(killed, what.removesuffix("_s"), f"{seconds:.1f}")
    return out


def markdown(report: dict[str, Any]) -> str:
    """The figures of one run, for the README."""
    lines = ["| " + " | ".join(COLUMNS) + " |"]
    lines.append("|" + "---|" * 2 + "---:|" * (len(COLUMNS) - 2))
    lines += ["| " + " | ".join(cells(row)) + " |" for row in report["rows"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
