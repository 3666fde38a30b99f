"""What comes last in a run of the chaos test: one thing goes wrong alone, and how saves end is certain.

In: a cluster whose ranks save, with everything put right. Out: the same, or a ChaosError. What
holds of all runs (no bits but their own, the newest is the newest) is checked afterwards, with all
the rest.
"""

import json
import os
import re
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pannier.daemon.rank_phase import has_reached
from pannier.v1 import save_pb2
from pannier.wire import object_names
from support.chaos.check import read_events
from support.chaos.cluster import BUCKET, SAVE_TIMEOUT_S, Cluster, undecided
from support.chaos.trainer import checkpoint_id
from support.processes.daemons import await_serving
from support.processes.stretch import stretched

Saves = dict[int, dict[int, dict[str, Any]]]
"""What ranks wrote down last of each save: by number and rank."""

_COMMIT_S = 40.0
"""Until a save is committed, with daemons that were just started."""
_AT_ONCE_S = 30.0
"""A call that ends at once ends within that on a busy machine; its timeouts are longer."""
_HANGING = 16
"""Files of a mount that hangs: more than a daemon has threads for storage."""


class ChaosError(AssertionError):
    """What must hold doesn't."""


class Scene:
    """A cluster, and what its ranks write down.

    Args:
        watch: raises ChaosError when a process ended by itself that isn't in the set it is given.
    """

    def __init__(self, cluster: Cluster, watch: Callable[[set[str]], None]) -> None:
        self.cluster = cluster
        self.busy: set[str] = set()
        self._watch = watch

    def until(self, what: str, ready: Callable[[], object], timeout_s: float = _COMMIT_S) -> None:
        deadline = time.monotonic() + stretched(timeout_s)
        while not ready():
            self._watch(self.busy)
            if time.monotonic() > deadline:
                raise ChaosError(f"{what}: not within {stretched(timeout_s):.0f} s")
            time.sleep(0.05)

    # Saves.

    def saves(self, *, job: str = "") -> Saves:
        """Those of the current incarnation, or of another job."""
        logs = [self.cluster.job_log(job)] if job else self.cluster.event_logs()
        number = 0 if job else self.cluster.current.number
        found: Saves = {}
        for event in read_events(path for path in logs if path.exists()):
            if "number" in event and event["incarnation"] == number:
                known = found.setdefault(event["number"], {}).setdefault(event["rank"], {})
                known.update(event)
                known[f"{event['event']} at"] = event["at"]
        return found

    def newest(self) -> int:
        """Number of the save that was begun last on any rank."""
        return max(self.saves(), default=0)

    def ended(self, number: int, *, job: str = "") -> dict[int, str]:
        """How a save ended, by rank: ``committed``, or why not; without those where it didn't."""
        return {
            rank: event.get("error") or event["outcome"]
            for rank, event in self.saves(job=job).get(number, {}).items()
            if event["event"] in ("ended", "raised")
        }

    def await_end(self, number: int) -> dict[int, str]:
        """Returns when a save has ended on all ranks: how, by rank."""
        world = self.cluster.current.world
        self.until(f"save {number} ends", lambda: len(self.ended(number)) == world)
        return self.ended(number)

    def await_commits(self, count: int = 1) -> None:
        """Until so many more saves are committed on all ranks."""
        newest, world = self.newest(), self.cluster.current.world

        def committed() -> bool:
            ends = [self.ended(number) for number in self.saves() if number > newest]
            return sum(end == dict.fromkeys(range(world), "committed") for end in ends) >= count

        self.until(f"{count} more saves are committed", committed)

    def must_commit(self, number: int, why: str) -> None:
        outcomes = self.await_end(number)
        if set(outcomes.values()) != {"committed"}:
            raise ChaosError(f"save {number}, {why}, ended like this: {outcomes}")

    def upcoming(self) -> int:
        """Number of a save of large tensors that isn't begun yet.

        It goes to an id of its own, as does the one after it.
        """
        number = self.newest() + 5
        return number + (4 - number) % 12

    def id(self, number: int) -> str:
        cluster = self.cluster
        return checkpoint_id(cluster.root, cluster.seed, cluster.current.number, number)

    def delay_uploads(self, number: int, seconds: float) -> None:
        """The large data files of an upcoming save take so long."""
        name = urllib.parse.quote(f"{self.id(number).rpartition('/')[2]}/__", safe="")
        path = f"uploadType=resumable.*{name}"
        self.cluster.server.fault(kind="delay", method="POST", path=path, seconds=seconds, times=-1)

    # Processes.

    def end_ranks(self) -> None:
        """Kills all ranks; the caller starts others."""
        self.busy.add("trainers")
        for child in self.cluster.current.children:
            child.signal(signal.SIGKILL)
        for child in self.cluster.current.children:
            child.wait(stretched(10))

    def start_ranks(self, **options: float) -> None:
        self.cluster.start_ranks(4, **options)
        self.busy.discard("trainers")

    @contextmanager
    def without_coordinator(self) -> Iterator[None]:
        daemon = self.cluster.coordinator
        self.busy.add(daemon.name)
        daemon.kill()
        yield
        daemon.start(ready=False)
        self.busy.discard(daemon.name)
        await_serving(daemon.address, process=daemon.process)


def restart_after_long_uploads(scene: Scene) -> None:
    """The coordinator is started again when all is ingested and the time for plans is over."""
    plan_timeout_s = 3.0
    scene.end_ranks()
    scene.start_ranks(plan_timeout_s=plan_timeout_s, save_timeout_s=3 * _AT_ONCE_S)
    scene.await_commits()
    number = scene.upcoming()
    scene.delay_uploads(number, stretched(plan_timeout_s) + 3)
    address, id = scene.cluster.coordinator.address, scene.id(number)

    def ingested() -> bool:
        return any(
            save.checkpoint_id == id
            and len(save.ranks) == scene.cluster.current.world
            and all(has_reached(rank.phase, save_pb2.RANK_PHASE_INGESTED) for rank in save.ranks)
            for save in undecided(address)
        )

    scene.until(f"save {number} is ingested", ingested, SAVE_TIMEOUT_S)
    began = min(event["begin at"] for event in scene.saves()[number].values())
    time.sleep(max(0.0, began + stretched(plan_timeout_s) + 0.5 - time.monotonic()))
    with scene.without_coordinator():
        pass
    scene.must_commit(number, "ingested before the coordinator was started again")


def lost_records(scene: Scene) -> None:
    """What numbers the incarnations is gone between two starts of the job."""
    scene.end_ranks()
    with scene.without_coordinator():
        name = scene.cluster.root.removeprefix(f"gs://{BUCKET}/")
        for key in _objects(scene, f"{name}/{object_names.incarnations_prefix()}"):
            _request(scene, f"o/{urllib.parse.quote(key, safe='')}", method="DELETE")
    scene.start_ranks()
    # Every third one overwrites a checkpoint of an earlier incarnation.
    scene.await_commits(7)


def expired_saves(scene: Scene) -> None:
    """Deadlines pass while a sidecar is stopped in the middle of uploads; it goes on, as do the ranks."""
    cluster = scene.cluster
    sidecar, link = cluster.sidecars[0], cluster.links["sidecar 0 to storage"]
    timeout_s = stretched(2.0)
    link.slow(0.05)
    _put(cluster.current.hurry, str(timeout_s))
    first = scene.newest() + 1

    def large_one_staged() -> bool:
        return any(
            number > first and number % 4 == 0 and all("staged at" in e for e in ranks.values())
            for number, ranks in scene.saves().items()
        )

    scene.until("a save with large tensors is staged", large_one_staged)
    sidecar.pause()
    time.sleep(2 * timeout_s)
    sidecar.resume()
    newest = scene.newest()
    scene.until("another save begins", lambda: scene.newest() > newest)
    cluster.current.hurry.unlink()
    link.mend()
    scene.await_commits(4)


def reverse_commits(scene: Scene) -> None:
    """Of the two last saves the earlier one is committed last."""
    number = scene.upcoming()
    scene.delay_uploads(number, 4.0)
    scene.busy.add("trainers")
    stop_after(scene.cluster, number + 1)
    for each in (number, number + 1):
        scene.must_commit(each, "whose uploads were slow" if each == number else "after a slow one")
    saves = scene.saves()
    slow, fast = (
        [event["ended at"] for event in saves[each].values()] for each in (number, number + 1)
    )
    if max(fast) > min(slow):
        raise ChaosError(f"save {number} was to be committed after save {number + 1}")


def hung_mount(scene: Scene) -> None:
    """Another job's file system hangs; a third job's and the ranks' saves go on beside it."""
    cluster = scene.cluster
    hung, well = cluster.directory / "hung", cluster.directory / "well"
    records = hung / object_names.incarnations_prefix()
    records.mkdir(parents=True)
    for number in range(1, _HANGING + 1):
        os.mkfifo(records / f"{number:012d}")
    files = cluster.start_job("files", str(well))

    def commits() -> int:
        return sum(
            scene.ended(number, job="files") == {0: "committed"}
            for number in scene.saves(job="files")
        )

    scene.until("the job beside it saves", lambda: commits() >= 2)
    stuck = cluster.start_job("hung", str(hung))
    scene.until("the hung job saves", lambda: scene.saves(job="hung"))
    first, before = scene.newest() + 1, commits()
    try:
        scene.until("the job beside it goes on", lambda: commits() >= before + 10)
        scene.await_commits(3)
        last = scene.newest()
    finally:
        stuck.children[0].signal(signal.SIGKILL)
        _release(records)
    for number in range(first, last + 1):
        scene.must_commit(number, "while another job's storage hung")
    stop_after(cluster, max(scene.saves(job="files")) + 2, files.stop)
    scene.until("the job beside it ends", lambda: files.ended)
    for number in scene.saves(job="files"):
        if (end := scene.ended(number, job="files")) != {0: "committed"}:
            raise ChaosError(f"save {number} of the job beside it ended like this: {end}")


def unreachable_storage(scene: Scene) -> None:
    """No way to storage at an incarnation's first save: its call says so at once."""
    links = [link for name, link in scene.cluster.links.items() if name.endswith("to storage")]
    scene.end_ranks()
    for link in links:
        link.cut()
    scene.start_ranks(plan_timeout_s=3 * _AT_ONCE_S, save_timeout_s=3 * _AT_ONCE_S)
    scene.await_end(1)
    for rank, event in scene.saves()[1].items():
        error, took_s = event.get("error", ""), event["at"] - event["begin at"]
        named = re.search("reset|refused|connect|reach", error)
        if event["event"] != "raised" or not named or took_s > stretched(_AT_ONCE_S):
            raise ChaosError(
                f"the first save without storage on rank {rank}: {event['event']} after "
                f"{took_s:.0f} s, {error!r}"
            )
    for link in links:
        link.mend()
    scene.await_commits()


def stop_after(cluster: Cluster, number: int, stop: Path | None = None) -> None:
    """Lets ranks end after a save."""
    _put(stop or cluster.current.stop, str(number))


def _put(path: Path, text: str) -> None:
    """Writes a file that ranks read at any moment."""
    partial = path.with_suffix(".part")
    partial.write_text(text)
    os.replace(partial, path)


def _release(records: Path) -> None:
    """Ends every process that reads one of these FIFOs, or is about to."""
    for path in records.iterdir():
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(fd)


def _objects(scene: Scene, prefix: str) -> list[str]:
    answer = _request(scene, f"o?prefix={urllib.parse.quote(prefix, safe='')}")
    return [item["name"] for item in answer.get("items", [])]


def _request(scene: Scene, what: str, method: str = "GET") -> Any:
    url = f"{scene.cluster.server.url}/storage/v1/b/{BUCKET}/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=20) as answer:
        return json.loads(answer.read() or b"{}")
