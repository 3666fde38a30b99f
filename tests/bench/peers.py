"""``async_save`` against other asynchronous saves: what a save costs the training.

That is the stall plus the time that the steps lose while the save is in flight: a ratio of steps alone
says little where one method is done in a fifth of another's time.

Every method saves the same state to the same place in a process of its own, one after another. So
that a drifting machine doesn't favour one, each stall is also given in copies of the same
tensors that its own process made in turns with the saves.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.embedded import Place, prefix, rest
from tests.bench.parts import Row, arguments, finish, parsed, say, sized
from tests.bench.timing import milliseconds, percentile
from tests.bench.worker import METHODS

from support.storage.gcs_server import GcsServer

BUCKET = "bench"
TIMEOUT_S = 600
ALLOWED = {"torch-thread": 0.6}
"""Times a peer's cost; 1 for all others."""
NAMES = {
    "pannier": "Pannier",
    "torch-thread": "`dcp.async_save` THREAD",
    "torch-process": "`dcp.async_save` PROCESS",
    "torch-process-shared": "`dcp.async_save` PROCESS, shared staging kept (pinning needs CUDA)",
    "torch-checkpointing": "torch_checkpointing",
}
PEERS = Path(sys.prefix) / "peers"
"""Where ``make bench`` installs what is only compared with."""


def run(method: str, options: Any) -> dict[str, Any]:
    """Figures of one method; ``{"failed": reason}`` when it doesn't run here."""
    with ExitStack() as stack:
        storage: dict[str, str] = {}
        if options.to == "gcs":
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix()))
            storage = stack.enter_context(GcsServer(Path(directory), [BUCKET])).env
        place = stack.enter_context(
            Place(options.transport, storage=storage, disk=options.directory)
        )
        command = [sys.executable, "-W", "ignore", "-m", "tests.bench.worker", method]
        command += [f"gs://{BUCKET}/{method}" if options.to == "gcs" else str(place.disk)]
        command += [f"--bytes={options.bytes}", f"--tensors={options.tensors}"]
        command += [f"--saves={options.saves}"]
        paths = [os.environ.get("PYTHONPATH", "")]
        if method == "torch-checkpointing":
            paths.append(str(PEERS))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            finished = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {TIMEOUT_S} s"}
        if finished.returncode:
            return {"failed": f"exit {finished.returncode}: {reason(finished.stderr)}"}
        found = json.loads(finished.stdout.splitlines()[-1])
    rest(1.0)
    return summary(found)


def reason(log: str) -> str:
    """The last error in a log, else its end."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank0\]: *)?[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no message"])[-1][:300]


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Medians, and ratios to the copies and quiet steps of the same process."""
    busy, quiet = found["busy_step_s"], found["quiet_step_s"]
    stall, memcpy = statistics.median(found["stall_s"]), statistics.median(found["memcpy_s"])
    lost = (sum(busy) - len(busy) * statistics.mean(quiet)) / len(found["stall_s"])
    return {
        "stall_s": stall,
        "stall_per_memcpy": stall / memcpy,
        "first_stall_s": found["first_stall_s"],
        "durable_s": statistics.median(found["durable_s"]),
        "step_median_ratio": percentile(busy, 0.5) / percentile(quiet, 0.5),
        "step_p99_ratio": percentile(busy, 0.99) / percentile(quiet, 0.99),
        "lost_s": lost,
        "cost_s": stall + lost,
        "steps": len(busy),
        "grown_bytes": found["grown_bytes"],
    }


def figures_text(found: dict[str, Any]) -> str:
    """One method's figures for people."""
    return (
        f"stall {milliseconds(found['stall_s'])} ({found['stall_per_memcpy']:.1f} × memcpy), "
        f"steps lose {milliseconds(found['lost_s'])}, {found['step_median_ratio']:.2f} × "
        f"(p99 {found['step_p99_ratio']:.1f} ×), "
        f"durable in {found['durable_s']:.2f} s"
    )


def rows(results: dict[str, dict[str, Any]], options: Any) -> list[Row]:
    """Ours, then each peer: met when the stall is shorter and the cost within what is allowed."""
    own = results["pannier"]
    of = f"{options.transport}, {sized(options.bytes)} in {options.tensors:,} tensors to {options.to}"
    if "failed" in own:
        return [Row(f"`async_save`, {of}", "", f"failed: {own['failed']}", False)]
    out = [Row(f"`async_save`, {of}", "", figures_text(own))]
    for method, found in results.items():
        if method == "pannier":
            continue
        what = f"against {NAMES[method]}, {options.tensors:,} tensors"
        if "failed" in found:
            out.append(Row(what, "", f"does not run here: {found['failed']}"))
            continue
        faster = found["stall_per_memcpy"] / own["stall_per_memcpy"]
        allowed = ALLOWED.get(method, 1.0)
        # A peer whose steps went faster beside a save than without is within the noise: the stall is its cost.
        cost = max(own["cost_s"], own["stall_s"]) / max(found["cost_s"], found["stall_s"])
        met = faster > 1 and cost <= allowed
        out.append(
            Row(
                what,
                f"less stall; a save costs ≤ {allowed} ×",
                f"stall {faster:.1f} × shorter; costs {cost:.2f} ×: {milliseconds(own['cost_s'])} "
                f"against {milliseconds(found['cost_s'])}",
                met if options.transport == "mapped" else None,
                figures_text(found),
            )
        )
    return out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--to", choices=("disk", "gcs"), default="disk")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--directory", help="on the disk to measure (default: a temporary one)")
    options = parsed(parser)
    results = {}
    for method in dict.fromkeys(["pannier", *options.methods]):
        if options.to == "gcs" and method == "torch-checkpointing":
            results[method] = {"failed": "it writes to local file systems only"}
            continue
        say(f"peers: {method} to {options.to}, {sized(options.bytes)}")
        results[method] = run(method, options)
    finish(options, rows(results, options), results)


if __name__ == "__main__":
    main()
