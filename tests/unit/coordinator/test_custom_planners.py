"""Planners that override global planning, run in the coordinator by their name."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from pannier.coordinator.planning.columns import InvalidPlanError
from pannier.coordinator.planning.custom_planners import Planners
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.plan_codec import build_metadata
from support.actors.ranks_by_hand import local_plan, rank_plans, shard, tensor, thing

ATTEMPT = "i1-a1-g00000000-s1"


class ToHighestRank(DefaultSavePlanner):
    """Copies go to the last rank that holds them."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        last = {item.index: rank for rank, plan in enumerate(all_plans) for item in plan.items}
        return [
            dataclasses.replace(
                plan, items=[item for item in plan.items if last[item.index] == rank]
            )
            for rank, plan in enumerate(all_plans)
        ]


class Inventive(DefaultSavePlanner):
    """Has rank 1 write what only rank 0 holds."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return [SavePlan([]), SavePlan([*plans[0].items, *plans[1].items])], metadata


class Forgetful(DefaultSavePlanner):
    """Assigns no rank what the metadata lists."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return [dataclasses.replace(plan, items=plan.items[1:]) for plan in plans], metadata


class Secretive(DefaultSavePlanner):
    """Has ranks write what the metadata doesn't list."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.state_dict_metadata.pop("o")
        return plans, metadata


class Repetitive(DefaultSavePlanner):
    """Lists one shard twice in the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        tensor_metadata = metadata.state_dict_metadata["w"]
        assert isinstance(tensor_metadata, TensorStorageMetadata)
        tensor_metadata.chunks.append(tensor_metadata.chunks[1])
        return plans, metadata


class Noted(DefaultSavePlanner):
    """Keeps something of its own in the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={"note": 5})


class Broken(DefaultSavePlanner):
    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise KeyError("oh")


class Demanding(DefaultSavePlanner):
    def __init__(self, needed: int) -> None:
        super().__init__()
        self.needed = needed


def named(cls: type[SavePlanner]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def plans_for(cls: type[SavePlanner], *, custom: bool = True) -> list[Any]:
    """``w`` is split, ``b`` and ``o`` are copies, ``alone`` is rank 0's."""
    ranks = [[shard("w", [2 * rank], [2], [4]), tensor("b", 4), thing("o")] for rank in (0, 1)]
    ranks[0].append(tensor("alone", 1))
    options = {"planner": named(cls), "custom_global_plan": custom}
    return rank_plans(*(local_plan(items, mappings={"w": ("w",)}, **options) for items in ranks))


def test_named_planner_decides_who_writes() -> None:
    plan = Planners([named(ToHighestRank)]).make(plans_for(ToHighestRank), ATTEMPT)
    metadata = build_metadata(plan.metadata, storage_meta=None)
    items = [item.index.fqn for item in _items(plan)]
    owners = sorted(zip(items, plan.assignment.owner.tolist(), strict=True))
    assert owners == [("alone", 0), ("b", 1), ("o", 1), ("w", 0), ("w", 1)]
    assert metadata.planner_data == {"w": ("w",)}
    files = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
    assert files["o"] == f"__{ATTEMPT}_1_objects.distcp"
    assert files["b"] == f"__{ATTEMPT}_1_0.distcp"


def _items(plan: Any) -> list[Any]:
    from pannier.wire.plan_codec import decode_items

    return decode_items(plan.metadata.items)


def test_default_planner_by_name_gives_the_same_metadata_as_ours() -> None:
    plans = plans_for(DefaultSavePlanner)
    for plan in plans:
        plan.plan.options.dedup_save_to_lowest_rank = True
    theirs = Planners([named(DefaultSavePlanner)]).make(plans, ATTEMPT)
    ours = make_global_plan(plans, ATTEMPT)
    one, two = (build_metadata(plan.metadata, storage_meta=None) for plan in (ours, theirs))
    assert one == two
    places = [
        sorted(zip(plan.assignment.owner.tolist(), plan.assignment.position.tolist(), strict=True))
        for plan in (ours, theirs)
    ]
    assert places[0] == places[1]


def test_planner_that_is_not_named_is_refused_with_the_flag() -> None:
    options = plans_for(ToHighestRank)[0].plan.options
    name = named(ToHighestRank)
    with pytest.raises(InvalidRequestError, match=rf"--planner {name}, or PANNIER_PLANNER={name} "):
        Planners().check(options)
    Planners([named(ToHighestRank)]).check(options)
    # One that leaves global planning alone needs no name.
    Planners().check(plans_for(ToHighestRank, custom=False)[0].plan.options)


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Inventive, "which isn't in that rank's own plan"),
        (Forgetful, "no rank is assigned to write it"),
        (Secretive, r"\['o'\], which the metadata doesn't list"),
        (Repetitive, r"lists 'w' at torch.Size\(\[2\]\) more than once"),
        (Broken, "create_global_plan raised KeyError: 'oh'"),
    ],
)
def test_planner_that_plans_no_checkpoint_is_refused(cls: type[SavePlanner], text: str) -> None:
    with pytest.raises(InvalidPlanError, match=text):
        Planners([named(cls)]).make(plans_for(cls), ATTEMPT)


def test_planner_data_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="planner_data"):
        Planners([named(Noted)]).make(plans_for(Noted), ATTEMPT)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no.such.module:Planner", "can't be imported"),
        (f"{__name__}:Missing", "can't be imported"),
        (f"{__name__}:plans_for", "is not a SavePlanner class"),
        (f"{__name__}:Demanding", "can't be made without arguments"),
    ],
)
def test_planner_that_cannot_run_is_refused_at_the_start(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Planners([name])


def test_an_embedded_coordinator_imports_the_ranks_planner_by_itself() -> None:
    """What PANNIER_PLANNER says doesn't count: the ranks name their class."""
    planners = Planners(["no.such.module:Planner"], on_demand=True)
    plans = plans_for(ToHighestRank)
    planners.check(plans[0].plan.options)
    plan = planners.make(plans, ATTEMPT)
    named_before = Planners([named(ToHighestRank)]).make(plans, ATTEMPT)
    assert plan.assignment.owner.tolist() == named_before.assignment.owner.tolist()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import no_such_module_at_all",
            "ModuleNotFoundError: No module named 'no_such_module_at_all'",
        ),
        ("raise SystemExit('usage: script')", "SystemExit: usage: script"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_class_that_it_cannot_import_ends_the_save_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str
) -> None:
    (tmp_path / "own_planner.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    plans = plans_for(ToHighestRank)
    for plan in plans:
        plan.plan.options.planner = "own_planner:Planner"
    planners = Planners(on_demand=True)
    planners.check(plans[0].plan.options)
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as caught:
        planners.make(plans, ATTEMPT)
    for word in ("own_planner:Planner overrides global planning", sys.executable, "PYTHONPATH"):
        assert word in str(caught.value)
