"""The store of each checkpoint, and what is known of its root.

In: checkpoint ids. Out: stores that were probed, and attempts in their order. Owns the
probe and the incarnation numbers of each root, each read once. Event loop only.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from pannier.common import timeouts
from pannier.common.locations import parse
from pannier.coordinator.incarnations import Claim, Incarnations
from pannier.storage import (
    Store,
    check_allowed,
    check_allowed_in_time,
    check_shared,
    open_store,
)
from pannier.storage.base import Retried, limited, retry_callback
from pannier.v1 import sidecar_pb2
from pannier.wire import object_names

_Answer = TypeVar("_Answer")

_KEPT: Final = 256
"""Answers remembered."""


class _Shared(Generic[_Answer]):
    """An answer that several saves wait for; each is notified when storage is asked again."""

    def __init__(self, ask: Callable[[], Awaitable[_Answer]]) -> None:
        self.listeners: list[Retried] = []
        self.waiting = 0
        """Saves that wait for the answer."""
        self._last = ""
        with limited(retried=self._notify):  # without the deadline of the first save that asks
            self.task = asyncio.get_running_loop().create_task(self._run(ask))

    @staticmethod
    async def _run(ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        return await ask()

    def _notify(self, reason: str) -> None:
        self._last = reason
        for notify in list(self.listeners):
            notify(reason)

    @property
    def failed(self) -> bool:
        """Whether it has ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    async def answer(self) -> _Answer:
        """The answer; a save that is aborted meanwhile doesn't cancel it for the others."""
        notify = retry_callback()
        self.waiting += 1
        if notify is not None:
            self.listeners.append(notify)
            if self._last and not self.task.done():
                notify(self._last)
        try:
            return await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if notify is not None:
                self.listeners.remove(notify)


class Stores:
    """Opens stores, whose accesses all stay below the allowed roots."""

    def __init__(
        self, *, allow: Sequence[str] = (), storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._allow = tuple(allow)
        self._options = dict(storage_options or {})
        self._probes: OrderedDict[str, _Shared[None]] = OrderedDict()
        self._numbers: OrderedDict[tuple[str, str, str], _Shared[int]] = OrderedDict()
        self._incarnations: OrderedDict[str, Incarnations] = OrderedDict()
        """By root."""

    def check(self, checkpoint_id: str) -> None:
        """Raises InvalidRequestError or ConfigurationError unless a save may go there, by its name.

        Where a local one leads is checked by :meth:`contact`, and by its store: a file system may not respond.
        """
        object_names.split_checkpoint_id(checkpoint_id)
        check_shared(checkpoint_id)
        if parse(checkpoint_id).scheme != "file":
            check_allowed(checkpoint_id, self._allow)

    def open(self, checkpoint_id: str) -> Store:
        """The store of one checkpoint; the caller closes it. Raises as :meth:`check`."""
        self.check(checkpoint_id)
        return self.open_root(checkpoint_id)

    def open_root(self, root: str) -> Store:
        """The store of a root or a checkpoint below it that passed :meth:`check`; the caller closes it."""
        return open_store(root, storage_options=self._options, allow=self._allow)

    async def attempt(self, context: sidecar_pb2.SaveContext) -> object_names.Attempt:
        """The save's attempt, which orders it among others; probes the root at its first use.

        Raises:
            InvalidRequestError, ConfigurationError: as :meth:`contact`.
            StorageError: with the provider's message.
            SupersededError: a newer incarnation has begun, and this one has not saved before.
        """
        save, (root, _) = context.save, object_names.split_checkpoint_id(context.checkpoint_id)
        await self.contact(context)
        claim = _claim(context)

        async def number_of(known: Incarnations, store: Store) -> int:
            # A root that answered an earlier incarnation may be unreachable by now.
            await store.contact(timeouts.STORAGE_CONTACT_S)
            return await known.number_of(store, claim)

        key = (root, save.job, save.incarnation)
        # A number taken after its only save was aborted would make a dead incarnation the newest.
        number = await _once(
            self._numbers, key, lambda: self._ask(root, number_of), cancel_unawaited=True
        )
        return object_names.Attempt(number, save.number, save.group, save.incarnation)

    async def find_attempt(self, context: sidecar_pb2.SaveContext) -> object_names.Attempt | None:
        """The save's attempt, or None if its incarnation has no number. Raises as :meth:`contact`."""
        await check_allowed_in_time(context.checkpoint_id, self._allow)
        save, (root, _) = context.save, object_names.split_checkpoint_id(context.checkpoint_id)
        claim = _claim(context)
        number = await self._ask(root, lambda known, store: known.find(store, claim))
        return (
            object_names.Attempt(number, save.number, save.group, save.incarnation)
            if number
            else None
        )

    async def contact(self, context: sidecar_pb2.SaveContext) -> None:
        """Probes the root at its first use.

        Raises:
            InvalidRequestError, ConfigurationError: it is not below an allowed root, or is a symbolic link;
                nothing is written there.
            StorageError: with the provider's message.
            UnavailableError: its file system doesn't respond.
        """
        # A resumed save may have been planned by an earlier process, whose roots were others.
        await check_allowed_in_time(context.checkpoint_id, self._allow, for_save=True)
        root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
        await _once(self._probes, root, lambda: self._probe(root))

    async def _probe(self, root: str) -> None:
        store = self.open_root(root)
        try:
            await store.contact(timeouts.STORAGE_CONTACT_S)
            await store.probe()
        finally:
            await store.close()

    async def check_newest(
        self, context: sidecar_pb2.SaveContext, attempt: object_names.Attempt
    ) -> None:
        """Raises SupersededError when a newer incarnation of the job has begun, or StorageError.

        Reads storage: another coordinator may have given out the newer number.
        """
        root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
        claim, number = _claim(context), attempt.incarnation_number
        await self._ask(root, lambda known, store: known.check_newest(store, claim, number))

    def earlier_incarnations(
        self, context: sidecar_pb2.SaveContext, attempt: object_names.Attempt
    ) -> dict[str, str]:
        """The job's earlier incarnations below the root, as of the last :meth:`check_newest`.

        Returns the job name of each by its id: each start may have another one.
        """
        root, _ = object_names.split_checkpoint_id(context.checkpoint_id)
        known = self._incarnations.get(root)
        return {} if known is None else known.earlier(_claim(context), attempt.incarnation_number)

    async def _ask(
        self, root: str, ask: Callable[[Incarnations, Store], Awaitable[_Answer]]
    ) -> _Answer:
        known = self._incarnations.setdefault(root, Incarnations())
        self._incarnations.move_to_end(root)
        while len(self._incarnations) > _KEPT:
            self._incarnations.popitem(last=False)
        store = self.open_root(root)
        try:
            return await ask(known, store)
        finally:
            await store.close()


def _claim(context: sidecar_pb2.SaveContext) -> Claim:
    return Claim(
        context.save.job,
        context.save.incarnation,
        host=context.host,
        seen=context.seen_incarnation if context.HasField("seen_incarnation") else None,
        apart=context.apart,
        launch=context.launch,
    )


async def _once(
    known: "OrderedDict[Any, _Shared[_Answer]]",
    key: object,
    ask: Callable[[], Awaitable[_Answer]],
    *,
    cancel_unawaited: bool = False,
) -> _Answer:
    """The answer for ``key``, asked for once; a failure isn't kept, so the next save tries again.

    Args:
        cancel_unawaited: no answer is needed once all saves that waited for it were aborted.
    """
    shared = known.get(key)
    # A failed one is still here when all saves that waited for it were aborted before.
    if shared is None or shared.failed:
        shared = known[key] = _Shared(ask)
        while len(known) > _KEPT:
            known.popitem(last=False)
    try:
        return await shared.answer()
    except BaseException:
        unawaited = cancel_unawaited and not shared.waiting and not shared.task.done()
        if unawaited:
            shared.task.cancel()
        if (unawaited or shared.failed) and known.get(key) is shared:
            del known[key]
        raise
