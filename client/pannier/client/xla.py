"""For programs of torch_xla: planners for ``dcp.save`` and ``dcp.load``, and optimizers that are new.

``client.async_save`` and ``client.load`` take states with XLA tensors as they are; nothing here is
needed for them but :func:`prime_optimizer`. torch_xla isn't imported before it is used.
"""

from collections.abc import Iterator

import torch

from pannier.client import xla_runtime
from pannier.client.xla_planners import LoadPlanner, SavePlanner

_RATES = ("lr", "weight_decay")


def prime_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that an optimizer otherwise has after its first step, so that it can be restored.

    What it makes is sharded as its parameters are. Parameters and settings stay as they are; gradients
    are gone; step counts are those of one step, until they are restored. Does nothing to an optimizer
    that has state.

    Args:
        optimizer: of any parameters, of XLA's or others.
    """
    if optimizer.state:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kept = [
        {name: group[name] for name in _RATES if name in group} for group in optimizer.param_groups
    ]
    before = [parameter.detach().clone() for parameter in trained]
    _settle(trained)
    try:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            if xla_runtime.is_xla(parameter):
                xla_runtime.mark_like(parameter.grad, parameter)
        for group, rates in zip(optimizer.param_groups, kept, strict=True):
            for name, value in rates.items():
                # A rate on a device stays the tensor that it is.
                group[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rates in zip(optimizer.param_groups, kept, strict=True):
            group.update(rates)
        optimizer.zero_grad(set_to_none=True)
    del before
    for parameter, state in _states(optimizer):
        if xla_runtime.is_xla(parameter) and xla_runtime.is_xla(state):
            xla_runtime.mark_like(state, parameter)
    _settle(trained)


def _settle(parameters: list[torch.Tensor]) -> None:
    if any(map(xla_runtime.is_xla, parameters)):
        xla_runtime.settle()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for parameter, states in optimizer.state.items():
        for state in states.values():
            if isinstance(state, torch.Tensor):
                yield parameter, state


__all__ = ["LoadPlanner", "SavePlanner", "prime_optimizer"]
