"""Training as SPMD programs: models, optimizers, random numbers and what else a loop saves."""

from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.states.xla import run_checks, run_program

PROGRAMS = Path(__file__).parent / "programs"


def _training_goes_on_on_another_mesh_as_if_nothing_had_happened() -> None:
    import os

    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch import nn

    from pannier import client
    from pannier.client.xla import prime_optimizer
    from support.states.bits import differences
    from support.states.xla_states import COLUMNS, GRID, ROWS, Layout, on_host, shardings, tensors

    layout = Layout()

    def build(seed: int, marks: tuple[str, tuple[int | None, ...]]) -> tuple[nn.Module, object]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 6)).to("xla")
        for part in model:
            layout.mark(part.weight, *marks)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(8, 12).to("xla")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()

    def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def tensors_of(value: object) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value] if value.is_floating_point() else []
        inner = list(value.values()) if isinstance(value, dict) else value
        return [t for v in inner for t in tensors_of(v)] if isinstance(inner, list) else []

    model, optimizer = build(0, ROWS)
    train(model, optimizer, range(2))
    xm.set_rng_state(4711)
    wanted = on_host(state_of(model, optimizer))
    random = {"host": torch.get_rng_state(), "devices": xm.get_rng_state()}
    whole = {"model": model, "optimizer": optimizer, "rng": random}
    directories = [f"{os.environ['ROOT']}/training/{number}" for number in range(2)]
    handles = [client.async_save(whole, checkpoint_id=each) for each in directories]
    train(model, optimizer, range(2, 4))
    later = on_host(state_of(model, optimizer))
    for handle in handles:
        handle.result(60)

    for directory, marks in zip(directories, (COLUMNS, GRID), strict=True):
        other, its_optimizer = build(1, marks)
        prime_optimizer(its_optimizer)
        specs = shardings(state_of(other, its_optimizer))
        parameters = [id(parameter) for parameter in other.parameters()]
        numbers = {"host": torch.zeros_like(torch.get_rng_state()), "devices": 0}
        restored = {"model": other, "optimizer": its_optimizer, "rng": numbers}
        client.load(restored, checkpoint_id=directory)
        assert not differences(restored["rng"], random)
        found = differences(on_host(state_of(other, its_optimizer)), wanted)
        assert not found, found
        torch_xla.sync()
        assert shardings(state_of(other, its_optimizer)) == specs
        assert [id(parameter) for parameter in other.parameters()] == parameters
        train(other, its_optimizer, range(2, 4))
        got = on_host(state_of(other, its_optimizer))
        for one, wish in zip(tensors_of(got), tensors_of(later), strict=True):
            # Sums are made in another order on another mesh.
            torch.testing.assert_close(one, wish)
        assert tensors(state_of(other, its_optimizer))


def _priming_makes_the_state_of_no_steps_sharded_as_the_parameters() -> None:
    import torch
    import torch_xla

    from pannier.client.xla import prime_optimizer
    from support.states.xla_states import GRID, HALF, ROWS, Layout, shardings

    layout = Layout()
    for kind, options in (
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
    ):
        parameters = [torch.nn.Parameter(torch.randn(8, 6).to("xla")) for _ in range(3)]
        for parameter, marks in zip(parameters, (ROWS, GRID, HALF), strict=True):
            layout.mark(parameter, *marks)
        torch_xla.sync()
        before = [parameter.detach().cpu() for parameter in parameters]
        optimizer = kind(parameters, **options)
        prime_optimizer(optimizer)
        assert {name: optimizer.param_groups[0][name] for name in options} == options
        for parameter, value in zip(parameters, before, strict=True):
            assert torch.equal(parameter.detach().cpu(), value)
            assert parameter.grad is None
            state = optimizer.state[parameter]
            moments = [each for each in state.values() if each.shape == parameter.shape]
            assert moments
            assert not any(each.cpu().any() for each in moments), kind
            assert shardings(moments) == shardings([parameter]) * len(moments), kind
            assert not state.get("step", torch.tensor(0)).item()
        first = optimizer.state[parameters[0]]
        prime_optimizer(optimizer)
        assert optimizer.state[parameters[0]] is first


def _what_fsdp2_has_saved_is_restored_into_any_sharding() -> None:
    import os

    import torch
    import torch_xla
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from pannier import client
    from pannier.client.xla import prime_optimizer
    from support.states.bits import differences
    from support.states.sharded_states import Model
    from support.states.xla_states import (
        COLUMNS,
        GRID,
        HALF,
        ROWS,
        WHOLE,
        Layout,
        on_host,
        shardings,
    )

    layout = Layout()
    wanted = torch.load(os.environ["EXPECTED"], weights_only=False)
    for marks in (ROWS, COLUMNS, GRID, HALF, WHOLE):
        model = Model(seed=6).to("xla")
        for parameter in model.parameters():
            layout.mark(parameter, *marks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        prime_optimizer(optimizer)
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optim": moments, "epoch": 0}
        specs = shardings(state)
        client.load(state, checkpoint_id=os.environ["FSDP2"])
        assert not differences(on_host(state), wanted), marks
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        torch_xla.sync()
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optim": moments, "epoch": state["epoch"]}
        assert not differences(on_host(state), wanted), marks
        # What isn't marked is found to be replicated when something is computed with it.
        assert [spec or "{replicated}" for spec in shardings(state)] == [
            spec or "{replicated}" for spec in specs
        ]


def _xla_tensors_inside_objects_need_no_torch_xla_to_be_read() -> None:
    import os
    import subprocess
    import sys
    from collections import namedtuple

    import torch

    from pannier import client
    from support.states.xla_states import ROWS, Layout

    DaemonSpec = namedtuple("Pair", "value name")
    globals()["Pair"] = DaemonSpec
    tensor = torch.arange(16.0).reshape(8, 2).to("xla")
    Layout().mark(tensor, *ROWS)
    state = {"tuple": (tensor, 1), "deep": ({"a": [tensor]}, None)}
    directory = os.environ["ROOT"] + "/objects"
    client.save(state, checkpoint_id=directory)
    assert state["tuple"][0] is tensor
    script = """
import sys
sys.modules["torch_xla"] = None
import torch
import torch.distributed.checkpoint as dcp
state = {"tuple": None, "deep": None}
dcp.load(state, checkpoint_id=sys.argv[1])
value = torch.arange(16.0).reshape(8, 2)
assert torch.equal(state["tuple"][0], value) and state["tuple"][1] == 1
assert torch.equal(state["deep"][0]["a"][0], value)
"""
    subprocess.run([sys.executable, "-c", script, directory], check=True)
    named = {"pair": DaemonSpec(tensor, "x")}
    client.save(named, checkpoint_id=directory + "-named")
    loaded: dict[str, object] = {"pair": None}
    client.load(loaded, checkpoint_id=directory + "-named")
    assert torch.equal(loaded["pair"].value, tensor.cpu())


def _errors_name_the_key() -> None:
    import os

    import pytest
    import torch

    from pannier import client
    from support.states.xla_states import GRID, ROWS, Layout

    layout = Layout()
    state = {"weight": torch.randn(8, 4).to("xla"), "same": torch.randn(4, 4).to("xla")}
    layout.mark(state["weight"], *ROWS)
    directory = os.environ["ROOT"] + "/errors"
    client.save(state, checkpoint_id=directory)
    other = {"weight": torch.randn(8, 5).to("xla")}
    layout.mark(other["weight"], *GRID)
    with pytest.raises(client.LoadError, match="weight"):
        client.load(other, checkpoint_id=directory)
    missing = {"absent": torch.randn(8, 4).to("xla")}
    with pytest.raises(client.LoadError, match="absent"):
        client.load(missing, checkpoint_id=directory)


def _views_and_tied_weights_are_saved_as_what_they_show() -> None:
    import os

    import torch
    import torch.distributed.checkpoint as dcp
    import torch_xla

    from pannier import client
    from support.states.xla_states import ROWS, Layout

    weight = torch.nn.Parameter(torch.randn(16, 4).to("xla"))
    Layout().mark(weight, *ROWS)
    torch_xla.sync()
    with torch.no_grad():
        state = {"a": weight, "b": weight, "rows": weight[3:7], "turned": weight.t()}
        weight.add_(1)
    directory = os.environ["ROOT"] + "/views"
    client.save(state, checkpoint_id=directory)
    value = weight.detach().cpu()
    wanted = {"a": value, "b": value, "rows": value[3:7], "turned": value.t()}
    loaded = {name: torch.zeros(each.shape) for name, each in wanted.items()}
    dcp.load(loaded, checkpoint_id=directory)
    for name, each in wanted.items():
        assert torch.equal(loaded[name], each), name
    # The same structure, but "b" is a tensor of its own now.
    other = torch.nn.Parameter(torch.randn(16, 4).to("xla"))
    Layout().mark(other, *ROWS)
    client.save({**state, "b": other}, checkpoint_id=directory + "-untied")
    dcp.load(loaded, checkpoint_id=directory + "-untied")
    assert torch.equal(loaded["a"], value)
    assert torch.equal(loaded["b"], other.detach().cpu())


def _a_prepared_save_goes_by_the_prepared_plan() -> None:
    import os

    import torch
    import torch_xla

    from pannier import client
    from support.states.xla_states import ROWS, Layout

    state = {"a": torch.randn(16, 4).to("xla"), "step": 1}
    Layout().mark(state["a"], *ROWS)
    torch_xla.sync()
    root = os.environ["ROOT"] + "/prepared"
    client.prepare(state, root)
    for number in range(2):
        result = client.save(state, checkpoint_id=f"{root}/{number}")
        loaded = {"a": torch.zeros(16, 4), "step": 0}
        torch.distributed.checkpoint.load(loaded, checkpoint_id=result.checkpoint_id)
        assert torch.equal(loaded["a"], state["a"].cpu())


CHECKS = [
    _training_goes_on_on_another_mesh_as_if_nothing_had_happened,
    _priming_makes_the_state_of_no_steps_sharded_as_the_parameters,
    _what_fsdp2_has_saved_is_restored_into_any_sharding,
    _xla_tensors_inside_objects_need_no_torch_xla_to_be_read,
    _errors_name_the_key,
    _views_and_tied_weights_are_saved_as_what_they_show,
    _a_prepared_save_goes_by_the_prepared_plan,
]


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    base = tmp_path_factory.mktemp("saving")
    with Daemons(base) as daemons:
        fsdp2 = {"CHECKPOINT": str(base / "fsdp2"), "EXPECTED": str(base / "expected.pt")}
        run_ranks(PROGRAMS / "fsdp2.py", 2, daemons.env(**fsdp2), timeout=100, torchrun=False)
        env = daemons.env(
            ROOT=str(base / "root"), FSDP2=fsdp2["CHECKPOINT"], EXPECTED=fsdp2["EXPECTED"]
        )
        return run_checks(CHECKS, 4, env)


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_saving(passed: set[str], name: str) -> None:
    assert name in passed


def test_without_spmd_a_tensor_of_a_device_is_a_tensor(tmp_path: Path) -> None:
    def program() -> None:
        import os

        import torch
        import torch_xla

        from pannier import client
        from support.states.bits import differences

        value = {"a": torch.randn(5, 3), "b": torch.arange(4), "c": {"step": 3}}
        state = {"a": value["a"].to("xla"), "b": value["b"].to("xla"), "c": {"step": 3}}
        state["a"].mul_(2)
        for number in range(2):
            client.save(state, checkpoint_id=f"{os.environ['ROOT']}/{number}")
        other = {name: torch.zeros_like(state[name]) for name in "ab"} | {"c": {"step": 0}}
        client.load(other, checkpoint_id=f"{os.environ['ROOT']}/1")
        torch_xla.sync()
        got = {name: other[name].cpu() for name in "ab"} | {"c": other["c"]}
        assert other["a"].device.type == "xla"
        assert not differences(got, {**value, "a": value["a"] * 2})

    with Daemons(tmp_path) as daemons:
        run_program(program, 1, daemons.env(ROOT=str(tmp_path / "root")))


def test_states_without_xla_tensors_import_no_torch_xla(tmp_path: Path) -> None:
    def program() -> None:
        import os
        import sys

        import torch

        from pannier import client
        from pannier.client import xla

        state = {"a": torch.ones(3), "b": {"c": 1}}
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0, momentum=0.9)
        xla.prime_optimizer(optimizer)
        client.save(state, checkpoint_id=os.environ["ROOT"], planner=xla.SavePlanner())
        client.load(state, checkpoint_id=os.environ["ROOT"], planner=xla.LoadPlanner())
        assert "torch_xla" not in sys.modules

    with Daemons(tmp_path) as daemons:
        run_program(program, 1, daemons.env(ROOT=str(tmp_path / "root")))
