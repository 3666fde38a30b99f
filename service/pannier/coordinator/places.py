"""Where saves go: a store per checkpoint, and what is known of the root it lies in.

In: checkpoint ids. Out: stores that were probed, and attempts in their order. Owns the
probe and the incarnation numbers of each root, which are asked for once. Event loop only.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pannier.coordinator.incarnations import number_of
from pannier.storage import Store, check_allowed, check_shared, open_store
from pannier.storage.limits import unlimited
from pannier.v1 import save_pb2
from pannier.wire import identity

_Answer = TypeVar("_Answer")

_KEPT: Final = 256
"""Answers remembered."""


class Places:
    """Opens stores below the allowed roots."""

    def __init__(
        self, *, allow: Sequence[str] = (), storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._allow = tuple(allow)
        self._options = dict(storage_options or {})
        self._probes: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._numbers: OrderedDict[tuple[str, str, str], asyncio.Task[int]] = OrderedDict()

    def check(self, checkpoint_id: str) -> None:
        """Raises InvalidRequestError unless a save may go there, as far as the name tells."""
        identity.split_checkpoint_id(checkpoint_id)
        check_shared(checkpoint_id)
        check_allowed(checkpoint_id, self._allow)

    def open(self, checkpoint_id: str) -> Store:
        """The store of one checkpoint; the caller closes it. Raises as :meth:`check`."""
        self.check(checkpoint_id)
        return open_store(checkpoint_id, storage_options=self._options)

    def open_root(self, root: str) -> Store:
        """The store of a root, or of a checkpoint below it, that was saved to; the caller closes it."""
        return open_store(root, storage_options=self._options)

    async def attempt(self, save: save_pb2.SaveId, checkpoint_id: str) -> identity.Attempt:
        """The save's place in the order of attempts; probes the root at its first use.

        Raises StorageError with the provider's message.
        """
        root, _ = identity.split_checkpoint_id(checkpoint_id)
        await _once(self._probes, root, lambda: self._probe(root))
        key = (root, save.job, save.incarnation)
        number = await _once(self._numbers, key, lambda: self._number(*key))
        return identity.Attempt(number, save.number, save.group)

    async def _probe(self, root: str) -> None:
        store = self.open_root(root)
        try:
            await store.probe()
        finally:
            await store.close()

    async def _number(self, root: str, job: str, incarnation: str) -> int:
        store = self.open_root(root)
        try:
            return await number_of(store, job, incarnation)
        finally:
            await store.close()


async def _once(
    known: "OrderedDict[Any, asyncio.Task[_Answer]]",
    key: object,
    ask: Callable[[], Awaitable[_Answer]],
) -> _Answer:
    """The answer for ``key``, asked for once; a failure is forgotten, so the next save tries again."""
    task = known.get(key)
    if task is None:

        async def asking() -> _Answer:
            return await ask()

        with unlimited():  # others share it, whose deadlines are not the first one's
            task = known[key] = asyncio.get_running_loop().create_task(asking())
        while len(known) > _KEPT:
            known.popitem(last=False)
    try:
        # A save that is aborted meanwhile must not take the answer from the others.
        return await asyncio.shield(task)
    except BaseException:
        failed = task.done() and (task.cancelled() or task.exception() is not None)
        if failed and known.get(key) is task:
            del known[key]
        raise
