"""Barriers of a group's ranks in the process group's store, for one call that all of them make.

In: each rank's arrival at a step, with a value. Out: one outcome per step, the same on all ranks: what one
of them has put together of the values, or which rank failed, ended or didn't come in time, by name. The
first outcome that is written counts; a rank that comes later gets it at once. Nothing blocks in the store:
it is polled, since a blocking call would hold the connection that torch uses as well. Not thread-safe.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.embedded.pg_store import POLL_SHARE
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.ranks.store_calls import FIRST_POLL_S, StoreCalls, StoreFailedError
from pannier.client.torch_compat import Store
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.wire.errors import InvalidRequestError
from pannier.wire.failures import shorten

T = TypeVar("T")

MOST_BYTES: Final = 4 << 20
"""Of a value in the store."""
_READ_AT_ONCE: Final = 256
"""Values of ranks that one call of the store returns."""
_NAMED: Final = 16
"""Missing ranks that are looked up."""
_SHOWN: Final = 4
"""Missing ranks whose progress a text has."""


@dataclass(frozen=True)
class Step:
    """One step of the call."""

    name: str
    """Short, for keys."""
    action: str
    """What the ranks are waited for to do: ``to call load``."""
    is_by_first: bool = False
    """Whether the group's first rank alone is waited for."""


@dataclass
class Missing:
    """Ranks that did not come."""

    ranks: list[int]
    """Global ranks; the first ones of many."""
    text: str
    """With their hosts."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    dead: Mapping[int, str] = field(default_factory=dict)
    """Those whose processes have ended, and how that is known."""
    waited_s: float = 0.0


Settle = Callable[[Mapping[int, Any], Missing | None], Any]
"""Makes the outcome of the values by rank; with missing ranks, of a step that failed. JSON, all of them."""


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


class StoreBarrier:
    """One call of this rank.

    Args:
        store: the group's, of this start (:func:`~pannier.client.ranks.group_start.start_store`).
        ranks: global ranks of the group.
        hosts: of all ranks.
        name: of the kind of call; the n-th call of each rank belongs together, but for :meth:`catch_up`.
        description: of the call, for errors.
        timeout_s: how long other ranks are waited for at each step, as long as none of them shows progress.

    Raises:
        StoreFailedError: from all methods.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        hosts: RankHosts,
        *,
        name: str,
        description: str,
        timeout_s: float,
    ) -> None:
        self._calls = StoreCalls(hosts, description)
        # Any: its stubs know text alone, it takes bytes as well.
        self._store: Any = PrefixStore(f"pannier-{name}", store)
        self._ranks = list(ranks)
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._missing: Missing | None = None
        self._description = description
        self.number = self._call(self._begin)

    @property
    def waiting_for(self) -> str:
        """The ranks that haven't come to the current step, with their hosts; empty: not looked up yet."""
        return "" if self._missing is None else self._missing.text

    def catch_up(self, step: Step, is_late_for: Callable[[Any], bool]) -> None:
        """Joins the group's newest call if the others have ended this one without this rank; else waits
        a moment for one.

        So a rank that left a call out, or came late, is in step again. It doesn't join a call with
        another description: then the next call of this rank will be in step.

        Args:
            step: the first one.
            is_late_for: whether its outcome is that ranks did not come.
        """
        self.number = self._call(lambda turn: self._newest(turn, step, is_late_for))

    def arrive(self, step: Step, value: Any, settle: Settle) -> Any:
        """Comes to a step with a value; returns its outcome, which one of the ranks settles.

        Args:
            value: for JSON, and small.
            settle: called on one rank, or on several at the same time.
        """
        content = encode(value)
        return self._call(lambda turn: self._arrive(turn, step, content, settle))

    def fail(self, step: Step, value: Any, settle: Settle, *, grace_s: float) -> Any:
        """Comes to a step with a failure, which ends it; returns its outcome.

        Args:
            grace_s: time for the other ranks to come with theirs.
        """
        content = encode(value)

        def end(turn: int) -> Any:
            self._store.set(self._key(step, f"rank/{self._hosts.rank}"), content)
            self._count_arrival(step)
            outcome = self._key(step, "outcome")
            began = time.monotonic()
            while not self._store.check([outcome]):
                waited_s = time.monotonic() - began
                lacking = self._lacking(step, self._ranks, 1)
                if not lacking or waited_s >= grace_s or not self._calls.is_awaited(turn):
                    missing = self._look(step, self._ranks, waited_s) if lacking else None
                    self._settle(step, settle, self._ranks, missing)
                time.sleep(timeouts.WAIT_LONGEST_POLL_S)
            return json.loads(self._store.get(outcome))

        return self._call(end, timeout_s=grace_s + timeouts.ANSWER_SLACK_S)

    def leave(self, step: Step) -> None:
        """Ends the call after a step that failed.

        Rank 0, whose process often serves the store, waits a moment for the others that came to the step,
        so that its end doesn't keep the outcome from them.
        """

        def leave(turn: int) -> None:
            left = self._store.add(self._key(step, "left"), 1)
            if self._hosts.rank == 0:
                deadline = Deadline(timeouts.CAUSES_S)
                here = len(self._ranks) - len(self._lacking(step, self._ranks, len(self._ranks)))
                while left < here and self._calls.is_awaited(turn) and not deadline.passed:
                    time.sleep(timeouts.WAIT_LONGEST_POLL_S)
                    left = self._store.add(self._key(step, "left"), 0)

        with suppress(StoreFailedError):
            self._call(leave, timeout_s=timeouts.ANSWER_SLACK_S)

    def show_progress(self, step: Step, text: str) -> None:
        """Lets ranks that wait for this one know how far it is: each change extends their deadline.

        In a thread of its own, since the store may not answer.
        """
        with suppress(RuntimeError):  # torch's DistStoreError
            self._store.set(self._key(step, f"progress/{self._hosts.rank}"), text)

    def outcome(self, step: Step) -> Any:
        """The outcome of a step, without coming to it; None: it has none yet."""
        key = self._key(step, "outcome")

        def look(_: int) -> Any:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

        return self._call(look, timeout_s=timeouts.ANSWER_SLACK_S)

    def forget_previous(self, steps: Sequence[Step]) -> None:
        """Removes what earlier calls have left; every rank has come to this one."""
        if self.number <= 1:
            return
        rank = self._hosts.rank
        names = ["arrived", "description", "outcome", "left"] if rank == self._ranks[0] else []
        names += [f"rank/{rank}", f"progress/{rank}"]

        def remove(_: int) -> None:
            # Calls that failed at their first step have removed nothing.
            done: int = self._store.add(f"forgotten/{rank}", 0)
            for number in range(done + 1, self.number):
                for step in steps:
                    for name in names:
                        # A store may not have it. One that fails is noticed at the next step.
                        with suppress(RuntimeError):
                            self._store.delete_key(f"{number}/{step.name}/{name}")
            self._store.add(f"forgotten/{rank}", self.number - 1 - done)

        self._call(remove)

    def _key(self, step: Step, name: str) -> str:
        return f"{self.number}/{step.name}/{name}"

    def _call(self, function: Callable[[int], T], *, timeout_s: float | None = None) -> T:
        return self._calls.run(function, self._timeout_s if timeout_s is None else timeout_s)

    # In the other thread.

    def _begin(self, _: int) -> int:
        # At each call: rank 0, which is looked up, may not have been there at the first.
        self._hosts.register()
        number: int = self._store.add(f"calls/{self._hosts.rank}", 1)
        return number

    def _newest(self, turn: int, step: Step, is_late_for: Callable[[Any], bool]) -> int:
        """The number of the call to which this rank is to come."""
        number = self.number
        deadline = Deadline(min(timeouts.LOAD_REJOIN_S, self._timeout_s))

        def is_over() -> bool:
            key = f"{number}/{step.name}/outcome"
            if not self._store.check([key]):
                return False
            return number > self.number or is_late_for(json.loads(self._store.get(key)))

        def has(key: str) -> bool:
            """Waits for it to the deadline."""
            while not self._store.check([key]):
                if deadline.passed or not self._calls.answered(turn):
                    return False
                time.sleep(timeouts.WAIT_LONGEST_POLL_S)
            return True

        while (over := is_over()) and has(f"{number + 1}/{step.name}/arrived"):
            number += 1
        if number > self.number and not over:
            key = f"{number}/{step.name}/description"
            if not has(key) or self._store.get(key).decode() != self._description:
                number -= 1
        if number > self.number:
            self._store.add(f"calls/{self._hosts.rank}", number - self.number)
        return number

    def _count_arrival(self, step: Step) -> int:
        arrived: int = self._store.add(self._key(step, "arrived"), 1)
        if arrived == 1:
            self._store.set(self._key(step, "description"), self._description)
        return arrived

    def _arrive(self, turn: int, step: Step, content: bytes, settle: Settle) -> Any:
        needed = self._ranks[:1] if step.is_by_first else self._ranks
        outcome = self._key(step, "outcome")
        self._store.set(self._key(step, f"rank/{self._hosts.rank}"), content)
        if self._hosts.rank in needed and self._count_arrival(step) >= len(needed):
            self._settle(step, settle, needed, None)
        began = moved = time.monotonic()
        look_at = began + timeouts.WAIT_LOOK_S
        progress = repr({})
        pause = FIRST_POLL_S
        while not self._store.check([outcome]):
            now = time.monotonic()
            if not self._calls.answered(turn):
                raise StoreFailedError("the wait was given up")
            if now >= look_at or now - moved >= self._timeout_s:
                missing = self._look(step, needed, now - began)
                shown = self._progress(step, missing)
                if shown != progress:
                    progress, moved = shown, now
                if not missing.ranks:
                    self._settle(step, settle, needed, None)
                elif missing.dead or now - moved >= self._timeout_s:
                    self._settle(step, settle, needed, missing)
                pause_s = max(timeouts.WAIT_LOOK_S, (now - began) / 4)
                look_at = now + min(pause_s, timeouts.WAIT_LONGEST_LOOK_S)
            time.sleep(pause)
            pause = max(FIRST_POLL_S, POLL_SHARE * (now - began))
            pause = min(pause, timeouts.WAIT_LONGEST_POLL_S)
        self._missing = None
        return json.loads(self._store.get(outcome))

    def _settle(
        self, step: Step, settle: Settle, needed: Sequence[int], missing: Missing | None
    ) -> None:
        lacking = set() if missing is None else self._lacking(step, needed, len(needed))
        here = [rank for rank in needed if rank not in lacking]
        keys = [self._key(step, f"rank/{rank}") for rank in here]
        contents: list[bytes] = []
        for begin in range(0, len(keys), _READ_AT_ONCE):
            contents += self._store.multi_get(keys[begin : begin + _READ_AT_ONCE])
        values = {rank: json.loads(content) for rank, content in zip(here, contents, strict=True)}
        # The first one counts.
        outcome = encode(settle(values, missing))
        self._store.compare_set(self._key(step, "outcome"), "", outcome)

    def _look(self, step: Step, needed: Sequence[int], waited_s: float) -> Missing:
        ranks = sorted(self._lacking(step, needed, _NAMED))
        text = self._hosts.text(ranks)
        if len(ranks) == _NAMED:
            text += " and maybe more"
        self._missing = Missing(
            ranks=ranks,
            text=text,
            hosts={rank: self._hosts.host(rank) for rank in ranks},
            dead=self._hosts.dead(ranks),
            waited_s=waited_s,
        )
        return self._missing

    def _progress(self, step: Step, missing: Missing) -> str:
        """What missing ranks show of their progress; also added to their text."""
        shown = {}
        for rank in missing.ranks:
            key = self._key(step, f"progress/{rank}")
            if self._store.check([key]):
                shown[rank] = self._store.get(key).decode()
        if shown:
            texts = [f"rank {rank}: {text}" for rank, text in shown.items()]
            missing.text += f" ({shorten(texts, _SHOWN, separator='; ')})"
        return repr(shown)

    def _lacking(self, step: Step, needed: Sequence[int], most: int) -> set[int]:
        """Up to ``most`` of the ranks that haven't come; few calls if few are missing."""
        parts = [list(needed)]
        found: set[int] = set()
        while parts and len(found) < most:
            part = parts.pop()
            if self._store.check([self._key(step, f"rank/{rank}") for rank in part]):
                continue
            if len(part) == 1:
                found.update(part)
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return found
