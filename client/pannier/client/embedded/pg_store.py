"""RankStore that the ranks of one incarnation leave each other in the process group's store.

In: keys and short texts. Out: what others wrote. Nothing here blocks in the store, whose one
connection torch uses as well: who waits, asks again. Thread-safe.
"""

import atexit
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.embedded.network import boot_id
from pannier.client.torch_compat import Store, group_store, own_connection
from pannier.wire.errors import DeadlineError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX: Final = "pannier-incarnation"
_FIRST_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 0.5
_CLOCK_S: Final = 0.5
"""Of one machine: what may be rounded."""
ANSWER_S: Final = 20.0
"""How long a rank of another machine may take to say that it lives: Python code may keep it busy."""
_EXIT_S: Final = 2.0
"""At exit: until an answer that is being given has been."""


class RankStore:
    """One rank's view of the store.

    Args:
        rank: for errors.
        store: default: that of the default process group.
        timeout_s: until a store that doesn't answer is an error; the store's own timeout belongs
            to the user and is long.
        since: when this process began, in seconds since its machine did; default: asked of the
            kernel.

    All methods raise DeadlineError when the store fails or doesn't answer.
    """

    def __init__(
        self, rank: int, *, timeout_s: float, store: Store | None = None, since: float | None = None
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._born = process_start_s() if since is None else since
        self._plain = store or group_store(None)
        self._store: Any = PrefixStore(_PREFIX, self._plain)

    def begin_incarnation(self, text: str, *, size: int, who: str = "") -> tuple[int, str]:
        """Begins this rank's next incarnation: its number, and what its first rank wrote.

        A store may live longer than processes, and longer than a process group: the n-th
        incarnation of one rank is the n-th of all, but for those that ended before this rank came
        so far. What a process of this machine wrote is told from what a former one did by the
        kernel's clock. One of another machine is asked, since clocks of two machines may differ:
        only a process that lives can answer.

        Args:
            text: of this rank, should it be the first.
            size: number of ranks.
            who: this rank, for people.
        """
        count = life = self.count(f"of/{self._rank}", 1)
        here = boot_id()
        own = json.dumps([here, self._born, _uptime(), who or f"rank {self._rank}", text])
        ended: set[tuple[str, float]] = set()
        while True:
            there = self.claim(str(life), own)
            machine, since, written, writer, found = json.loads(there)
            if there == own:
                _Responder(self._plain, life, size).start()
                break
            if machine == here:
                # Ranks begin once all are connected. What was written before this process was
                # there is of processes that have ended.
                if written > self._born - _CLOCK_S:
                    self.count(_asked(life), 1)
                    break
            elif (machine, since) not in ended:
                if self._is_answered(life, writer):
                    break
                ended.add((machine, since))
            life += 1
        if life > count:
            # The next one is the one after this.
            self.count(f"of/{self._rank}", life - count)
        return life, found

    def _is_answered(self, life: int, writer: str) -> bool:
        """Whether the rank that wrote to this incarnation lives."""
        ticket = self.count(_asked(life), 1)

        def look() -> bool | None:
            return self.count(_answered(life)) >= ticket or None

        _log.debug("rank %d: waiting for %s to say that it lives", self._rank, writer)
        if self.poll(look, ANSWER_S):
            return True
        _log.warning(
            "rank %d: %s did not answer within %g s; incarnation %d in the process group's store is "
            "taken for one of processes that have ended",
            *(self._rank, writer, ANSWER_S, life),
        )
        return False

    def claim(self, key: str, text: str) -> str:
        """Writes ``text`` unless there is something; returns what is there then."""
        return self._ask(lambda: str(self._store.compare_set(key, "", text).decode()))

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a number that begins at 0; returns it."""
        return self._ask(lambda: int(self._store.add(key, more)))

    def read(self, key: str) -> str | None:
        """What is there; None: nothing yet."""

        def ask() -> str | None:
            # `get` alone would wait for it.
            return self._store.get(key).decode() if self._store.check([key]) else None

        return self._ask(ask)

    def poll(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What ``look`` returns once that isn't None; None after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_POLL_S
        while (found := look()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_POLL_S)
        return found

    def _ask(self, call: Callable[[], T]) -> T:
        answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((call(), None))
            except RuntimeError as error:  # torch's DistStoreError
                answer.put((None, error))

        threading.Thread(target=run, name="pannier-notes", daemon=True).start()
        problem: Exception | None
        try:
            found, problem = answer.get(timeout=self._timeout_s)
        except queue.Empty:
            found, problem = None, TimeoutError(f"no answer within {self._timeout_s:g} s")
        if problem is not None:
            raise DeadlineError(
                f"rank {self._rank} could not agree on an incarnation through the process group's "
                f"store, which rank 0 or its launcher serves: {problem}"
            ) from problem
        return found  # type: ignore[return-value]  # None only where T has it


class _Responder:
    """Tells ranks of other machines that this process lives, until all have asked.

    Uses a connection of its own where the store can have one: torch may wait for other ranks
    through the first for long.
    """

    def __init__(self, store: Store, life: int, size: int) -> None:
        self._store: Any = PrefixStore(_PREFIX, own_connection(store))
        self._life = life
        self._others = size - 1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pannier-responder", daemon=True)

    def start(self) -> None:
        """Begins to answer, in a thread."""
        if self._others:
            # The interpreter must not end while the thread is in the store.
            atexit.register(self._stop)
            self._thread.start()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join(_EXIT_S)

    def _run(self) -> None:
        answered = 0
        pause = _FIRST_POLL_S
        try:
            while answered < self._others and not self._ended.wait(pause):
                asked = int(self._store.add(_asked(self._life), 0))
                if asked > answered:
                    self._store.add(_answered(self._life), asked - answered)
                    answered, pause = asked, _FIRST_POLL_S
                pause = min(2 * pause, _LONGEST_POLL_S)
        except RuntimeError as error:  # torch's DistStoreError: the process group has ended
            _log.debug("incarnation %d is answered for no longer: %s", self._life, error)
        finally:
            atexit.unregister(self._stop)


def _asked(life: int) -> str:
    return f"{life}/asked"


def _answered(life: int) -> str:
    return f"{life}/answered"


def process_start_s() -> float:
    """When this process began, in seconds since its machine did."""
    with open("/proc/self/stat", "rb") as file:
        # The name, in brackets, may have spaces.
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
