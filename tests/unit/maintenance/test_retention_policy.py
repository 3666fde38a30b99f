"""Which checkpoints a policy keeps."""

import math

import pytest

from pannier.attempts.listing import Checkpoint, CheckpointState
from pannier.common.locations import Pattern
from pannier.maintenance.retention_policy import Best, Policy, apply_policy
from pannier.wire.errors import ConfigurationError
from pannier.wire.object_names import Attempt


def checkpoint(name: str, save: int, loss: float | None = None, **changes: object) -> Checkpoint:
    """Of the ``save``-th save; the clocks of those that committed them run backwards."""
    fields: dict[str, object] = {
        "state": CheckpointState.COMMITTED,
        "attempt": attempt(save),
        "size": 1,
        "job": "job",
        "metrics": {} if loss is None else {"loss": loss},
        **changes,
    }
    return Checkpoint(name=name, time=-save, **fields)  # type: ignore[arg-type]


def test_checkpoints_of_several_groups_are_kept_in_the_order_in_which_they_began() -> None:
    lone = Attempt(1, 1, "g0000000b", "inc").name
    found = kept(
        Policy(newest=1),
        checkpoint("step-8", 8, ordinal=8),
        checkpoint("lone-1", 1, attempt=lone, ordinal=9),
        checkpoint("step-9", 9, ordinal=10),
        committed=attempt(9),
    )
    assert found == {"step-8": (), "lone-1": (), "step-9": ("newest",)}


def attempt(save: int) -> str:
    return Attempt(1, save, "g0000000a", "inc").name


def kept(
    policy: Policy, *checkpoints: Checkpoint, committed: str | None = None
) -> dict[str, tuple[str, ...]]:
    results = apply_policy(policy, checkpoints, job="job", committed=committed)
    return {each.checkpoint.name: each.reasons for each in results}


STEPS = [checkpoint(f"step-{n}", n, loss) for n, loss in ((10, 3), (20, 1), (30, 2), (40, 4))]


def test_the_newest_in_the_order_of_their_saves() -> None:
    rolled_back = checkpoint("step-5", 50)
    assert kept(Policy(newest=2), *STEPS, rolled_back) == {
        "step-10": (),
        "step-20": (),
        "step-30": (),
        "step-40": ("newest 2",),
        "step-5": ("newest",),
    }


def test_checkpoints_of_one_step_stay_together() -> None:
    pairs = [
        checkpoint(f"{name}_{step}", save)
        for save, (step, name) in enumerate(
            (step, name) for step in (0, 1, 2) for name in ("model", "optimizer")
        )
    ]
    found = kept(Policy(newest=2), *pairs)
    assert [name for name, reasons in found.items() if not reasons] == ["model_0", "optimizer_0"]
    assert found["model_2"] == found["optimizer_2"] == ("newest",)
    # A number that all have makes them no step.
    same = [checkpoint(f"7b-step-{save}-v2", save) for save in (1, 2)]
    assert kept(Policy(newest=1), *same) == {"7b-step-1-v2": (), "7b-step-2-v2": ("newest",)}


def test_a_name_without_a_step_takes_no_place_among_the_newest() -> None:
    best = checkpoint("best", 30)
    assert kept(Policy(newest=2), *STEPS[:2], best) == {
        "step-10": ("newest 2",),
        "step-20": ("newest",),
        "best": ("its name has no step",),
    }
    assert kept(Policy(every=100), *STEPS[:2], best)["step-20"] == ("newest",)
    late = kept(Policy(newest=1), *STEPS[:2], best, committed=attempt(20))
    assert late["best"] == ("newer than the one committed last", "its name has no step")


def test_a_newer_incarnation_is_newer_than_any_save_of_an_older_one() -> None:
    restarted = checkpoint("step-1", 1, attempt=Attempt(2, 1, "g0000000a", "inc").name)
    assert kept(Policy(newest=1), *STEPS, restarted)["step-1"] == ("newest",)
    assert not kept(Policy(newest=1), *STEPS, restarted)["step-40"]


def test_neither_what_was_committed_last_nor_anything_newer_goes() -> None:
    """Two saves are in flight, and the older one is committed after the newer one."""
    late = kept(Policy(newest=1), *STEPS, committed=attempt(20))
    assert late == {
        "step-10": (),
        "step-20": ("committed last",),
        "step-30": ("newer than the one committed last",),
        "step-40": ("newest",),
    }
    later = kept(Policy(newest=1), *STEPS, checkpoint("step-50", 50), committed=attempt(50))
    assert [name for name, reasons in later.items() if reasons] == ["step-50"]


def test_every_so_many_steps_and_the_newest_all_the_same() -> None:
    assert kept(Policy(every=20), *STEPS, checkpoint("step-50", 50)) == {
        "step-10": (),
        "step-20": ("every 20",),
        "step-30": (),
        "step-40": ("every 20",),
        "step-50": ("newest",),
    }


def test_the_best_by_a_metric() -> None:
    lowest = kept(Policy(best=(Best("loss", count=2),)), *STEPS)
    assert [name for name, reasons in lowest.items() if not reasons] == ["step-10"]
    assert lowest["step-20"] == ("best loss:min:2",)
    highest = kept(Policy(best=(Best("loss", lowest=False),)), *STEPS[:3])
    assert highest == {"step-10": ("best loss:max:1",), "step-20": (), "step-30": ("newest",)}
    # What wasn't measured, or was no number, is never the best; of equal ones the newer is.
    odd = [checkpoint("1", 1, math.nan), checkpoint("2", 2), checkpoint("3", 3, 7.0)]
    odd += [checkpoint("4", 4, 7.0), checkpoint("5", 5, 9.0)]
    best = kept(Policy(best=(Best("loss"),)), *odd)
    assert [name for name, reasons in best.items() if reasons] == ["4", "5"]


def test_what_is_never_touched() -> None:
    strangers = [
        checkpoint("step-1", 1, job="another"),
        checkpoint("step-2", 2, state=CheckpointState.UNDECIDED),
        checkpoint("step-3", 3, state=CheckpointState.FOREIGN, attempt=None),
        checkpoint("deeper/step-4", 4),
    ]
    named = [checkpoint("final", 5), checkpoint("release-7", 6), checkpoint("step-8", 7)]
    assert kept(Policy(newest=1, always=("release-*",)), *strangers, *named) == {
        "final": ("its name has no step",),
        "release-7": ("matches release-*",),
        "step-8": ("newest",),
    }


def nested(step: int, start: str, save: int, began: float, number: int = 1) -> Checkpoint:
    name = Attempt(number, save, "g0000000a", start).name
    return checkpoint(f"checkpoint-{step}/dcp", save, attempt=name, began=began)


NESTED = Pattern("checkpoint-*/dcp")


def test_of_a_pattern_the_step_counts_and_other_directories_are_never_touched() -> None:
    ours = [nested(step, "one", step, 100.0) for step in (10, 15, 20, 25)]
    strangers = [checkpoint("step-10", 1), checkpoint("checkpoint-5/model", 2)]
    found = kept(Policy(every=10, always=("checkpoint-15",), pattern=NESTED), *ours, *strangers)
    assert found == {
        "checkpoint-10/dcp": ("every 10",),
        "checkpoint-15/dcp": ("matches checkpoint-15",),
        "checkpoint-20/dcp": ("every 10",),
        "checkpoint-25/dcp": ("newest",),
    }


def test_of_several_directories_a_later_start_is_newer_whatever_its_numbers() -> None:
    ours = [
        nested(20, "zzz", 7, 100.0),
        nested(10, "aaa", 1, 200.0, number=2),
        nested(15, "aaa", 2, 200.0),
    ]
    policy = Policy(newest=1, pattern=NESTED)
    assert [name for name, why in kept(policy, *ours).items() if why] == ["checkpoint-15/dcp"]
    # The later start's first save is committed last.
    late = kept(policy, *ours, committed=ours[1].attempt)
    assert late["checkpoint-10/dcp"] == ("committed last",)
    assert not late["checkpoint-20/dcp"]
    # An earlier start's is committed last: nothing that is newer goes.
    earlier = kept(policy, *ours, committed=ours[0].attempt)
    assert earlier["checkpoint-10/dcp"] == ("newer than the one committed last",)
    # Of one that isn't there any more, and whose start has nothing else, nothing is known.
    gone = Attempt(1, 1, "g0000000a", "gone").name
    assert all(kept(policy, *ours, committed=gone).values())


def test_without_a_rule_that_limits_all_stay() -> None:
    for policy in (Policy(), Policy(always=("step-10",))):
        assert all(kept(policy, *STEPS).values())
    assert kept(Policy(newest=1), STEPS[0]) == {"step-10": ("newest",)}


@pytest.mark.parametrize(
    "text", ["", "loss", "loss:", ":min", "loss:best", "loss:min:0", "a:min:x"]
)
def test_a_rule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="METRIC:min or METRIC:max"):
        Best.parse(text)


def test_rules_as_they_are_written() -> None:
    assert Best.parse("eval/loss:min") == Best("eval/loss")
    assert Best.parse("a:b:max:3") == Best("a:b", lowest=False, count=3)
    with pytest.raises(ConfigurationError, match="--keep-every 0"):
        Policy(every=0)
