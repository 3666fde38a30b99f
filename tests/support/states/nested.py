"""Random nested states: what they are made of, apart from their values."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)
OBJECTS = (
    *(0, -3, 0.0, -0.0, 1.5, float("nan"), float("inf"), True, None, "adam", "x" * 40, b"\0"),
    *((0.9, 0.999), (), ((1,), "a"), {1, 2}, 3 + 1j, 1 << 80),
)


@dataclass(frozen=True)
class Tensor:
    """A tensor of any strides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: bool

    def build(self, chance: random.Random) -> torch.Tensor:
        """Its dtype, shape and ``requires_grad`` are always the same; nothing else is."""
        count = 2 * self.dtype.itemsize * max(1, torch.Size(self.shape).numel())
        raw = bytearray(chance.randbytes(count))
        if self.dtype is torch.bool:
            raw = bytearray(byte & 1 for byte in raw)
        flat = torch.frombuffer(raw, dtype=self.dtype)
        tensor = self._view(flat, chance.randrange(5))
        return torch.nn.Parameter(tensor) if self.parameter else tensor

    def _view(self, flat: torch.Tensor, how: int) -> torch.Tensor:
        size = torch.Size(self.shape).numel()
        if how == 0:
            return flat[1 : 1 + size].reshape(self.shape)
        if how == 1:
            return flat[: 2 * size : 2].view(self.shape)
        if how == 2:
            return (
                flat[:size].reshape(self.shape[::-1]).permute(tuple(range(len(self.shape))[::-1]))
            )
        if how == 3 and size and self.shape:
            return flat[:1].expand(self.shape)
        tensor = flat[:size].reshape(self.shape)
        return tensor.conj() if self.dtype.is_complex else tensor


@dataclass(frozen=True)
class Object:
    """An object that DCP pickles, always another one."""

    def build(self, chance: random.Random) -> Any:
        if chance.randrange(4) == 0:
            return [chance.choice(OBJECTS) for _ in range(chance.randrange(4))]
        return chance.choice(OBJECTS)


@dataclass(frozen=True)
class Container:
    """A dict, an ordered dict or a list."""

    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]
    ordered: bool

    def build(self, chance: random.Random) -> Any:
        values = [value.build(chance) for value in self.values]
        if self.keys is None:
            return values
        return (OrderedDict if self.ordered else dict)(zip(self.keys, values, strict=True))


_shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.just((70_000,))
_tensors = st.builds(Tensor, st.sampled_from(DTYPES), _shapes, st.booleans()).map(
    # Only floating-point parameters have gradients.
    lambda t: (
        t if t.dtype.is_floating_point or t.dtype.is_complex else Tensor(t.dtype, t.shape, False)
    )
)


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text("ab", max_size=2) | st.integers(0, 3) | st.booleans()

    def of(pairs: dict[Any, Any], ordered: bool) -> Container:
        return Container(tuple(pairs), tuple(pairs.values()), ordered)

    mappings = st.builds(of, st.dictionaries(keys, values, max_size=4), st.booleans())
    lists = st.lists(values, max_size=3).map(lambda v: Container(None, tuple(v), False))
    return mappings | lists


_nodes = st.recursive(_tensors | st.just(Object()), _containers, max_leaves=12)

states: st.SearchStrategy[dict[str, Any]] = st.dictionaries(st.text("ab", max_size=2), _nodes)
"""By key; each value has ``build(chance)``."""


def build(state: dict[str, Any], seed: int) -> dict[str, Any]:
    """A state of that structure; its values depend on ``seed``."""
    chance = random.Random(seed)
    return {key: value.build(chance) for key, value in state.items()}
