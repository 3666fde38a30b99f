"""Barriers of a group's ranks in the process group's store, for one call that all of them make.

In: each rank's arrival at a step, with a value. Out: one outcome per step, the same on all ranks: what one
of them has put together of the values, or which rank failed, ended or didn't come in time, by name. The
first outcome that is written counts; a rank that comes later gets it at once. Not thread-safe.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.ranks.group_store import GroupStore, StoreCall, StoreFailedError, poll
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.torch_compat import Store
from pannier.common import timeouts
from pannier.common.deadline import Deadline
from pannier.wire.failures import shorten

T = TypeVar("T")

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


class StoreBarrier:
    """One call of this rank.

    Args:
        store: the group's, of this start (:func:`~pannier.client.ranks.group_store.join_start`).
        ranks: global ranks of the group.
        hosts: of all ranks.
        name: of the kind of call.
        number: of the call; calls with the same number belong together, but for :meth:`catch_up`.
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
        number: int,
        description: str,
        timeout_s: float,
    ) -> None:
        store = PrefixStore(name, store)
        self._store = GroupStore(store, hosts, description=description, timeout_s=timeout_s)
        self._ranks = list(ranks)
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._missing: Missing | None = None
        self._description = description
        self.number = number
        # At each call: rank 0, which is looked up, may not have been there at the first.
        self._store.run(lambda _: hosts.register())

    @property
    def waiting_for(self) -> str:
        """The ranks that haven't come to the current step, with their hosts; empty: not looked up yet."""
        return "" if self._missing is None else self._missing.text

    def catch_up(self, step: Step, is_late_for: Callable[[Any], bool]) -> int:
        """Joins the group's newest call if the others have ended this one without this rank; else waits
        a moment for one. Returns its number.

        So a rank that left a call out, or came late, is in step again. It doesn't join a call with
        another description: then the next call of this rank will be in step.

        Args:
            step: the first one.
            is_late_for: whether its outcome is that ranks did not come.
        """
        self.number = self._store.run(lambda store: self._newest(store, step, is_late_for))
        return self.number

    def arrive(self, step: Step, value: Any, settle: Settle) -> Any:
        """Comes to a step with a value; returns its outcome, which one of the ranks settles.

        Args:
            value: for JSON, and small.
            settle: called on one rank, or on several at the same time.
        """
        outcome = self._store.run(lambda store: self._arrive(store, step, value, settle))
        self._missing = None
        return outcome

    def fail(self, step: Step, value: Any, settle: Settle, *, grace_s: float) -> Any:
        """Comes to a step with a failure, which ends it; returns its outcome.

        Args:
            grace_s: time for the other ranks to come with theirs.
        """

        def end(store: StoreCall) -> Any:
            store.put(self._key(step, f"rank/{self._hosts.rank}"), value)
            self._count_arrival(store, step)
            began = time.monotonic()

            def look() -> Any:
                outcome = store.get(self._key(step, "outcome"))
                if outcome is not None:
                    return outcome
                waited_s = time.monotonic() - began
                lacking = self._lacking(store, step, self._ranks, 1)
                if lacking and waited_s < grace_s:
                    return None
                missing = self._look(store, step, self._ranks, waited_s) if lacking else None
                return self._settle(store, step, settle, self._ranks, missing)

            return poll(look, grace_s + timeouts.ANSWER_SLACK_S)

        return self._store.run(end, timeout_s=grace_s + timeouts.ANSWER_SLACK_S)

    def leave(self, step: Step) -> None:
        """Ends the call after its last step, or one that failed.

        Rank 0, whose process often serves the store, waits a moment for the others that came to the step,
        so that its end doesn't keep the outcome from them.
        """

        def leave(store: StoreCall) -> None:
            key = self._key(step, "left")
            store.count(key, 1)
            if self._hosts.rank == 0:
                here = len(self._ranks) - len(
                    self._lacking(store, step, self._ranks, len(self._ranks))
                )
                poll(lambda: store.count(key) >= here or None, timeouts.CAUSES_S)

        with suppress(StoreFailedError):
            self._store.run(leave, timeout_s=timeouts.ANSWER_SLACK_S)

    def show_progress(self, step: Step, text: str) -> None:
        """Lets ranks that wait for this one know how far it is: each change extends their deadline."""
        key = self._key(step, f"progress/{self._hosts.rank}")
        with suppress(StoreFailedError):
            self._store.run(lambda store: store.put(key, text))

    def outcome(self, step: Step) -> Any:
        """The outcome of a step, without coming to it; None: it has none yet."""
        key = self._key(step, "outcome")
        return self._store.run(lambda store: store.get(key), timeout_s=timeouts.ANSWER_SLACK_S)

    def forget(self, steps: Sequence[Step], numbers: Sequence[int]) -> None:
        """Removes what this rank has left in earlier calls; every rank has come to this one."""
        rank = self._hosts.rank
        names = ["arrived", "description", "outcome", "left"] if rank == self._ranks[0] else []
        names += [f"rank/{rank}", f"progress/{rank}"]
        keys = [f"{n}/{step.name}/{name}" for n in numbers for step in steps for name in names]
        self._store.run(lambda store: store.remove(keys))

    def _key(self, step: Step, name: str) -> str:
        return f"{self.number}/{step.name}/{name}"

    # In the other thread.

    def _newest(self, store: StoreCall, step: Step, is_late_for: Callable[[Any], bool]) -> int:
        """The number of the call to which this rank is to come."""
        number = self.number
        deadline = Deadline(min(timeouts.LOAD_REJOIN_S, self._timeout_s))

        def is_over() -> bool:
            outcome = store.get(f"{number}/{step.name}/outcome")
            return outcome is not None and (number > self.number or is_late_for(outcome))

        def awaited(key: str) -> Any:
            return poll(lambda: store.has([key]) or None, deadline.remaining())

        while (over := is_over()) and awaited(f"{number + 1}/{step.name}/arrived"):
            number += 1
        if number > self.number and not over:
            key = f"{number}/{step.name}/description"
            if not awaited(key) or store.get(key) != self._description:
                number -= 1
        return number

    def _count_arrival(self, store: StoreCall, step: Step) -> int:
        arrived = store.count(self._key(step, "arrived"), 1)
        if arrived == 1:
            store.put(self._key(step, "description"), self._description)
        return arrived

    def _arrive(self, store: StoreCall, step: Step, value: Any, settle: Settle) -> Any:
        needed = self._ranks[:1] if step.is_by_first else self._ranks
        store.put(self._key(step, f"rank/{self._hosts.rank}"), value)
        if self._hosts.rank in needed and self._count_arrival(store, step) >= len(needed):
            return self._settle(store, step, settle, needed, None)
        began = moved = time.monotonic()
        look_at = began + timeouts.WAIT_LOOK_S
        progress: Mapping[int, str] = {}

        def look() -> Any:
            nonlocal moved, look_at, progress
            outcome = store.get(self._key(step, "outcome"))
            now = time.monotonic()
            if outcome is not None or (now < look_at and now - moved < self._timeout_s):
                return outcome
            missing = self._look(store, step, needed, now - began)
            shown = self._progress(store, step, missing)
            if shown != progress:
                progress, moved = shown, now
            if not missing.ranks:
                return self._settle(store, step, settle, needed, None)
            if missing.dead or now - moved >= self._timeout_s:
                return self._settle(store, step, settle, needed, missing)
            pause_s = max(timeouts.WAIT_LOOK_S, (now - began) / 4)
            look_at = now + min(pause_s, timeouts.WAIT_LONGEST_LOOK_S)
            return None

        return poll(look, math.inf)

    def _settle(
        self,
        store: StoreCall,
        step: Step,
        settle: Settle,
        needed: Sequence[int],
        missing: Missing | None,
    ) -> Any:
        """The outcome: this rank's, unless another one has written one before."""
        lacking = set() if missing is None else self._lacking(store, step, needed, len(needed))
        here = [rank for rank in needed if rank not in lacking]
        values = store.get_all([self._key(step, f"rank/{rank}") for rank in here])
        outcome = settle(dict(zip(here, values, strict=True)), missing)
        return store.claim(self._key(step, "outcome"), outcome)

    def _look(
        self, store: StoreCall, step: Step, needed: Sequence[int], waited_s: float
    ) -> Missing:
        ranks = sorted(self._lacking(store, step, needed, _NAMED))
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

    def _progress(self, store: StoreCall, step: Step, missing: Missing) -> Mapping[int, str]:
        """What missing ranks show of their progress; also added to their text."""
        found = {rank: store.get(self._key(step, f"progress/{rank}")) for rank in missing.ranks}
        shown = {rank: text for rank, text in found.items() if text is not None}
        if shown:
            texts = [f"rank {rank}: {text}" for rank, text in shown.items()]
            missing.text += f" ({shorten(texts, _SHOWN, separator='; ')})"
        return shown

    def _lacking(self, store: StoreCall, step: Step, needed: Sequence[int], most: int) -> set[int]:
        """Up to ``most`` of the ranks that haven't come; few calls if few are missing."""
        parts = [list(needed)]
        found: set[int] = set()
        while parts and len(found) < most:
            part = parts.pop()
            if store.has([self._key(step, f"rank/{rank}") for rank in part]):
                continue
            if len(part) == 1:
                found.update(part)
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return found
