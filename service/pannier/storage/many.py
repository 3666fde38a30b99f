"""One request for each of many objects, some of them at a time. On the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

PARALLEL: Final = 16
"""Default number of calls at a time."""


async def for_each(
    call: Callable[[_Item], Awaitable[_Answer]],
    items: Iterable[_Item],
    *,
    parallel: int = PARALLEL,
    try_all: bool = False,
) -> list[_Answer]:
    """The call's results, in the order of the items. No call is running when this returns or raises.

    Args:
        try_all: raises the first error when all calls have ended; else it cancels the others. A write that is
            cancelled may still take effect, unseen: ``try_all`` is for writes.
    """
    limit = asyncio.Semaphore(parallel)

    async def run(item: _Item) -> _Answer:
        async with limit:
            return await call(item)

    tasks = [asyncio.ensure_future(run(item)) for item in items]
    until = asyncio.ALL_COMPLETED if try_all else asyncio.FIRST_EXCEPTION
    try:
        if tasks:
            # Not gather, which would cancel them, too: twice would end a call's own clean-up.
            await asyncio.wait(tasks, return_when=until)
        # With an error, not all of them are done.
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
