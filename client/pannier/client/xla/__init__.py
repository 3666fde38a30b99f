"""For programs that use torch_xla: planners for ``dcp.save`` and ``dcp.load``, and optimizer state.

``client.async_save`` and ``client.load`` take states with XLA tensors as they are; they need nothing
from here but :func:`prime_optimizer`. Does not import torch_xla.
"""

from typing import Any, Final

import torch

from pannier.client.xla import runtime
from pannier.client.xla.planners import LoadPlanner, SavePlanner

_RATES: Final[tuple[str, ...]] = ("lr", "weight_decay")


def prime_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that an optimizer otherwise gets in its first step, so that it can be restored.

    The state is that before the first step: zero moments, no steps counted; sharded like the
    parameters. Parameters and settings keep their values; gradients are cleared. Does nothing to an
    optimizer that has state. Waits for the devices.

    Args:
        optimizer: of parameters on XLA devices or elsewhere, whose ``step()`` takes no closure.

    Raises whatever its ``step()`` raises.
    """
    if optimizer.state:
        return
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    on_xla = any(map(runtime.is_xla, parameters))
    if on_xla:
        runtime.settle()
    rates = [
        {name: group[name] for name in _RATES if name in group} for group in optimizer.param_groups
    ]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            _shard_like(parameter.grad, parameter)
        for group, values in zip(optimizer.param_groups, rates, strict=True):
            group.update({name: _zero(value) for name, value in values.items()})
        optimizer.step()
    finally:
        for group, values in zip(optimizer.param_groups, rates, strict=True):
            group.update(values)
        optimizer.zero_grad(set_to_none=True)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = _zero(state["step"])
        for value in state.values():
            _shard_like(value, parameter)
    if on_xla:
        runtime.settle()


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


def _shard_like(value: Any, parameter: torch.Tensor) -> None:
    if runtime.is_xla(value) and runtime.is_xla(parameter):
        runtime.mark_like(value, parameter)


__all__ = ["LoadPlanner", "SavePlanner", "prime_optimizer"]
