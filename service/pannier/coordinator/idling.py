"""When a coordinator that an embedded pair brought along has nothing left to do, on any host.

In: what it knows of saves, and what sidecars tell of trainers. Out: a call, once. Event loop only.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from pannier.coordinator.attach import Attachments
from pannier.coordinator.registry import Registry

_TICK_S: Final = 1.0
_REPORTED_S: Final = 5.0
"""Sidecars tell of their trainers every second or so."""


async def await_idle(
    registry: Registry, attachments: Attachments, after_s: float, leave: Callable[[], None]
) -> None:
    """Calls ``leave`` when no save was undecided and no trainer connected for ``after_s`` seconds."""
    busy = time.monotonic()
    while True:
        await asyncio.sleep(_TICK_S)
        now = time.monotonic()
        if registry.undecided() or now - attachments.attended < _REPORTED_S:
            busy = now
        if now - busy >= after_s:
            leave()
            return
