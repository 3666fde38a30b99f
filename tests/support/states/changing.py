"""A training whose tensors change between saves in the ways that real ones do.

``CHANGES`` are functions of a :class:`Training`, by name: in place, by new memory, by new objects, by other
dtypes, shapes, strides and keys.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.optim.swa_utils import AveragedModel


class Net(nn.Module):
    """Tied weights, a buffer, small tensors and one that is copied by address."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.up = nn.Linear(width, 5)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embed.weight
        self.large = nn.Parameter(torch.randn(66_000))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        out: torch.Tensor = self.up(hidden).sum() + self.head(hidden).sum() + self.large[:4].sum()
        return out


class Training:
    """A model, its moving average, an optimizer, and what a loop counts.

    Args:
        on_optimizer: called with each optimizer that it makes.
    """

    def __init__(
        self, seed: int, on_optimizer: Callable[[torch.optim.Optimizer], object] = lambda _: None
    ) -> None:
        self._on_optimizer = on_optimizer
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Net()
        self.renew_optimizer()
        self.average = AveragedModel(self.model)
        self.loop: dict[str, Any] = {"step": 0, "losses": [0.5], "rng": torch.get_rng_state()}
        step(self)

    def renew_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self._on_optimizer(self.optimizer)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loop": self.loop,
        }

    def any_parameter(self) -> nn.Parameter:
        return self.chance.choice(list(self.model.parameters()))

    def any_moments(self) -> dict[str, torch.Tensor]:
        return self.chance.choice(list(self.optimizer.state.values()) or [{}])


def step(t: Training) -> None:
    """In place, as most steps are."""
    for parameter in t.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    t.optimizer.step()
    t.model.seen += 1
    t.loop["step"] += 1
    t.loop["losses"].append(t.chance.random())


def step_and_drop_gradients(t: Training) -> None:
    step(t)
    t.optimizer.zero_grad(set_to_none=True)


def replace_data(t: Training) -> None:
    """The parameter stays, its memory doesn't."""
    parameter = t.any_parameter()
    parameter.data = torch.randn_like(parameter)


def replace_parameter(t: Training) -> None:
    """The optimizer keeps the old one, as after a careless surgery."""
    t.model.up.bias = nn.Parameter(torch.randn_like(t.model.up.bias))


def swap_tensors(t: Training) -> None:
    """The objects stay, with each other's contents."""
    bias = t.model.up.bias
    bias.grad = None
    torch.utils.swap_tensors(bias, nn.Parameter(torch.randn_like(bias)))


def reallocate(t: Training) -> None:
    """Memory is freed, used by others, and found again: often at the same address."""
    parameter = t.any_parameter()
    shape, dtype = parameter.shape, parameter.dtype
    parameter.data = torch.empty(0, dtype=dtype)
    others = [torch.randn(shape) for _ in range(2)]
    parameter.data = torch.randn(shape, dtype=dtype)
    del others


def free_and_fill_again(t: Training) -> None:
    """As FSDP does with what it gathers: the storage is resized."""
    parameter = t.any_parameter()
    size = parameter.untyped_storage().nbytes()
    parameter.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(size)
    with torch.no_grad():
        parameter.fill_(t.chance.random())


def other_strides(t: Training) -> None:
    for parameter in t.model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.clone().t().contiguous().t()


def view_of_another(t: Training) -> None:
    """Parameters become views of one flat tensor."""
    parameters = list(t.model.parameters())
    flat = torch.cat([p.detach().reshape(-1).float() for p in parameters])
    at = 0
    for parameter in parameters:
        view = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
        if parameter.dtype is torch.float32:
            parameter.data = view


def cast(t: Training) -> None:
    t.model.to(t.chance.choice([torch.float32, torch.bfloat16, torch.float64]))
    t.renew_optimizer()
    step(t)


def cast_to_the_same_size(t: Training) -> None:
    """Another dtype, but for the bytes all is as it was."""
    parameter = t.any_parameter()
    dtype = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(parameter.dtype)
    if dtype is not None:
        parameter.data = parameter.data.to(dtype)


def grow(t: Training) -> None:
    """A vocabulary grows, or shrinks."""
    width = t.model.embed.embedding_dim
    t.model.embed = nn.Embedding(t.chance.randrange(1, 20), width)
    t.model.head.weight = t.model.embed.weight
    t.renew_optimizer()
    step(t)


def reshape(t: Training) -> None:
    """The same bytes in another shape."""
    t.model.large = nn.Parameter(
        t.model.large.detach().reshape(66, -1).flatten(0, t.chance.randrange(2))
    )


def untie_or_tie(t: Training) -> None:
    tied = t.model.head.weight is t.model.embed.weight
    weight = t.model.embed.weight
    t.model.head.weight = nn.Parameter(weight.detach().clone()) if tied else weight


def freeze(t: Training) -> None:
    t.any_parameter().requires_grad_(t.chance.random() < 0.5)


def parametrize(t: Training) -> None:
    """Its weight becomes two, under other keys; or again one."""
    if is_parametrized(t.model.up):
        remove_parametrizations(t.model.up, "weight")
    else:
        parametrizations.weight_norm(t.model.up)
    t.renew_optimizer()


def swap_average_in_place(t: Training) -> None:
    """As for an evaluation, and forgotten."""
    with torch.no_grad():
        for one, other in _pairs(t):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def swap_average_by_memory(t: Training) -> None:
    for one, other in _pairs(t):
        one.data, other.data = other.data, one.data


def _pairs(t: Training) -> list[tuple[nn.Parameter, nn.Parameter]]:
    theirs = dict(t.average.module.named_parameters())
    return [
        (one, theirs[name])
        for name, one in t.model.named_parameters()
        if name in theirs and (one.shape, one.dtype) == (theirs[name].shape, theirs[name].dtype)
    ]


def renew_average(t: Training) -> None:
    t.average = AveragedModel(t.model)


def replace_moments(t: Training) -> None:
    """As optimizers do that don't work in place: new tensors of the same kind."""
    moments = t.any_moments()
    for key, value in moments.items():
        moments[key] = value * 2 + 1


def load_optimizer(t: Training) -> None:
    """All of its state is replaced."""
    t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))
    replace_moments(t)


def drop_moments(t: Training) -> None:
    t.optimizer.state.clear()


def change_learning_rate(t: Training) -> None:
    """An object in a list of mappings; sometimes it becomes a tensor."""
    group = t.optimizer.param_groups[0]
    group["lr"] = t.chance.choice([0.1, 0.2, torch.tensor(0.3)])


def replace_buffer(t: Training) -> None:
    t.model.seen = torch.full((3,), t.chance.random())


def change_objects(t: Training) -> None:
    """Another object, another type, or the same object with other contents."""
    t.loop["losses"].append(t.chance.random())
    t.loop["note"] = t.chance.choice([1, "a", None, {"deep": [1, 2]}, (1, 2), torch.ones(2)])


def reorder_keys(t: Training) -> None:
    t.loop = dict(reversed(t.loop.items()))


def drop_a_key(t: Training) -> None:
    t.loop.pop("note", None)


CHANGES: dict[str, Callable[[Training], None]] = {
    change.__name__: change
    for change in (
        *(step, step_and_drop_gradients, replace_data, replace_parameter, swap_tensors),
        *(reallocate, free_and_fill_again, other_strides, view_of_another, cast),
        *(cast_to_the_same_size, grow, reshape, untie_or_tie, freeze, parametrize),
        *(swap_average_in_place, swap_average_by_memory, renew_average, replace_moments),
        *(load_optimizer, drop_moments, change_learning_rate, replace_buffer, change_objects),
        *(reorder_keys, drop_a_key),
    )
}
WRITING_IN_PLACE = {"free_and_fill_again", "swap_average_in_place"}
"""Those that write into parameters without the optimizer."""
