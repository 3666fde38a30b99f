"""What each kind of event does to a cluster, and how it is put right again.

An event that can't happen now (its process is down or stopped already) is passed over; so one
schedule fits however fast the machine is.
"""

import heapq
import itertools
import shutil
import signal
import time
from collections.abc import Callable

from support.chaos.cluster import Cluster
from support.chaos.schedule import Event
from support.processes.daemons import Daemon, await_serving
from support.processes.stretch import stretched

_READY_S = 60.0

Step = Callable[[], None]


class Events:
    """Runs a schedule. One thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._later: list[tuple[float, int, Step]] = []
        self._count = itertools.count()
        self.busy: set[str] = set()
        """What is down, stopped or cut on purpose."""
        self._began = 0.0
        self.happened: list[str] = []
        """With times, for people."""
        self.passed_over = 0

    def run(self, events: list[Event], watch: Step) -> None:
        """Returns when all is put right again. ``watch`` is called all the time; what it raises ends it."""
        self._began = time.monotonic()
        for event in events:
            self._at(event.at_s, lambda event=event: self._happen(event))
        while self._later:
            due = self._later[0][0]
            watch()
            left = due - self._now()
            if left > 0:
                time.sleep(min(left, 0.05))
                continue
            heapq.heappop(self._later)[2]()
        for daemon in self._cluster.daemons:
            await_serving(daemon.address, timeout=stretched(_READY_S), process=daemon.process)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _at(self, at_s: float, step: Step) -> None:
        heapq.heappush(self._later, (at_s, next(self._count), step))

    def _after(self, seconds: float, step: Step) -> None:
        self._at(self._now() + seconds, step)

    def _happen(self, event: Event) -> None:
        begin: Callable[..., bool] = getattr(self, event.kind)
        if begin(event.lasts_s, **event.details):
            self.happened.append(f"{self._now():5.1f} s: {event}")
        else:
            self.passed_over += 1

    def _take(self, *names: str) -> bool:
        """Whether none of these was busy; they are now."""
        if self.busy.intersection(names):
            return False
        self.busy.update(names)
        return True

    def _give(self, *names: str) -> None:
        self.busy.difference_update(names)

    # Trainers.

    def kill_trainer(self, lasts_s: float, rank: int, world: int) -> bool:
        """One dies; a moment later the launcher ends the others and starts all of them again."""
        if not self._take("trainers"):
            return False
        current = self._cluster.current
        current.children[rank % current.world].signal(signal.SIGKILL)
        self._after(lasts_s, lambda: self._next_incarnation(world))
        return True

    def kill_all_trainers(self, lasts_s: float, world: int) -> bool:
        if not self._take("trainers"):
            return False
        for child in self._cluster.current.children:
            child.signal(signal.SIGKILL)
        self._after(lasts_s, lambda: self._next_incarnation(world))
        return True

    def stop_trainer(self, lasts_s: float, rank: int) -> bool:
        if not self._take("trainers"):
            return False
        current = self._cluster.current
        child = current.children[rank % current.world]
        child.signal(signal.SIGSTOP)

        def resume() -> None:
            child.signal(signal.SIGCONT)
            self._give("trainers")

        self._after(lasts_s, resume)
        return True

    def _next_incarnation(self, world: int) -> None:
        for child in self._cluster.current.children:
            child.signal(signal.SIGKILL)
        self._cluster.start_ranks(world)
        self._give("trainers")

    # Daemons.

    def _kill(self, daemon: Daemon, lasts_s: float) -> None:
        daemon.kill()
        self._after(lasts_s, lambda: self._start(daemon))

    def _start(self, daemon: Daemon) -> None:
        daemon.start(ready=False)
        self._give(daemon.name)

    def _stop(self, daemon: Daemon, lasts_s: float) -> bool:
        if not self._take(daemon.name):
            return False
        daemon.pause()

        def resume() -> None:
            daemon.resume()
            self._give(daemon.name)

        self._after(lasts_s, resume)
        return True

    def kill_sidecar(self, lasts_s: float, host: int) -> bool:
        daemon = self._cluster.sidecars[host]
        if not self._take(daemon.name):
            return False
        self._kill(daemon, lasts_s)
        return True

    def stop_sidecar(self, lasts_s: float, host: int) -> bool:
        return self._stop(self._cluster.sidecars[host], lasts_s)

    def kill_coordinator(self, lasts_s: float) -> bool:
        daemon = self._cluster.coordinator
        if not self._take(daemon.name):
            return False
        self._kill(daemon, lasts_s)
        return True

    def stop_coordinator(self, lasts_s: float) -> bool:
        return self._stop(self._cluster.coordinator, lasts_s)

    def kill_host(self, lasts_s: float, host: int, spool: str) -> bool:
        """All on it dies at once; its spool comes back with it, or is empty."""
        daemon = self._cluster.sidecars[host]
        if not self._take(daemon.name, "trainers"):
            return False
        current = self._cluster.current
        for rank, child in enumerate(current.children):
            if current.host(rank) == host:
                child.signal(signal.SIGKILL)
        self._kill(daemon, lasts_s)
        if spool == "lost":
            shutil.rmtree(self._cluster.spools[host], ignore_errors=True)
        self._after(lasts_s, lambda: self._next_incarnation(4))
        return True

    # Links.

    def cut(self, lasts_s: float, link: str) -> bool:
        return self._break(link, lasts_s, self._cluster.links[link].cut)

    def stall(self, lasts_s: float, link: str) -> bool:
        return self._break(link, lasts_s, self._cluster.links[link].stall)

    def slow(self, lasts_s: float, link: str, delay_s: float) -> bool:
        return self._break(link, lasts_s, lambda: self._cluster.links[link].slow(delay_s))

    def _break(self, link: str, lasts_s: float, begin: Step) -> bool:
        if not self._take(link):
            return False
        begin()

        def mend() -> None:
            self._cluster.links[link].mend()
            self._give(link)

        self._after(lasts_s, mend)
        return True

    # Storage.

    def storage_errors(self, lasts_s: float, **fault: object) -> bool:
        self._cluster.server.fault(**fault)
        return True

    def corruption(self, lasts_s: float, **fault: object) -> bool:
        self._cluster.server.fault(**fault)
        return True

    def storage_outage(self, lasts_s: float, status: int) -> bool:
        if not self._take("storage"):
            return False
        self._cluster.server.fault(kind="status", status=status, times=-1)
        self._after(lasts_s, self._calm_storage)
        return True

    def slow_storage(self, lasts_s: float, seconds: float) -> bool:
        if not self._take("storage"):
            return False
        self._cluster.server.fault(kind="delay", seconds=seconds, times=-1)
        self._after(lasts_s, self._calm_storage)
        return True

    def _calm_storage(self) -> None:
        # Rules that aren't used up yet go, too.
        self._cluster.server.clear()
        self._give("storage")
