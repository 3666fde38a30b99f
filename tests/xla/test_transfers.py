"""What crosses between devices and host: each shard once, nothing for others, little at a time."""

import pytest

from support.processes.daemons import Daemons
from support.states.xla import run_checks


def _each_shard_crosses_once_per_save() -> None:
    import os

    import torch
    import torch_xla
    import torch_xla.debug.metrics as met
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    from pannier import client
    from pannier.client.planning import local_plan, plan_cache
    from support.states.xla_states import GRID, HALF, ROWS, UNMARKED, WHOLE, Layout

    layout = Layout()
    state, expected = {}, 0
    # Bytes of all shards, with padding; a replicated tensor crosses from one device only.
    for name, shape, (mesh, spec), elements in (
        ("tiled", (64, 16), ROWS, 64 * 16),
        ("uneven", (7, 3), ROWS, 8 * 3),
        ("two dimensions", (7, 5), GRID, 8 * 6),
        ("half", (64, 16), HALF, 2 * 64 * 16),
        ("replicated", (32, 4), WHOLE, 32 * 4),
        ("unmarked", (9, 9), UNMARKED, 9 * 9),
    ):
        state[name] = torch.randn(shape).to("xla")
        if spec is None:
            # What is only sent would still be on the host.
            state[name] = state[name] + 1
        layout.mark(state[name], mesh, spec)
        expected += 4 * elements
    torch_xla.sync()
    root = os.environ["ROOT"]

    class Own(DefaultSavePlanner):
        """Has to be run for each save."""

    for planner in (None, Own(), SPMDSavePlanner()):
        for number in range(3):
            met.clear_all()
            directory = f"{root}/once-{type(planner).__name__}-{number}"
            client.save(state, checkpoint_id=directory, planner=planner)
            _, crossed, _ = met.metric_data("InboundData")
            assert crossed == expected, (planner, number, crossed, expected)
            if planner is None:
                # From now on by the plan that is known: nothing is planned item by item.
                plan_cache.PlannerRun = None
        plan_cache.PlannerRun = local_plan.PlannerRun


def _a_tensor_that_was_already_saved_elsewhere_does_not_cross() -> None:
    """Dedup gives a replicated tensor to one rank; here a planner gives it to none."""
    import os

    import torch
    import torch_xla
    import torch_xla.debug.metrics as met
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan

    from pannier import client
    from support.states.xla_states import ROWS, Layout

    class Without(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            plan.items[:] = [item for item in plan.items if item.index.fqn != "left out"]
            return plan

    layout = Layout()
    state = {name: torch.randn(64, 64).to("xla") for name in ("kept", "left out")}
    for tensor in state.values():
        layout.mark(tensor, *ROWS)
    torch_xla.sync()
    met.clear_all()
    client.save(state, checkpoint_id=os.environ["ROOT"] + "/less", planner=Without())
    assert met.metric_data("InboundData")[1] == 64 * 64 * 4


def _shards_are_let_go_of_as_soon_as_they_are_staged() -> None:
    import gc
    import os
    import weakref

    import torch
    import torch_xla
    from torch.distributed.checkpoint import DefaultSavePlanner

    from pannier import client
    from pannier.client.staging import host_copy
    from pannier.client.xla import shard_tensors
    from support.states.xla_states import ROWS, Layout

    class Own(DefaultSavePlanner):
        """Has to be run for each save."""

    shard_tensors.BATCH_BYTES = 2 << 20
    host_copy._HELD = 3 << 20
    layout = Layout()
    state = {f"layer {i}": torch.full((512, 512), float(i)).to("xla") for i in range(24)}
    for tensor in state.values():
        layout.mark(tensor, *ROWS)
    torch_xla.sync()
    bindings = torch_xla._XLAC
    fetch, shards, most = bindings._get_local_shards, [], [0]

    def counting(tensors: list[torch.Tensor]) -> object:
        gc.collect()
        alive = sum(tensor.nbytes for tensor in (each() for each in shards) if tensor is not None)
        most[0] = max(most[0], alive)
        found = fetch(tensors)
        shards.extend(weakref.ref(shard) for each in found for shard, _ in each)
        return found

    bindings._get_local_shards = counting
    try:
        for number, planner in enumerate((None, Own())):
            directory = f"{os.environ['ROOT']}/few-{number}"
            handle = client.async_save(state, checkpoint_id=directory, planner=planner)
            assert not [each for each in shards if each() is not None]
            handle.result(60)
    finally:
        bindings._get_local_shards = fetch
    assert len(shards) == 2 * 24 * layout.devices
    assert most[0] <= 6 << 20, most[0]


def _what_is_traced_but_has_not_run_is_saved_as_it_will_be() -> None:
    import os

    import torch
    import torch.distributed.checkpoint as dcp
    import torch_xla

    from pannier import client
    from support.states.xla_states import ROWS, UNMARKED, Layout

    layout = Layout()
    values = {name: torch.arange(64.0).reshape(16, 4) for name in ("sharded", "whole")}
    state = {name: value.to("xla") for name, value in values.items()}
    layout.mark(state["sharded"], *ROWS)
    layout.mark(state["whole"], *UNMARKED)
    torch_xla.sync()
    for tensor in state.values():
        # Nothing of this has run when the save begins.
        tensor.mul_(2).add_(1)
    state["new"] = state["whole"][2:4] * 3
    directory = os.environ["ROOT"] + "/traced"
    handle = client.async_save(state, checkpoint_id=directory)
    for tensor in state.values():
        tensor.zero_()
    torch_xla.sync()
    handle.result(60)
    loaded = {name: torch.zeros(16, 4) for name in values} | {"new": torch.zeros(2, 4)}
    dcp.load(loaded, checkpoint_id=directory)
    for name, value in values.items():
        assert torch.equal(loaded[name], value * 2 + 1), name
    assert torch.equal(loaded["new"], (values["whole"] * 2 + 1)[2:4] * 3)


def _overlapped_staging_falls_back_and_says_so() -> None:
    import os

    import torch
    import torch_xla

    from pannier import client
    from support.states.xla_states import ROWS, Layout

    layout = Layout()
    parameter = torch.nn.Parameter(torch.randn(64, 64).to("xla"))
    layout.mark(parameter, *ROWS)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    torch_xla.sync()
    wanted = parameter.detach().cpu()
    with client.guard(optimizer):
        for number in range(2):
            directory = f"{os.environ['ROOT']}/overlapped-{number}"
            handle = client.async_save(
                {"p": parameter}, checkpoint_id=directory, staging="overlapped"
            )
            assert handle.staging_completion.done()
            assert "torch_xla" in handle.status().staging, handle.status()
            handle.result(60)
    loaded = {"p": torch.zeros(64, 64)}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=directory)
    assert torch.equal(loaded["p"], wanted)


def _restoring_fetches_nothing_and_sends_each_shard_once() -> None:
    import os

    import torch
    import torch_xla
    import torch_xla.debug.metrics as met

    from pannier import client
    from support.states.xla_states import ROWS, WHOLE, Layout

    layout = Layout()

    def build(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        state = {"tiled": torch.randn(64, 16).to("xla"), "whole": torch.randn(8, 8).to("xla")}
        layout.mark(state["tiled"], *ROWS)
        layout.mark(state["whole"], *WHOLE)
        torch_xla.sync()
        return state

    state, other = build(0), build(1)
    directory = os.environ["ROOT"] + "/sent"
    client.save(state, checkpoint_id=directory)
    met.clear_all()
    client.load(other, checkpoint_id=directory)
    assert met.metric_data("InboundData") is None
    for name, tensor in state.items():
        assert torch.equal(tensor.cpu(), other[name].cpu()), name


CHECKS = [
    _each_shard_crosses_once_per_save,
    _a_tensor_that_was_already_saved_elsewhere_does_not_cross,
    _shards_are_let_go_of_as_soon_as_they_are_staged,
    _what_is_traced_but_has_not_run_is_saved_as_it_will_be,
    _overlapped_staging_falls_back_and_says_so,
    _restoring_fetches_nothing_and_sends_each_shard_once,
]


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    base = tmp_path_factory.mktemp("transfers")
    with Daemons(base) as daemons:
        return run_checks(CHECKS, 4, daemons.env(ROOT=str(base / "checkpoints")))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_transfers(passed: set[str], name: str) -> None:
    assert name in passed
