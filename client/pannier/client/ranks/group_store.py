"""The process group's store as ranks use it: one start, one numbering, small JSON values, calls that end in time.

In: a process group, and functions that use its store. Out: what they return, or an error that names the process
that serves the store; the start of the job's ranks, on which all of them agree (:func:`join_start`). Each function
runs in another thread, so that neither a store that doesn't answer nor a signal's exception can keep the
caller. Nothing blocks in the store: it is polled, since a blocking call would hold the connection that torch uses
as well. Thread-safe, unless said otherwise.
"""

import asyncio
import atexit
import json
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pannier.client import console, torch_compat
from pannier.client.engine import engine
from pannier.client.interrupts import Call, UnansweredError
from pannier.client.ranks.load_error import LoadError
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.torch_compat import Store
from pannier.common import timeouts
from pannier.common.deadline import set_within
from pannier.common.machine import process_state
from pannier.v1 import save_pb2
from pannier.wire.errors import DeadlineError, InvalidRequestError

_log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_BYTES: Final = 4 << 20
"""Of a value in the store."""
_READ_AT_ONCE: Final = 256
"""Values that one call of the store returns."""
_FIRST_POLL_S: Final = 0.0002
_POLL_SHARE: Final = 0.1
"""Of the time waited so far: the pause until the next look into the store."""
_PREFIX: Final = "pannier"
_CLAIM: Final = "start"


class StoreFailedError(LoadError, DeadlineError):
    """The process group's store, which rank 0 or its launcher serves, can't be used."""


class StoreUnansweredError(StoreFailedError):
    """It has not answered in time; it may only be busy."""


class StartError(LoadError, DeadlineError):
    """The rank that began this start of the job has not confirmed it in time."""


def encode(value: Any) -> bytes:
    """A value as the store gets it.

    Raises:
        InvalidRequestError: it is too large. torch's store closes the connection above 8 MiB, which torch
            itself uses as well (``MAX_PAYLOAD_LEN`` in TCPStoreLibUvBackend.cpp of torch 2.9 to 2.15).
    """
    content = json.dumps(value).encode()
    if len(content) > MOST_BYTES:
        raise InvalidRequestError(
            f"a value of {len(content)} bytes, which begins with {content[:80].decode()}, is too large for the "
            f"process group's store: at most {MOST_BYTES} bytes"
        )
    return content


def poll(look: Callable[[], T | None], timeout_s: float) -> T | None:
    """Calls ``look`` until it returns a value; None after ``timeout_s`` seconds."""
    began = time.monotonic()
    while (found := look()) is None:
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            return None
        pause_s = min(max(_FIRST_POLL_S, _POLL_SHARE * waited_s), timeouts.WAIT_LONGEST_POLL_S)
        time.sleep(min(pause_s, timeout_s - waited_s))
    return found


class StoreCall:
    """The store for one function of :meth:`GroupStore.run`, in its thread.

    Each answer extends the function's time.

    Raises:
        StoreFailedError: from all methods: the caller doesn't wait any more.
    """

    def __init__(self, store: Store) -> None:
        # Any: its stubs know text alone, it takes bytes as well.
        self._store: Any = store
        self.answered_at = time.monotonic()
        self.is_given_up = False

    def get(self, key: str) -> Any:
        """A value; None: it has none yet."""
        # `get` alone would wait for a value.
        return json.loads(self._store.get(key)) if self.has([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys that have one."""
        found: list[Any] = []
        for begin in range(0, len(keys), _READ_AT_ONCE):
            part = list(keys[begin : begin + _READ_AT_ONCE])
            found += map(json.loads, self._answered(self._store.multi_get(part)))
        return found

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return bool(self._answered(self._store.check(list(keys))))

    def put(self, key: str, value: Any) -> None:
        """Writes a value."""
        self._answered(self._store.set(key, encode(value)))

    def claim(self, key: str, value: Any, *, instead_of: Any = None) -> Any:
        """Writes a value unless the key has another one than ``instead_of`` (None: any); returns its value."""
        before = b"" if instead_of is None else encode(instead_of)
        return json.loads(self._answered(self._store.compare_set(key, before, encode(value))))

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a counter that starts at 0; returns its value."""
        return int(self._answered(self._store.add(key, more)))

    def remove(self, keys: Iterable[str]) -> None:
        """Removes keys, as far as the store can: one that fails is noticed at its next use."""
        for key in keys:
            with suppress(RuntimeError):
                self._answered(self._store.delete_key(key))

    def _answered(self, answer: T) -> T:
        if self.is_given_up:
            raise StoreFailedError("the wait was given up")
        self.answered_at = time.monotonic()
        return answer


class GroupStore:
    """A part of a process group's store, for one purpose.

    Args:
        store: that part.
        hosts: names the process that serves the store.
        description: the purpose, for errors.
        timeout_s: how long the store may take for an answer.

    Raises:
        StoreUnansweredError: from all methods: the store did not answer in time.
        StoreFailedError: it can't be used.
        InvalidRequestError: a value is too large.
    """

    def __init__(
        self, store: Store, hosts: RankHosts, *, description: str, timeout_s: float
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._description = description
        self._timeout_s = timeout_s

    def run(self, function: Callable[[StoreCall], T], *, timeout_s: float | None = None) -> T:
        """What ``function`` returns.

        Args:
            timeout_s: how long it may take since it began or the store's last answer.
        """
        most_s = self._timeout_s if timeout_s is None else timeout_s
        access = StoreCall(self._store)
        call = Call(lambda: function(access))
        try:
            while True:
                try:
                    return call.result(timeouts.WAIT_LOOK_S)
                except UnansweredError:
                    if time.monotonic() - access.answered_at > most_s:
                        why = f"has not answered for {most_s:g} s"
                        raise self._failed(why, StoreUnansweredError) from None
        except RuntimeError as error:  # torch's DistStoreError
            raise self._failed(f"can't be used: {error}", StoreFailedError) from error
        finally:
            # An exception of a signal handler ends the wait, and so the thread's.
            access.is_given_up = True

    def await_value(self, key: str, timeout_s: float) -> Any:
        """A value once there is one; None after ``timeout_s`` seconds."""
        return self.run(lambda store: poll(lambda: store.get(key), timeout_s))

    def put(self, key: str, value: Any) -> None:
        """See :meth:`StoreCall.put`."""
        self.run(lambda store: store.put(key, value))

    def claim(self, key: str, value: Any) -> Any:
        """See :meth:`StoreCall.claim`."""
        return self.run(lambda store: store.claim(key, value))

    def _failed(self, why: str, kind_of_error: type[StoreFailedError]) -> StoreFailedError:
        text = f"the process group's store, which {self._hosts.server_text()} serves, {why}"
        failure = save_pb2.Failure(
            rank=0,
            host=self._hosts.known_host(0),
            kind=save_pb2.FAILURE_KIND_LOST,
            message=text,
        )
        return kind_of_error(f"{self._description}: {text}", [failure])


class Start:
    """One start of the job's ranks, on which all of them have agreed.

    A store may outlive processes (torchrun's does) and process groups. Keys below :meth:`prefix` are this start's
    alone, so that the ranks can count their calls by themselves.
    """

    def __init__(self, start_id: str) -> None:
        self.id: Final = start_id
        self._lock: Final = threading.Lock()
        self._numbers: Final[dict[tuple[str, str], int]] = {}
        self._done: Final[dict[tuple[str, str], int]] = {}

    def prefix(self, store: Store) -> Store:
        """The part of a process group's store that belongs to this start."""
        return PrefixStore(f"{_PREFIX}/{self.id}", store)

    def next_number(self, group: str, kind: str) -> int:
        """Counts the calls of a kind in a group: those with the same number on all ranks belong together."""
        with self._lock:
            number = self._numbers[group, kind] = self._numbers.get((group, kind), 0) + 1
            return number

    def take_done(self, group: str, kind: str, number: int) -> range:
        """The numbers before ``number`` that no call has taken before, to remove what those calls have left."""
        with self._lock:
            done = self._done.get((group, kind), 0)
            self._done[group, kind] = max(done, number - 1)
            return range(done + 1, number)

    def skip_to(self, group: str, kind: str, number: int) -> None:
        """This rank's last call was that of the group with this number; never goes back."""
        with self._lock:
            self._numbers[group, kind] = max(number, self._numbers.get((group, kind), 0))


_starts: Final[WeakKeyDictionary[Any, Start]] = WeakKeyDictionary()
"""By default process group, those that were agreed on."""
_claims: Final[WeakKeyDictionary[Any, "_Agreement"]] = WeakKeyDictionary()
"""By default process group."""
_joined_by: Final[dict[str, object]] = {}
"""Starts that this process has joined, and by which agreement."""
_lock: Final = threading.Lock()


def join_start(hosts: RankHosts, *, description: str, timeout_s: float) -> Start:
    """The start of this process's ranks, the same on all that the default process group connects. Blocking.

    The first rank to come claims the start by a random id. The others ask it to confirm that it is one of them:
    what a store has may be left by ranks that have ended. So a rank waits until the one that claimed the start has
    confirmed it, however long that is stopped or busy, or until it is certain that the claim is an earlier
    start's: another process of the same rank comes, there is no such rank any more, or the process was on this
    machine and has ended. Silence decides nothing. The rank that claims it waits for no other.

    Args:
        hosts: looks its ranks up in the store's part of this start from then on.
        description: of the call that needs it, for errors.
        timeout_s: how long the confirmation, or an answer of the store, may take.

    Raises:
        StartError: the rank that claimed the start has not confirmed it in time.
        StoreFailedError: the store did not answer in time, or can't be used.
    """
    group = dist.group.WORLD
    plain = torch_compat.group_store(None)
    start = _starts.get(group)
    if start is None:
        with _lock:
            if group not in _claims:
                current = weakref.ref(group)
                _claims[group] = _Agreement(
                    hosts,
                    PrefixStore(_PREFIX, plain),
                    size=dist.get_world_size(),
                    is_current=lambda: dist.is_initialized() and dist.group.WORLD is current(),
                    joined_by=_joined_by,
                )
        start_id = _claims[group].join(hosts, description=description, timeout_s=timeout_s)
        with _lock:
            start = _starts.setdefault(group, Start(start_id))
    hosts.use(start.prefix(plain))
    return start


class _Agreement:
    """This rank's agreement with the others on one start.

    Args:
        store: where the ranks agree.
        size: number of ranks.
        is_current: whether this process still belongs to the start.
        joined_by: starts that this process has joined, and by which agreement.
    """

    def __init__(
        self,
        hosts: RankHosts,
        store: Store,
        *,
        size: int,
        is_current: Callable[[], bool],
        joined_by: dict[str, object],
    ) -> None:
        self._store = store
        self._size = size
        self._is_current = is_current
        self._joined_by = joined_by
        own = hosts.own
        self._claim: Final[dict[str, Any]] = {
            "id": secrets.token_hex(8),
            "rank": hosts.rank,
            "host": own.host,
            "machine": own.machine,
            "pid": own.pid,
            "started_s": own.started_s,
        }
        self._token: Final = object()
        self._confirming: _Confirming | None = None
        self._lock: Final = threading.Lock()

    def join(self, hosts: RankHosts, *, description: str, timeout_s: float) -> str:
        """The id of the start."""
        store = GroupStore(self._store, hosts, description=description, timeout_s=timeout_s)
        awaited: dict[str, Any] = {}
        """The claim whose confirmation is awaited."""

        def agree(store: StoreCall) -> str | None:
            claim = store.claim(_CLAIM, self._claim)
            if self._is_over(claim):
                store.claim(_CLAIM, self._claim, instead_of=claim)
                return None
            if claim["id"] == self._claim["id"]:
                self._confirm()
                return str(claim["id"])
            awaited.update(claim)
            ticket = store.count(_asked(claim["id"]), 1)

            def is_confirmed() -> bool | None:
                if store.count(_confirmed(claim["id"])) >= ticket:
                    return True
                # In this order: so a claim that was replaced meanwhile isn't waited for.
                changed = self._is_over(claim) or store.get(_CLAIM) != claim
                return False if changed else None

            found = poll(is_confirmed, deadline_s - time.monotonic())
            if found:
                store.count(_joined(claim["id"]), 1)
                return str(claim["id"])
            return None

        deadline_s = time.monotonic() + timeout_s

        def reason() -> str | None:
            if not awaited:
                return None
            rank, host = awaited["rank"], awaited["host"]
            return f"rank {rank} (host {host}) to confirm this start of the job"

        with console.logged(description, reason):
            while (found := store.run(agree)) is None:
                if time.monotonic() >= deadline_s:
                    raise _unconfirmed(f"{description}: after {timeout_s:g} s", awaited, reason())
        self._joined_by[found] = self._token
        return found

    def _is_over(self, claim: Mapping[str, Any]) -> bool:
        """Whether a claim is certainly an earlier start's."""
        if claim["id"] == self._claim["id"]:
            return False
        return (
            claim["rank"] == self._claim["rank"]
            or claim["rank"] >= self._size
            or self._joined_by.get(claim["id"], self._token) is not self._token
            or (
                claim["machine"] == self._claim["machine"]
                and process_state(claim["pid"], claim["started_s"]) == "ended"
            )
        )

    def _confirm(self) -> None:
        with self._lock:
            if self._confirming is None:
                self._confirming = _Confirming(
                    self._store, self._claim["id"], self._size - 1, self._is_current
                )
                self._confirming.start()


def _unconfirmed(text: str, claim: Mapping[str, Any], reason: str | None) -> StartError:
    message = (
        f"{text} still waiting for {reason}: it was the first rank to save or load, or was so in an earlier "
        "start and hasn't called in this one; is it stopped or busy?"
    )
    failure = save_pb2.Failure(
        rank=claim.get("rank", 0),
        host=claim.get("host", ""),
        kind=save_pb2.FAILURE_KIND_DEADLINE,
        message=message,
    )
    return StartError(message, [failure])


class _Confirming:
    """Confirms to other ranks that this process is one of their start, until all have joined it.

    Uses a separate connection where the store supports that: torch may block the first one for long
    while it waits for other ranks.
    """

    def __init__(
        self, store: Store, start_id: str, others: int, is_current: Callable[[], bool]
    ) -> None:
        self._plain = store
        self._id = start_id
        self._others = others
        self._is_current = is_current
        self._engine = engine()
        self._stopped = asyncio.Event()
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Confirms in the background from now on."""
        if self._others:
            # The interpreter must not end while a thread is in the store.
            atexit.register(self._stop)
            self._engine.start(self._run)

    def _stop(self) -> None:
        async def stop() -> None:
            self._stopped.set()
            await set_within(timeouts.RANK_ANSWER_EXIT_S, self._ended)

        # A forked child has the function, too, and nothing to wait for.
        if not self._engine.is_inherited:
            self._engine.call(stop)

    async def _run(self) -> None:
        confirmed = 0
        began = time.monotonic()
        pause_s = 0.0
        try:
            store = StoreCall(
                await self._engine.in_thread(lambda: torch_compat.own_connection(self._plain))
            )

            async def count(key: str, more: int = 0) -> int:
                return await self._engine.in_thread(lambda: store.count(key, more))

            while not await set_within(pause_s, self._stopped) and self._is_current():
                asked = await count(_asked(self._id))
                if asked > confirmed:
                    await count(_confirmed(self._id), asked - confirmed)
                    confirmed = asked
                if await count(_joined(self._id)) >= self._others:
                    break
                # Ranks mostly come at almost the same time, and wait for the answer.
                pause_s = max(timeouts.STORE_POLL_S, _POLL_SHARE * (time.monotonic() - began))
                pause_s = min(pause_s, timeouts.STORE_LONGEST_POLL_S)
        except RuntimeError as error:  # torch's DistStoreError: the process group has ended
            _log.debug("start %s: no more confirmations: %s", self._id, error)
        finally:
            self._ended.set()
            atexit.unregister(self._stop)


def _asked(start_id: str) -> str:
    return f"{start_id}/asked"


def _confirmed(start_id: str) -> str:
    return f"{start_id}/confirmed"


def _joined(start_id: str) -> str:
    return f"{start_id}/joined"
