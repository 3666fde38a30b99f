"""How many saves of a client hold staging memory at a time."""

import pytest

from pannier.client.staging.in_flight import InFlightSaves
from pannier.wire.errors import DeadlineError


def test_a_save_that_gets_no_staging_memory_in_time_names_those_that_hold_it() -> None:
    saves = InFlightSaves(2, lambda: "job/abc/g1/1 and job/abc/g1/2")
    held = [saves.admit("wait", 1) for _ in range(2)]
    with pytest.raises(DeadlineError) as caught:
        saves.admit("wait", 0.2)
    assert str(caught.value) == (
        "no staging memory became free within 0.2 s: 2 saves hold it (PANNIER_MAX_IN_FLIGHT): "
        "job/abc/g1/1 and job/abc/g1/2; save less often or raise it"
    )
    for each in held:
        each.free()
    assert saves.idle == 2
