"""What the memory of a data file still holds of the save before: heads, tails, zeroed gaps.

In: regions and what was engraved in them. Out: the same again, as long as nobody else wrote
there. Whoever writes to a region takes its imprint away first, and leaves one when everything is
in its place; so a failure in between leaves none. Thread-safe.
"""

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from pannier.client.staging.arena import Mapping, Region


@dataclass(frozen=True)
class Imprint:
    """One region's."""

    pattern: object
    """Who engraved it, and may rely on it."""
    views: list[torch.Tensor]
    """Places of tensors, as tensors. They don't keep the memory: to be used while an arena does."""
    together: list[torch.Tensor]
    """Those of them that are filled by one call."""


_lock = threading.Lock()
_imprints: "WeakKeyDictionary[Mapping, Imprint]" = WeakKeyDictionary()


def take(region: Region) -> Imprint | None:
    """The region's imprint, which it has no more."""
    if region.mapping is None:
        return None
    with _lock:
        return _imprints.pop(region.mapping, None)


def leave(region: Region, imprint: Imprint) -> None:
    """Says that the region holds ``imprint``."""
    if region.mapping is not None:
        with _lock:
            _imprints[region.mapping] = imprint
