"""The order of a rank's phases, which is not that of their numbers in the proto.

In: phases as messages carry them. Out: which of two is later. Pure.
"""

from typing import Final

from pannier.v1 import save_pb2

_ORDER: Final = {
    phase: index
    for index, phase in enumerate(
        (
            save_pb2.RANK_PHASE_UNSPECIFIED,
            save_pb2.RANK_PHASE_MISSING,
            save_pb2.RANK_PHASE_PLANNED,
            save_pb2.RANK_PHASE_STREAMING,
            save_pb2.RANK_PHASE_HANDED_OVER,
            save_pb2.RANK_PHASE_INGESTED,
            save_pb2.RANK_PHASE_DURABLE,
            save_pb2.RANK_PHASE_FAILED,
        )
    )
}


def has_reached(phase: "save_pb2.RankPhase", other: "save_pb2.RankPhase") -> bool:
    """Whether ``phase`` is ``other`` or a later one; an unknown phase counts as the earliest."""
    return _ORDER.get(phase, 0) >= _ORDER[other]
