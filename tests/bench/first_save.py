"""The first save of a process when nothing is prepared: with the start of the daemons, and the first plan.

Each is measured in a process of its own, after its imports, with no daemons on the host. The daemons'
start is CPU, most of it imports: so their CPU time is given, too.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from tests.bench.embedded import Place, cpu_seconds, find
from tests.bench.parts import MIB, Row, arguments, finish, parsed, say, sized
from tests.bench.timing import timed
from tests.bench.training import make_state

ALLOWED_S = 1.7


def measure_once(options: Any) -> dict[str, Any]:
    """Seconds of the call and until the commit, and CPU seconds of each daemon by then."""
    from pannier import client

    state = make_state(options.bytes, options.tensors)
    with Place(options.transport) as place, place.checkpoint("step-1") as target:
        called_s, handle = timed(client.async_save, state, checkpoint_id=target)
        rest_s, _ = timed(handle.result)
        supervisor, *_ = place.daemons()
        cpu_s = {
            "supervisor": cpu_seconds(supervisor),
            "coordinator": cpu_seconds(find(place.runtime, "coordinator")),
            "sidecar": cpu_seconds(place.sidecar),
        }
    return {"called_s": called_s, "durable_s": called_s + rest_s, "cpu_s": cpu_s}


def measure(options: Any) -> list[dict[str, Any]]:
    """The figures of several processes, one after another."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.first_save", "--once", "--json"]
    command += [f"--bytes={options.bytes}", f"--tensors={options.tensors}"]
    command += [f"--transport={options.transport}"]
    found = []
    for _ in range(options.saves):
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found.append(json.loads(output.splitlines()[-1])["figures"])
        time.sleep(0.5)
    return found


def row(found: list[dict[str, Any]], options: Any) -> Row:
    """Medians of all processes."""

    def median(name: str) -> float:
        return statistics.median(each[name] for each in found)

    called = [each["called_s"] for each in found]
    cpu = ", ".join(
        f"{daemon} {statistics.median(each['cpu_s'][daemon] for each in found):.2f}"
        for daemon in found[0]["cpu_s"]
    )
    return Row(
        f"first save of a process, nothing prepared, {sized(options.bytes)} in {options.tensors} tensors",
        f"≤ {ALLOWED_S} s",
        f"{median('called_s'):.2f} s ({min(called):.2f} to {max(called):.2f})",
        median("called_s") <= ALLOWED_S,
        f"committed after {median('durable_s'):.2f} s; CPU s of the daemons by then: {cpu}",
    )


def main() -> None:
    parser = arguments(__doc__, size=64 * MIB)
    parser.add_argument("--once", action="store_true", help="this process's own first save")
    options = parsed(parser)
    os.environ.setdefault("PANNIER_LOG", "error")
    if options.once:
        finish(options, [], measure_once(options))
        return
    say(f"first save, {sized(options.bytes)}")
    found = measure(options)
    finish(options, [row(found, options)], {"processes": found})


if __name__ == "__main__":
    main()
