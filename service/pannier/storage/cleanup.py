"""Ends what a failed upload left open, also while its task is being cancelled."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from pannier.storage.base import StorageError
from pannier.storage.time_limits import unlimited

LIMIT_S = 5.0
_log = logging.getLogger(__name__)


async def clean_up(request: Coroutine[Any, Any, object], what: str) -> None:
    """Runs ``request`` for at most :data:`LIMIT_S`; a failure is logged, not raised.

    It stands in for an error that is already on its way, which must not be hidden.
    """
    with unlimited():
        task = asyncio.ensure_future(request)
    with suppress(asyncio.CancelledError):
        await asyncio.wait({task}, timeout=LIMIT_S)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1)
    error = task.exception() if task.done() and not task.cancelled() else None
    if isinstance(error, StorageError) or task.cancelled():
        _log.warning("%s: %s", what, error or f"no answer within {LIMIT_S:.0f} s")
    elif error is not None:
        raise error
