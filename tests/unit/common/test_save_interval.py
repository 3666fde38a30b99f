"""The interval between saves, against a search, a simulation and the papers' first term."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.common.save_interval import (
    Advice,
    SaveCost,
    advise,
    best_interval,
    expected_loss,
)
from pannier.wire.errors import InvalidRequestError

STALLS = st.floats(1e-3, 1e4)
MTBFS = st.floats(1, 1e8)
DELAYS = st.floats(0, 1e4)
COST = SaveCost(stalled_s=0.09, ingested_s=0.1, durable_s=0.9)


def advice(*saves: SaveCost, restores: tuple[float, ...] = (), mtbf_s: float | None) -> Advice:
    found = advise(saves, restores, mtbf_s)
    assert found is not None
    return found


@given(STALLS, MTBFS, DELAYS, DELAYS)
def test_no_other_interval_loses_less(
    stalled_s: float, mtbf_s: float, background_s: float, restore_s: float
) -> None:
    def used(interval_s: float) -> float:
        loss = expected_loss(interval_s, stalled_s, stalled_s + background_s, restore_s, mtbf_s)
        assert 0 <= loss.saves <= 1
        assert 0 <= loss.failures <= 1
        return 1 - loss.total

    best = best_interval(stalled_s, mtbf_s)
    others = [stalled_s + (best - stalled_s) * 1.05**step for step in range(-200, 200)]
    # The error of the estimate, largest where a save stops training for twice the time between failures.
    assert used(best) >= max(map(used, others)) * (1 - 0.002) - 1e-9


@given(STALLS, MTBFS, st.floats(1.01, 1e3))
def test_rarer_failures_mean_rarer_saves_and_a_smaller_loss(
    stalled_s: float, mtbf_s: float, factor: float
) -> None:
    often, rarely = (best_interval(stalled_s, each) for each in (mtbf_s, factor * mtbf_s))
    assert often < rarely
    lost, less = (
        expected_loss(interval, stalled_s, stalled_s, 0, each).total
        for interval, each in ((often, mtbf_s), (rarely, factor * mtbf_s))
    )
    assert less <= lost + 1e-9


@given(st.floats(1e-3, 10), st.floats(1e6, 1e8))
def test_where_failures_are_rare_it_is_youngs(stalled_s: float, mtbf_s: float) -> None:
    young = math.sqrt(2 * stalled_s * mtbf_s)
    assert best_interval(stalled_s, mtbf_s) == pytest.approx(young, rel=1e-3)


@pytest.mark.parametrize(("mtbf_h", "trained_min"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_it_is_what_daly_predicts_for_saves_of_5_minutes(mtbf_h: float, trained_min: float) -> None:
    # His figures 3 to 5, with the training time between two saves.
    trained_s = best_interval(300, 3600 * mtbf_h) - 300
    assert trained_s / 60 == pytest.approx(trained_min, rel=0.01)


@pytest.mark.parametrize(
    ("interval_s", "stalled_s", "safe_s", "restore_s", "mtbf_s"),
    [
        (60, 5, 30, 20, 300),
        # Durable only after several later saves have begun.
        (60, 5, 150, 20, 300),
        (10, 0.1, 0.1, 0, 10),
    ],
)
def test_the_loss_is_that_of_a_simulated_job(
    interval_s: float, stalled_s: float, safe_s: float, restore_s: float, mtbf_s: float
) -> None:
    trained_s = interval_s - stalled_s
    chance = random.Random(1974)
    elapsed, kept = 0.0, 0.0
    for _ in range(200_000):
        up_s = chance.expovariate(1 / mtbf_s)
        elapsed += up_s
        # The first save after a restore is called when as much was trained as between two saves.
        since_safe = up_s - restore_s - trained_s - safe_s
        if since_safe >= 0:
            kept += (since_safe // interval_s + 1) * trained_s
    loss = expected_loss(interval_s, stalled_s, safe_s, restore_s, mtbf_s)
    assert kept / elapsed == pytest.approx(1 - loss.total, rel=0.02)


def test_advice_is_one_line() -> None:
    found = advice(*[COST] * 12, restores=(3.1, 3.1), mtbf_s=6 * 3600)
    assert str(found) == (
        "save every 1 min 2 s: a save costs 90 ms of training and is durable after 0.9 s (12 saves); at one "
        "failure in 6 h, each of a whole host, 0.14 % of the time is lost to saves, 0.16 % to repeated steps "
        "and restores; a restore takes 3.1 s (2 loads)"
    )
    assert found.interval_s == best_interval(0.09, 6 * 3600)
    assert found.loss is not None
    assert found.loss == expected_loss(found.interval_s, 0.09, 0.9, 3.1, 6 * 3600)
    assert found.loss_in_place == expected_loss(found.interval_s, 0.09, 0.1, 3.1, 6 * 3600)


def test_without_a_mean_time_between_failures_only_costs_are_known() -> None:
    found = advice(COST, restores=(3.1,), mtbf_s=None)
    assert (found.interval_s, found.loss, found.loss_in_place) == (None, None, None)
    assert str(found) == (
        "a save costs 90 ms of training and is durable after 0.9 s (1 save, and the first is slower); a "
        "restore takes 3.1 s (1 load)"
    )


def test_a_restore_that_was_not_measured_is_assumed_by_name() -> None:
    assert str(advice(COST, COST, mtbf_s=None)).endswith("(2 saves); no load was measured")
    found = advice(COST, COST, mtbf_s=3600)
    assert (found.restore_s, found.restores) == (COST.durable_s, 0)
    assert str(found).endswith(
        "no load was measured: a restore is assumed to take 0.9 s, as a save does until it is durable"
    )


def test_a_save_is_durable_before_the_next_begins() -> None:
    slow = replace(COST, durable_s=200.0)
    found = advice(slow, slow, mtbf_s=6 * 3600)
    assert found.is_limited
    assert found.interval_s == 200
    assert "save every 3 min 20 s, as soon as the last save is durable: " in str(found)
    rare = advice(slow, slow, mtbf_s=365 * 86400)
    assert not rare.is_limited
    assert "as soon as" not in str(rare)


def test_the_slow_first_save_does_not_count_besides_others() -> None:
    first = SaveCost(stalled_s=3.6, ingested_s=3.7, durable_s=4.3)
    for others in (1, 2, 5):
        assert advice(first, *[COST] * others, mtbf_s=None).cost == COST


def test_what_failures_of_every_second_leave_is_nothing() -> None:
    found = advice(replace(COST, durable_s=1e4), mtbf_s=1)
    assert found.loss is not None
    assert found.loss.total == 1


def test_without_a_save_there_is_no_advice() -> None:
    assert advise([], [3.1], 3600) is None


@pytest.mark.parametrize("mtbf_s", [0.0, -1.0, 0.5, math.inf, math.nan])
def test_a_mean_time_between_failures_that_is_none_is_refused(mtbf_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="mean time between failures"):
        advise([], [], mtbf_s)
