"""One request for each of many objects, some of them at a time. On the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

PARALLEL: Final = 16
"""At a time, unless a caller says otherwise."""


async def for_each(
    call: Callable[[_Item], Awaitable[_Answer]],
    items: Iterable[_Item],
    *,
    parallel: int = PARALLEL,
    try_all: bool = False,
) -> list[_Answer]:
    """The call's results, in the order of the items.

    Args:
        try_all: raises the first error when all calls have ended; else at once.
    """
    limit = asyncio.Semaphore(parallel)

    async def run(item: _Item) -> _Answer:
        async with limit:
            return await call(item)

    if not try_all:
        return await asyncio.gather(*map(run, items))
    found: list[_Answer] = []
    for each in await asyncio.gather(*map(run, items), return_exceptions=True):
        if isinstance(each, BaseException):
            raise each
        found.append(each)
    return found
