"""Notes that the ranks of one incarnation leave each other in the process group's store.

In: keys and short texts. Out: what others wrote. Nothing here blocks in the store, whose one
connection torch uses as well: who waits, asks again. Thread-safe.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.compat import Store, group_store
from pannier.client.hosts import kernel
from pannier.wire.errors import DeadlineError

T = TypeVar("T")

_PREFIX: Final = "pannier-incarnation"
_FIRST_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 0.5
_CLOCK_S: Final = 0.5
"""Of one machine: what may be rounded."""
_CLOCKS_S: Final = 60.0
"""How much the clocks of two machines may differ."""


class Notes:
    """One rank's view of the store.

    Args:
        rank: for errors.
        store: default: that of the default process group.
        timeout_s: until a store that doesn't answer is an error; the store's own timeout belongs
            to the user and is long.
        since: when this process began, in seconds since the epoch; default: asked of the kernel.

    All methods raise DeadlineError when the store fails or doesn't answer.
    """

    def __init__(
        self, rank: int, *, timeout_s: float, store: Store | None = None, since: float | None = None
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._born = born() if since is None else since
        self._store: Any = PrefixStore(_PREFIX, store or group_store(None))

    def begin(self, text: str) -> tuple[int, str]:
        """Begins this rank's next incarnation: its number, and what its first rank wrote.

        A store may live longer than processes, and longer than a process group: the n-th
        incarnation of one rank is the n-th of all, but for those that ended before this rank came
        so far.
        """

        def ask() -> tuple[int, str]:
            life = self._store.add(f"of/{self._rank}", 1)
            here = kernel()
            while True:
                own = f"{time.time()} {here} {text}"
                there = self._store.compare_set(str(life), "", own).decode()
                written, machine, found = there.split(" ", 2)
                # Ranks begin once all are connected. What was written before this process was
                # there is of processes that are gone.
                clocks_s = _CLOCK_S if machine == here else _CLOCKS_S
                if float(written) > self._born - clocks_s:
                    return life, found
                life += 1

        return self._ask(ask)

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

    def await_one(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
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


def born() -> float:
    """When this process began, in seconds since the epoch."""
    with open("/proc/self/stat", "rb") as file:
        # The name, in brackets, may have spaces.
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
