"""Replicated keys whose values differ by rank, of which a checkpoint keeps one.

In: of each rank that sends its local plan, hashes of its values by key. Out: a warning that names the keys
and ranks. Event loop only.
"""

from collections.abc import Mapping
from typing import Final

from pannier.wire.failures import shorten

_SHOWN: Final = 5


class ReplicaHashes:
    """The hashes of one save's values."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[int, int]] = {}
        """By key and hash, the lowest rank that sent it."""

    def add(self, rank: int, hashes: Mapping[str, int]) -> None:
        """Records the hashes of a rank. Idempotent."""
        for key, value in hashes.items():
            ranks = self._ranks.setdefault(key, {})
            ranks[value] = min(rank, ranks.get(value, rank))

    def warning(self) -> str:
        """Names the keys whose values differ by rank; empty: there are none."""
        differing = {key: sorted(ranks.values()) for key, ranks in self._ranks.items()}
        shown = [
            f"{key!r} ({len(ranks)} values: ranks {ranks[0]} and {ranks[1]} differ)"
            for key, ranks in sorted(differing.items())
            if len(ranks) > 1
        ]
        if not shown:
            return ""
        return (
            f"{len(shown)} replicated key{'s have' if len(shown) > 1 else ' has'} different values on different "
            f"ranks, of which the checkpoint keeps one: {shorten(shown, _SHOWN)}. Give each rank a key of its own "
            "for what belongs to it, as f'rng.{rank}'"
        )
