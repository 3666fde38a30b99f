"""A planner's run: what it plans goes on the wire, what can't be honoured is refused by name."""

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.testing._internal.two_tensor import TwoTensor

from pannier.client import torch_compat
from pannier.client.staging import archives
from pannier.wire import plan_codec, plan_columns
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import decode_column
from support.actors.staged import plan
from support.plan_messages import tables_of
from support.states.contents import without_strides

CACHES = (
    SavePlanner._cached_save_plan,
    SavePlanner._cached_final_save_plan,
    SavePlanner._cached_all_plans,
    SavePlanner._cached_global_plan,
    SavePlanner._cached_metadata,
)


@pytest.fixture(autouse=True)
def clean_caches() -> Iterator[None]:
    for cache in CACHES:
        cache.clear()
    yield
    for cache in CACHES:
        cache.clear()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group that believes to be rank 0 of 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(3, 4), "b": torch.nn.Parameter(torch.zeros(3))},
        "steps": [torch.tensor(3), {"rate": 0.1}],
        "extra": ("a", 1),
    }


def test_the_plan_is_dcps_own() -> None:
    state = _state()
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    theirs = planner.create_local_plan()

    planning = plan(state)

    assert planning.items == theirs.items
    for item in theirs.items:
        if item.tensor_data is not None:
            without_strides(item.tensor_data.properties)
    assert plan_codec.decode_items(planning.message.items) == theirs.items
    assert (
        plan_columns.decode_mappings(plan_columns.parse_mappings(planning.message.mappings))
        == theirs.planner_data
    )
    options = planning.message.options
    assert options.planner == "torch.distributed.checkpoint.default_planner:DefaultSavePlanner"
    assert (options.flatten_state_dict, options.flatten_sharded_tensors) == (True, True)
    assert not options.dedup_save_to_lowest_rank
    assert not options.custom_global_plan


def test_slots_have_the_lengths_of_archives_and_objects_have_none() -> None:
    planning = plan({"w": torch.zeros(3, 5, dtype=torch.bfloat16), "o": object, "e": torch.ones(0)})
    message = planning.message
    names = [item.index.fqn for item in planning.items]
    slots = dict(
        zip(
            names,
            zip(*map(decode_column, (message.head, message.body, message.tail)), strict=True),
            strict=True,
        )
    )
    archive = archives.archive(torch.bfloat16, (3, 5))
    assert slots["w"] == (len(archive.head), 30, len(archive.tail))
    assert slots["o"] == (0, 0, 0)
    assert slots["e"][0] > 0
    assert slots["e"][1] == 0


def test_the_digest_covers_structure_and_options_but_not_values() -> None:
    digest = plan({"w": torch.zeros(3)}).digest
    assert plan({"w": torch.ones(3)}).digest == digest
    assert plan({"w": torch.ones(4)}).digest != digest
    assert plan({"w": torch.ones(3, dtype=torch.float64)}).digest != digest
    assert plan(
        {"w": torch.ones(3)}, DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ).digest != (digest)


def test_planner_options_reach_the_message() -> None:
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    message = plan({"a": {"b": torch.ones(2)}}, planner).message
    assert tables_of(message.items).fqns == ["a"]
    assert not message.mappings
    assert not message.options.flatten_state_dict
    assert not message.options.flatten_sharded_tensors
    assert message.options.dedup_save_to_lowest_rank


def test_stateful_objects_are_asked_once_at_the_top_level() -> None:
    class Counter:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {"n": torch.tensor(7)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    counter, nested = Counter(), Counter()
    planning = plan({"top": counter, "deep": {"c": nested}})
    assert [item.index.fqn for item in planning.items] == ["top.n", "deep.c"]
    assert (counter.asked, nested.asked) == (1, 0)


def test_planners_are_set_up_by_their_signature_with_the_storage_meta() -> None:
    class Old(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
            self.seen = is_coordinator
            super().set_up_planner(state_dict, None, is_coordinator)

    class New(DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            self.seen = storage_meta
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    old, new = Old(), New()
    plan({"w": torch.ones(1)}, old)
    plan({"w": torch.ones(1)}, new, checkpoint_id="gs://bucket/run/step-7")
    assert old.seen is True
    assert new.seen.checkpoint_id == "gs://bucket/run/step-7"
    assert new.seen.save_id


def test_finish_gives_the_planners_own_items_at_the_positions() -> None:
    planning = plan({"a": torch.ones(1), "b": torch.ones(2), "c": "text"})
    items = planning.finish([0, 2]).items
    assert [item.index.fqn for item in items] == ["a", "c"]
    assert items[0] is planning.items[0]
    assert items[1] is planning.items[2]


class _CountsFinish(DefaultSavePlanner):
    finished: SavePlan | None = None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.finished = super().finish_plan(new_plan)
        return self.finished


def test_finish_plan_of_the_planner_is_called() -> None:
    planner = _CountsFinish()
    planning = plan({"a": torch.ones(1)}, planner)
    planning.finish(range(len(planning.items)))
    assert planner.finished is not None
    assert planner.finished.planner_data == {"a": ("a",)}


class _DropsLast(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return dataclasses.replace(new_plan, items=new_plan.items[:-1])


class _ChangesHint(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        def hinted(item: WriteItem) -> WriteItem:
            index = MetadataIndex(item.index.fqn, item.index.offset, 5)
            return dataclasses.replace(item, index=index)

        return dataclasses.replace(new_plan, items=[hinted(item) for item in new_plan.items])


class _ForgetsToReturn(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("planner", [_DropsLast(), _ChangesHint(), _ForgetsToReturn()])
def test_a_planner_that_changes_its_items_at_the_end_is_refused(planner: SavePlanner) -> None:
    planning = plan({"a": torch.ones(1), "b": torch.ones(1)}, planner)
    with pytest.raises(
        InvalidRequestError, match=f"{type(planner).__name__} changes .*finish_plan"
    ):
        planning.finish(range(len(planning.items)))


class _Transforms(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object)


class _LooksUp(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index)


class _Resolves(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return super().resolve_data(write_item)


@pytest.mark.parametrize("planner", [_Transforms(), _LooksUp(), _Resolves()])
def test_only_values_that_reach_storage_as_planned_get_a_slot(planner: SavePlanner) -> None:
    assert decode_column(plan({"w": torch.ones(3)}, planner).message.head) == [0]


def test_a_transform_set_on_the_planner_itself_counts_too() -> None:
    planner = DefaultSavePlanner()
    planner.transform_object = lambda item, value: value  # type: ignore[method-assign]
    assert decode_column(plan({"w": torch.ones(3)}, planner).message.head) == [0]


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_values_that_are_more_than_raw_bytes_get_no_slot() -> None:
    class Named(torch.Tensor): ...

    planning = plan(
        {
            "plain": torch.ones(3),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            "wrapper": TwoTensor(torch.ones(3), torch.ones(3)),
            "subclass": torch.ones(3).as_subclass(Named),
            "buffer": torch.nn.Buffer(torch.ones(3)),
        }
    )
    names = [item.index.fqn for item in planning.items]
    slots = dict(
        zip(names, (bool(head) for head in decode_column(planning.message.head)), strict=True)
    )
    assert slots == {
        "plain": True,
        "quantized": False,
        "wrapper": False,
        "subclass": False,
        "buffer": True,
    }


class _GlobalPlan(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return super().create_global_plan(all_plans)


class _PrivateGlobalPlan(DefaultSavePlanner):
    def _create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return super()._create_global_plan(all_plans)


class _Dedup(DefaultSavePlanner):
    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans


class _Grandchild(_Dedup):
    pass


@pytest.mark.parametrize("planner", [_GlobalPlan(), _PrivateGlobalPlan(), _Dedup(), _Grandchild()])
def test_a_planner_of_global_plans_is_named_to_the_coordinator(planner: SavePlanner) -> None:
    options = plan({"w": torch.ones(3)}, planner).message.options
    assert options.custom_global_plan
    assert options.planner == f"{__name__}:{type(planner).__name__}"


class _Own(SavePlanner):
    """Not a DefaultSavePlanner: keeps its tensors in its own way."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.inner = DefaultSavePlanner(flatten_state_dict=False)
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.inner.resolve_data(write_item)


def test_any_save_planner_is_taken_whose_plan_can_be_sent() -> None:
    planning = plan({"w": torch.arange(3)}, _Own())
    assert planning.message.options.custom_global_plan
    assert not planning.message.options.flatten_state_dict
    values = planning.finish([0])
    assert torch.equal(values.resolve(0), torch.arange(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", [DefaultLoadPlanner(), DefaultSavePlanner, "default"])
def test_what_is_no_save_planner_is_refused(planner: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a SavePlanner"):
        plan({"w": torch.ones(1)}, planner)


def test_what_is_no_state_dict_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not list"):
        plan([torch.ones(1)])


@pytest.mark.filterwarnings("ignore:.*(CSR|nested tensors)")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.eye(3).to_mkldnn(), "_mkldnn"),
        (lambda: torch.ones(3, device="meta"), "meta tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.empty(3, dtype=torch.int4), "int4"),
    ],
)
def test_what_dcp_cannot_store_is_refused_by_key(
    make: Callable[[], torch.Tensor], text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"'model\.layers\.0\.bad'.*{text}"):
        plan({"model": {"ok": torch.ones(1), "layers": [{"bad": make()}]}})


@pytest.mark.filterwarnings("ignore:.*CSR")
def test_it_is_refused_for_planners_that_keep_no_state_dict_too() -> None:
    with pytest.raises(InvalidRequestError, match=r"'bad'.*sparse_coo"):
        plan({"bad": torch.eye(3).to_sparse()}, _Own())


def test_a_planner_may_leave_out_what_cannot_be_stored() -> None:
    class Skips(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            kept = {k: v for k, v in self.state_dict.items() if not v.is_meta}
            everything, self.state_dict = self.state_dict, kept
            try:
                return super().create_local_plan()
            finally:
                self.state_dict = everything

    planning = plan({"w": torch.ones(2), "lazy": torch.ones(2, device="meta")}, Skips())
    assert [item.index.fqn for item in planning.items] == ["w"]


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(InvalidRequestError, match=r"'fake'.*no data"):
        plan({"fake": fake})


def test_partial_placements_are_refused_by_key(two_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(InvalidRequestError, match=r"'opt\.grad'.*Partial.*redistribute"):
        plan({"ok": torch.ones(1), "opt": {"grad": partial}})


def test_shards_are_planned_with_slots_of_their_own_size(two_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.ones(3, 2), mesh, [ShardOf(0)])
    replicated = DTensor.from_local(torch.ones(5), mesh, [Replicate()])
    wrapper = DTensor.from_local(TwoTensor(torch.ones(4), torch.ones(4)), mesh, [ShardOf(0)])
    planning = plan({"s": sharded, "r": replicated, "w": wrapper})
    assert decode_column(planning.message.body) == [3 * 2 * 4, 5 * 4, 0]
    assert [bool(head) for head in decode_column(planning.message.head)] == [True, True, False]
    assert planning.items[0].tensor_data is not None
    assert planning.items[0].tensor_data.size == torch.Size([6, 2])


def test_sharded_tensors_are_planned_shard_by_shard(two_ranks: None) -> None:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )

    def shard(offset: int, rank: int) -> ShardMetadata:
        return ShardMetadata([offset], [4], placement=f"rank:{rank}/cpu")

    metadata = ShardedTensorMetadata(
        [shard(0, 0), shard(4, 1)], torch.Size([8]), TensorProperties(dtype=torch.float32)
    )
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.arange(4.0), shard(0, 0))], metadata
    )
    planning = plan({"flat": tensor})
    assert decode_column(planning.message.body) == [16]
    values = planning.finish([0])
    assert torch.equal(values.resolve(0), torch.arange(4.0))  # type: ignore[arg-type]


class _Fails(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise RuntimeError("no plan today")


def test_a_planner_that_raises_is_named_with_its_method() -> None:
    with pytest.raises(RuntimeError, match=r"no plan today\nplanner .*_Fails: create_local_plan"):
        plan({"w": torch.ones(1)}, _Fails())


def test_a_stateful_that_raises_is_named() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("lost")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(KeyError, match=r"lost'\nstate_dict\(\) of 'app'"):
        plan({"app": Broken()})


class _ExtraData(DefaultSavePlanner):
    data: Any = "per-rank-data"

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data=self.data)


@pytest.mark.parametrize("data", ["per-rank-data", {"w": "w"}, {1: ("w",)}, {"w": (1.5,)}])
def test_planner_data_other_than_mappings_is_refused_by_name(data: Any) -> None:
    planner = _ExtraData()
    planner.data = data
    with pytest.raises(
        InvalidRequestError, match=f"_ExtraData: planner_data of type {type(data).__name__}"
    ):
        plan({"w": torch.ones(1)}, planner)


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="key 5 is not a string"):
        plan({5: torch.ones(1)}, DefaultSavePlanner(False, False))


def test_colliding_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.b(.|\n)*set_up_planner"):
        plan({"a": {"b": 1}, "a.b": 2})


# torch's plan cache


def _save(state: dict[str, Any], directory: Path) -> None:
    dcp.save(
        state,
        checkpoint_id=directory,
        planner=DefaultSavePlanner(enable_plan_caching=True),
        no_dist=True,
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_plan_cache_is_neither_read_nor_filled(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    state = {"w": torch.ones(3)}
    for _ in range(3):
        planning = plan(state, planner)
        assert len(planning.finish([0]).items) == 1
    assert not any(CACHES)
    assert planner._enable_plan_caching is True

    _save(state, tmp_path / "1")
    filled = [dict(cache) for cache in CACHES]
    assert any(filled)
    # The same name and shape with another dtype: torch's cache would describe float32.
    planning = plan({"w": torch.ones(3, dtype=torch.bfloat16)}, planner)
    (item,) = planning.finish([0]).items
    assert item.tensor_data is not None
    assert item.tensor_data.properties.dtype is torch.bfloat16
    assert [dict(cache) for cache in CACHES] == filled

    _save(state, tmp_path / "2")
    into = {"w": torch.zeros(3)}
    dcp.load(into, checkpoint_id=tmp_path / "2", no_dist=True)
    assert torch.equal(into["w"], torch.ones(3))


def test_the_cache_option_survives_a_planner_that_raises() -> None:
    planner = _Fails(enable_plan_caching=True)
    with pytest.raises(RuntimeError, match="no plan today"):
        plan({"w": torch.ones(1)}, planner)
    assert planner._enable_plan_caching is True


def test_the_cache_option_of_a_class_is_restored_as_it_was() -> None:
    class Always(DefaultSavePlanner):
        _enable_plan_caching = True

        def __init__(self) -> None:
            super().__init__()
            del self._enable_plan_caching

    planner = Always()
    planning = plan({"w": torch.ones(1)}, planner)
    planning.finish(range(len(planning.items)))
    assert not any(CACHES)
    assert "_enable_plan_caching" not in vars(planner)
    assert planner._enable_plan_caching is True


def test_a_planner_with_a_cache_of_its_own_is_refused() -> None:
    class Caches(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return SavePlan([], usable=False)

    with pytest.raises(InvalidRequestError, match=r"Caches.*usable"):
        plan({"w": torch.ones(1)}, Caches())


# torch's private names


def test_the_default_groups_store_is_found(two_ranks: None) -> None:
    assert torch_compat.group_store(None) is torch_compat.group_store(dist.group.WORLD)


def test_a_store_without_a_process_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        torch_compat.group_store(None)


def test_an_empty_state_is_a_plan_without_items() -> None:
    planning = plan({})
    assert planning.items == []
    assert planning.finish([]).items == []
