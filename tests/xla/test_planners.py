"""Planners of SPMD programs: ours, torch_xla's own, the user's, through async_save and dcp.save."""

import pytest

from support.processes.daemons import Daemons
from support.states.xla import run_checks


def _sharded_tensors_make_an_item_for_each_part_and_all_else_is_planned_as_ever() -> None:
    import torch
    import torch_xla
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItemType

    from pannier.client.xla import SavePlanner
    from support.states.xla_states import HALF, ROWS, WHOLE, Layout

    layout = Layout()
    state = {
        "tiled": torch.randn(7, 3).to("xla"),
        "half": torch.randn(8, 2).to("xla"),
        "replicated": torch.randn(4, 4).to("xla"),
        "unmarked": torch.randn(3).to("xla"),
        "host": torch.randn(3),
        "few": torch.randn(2, 2).to("xla"),
        "extra": {"step": 1},
    }
    for name, marks in {"tiled": ROWS, "half": HALF, "replicated": WHOLE, "few": ROWS}.items():
        layout.mark(state[name], *marks)
    torch_xla.sync()
    planner = SavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    plan = planner.create_local_plan()
    found: dict[str, list[tuple[object, ...]]] = {}
    for item in plan.items:
        data = item.tensor_data
        place = (tuple(data.chunk.offsets), tuple(data.chunk.sizes)) if data else ()
        found.setdefault(item.index.fqn, []).append((item.type, item.index.index, *place))
    shard, tensor = WriteItemType.SHARD, WriteItemType.TENSOR
    rows = [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (2, 3)), ((6, 0), (1, 3))]
    assert found["tiled"] == [(shard, i, *place) for i, place in enumerate(rows)]
    # On a mesh of 2x2: devices 0 and 1 hold the same half.
    assert found["half"] == [(shard, 0, (0, 0), (4, 2)), (shard, 2, (4, 0), (4, 2))]
    # Two devices have padding only.
    assert found["few"] == [(shard, 0, (0, 0), (1, 2)), (shard, 1, (1, 0), (1, 2))]
    assert found["replicated"] == [(tensor, None, (0, 0), (4, 4))]
    assert found["unmarked"] == [(tensor, None, (0,), (3,))]
    default = DefaultSavePlanner()
    default.set_up_planner({"host": state["host"], "extra": state["extra"]}, is_coordinator=True)
    theirs = default.create_local_plan().items
    assert [i for i in plan.items if i.index.fqn in ("host", "extra.step")] == theirs

    planner.finish_plan(plan)
    for _ in range(2):
        # As often as one likes.
        got = planner.resolve_data(plan.items[3])
        assert torch.equal(got, state["tiled"].cpu()[6:7]), got
    assert plan.items[3].index == MetadataIndex("tiled", torch.Size([6, 0]))


def _torch_xlas_own_planners_lose_nothing() -> None:
    import os
    from pathlib import Path

    import torch_xla
    from torch.distributed.checkpoint import FileSystemReader
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner
    from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict

    from pannier import client
    from support.states.bits import differences
    from support.states.xla_states import AFTER, BEFORE, KINDS, Layout, on_host

    class Counting(SPMDSavePlanner):
        resolved = 0

        def resolve_data(self, write_item: object) -> object:
            Counting.resolved += 1
            return super().resolve_data(write_item)

    layout = Layout()
    planners = [SPMDSavePlanner(), Counting()]
    names = ["uneven", "partially replicated", "replicated", "unsharded", "wrapped", "dtypes"]
    names.append("nested, objects and tensors of the host")
    for name in names:
        kind = KINDS[name]
        for number, planner in enumerate(planners):
            directory = f"{os.environ['ROOT']}/theirs/{name}/{number}"
            # The same planner every time; torch_xla's keeps values of what it wasn't asked for.
            client.save(
                layout.place(kind, number, BEFORE), checkpoint_id=directory, planner=planner
            )
            for load_planner in (None, SPMDLoadPlanner()):
                state = layout.place(kind, 77, AFTER)
                torch_xla.sync()
                client.load(state, checkpoint_id=directory, planner=load_planner)
                found = differences(on_host(state), kind.values(number))
                assert not found, (name, number, load_planner, found)
        # Shards that torch_xla's manager has copied to the host.
        directory = f"{os.environ['ROOT']}/theirs/{name}/shards"
        shards = _sharded_cpu_state_dict(layout.place(kind, 5, BEFORE))
        client.save(shards, checkpoint_id=directory, planner=SPMDSavePlanner())
        state = layout.place(kind, 77, AFTER)
        torch_xla.sync()
        client.load(state, checkpoint_id=directory)
        found = differences(on_host(state), kind.values(5))
        assert not found, (name, found)
        # What ours has saved, by its planner.
        client.save(layout.place(kind, 6, BEFORE), checkpoint_id=f"{directory}/ours")
        client.load(state, checkpoint_id=f"{directory}/ours", planner=SPMDLoadPlanner())
        found = differences(on_host(state), kind.values(6))
        assert not found, (name, found)
    assert Counting.resolved
    metadata = FileSystemReader(Path(os.environ["ROOT"]) / "theirs/uneven/0").read_metadata()
    chunks = metadata.state_dict_metadata["7x3"].chunks
    assert [chunk.sizes[0] for chunk in chunks] == [2, 2, 2, 1]


def _a_planner_with_a_global_plan_of_its_own_is_refused_by_name() -> None:
    import os

    import pytest
    import torch
    import torch_xla
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    from pannier import client
    from support.states.xla_states import ROWS, Layout

    class Mine(SPMDSavePlanner):
        def create_global_plan(self, all_plans: list[object]) -> object:
            return super().create_global_plan(all_plans)

    state = {"a": torch.randn(8, 8).to("xla")}
    Layout().mark(state["a"], *ROWS)
    torch_xla.sync()
    with pytest.raises(client.PannierError, match=r"--planner \S*Mine"):
        client.save(state, checkpoint_id=os.environ["ROOT"] + "/refused", planner=Mine())


def _a_users_planner_sees_parts_in_host_memory() -> None:
    import os
    from pathlib import Path

    import torch
    import torch_xla
    from torch.distributed.checkpoint import (
        DefaultLoadPlanner,
        DefaultSavePlanner,
        FileSystemReader,
    )

    from pannier import client
    from support.states.xla_states import GRID, ROWS, Layout

    class Smaller(DefaultSavePlanner):
        def transform_object(self, write_item: object, object: object) -> object:
            value = super().transform_object(write_item, object)
            if isinstance(value, torch.Tensor):
                assert value.device.type == "cpu"
                value = value.to(torch.bfloat16)
            return value

    class Twice(DefaultLoadPlanner):
        def transform_tensor(self, read_item: object, tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.device.type == "cpu"
            return super().transform_tensor(read_item, tensor)

    layout = Layout()
    value = torch.randn(9, 6)
    state = {"a": value.to("xla"), "step": 3}
    layout.mark(state["a"], *ROWS)
    torch_xla.sync()
    directory = os.environ["ROOT"] + "/smaller"
    for _ in range(2):
        client.save(state, checkpoint_id=directory, planner=Smaller())
    assert (
        len(FileSystemReader(Path(directory)).read_metadata().state_dict_metadata["a"].chunks) > 1
    )
    other = {"a": torch.zeros(9, 6).to("xla"), "step": 0}
    layout.mark(other["a"], *GRID)
    torch_xla.sync()
    client.load(other, checkpoint_id=directory, planner=Twice())
    assert torch.equal(other["a"].cpu(), value.to(torch.bfloat16).float())
    assert other["step"] == 3
    part = {"a": torch.zeros(9, 6).to("xla"), "b": torch.ones(2).to("xla")}
    layout.mark(part["a"], *GRID)
    client.load(part, checkpoint_id=directory, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(part["a"].cpu(), other["a"].cpu())
    assert torch.equal(part["b"].cpu(), torch.ones(2))


def _what_a_checkpoint_lacks_of_a_tensor_stays_as_it_is() -> None:
    import os

    import torch
    import torch_xla
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan

    from pannier import client
    from support.states.xla_states import COLUMNS, GRID, ROWS, UNMARKED, WHOLE, Layout

    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            # A single process may hold a part only.
            plan.items[:] = plan.items[:2]
            return plan

    layout = Layout()
    value = torch.randn(8, 6)
    state = {"a": value.to("xla")}
    layout.mark(state["a"], *ROWS)
    directory = os.environ["ROOT"] + "/half"
    client.save(state, checkpoint_id=directory, planner=Half())
    for marks in (ROWS, COLUMNS, GRID, WHOLE, UNMARKED):
        other = {"a": torch.ones(8, 6).to("xla")}
        layout.mark(other["a"], *marks)
        torch_xla.sync()
        client.load(other, checkpoint_id=directory)
        got = other["a"].cpu()
        assert torch.equal(got[:4], value[:4]), marks
        assert torch.equal(got[4:], torch.ones(4, 6)), marks


def _a_tensor_changes_when_all_of_it_has_been_read_and_not_before() -> None:
    import os
    from pathlib import Path

    import torch
    import torch_xla
    from torch.distributed.checkpoint import FileSystemReader

    from pannier import client
    from pannier.client.xla import LoadPlanner
    from support.states.xla_states import COLUMNS, ROWS, Layout, on_host

    layout = Layout()
    state = {"a": torch.randn(8, 8).to("xla")}
    layout.mark(state["a"], *ROWS)
    directory = os.environ["ROOT"] + "/step by step"
    client.save(state, checkpoint_id=directory)
    other = {"a": torch.ones(8, 8).to("xla")}
    layout.mark(other["a"], *COLUMNS)
    torch_xla.sync()
    planner = LoadPlanner()
    metadata = FileSystemReader(Path(directory)).read_metadata()
    planner.set_up_planner(dict(other), metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    # Each of the four columns is read from each of the four rows.
    assert len(plan.items) == 16
    for item in plan.items:
        assert torch.equal(on_host(other)["a"], torch.ones(8, 8))
        target = planner.resolve_tensor(item)
        assert target.shape == (2, 2)
        target.fill_(7)
        planner.commit_tensor(item, target)
    assert torch.equal(on_host(other)["a"], torch.full((8, 8), 7.0))


def _dcp_save_and_dcp_load_go_through_pannier_too() -> None:
    import os

    import torch.distributed.checkpoint as dcp
    import torch_xla
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    from pannier import client
    from pannier.client import xla
    from support.states.bits import differences
    from support.states.xla_states import AFTER, BEFORE, KINDS, Layout, on_host

    layout = Layout()
    for name in ("partially replicated", "uneven", "nested, objects and tensors of the host"):
        kind = KINDS[name]
        for number, planner in enumerate((xla.SavePlanner(), SPMDSavePlanner())):
            directory = f"{os.environ['ROOT']}/seam/{name}/{number}"
            for seed in (1, 2):
                state = layout.place(kind, seed, BEFORE)
                dcp.save(state, storage_writer=client.StorageWriter(directory), planner=planner)
            restored = layout.place(kind, 9, AFTER)
            torch_xla.sync()
            reader = client.StorageReader(directory)
            dcp.load(restored, storage_reader=reader, planner=xla.LoadPlanner())
            assert not differences(on_host(restored), kind.values(2)), (name, number)


def _another_sharding_is_another_plan() -> None:
    import os
    from pathlib import Path

    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    from torch.distributed.checkpoint import FileSystemReader

    from pannier import client
    from support.states.xla_states import COLUMNS, GRID, ROWS, UNMARKED, WHOLE, Layout

    layout = Layout()
    tensor = torch.randn(8, 8).to("xla")
    value = tensor.cpu()
    wanted = {"rows": (2, 8), "columns": (8, 2), "grid": (4, 4), "whole": (8, 8), "none": (8, 8)}
    marks = dict(zip(wanted, (ROWS, COLUMNS, GRID, WHOLE, UNMARKED), strict=True))
    for turn in range(2):
        for name, size in wanted.items():
            xs.clear_sharding(tensor)
            # A tensor on the devices keeps its layout there: a new one is made.
            tensor = value.to("xla")
            layout.mark(tensor, *marks[name])
            for number in range(2):
                directory = f"{os.environ['ROOT']}/plans/{turn}-{name}-{number}"
                client.save({"a": tensor}, checkpoint_id=directory)
                metadata = FileSystemReader(Path(directory)).read_metadata()
                chunks = metadata.state_dict_metadata["a"].chunks
                assert {tuple(chunk.sizes) for chunk in chunks} == {size}, (name, chunks)
                loaded = {"a": torch.zeros(8, 8)}
                torch.distributed.checkpoint.load(loaded, checkpoint_id=directory)
                assert torch.equal(loaded["a"], value), name
            torch_xla.sync()


def _manual_sharding_is_refused_by_name() -> None:
    import os

    import pytest
    import torch
    import torch_xla.distributed.spmd as xs

    from pannier import client
    from support.states.xla_states import Layout

    layout = Layout()
    mesh = layout._meshes["flat"]
    inside = xs.enable_manual_sharding(torch.randn(8, 8).to("xla"), (0, None), mesh=mesh)
    with pytest.raises(client.InvalidRequestError, match="'inside' is inside a region"):
        client.save({"inside": inside}, checkpoint_id=os.environ["ROOT"] + "/manual")


CHECKS = [
    _sharded_tensors_make_an_item_for_each_part_and_all_else_is_planned_as_ever,
    _torch_xlas_own_planners_lose_nothing,
    _a_planner_with_a_global_plan_of_its_own_is_refused_by_name,
    _a_users_planner_sees_parts_in_host_memory,
    _what_a_checkpoint_lacks_of_a_tensor_stays_as_it_is,
    _a_tensor_changes_when_all_of_it_has_been_read_and_not_before,
    _dcp_save_and_dcp_load_go_through_pannier_too,
    _another_sharding_is_another_plan,
    _manual_sharding_is_refused_by_name,
]


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    base = tmp_path_factory.mktemp("planners")
    with Daemons(base) as daemons:
        return run_checks(CHECKS, 4, daemons.env(ROOT=str(base / "checkpoints")))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_planners(passed: set[str], name: str) -> None:
    assert name in passed
