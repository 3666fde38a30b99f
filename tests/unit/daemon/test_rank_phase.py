"""The order of a rank's phases."""

import itertools

from pannier.daemon.rank_phase import has_reached
from pannier.v1 import save_pb2

IN_ORDER = (
    "UNSPECIFIED",
    "MISSING",
    "PLANNED",
    "STREAMING",
    "HANDED_OVER",
    "INGESTED",
    "DURABLE",
    "FAILED",
)


def test_every_phase_has_its_place() -> None:
    phases = [save_pb2.RankPhase.Value(f"RANK_PHASE_{name}") for name in IN_ORDER]
    assert sorted(phases) == sorted(save_pb2.RankPhase.values())
    for earlier, later in itertools.pairwise(phases):
        assert has_reached(later, earlier)
        assert has_reached(later, later)
        assert not has_reached(earlier, later)


def test_a_phase_of_a_newer_version_is_none_that_is_known() -> None:
    unknown = 99
    assert not has_reached(unknown, save_pb2.RANK_PHASE_MISSING)  # type: ignore[arg-type]
