"""Calls of the process group's store that end in time, also when the store doesn't answer.

In: functions that use the store. Out: what they return, or an error that names the process that serves the
store. Each runs in another thread, so that neither a store that doesn't answer nor a signal's exception can
keep the caller. One call at a time; not thread-safe, but for what the functions call.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from pannier.client.embedded.pg_store import POLL_SHARE
from pannier.client.interrupts import Call, UnansweredError
from pannier.client.ranks.load_error import LoadError
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.torch_compat import Store
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.v1 import save_pb2

T = TypeVar("T")

FIRST_POLL_S: Final = 0.0002


class StoreFailedError(LoadError):
    """The process group's store, which rank 0 or its launcher serves, doesn't answer."""


class StoreUnansweredError(StoreFailedError):
    """It has not answered in time; it may only be busy."""


class StoreCalls:
    """The calls of one load, or of one search for the newest checkpoint.

    Args:
        hosts: names the process that serves the store.
        description: what they are for, for errors.
    """

    def __init__(self, hosts: RankHosts, description: str) -> None:
        self._hosts = hosts
        self._description = description
        self._answered_at = time.monotonic()
        self._turn = 0
        """Counts calls: one that isn't the last was given up."""

    def run(self, function: Callable[[int], T], timeout_s: float) -> T:
        """What ``function`` returns.

        Args:
            function: gets the number of this call.
            timeout_s: how long it may take since it began or :meth:`answered`.

        Raises:
            StoreUnansweredError: the store did not answer in time.
            StoreFailedError: it can't be used.
        """
        self._turn = turn = self._turn + 1
        self._answered_at = time.monotonic()
        call = Call(lambda: function(turn))
        try:
            while True:
                try:
                    return call.result(timeouts.WAIT_LOOK_S)
                except UnansweredError:
                    if time.monotonic() - self._answered_at > timeout_s:
                        why = f"has not answered for {timeout_s:g} s"
                        raise self._failed(why, StoreUnansweredError) from None
        except RuntimeError as error:  # torch's DistStoreError
            raise self._failed(f"can't be used: {error}") from error
        finally:
            # An exception of a signal handler ends the wait, and so the thread's.
            self._turn += 1

    def await_key(self, store: Store, key: str, timeout_s: float) -> bytes | None:
        """The value of a key once it has one; None after ``timeout_s`` seconds.

        Raises:
            StoreFailedError: as :meth:`run`.
        """
        deadline = Deadline(timeout_s)

        def poll(turn: int) -> bytes | None:
            began = time.monotonic()
            while not store.check([key]):
                if deadline.passed or not self.answered(turn):
                    return None
                pause = max(FIRST_POLL_S, POLL_SHARE * (time.monotonic() - began))
                time.sleep(min(pause, timeouts.WAIT_LONGEST_POLL_S))
            value: bytes = store.get(key)
            return value

        return self.run(poll, timeout_s)

    def answered(self, turn: int) -> bool:
        """For a function: the store has answered just now. Returns whether the call is still awaited."""
        if self.is_awaited(turn):
            self._answered_at = time.monotonic()
        return self.is_awaited(turn)

    def is_awaited(self, turn: int) -> bool:
        """For a function: whether its call has not been given up."""
        return turn == self._turn

    def _failed(
        self, why: str, kind_of_error: type[StoreFailedError] = StoreFailedError
    ) -> StoreFailedError:
        server = self._hosts.server_text()
        text = f"the process group's store, which {server} serves, {why}"
        kind = save_pb2.FAILURE_KIND_LOST
        failure = save_pb2.Failure(rank=0, host=self._hosts.known_host(0), kind=kind, message=text)
        return kind_of_error(f"{self._description}: {text}", [failure])
