"""Exchanges short texts between the ranks of one incarnation, in the process group's store.

In: keys and short texts. Out: what other ranks wrote. Waits by polling, since a blocking call would
hold the store's only connection, which torch uses as well. Thread-safe.
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
from pannier.common import timeouts
from pannier.wire.errors import DeadlineError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX: Final = "pannier-incarnation"
POLL_SHARE: Final = 0.1
"""Of the time waited so far: the pause until the next look into the store."""
CLOCK_S: Final = 0.05
"""Rounding of two times on one machine: the kernel gives a process's start in ticks of mostly 10 ms."""


class RankStore:
    """One rank's access to the store.

    Args:
        rank: for errors.
        store: default: that of the default process group.
        timeout_s: of each call; the store's own timeout is set by the user, and long.
        since: when this process started, in seconds since the machine's boot; default: from the
            kernel.

    All methods raise DeadlineError when the store fails or doesn't answer; a subclass may call the store
    in another way (:meth:`ask`).
    """

    def __init__(
        self, rank: int, *, timeout_s: float, store: Store | None = None, since: float | None = None
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._started_s = process_start_s() if since is None else since
        self._plain = store or group_store(None)
        self._store: Any = PrefixStore(_PREFIX, self._plain)

    def begin_incarnation(self, text: str, *, size: int, who: str = "") -> tuple[int, str]:
        """Begins this rank's next incarnation: returns its number, and what its first rank wrote.

        The store may outlive processes and process groups. The n-th incarnation of one rank is the
        n-th of all, except for those whose processes ended before this rank reached them. Whether
        the writer of an incarnation still runs is seen from the kernel's clock if it was on this
        machine; on another machine, whose clock may differ, it is asked to confirm.

        Args:
            text: written if this rank is the first.
            size: number of ranks.
            who: this rank, human-readable.
        """
        count = incarnation = self.count(f"of/{self._rank}", 1)
        here = boot_id()
        own = json.dumps([here, self._started_s, uptime_s(), who or f"rank {self._rank}", text])
        ended: set[tuple[str, float]] = set()
        while True:
            there = self.claim(str(incarnation), own)
            machine, since, written, writer, found = json.loads(there)
            if there == own:
                _Responder(self._plain, incarnation, size).start()
                break
            if machine == here:
                # Ranks begin once all are connected: what was written before this process started
                # is from processes that have ended.
                if written > self._started_s - CLOCK_S:
                    self.count(_asked(incarnation), 1)
                    break
            elif (machine, since) not in ended:
                if self._is_answered(incarnation, writer):
                    break
                ended.add((machine, since))
            incarnation += 1
        if incarnation > count:
            # So that this rank's next incarnation is the one after this.
            self.count(f"of/{self._rank}", incarnation - count)
        return incarnation, found

    def _is_answered(self, incarnation: int, writer: str) -> bool:
        """Whether the rank that wrote to this incarnation confirms that it is alive."""
        ticket = self.count(_asked(incarnation), 1)

        def look() -> bool | None:
            return self.count(_answered(incarnation)) >= ticket or None

        _log.debug("rank %d: waiting for %s to confirm that it is alive", self._rank, writer)
        if self.poll(look, timeouts.RANK_ANSWER_S):
            return True
        _log.warning(
            "rank %d: %s did not answer within %g s; assuming that the processes of incarnation %d in "
            "the process group's store have ended",
            *(self._rank, writer, timeouts.RANK_ANSWER_S, incarnation),
        )
        return False

    def claim(self, key: str, text: str) -> str:
        """Writes ``text`` unless the key has a value; returns its value."""
        return self.ask(lambda: str(self._store.compare_set(key, "", text).decode()))

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a counter that starts at 0; returns its value."""
        return self.ask(lambda: int(self._store.add(key, more)))

    def read(self, key: str) -> str | None:
        """The value of a key; None: it has none yet."""

        def ask() -> str | None:
            # `get` alone would wait for a value.
            return self._store.get(key).decode() if self._store.check([key]) else None

        return self.ask(ask)

    def poll(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """Calls ``look`` until it returns a value; None after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        pause = timeouts.STORE_POLL_S
        while (found := look()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, timeouts.STORE_LONGEST_POLL_S)
        return found

    def ask(self, call: Callable[[], T]) -> T:
        """Makes one call of the store, and returns its answer."""
        answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((call(), None))
            except RuntimeError as error:  # torch's DistStoreError
                answer.put((None, error))

        threading.Thread(target=run, name="pannier-pg-store", daemon=True).start()
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
    """Confirms to ranks on other machines that this process is alive, until all have asked.

    Uses a separate connection where the store supports that: torch may block the first one for long
    while it waits for other ranks.
    """

    def __init__(self, store: Store, incarnation: int, size: int) -> None:
        self._store: Any = PrefixStore(_PREFIX, own_connection(store))
        self._incarnation = incarnation
        self._others = size - 1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pannier-responder", daemon=True)

    def start(self) -> None:
        """Answers in a thread from now on."""
        if self._others:
            # The interpreter must not end while the thread is in the store.
            atexit.register(self._stop)
            self._thread.start()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join(timeouts.RANK_ANSWER_EXIT_S)

    def _run(self) -> None:
        answered = 0
        began = time.monotonic()
        pause = timeouts.STORE_POLL_S
        try:
            while answered < self._others and not self._ended.wait(pause):
                asked = int(self._store.add(_asked(self._incarnation), 0))
                if asked > answered:
                    self._store.add(_answered(self._incarnation), asked - answered)
                    answered = asked
                # Ranks mostly come at almost the same time, and wait for the answer.
                pause = max(timeouts.STORE_POLL_S, POLL_SHARE * (time.monotonic() - began))
                pause = min(pause, timeouts.STORE_LONGEST_POLL_S)
        except RuntimeError as error:  # torch's DistStoreError: the process group has ended
            _log.debug("incarnation %d: no more confirmations: %s", self._incarnation, error)
        finally:
            atexit.unregister(self._stop)


def _asked(incarnation: int) -> str:
    return f"{incarnation}/asked"


def _answered(incarnation: int) -> str:
    return f"{incarnation}/answered"


def process_start_s() -> float:
    """When this process started, in seconds since the machine's boot."""
    with open("/proc/self/stat", "rb") as file:
        # The process name, in brackets, may contain spaces.
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def uptime_s() -> float:
    """Seconds since the machine's boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
