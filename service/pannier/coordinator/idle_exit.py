"""When a coordinator that an embedded pair brought along has nothing left to do, on any host.

In: what it knows of saves, and what sidecars tell of trainers. Out: a call, once. Event loop only.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from pannier.common import observer_clock
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.sidecar_streams import Attachments

_TICK_S: Final = 1.0
_REPORTED_S: Final = 5.0
"""Sidecars report their trainers every second or so."""
FIRST_S: Final = 60.0
"""At least so long the first trainer is waited for: its host may only be starting its sidecar."""


async def await_idle(
    registry: Registry, attachments: Attachments, after_s: float, leave: Callable[[], None]
) -> None:
    """Calls ``leave`` when no save was undecided and no trainer connected for ``after_s`` seconds.

    Before the first trainer, for at least ``FIRST_S`` seconds.
    """
    busy = observer_clock.now()
    while True:
        await asyncio.sleep(_TICK_S)
        now = observer_clock.now()
        if registry.undecided() or _attended(attachments, now):
            busy = now
        patience_s = max(after_s, FIRST_S) if attachments.attended is None else after_s
        if now - busy >= patience_s:
            leave()
            return


def _attended(attachments: Attachments, now: float) -> bool:
    """Whether a trainer is connected, by the last messages of the sidecars.

    A sidecar that is attached but late (its host or this one is busy) keeps its trainers.
    """
    if attachments.attended is None:
        return False
    return now - attachments.attended < _REPORTED_S or any(
        presence.attended is not None and presence.heard - presence.attended < _REPORTED_S
        for presence in attachments.present()
    )
