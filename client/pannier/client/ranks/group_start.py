"""The part of a process group's store that belongs to this start of its ranks.

In: a process group. Out: a store under a prefix of this start. The group's own store may outlive processes
(torchrun's does), and what ranks of an earlier start counted there would put the ranks of this one out of
step: a rank that had died before its first load would wait in another call than the others. Each process
looks up the number of the start once per group. Thread-safe.
"""

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pannier.client.embedded.pg_store import RankStore
from pannier.client.ranks.rank_hosts import RankHosts
from pannier.client.ranks.store_calls import StoreCalls, StoreFailedError
from pannier.client.torch_compat import Store, group_store

T = TypeVar("T")

_PREFIX: Final = "pannier-start"

_numbers: Final[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
"""Of the start, by process group."""
_lock: Final = threading.Lock()


def start_store(
    process_group: Any, hosts: RankHosts, *, description: str, timeout_s: float
) -> Store:
    """The store of this start. Blocking.

    Args:
        process_group: None: all ranks.
        hosts: of the ranks; this process registers itself there.
        description: of the call that needs it, for errors.
        timeout_s: how long the store may take for an answer.

    Raises:
        StoreFailedError: it did not answer in time, or can't be used.
    """
    group = dist.group.WORLD if process_group is None else process_group
    store = PrefixStore(_PREFIX, group_store(process_group))
    number = _numbers.get(group)
    if number is None:
        calls = StoreCalls(hosts, description)

        def begin(turn: int) -> int:
            hosts.register()
            with _lock:
                if group not in _numbers:
                    ranks = _AnsweredStore(hosts.rank, store, calls, turn)
                    who = f"rank {hosts.rank} (host {hosts.own.host})"
                    size = dist.get_world_size(process_group)
                    _numbers[group], _ = ranks.begin_incarnation("", size=size, who=who)
                return _numbers[group]

        number = calls.run(begin, timeout_s)
    return PrefixStore(str(number), store)


class _AnsweredStore(RankStore):
    """For a function of StoreCalls, which bounds its time: each answer extends it.

    Args:
        turn: the number of the call.
    """

    def __init__(self, rank: int, store: Store, calls: StoreCalls, turn: int) -> None:
        super().__init__(rank, timeout_s=0.0, store=store)
        self._calls = calls
        self._turn = turn

    def ask(self, call: Callable[[], T]) -> T:
        found = call()
        if not self._calls.answered(self._turn):
            raise StoreFailedError("the wait was given up")
        return found
