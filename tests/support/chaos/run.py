"""The chaos test: everything that can go wrong does, at random, and nothing handed over is lost.

A seed is a schedule; :func:`run_seed` runs it against a cluster of its own and checks what must
hold afterwards. By hand, for one seed or many::

    PYTHONPATH=tests python -m support.chaos.run --seeds 7
    make chaos SEEDS=1-50 MINUTES=90
    make chaos SEEDS=7 ACT=lost_records

``--seeds`` takes numbers and ranges: ``17``, ``1-50``, ``3,8,20-30``. The logs of a failing seed
are kept.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pannier.common import timeouts
from pannier.v1 import save_pb2
from support.chaos import acts as chaos_acts
from support.chaos.acts import ChaosError, Scene, stop_after
from support.chaos.check import read_events
from support.chaos.cluster import BUCKET, END_S, Cluster, undecided
from support.chaos.events import Events
from support.chaos.schedule import ACTS, Event, act, schedule
from support.processes import fork_server
from support.processes.cli import pannier
from support.processes.processes import Process, python
from support.processes.ranks import rank_environment
from support.processes.stretch import stretched
from support.processes.watching import listed
from support.storage.gcs_server import GcsServer

SECONDS = 16.0
"""How long things go wrong, by default."""
_FIRST_S = 40.0
"""Until a save is committed, while nothing goes wrong."""
_SETTLE_S = timeouts.RESUMED_SAVE_S + 20.0
"""Until the daemons have nothing left to do, once the ranks have ended: what a start left has a minute more."""
_CHECK_S = 300.0


@dataclass
class Outcome:
    """One seed."""

    seed: int
    problems: list[str] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    passed_over: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems


class Chaos:
    """What all seeds share: ``with Chaos(directory) as chaos: chaos.run_seed(7)``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._runs = 0

    def __enter__(self) -> "Chaos":
        with ExitStack() as stack:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._server = stack.enter_context(GcsServer(self.directory / "gcs", [BUCKET]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def run_seed(self, seed: int, seconds: float = SECONDS, last: str = "") -> Outcome:
        """Runs the schedule of a seed; what went wrong is in the outcome.

        Args:
            last: one of ``ACTS``, to go by instead of the seed's.
        """
        return self.run_events(seed, schedule(seed, seconds), last or act(seed))

    def run_events(self, seed: int, events: list[Event], last: str) -> Outcome:
        """The same with a schedule of one's own."""
        outcome = Outcome(seed)
        began = time.monotonic()
        self._runs += 1
        directory = self.directory / f"seed-{seed}-{self._runs}"
        name = f"seed-{seed}-{self._runs}"
        try:
            with Cluster(directory, seed, name, self._server) as cluster:
                try:
                    self._run(cluster, events, last, outcome)
                except AssertionError as error:
                    outcome.problems.append(f"{error}\n{cluster.statuses()}")
        except AssertionError as error:
            outcome.problems.append(str(error))
        outcome.seconds = time.monotonic() - began
        return outcome

    def _run(self, cluster: Cluster, events: list[Event], act: str, outcome: Outcome) -> None:
        cluster.start_ranks(4)
        _await_first(cluster)
        happening = Events(cluster)
        try:
            happening.run(events, lambda: _watch(cluster, happening.busy))
        finally:
            outcome.happened = happening.happened
            outcome.passed_over = happening.passed_over
        cluster.server.clear()
        scene = Scene(cluster, lambda busy: _watch(cluster, busy))
        scene.await_commits()
        outcome.happened.append(f"       then {act.replace('_', ' ')}")
        getattr(chaos_acts, act)(scene)
        cluster.server.clear()
        last = _end_ranks(cluster)
        _settle(cluster)
        _check_last(cluster, last)
        _end_daemons(cluster)
        _sweep(cluster)
        self._check(cluster, outcome)

    def _check(self, cluster: Cluster, outcome: Outcome) -> None:
        report = cluster.directory / "report.json"
        arguments = {
            "root": cluster.root,
            "endpoint": self._server.url,
            "events": [str(path) for path in cluster.event_logs()],
            "report": str(report),
        }
        log = cluster.directory / "check.log"
        command = python("-m", "support.chaos.check", json.dumps(arguments))
        child = Process(
            "check", command, environment=rank_environment(), log=log, imported=fork_server.TORCH
        )
        try:
            code = child.wait(stretched(_CHECK_S))
        finally:
            child.close()
        if code:
            raise ChaosError(f"the check failed with {code}:\n{log.read_text()}")
        found = json.loads(report.read_text())
        outcome.problems += found.pop("problems")
        outcome.counts = found


def _await(what: str, ready: object, timeout_s: float, watch: object = None) -> None:
    deadline = time.monotonic() + stretched(timeout_s)
    while not ready():  # type: ignore[operator]
        if watch is not None:
            watch()  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise ChaosError(f"{what}: not within {stretched(timeout_s):.0f} s")
        time.sleep(0.05)


def _await_first(cluster: Cluster) -> None:
    """Until a save is committed on all ranks: the machine works."""

    def committed() -> bool:
        ended = [event for event in read_events(cluster.event_logs()) if event["event"] == "ended"]
        return sum(event["outcome"] == "committed" for event in ended) >= cluster.current.world

    _await("the first save is committed", committed, _FIRST_S, lambda: _watch(cluster, set()))


def _watch(cluster: Cluster, busy: set[str]) -> None:
    """Nothing dies but what was killed."""
    for daemon in cluster.daemons:
        if daemon.name not in busy and daemon.process.returncode is not None:
            raise ChaosError(
                f"{daemon.name} ended by itself with {daemon.process.returncode}:\n{daemon.log()}"
            )
    if "trainers" in busy:
        return
    for child in cluster.current.children:
        if child.returncode is not None:
            raise ChaosError(f"{child.name} ended by itself with {child.returncode}")


def _end_ranks(cluster: Cluster) -> int:
    """Lets the ranks make one more save together and end; returns its number."""
    current = cluster.current
    if current.stop.exists():
        _await_end(cluster)
        return int(current.stop.read_text())

    def begun() -> list[int]:
        return [
            event["number"]
            for event in read_events(cluster.event_logs())
            if event["event"] == "begin" and event["incarnation"] == current.number
        ]

    _await("the ranks save again", lambda: len(begun()) >= current.world, _FIRST_S)
    last = max(begun()) + 3
    stop_after(cluster, last)
    _await_end(cluster)
    return last


def _await_end(cluster: Cluster) -> None:
    current = cluster.current

    def ended() -> bool:
        for child in current.children:
            if child.returncode:
                raise ChaosError(f"{child.name} ended with {child.returncode}")
        return current.ended

    _await("the ranks end", ended, 3 * END_S)


def _settle(cluster: Cluster) -> None:
    """Until no daemon has anything left to do."""

    def left() -> list[save_pb2.SaveStatus]:
        return [save for daemon in cluster.daemons for save in undecided(daemon.address)]

    def lacks_manifest(save: save_pb2.SaveStatus) -> bool:
        return "no plan manifest" in save.waiting_on.text

    try:
        _await("nothing is undecided any more", lambda: not left(), _SETTLE_S)
    except ChaosError:
        if not all(map(lacks_manifest, left())):
            raise
        # They might be torch's, whose manifests come last: they have an hour, unless an operator knows better.
        _run_command(cluster, "recover", cluster.root, "--abort")
        _await("nothing is undecided any more", lambda: not left(), _SETTLE_S)


def _check_last(cluster: Cluster, last: int) -> None:
    """When nothing goes wrong any more, a save is committed."""
    current = cluster.current
    outcomes = {
        event["rank"]: event.get("error") or event.get("outcome")
        for event in read_events(cluster.event_logs())
        if event.get("number") == last
        and event["incarnation"] == current.number
        and event["event"] in ("ended", "raised")
    }
    if outcomes != dict.fromkeys(range(current.world), "committed"):
        raise ChaosError(
            f"save {last}, after everything was put right, ended like this: {outcomes}"
        )


def _end_daemons(cluster: Cluster) -> None:
    """They leave in order, and leave nothing behind but copies of the newest saves."""
    copies = sum(
        copy.files for sidecar in cluster.sidecars for copy in listed(sidecar.address).local_copies
    )
    for daemon in cluster.daemons:
        status = daemon.stop(stretched(15))
        if status:
            raise ChaosError(f"{daemon.name} left with {status}")
    left = [
        str(path)
        for spool in cluster.spools
        for path in spool.rglob("*")
        if path.is_file() and path.name != "lock"
    ]
    files = [path for path in left if path.endswith(".data")]
    if len(files) != copies or (left and not copies):
        raise ChaosError(f"left in the spools beside {copies} files of local copies: {left}")


def _sweep(cluster: Cluster) -> None:
    _run_command(cluster, "gc", cluster.root, "--grace", "0", "--abandoned-after", "0")


def _run_command(cluster: Cluster, *arguments: str) -> None:
    result = pannier(*arguments, env=cluster.server.env, timeout=stretched(_CHECK_S))
    (cluster.directory / f"{arguments[0]}.log").write_text(repr(result))
    if result.code:
        raise ChaosError(f"pannier {arguments[0]} failed: {result}")


# By hand.


def _seeds(text: str) -> list[int]:
    """``3,8,20-30`` spelled out."""
    found: list[int] = []
    for word in text.replace(",", " ").split():
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_seeds, default="1-10", help="for example 17 or 3,20-30")
    parser.add_argument("--minutes", type=float, default=30, help="no new seed is begun after that")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of chaos per seed")
    parser.add_argument(
        "--act", choices=ACTS, default="", help="what comes last, whatever the seed"
    )
    parser.add_argument("--verbose", action="store_true", help="show what happened in every seed")
    options = parser.parse_args()
    console = Console(width=140, highlight=False)
    table = Table("seed", "outcome", "time", "events", "saves", "committed", "failed", "unknown")
    deadline = time.monotonic() + 60 * options.minutes
    directory = Path(tempfile.mkdtemp(prefix="pannier-chaos-"))
    failed = []
    began = time.monotonic()
    with Chaos(directory) as chaos:
        for seed in options.seeds:
            if time.monotonic() > deadline:
                console.print(f"{options.minutes:g} minutes are over before seed {seed}")
                break
            outcome = chaos.run_seed(seed, options.seconds, options.act)
            counts = [
                str(outcome.counts.get(name, ""))
                for name in ("saves", "committed", "failed", "unknown")
            ]
            row = [str(seed), "ok" if outcome.ok else "FAILED", f"{outcome.seconds:.0f} s"]
            table.add_row(*row, str(len(outcome.happened)), *counts)
            console.print(*row, len(outcome.happened), *counts)
            if options.verbose or not outcome.ok:
                console.print("\n".join(outcome.happened))
            if not outcome.ok:
                failed.append(seed)
                console.print("\n".join(outcome.problems))
    console.print(table)
    console.print(f"{len(table.rows)} seeds in {time.monotonic() - began:.0f} s")
    if not failed:
        shutil.rmtree(directory, ignore_errors=True)
        return
    scale = f"PANNIER_TIME_SCALE={timeouts.SCALE:g} " if timeouts.SCALE != 1 else ""
    for seed in failed:
        more = f" ACT={options.act}" if options.act else ""
        console.print(f"again: {scale}make chaos SEEDS={seed} SECONDS={options.seconds:g}{more}")
    console.print(f"logs: {directory}")
    sys.exit(1)


if __name__ == "__main__":
    main()
