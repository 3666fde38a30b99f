"""Kinds of state for SPMD programs: what they hold, and how it is laid over the devices.

Values are made on the host from a seed, so that a process that restores them elsewhere can compute them; nothing
here imports torch_xla but :meth:`Layout.place` and what follows it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from support.states.states import noise

State = dict[str, Any]
Spec = tuple[int | None, ...] | None
"""For each dimension of a tensor the mesh's; None instead: the tensor isn't marked at all."""

BEFORE: Final = "before"
AFTER: Final = "after"
"""The two layouts of each kind: it is saved from one and restored into the other."""


class Marks(NamedTuple):
    """How tensors are laid out, before and after."""

    before: tuple[str, Spec]
    """Mesh and spec."""
    after: tuple[str, Spec]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of state."""

    values: Callable[[int], State]
    """On the host, from a seed."""
    marks: Mapping[str, Marks]
    """By the beginning of a tensor's path; the longest counts. Others stay on the host."""
    wrapped: bool = False
    """Whether sharded tensors stand in the state as what ``mark_sharding`` returns."""


def meshes(devices: int) -> dict[str, tuple[int, int]]:
    """Shapes of the meshes for so many devices."""
    return {
        "flat": (devices, 1),
        "wide": (1, devices),
        "grid": (max(1, devices // 2), min(2, devices)),
        "turned": (min(2, devices), max(1, devices // 2)),
    }


ROWS: Final = ("flat", (0, None))
COLUMNS: Final = ("flat", (None, 0))
GRID: Final = ("grid", (0, 1))
TURNED: Final = ("turned", (1, 0))
HALF: Final = ("grid", (0, None))
"""Tiled over one dimension of the mesh, replicated over the other."""
OTHER_HALF: Final = ("turned", (None, 1))
WHOLE: Final = ("flat", (None, None))
"""Marked as replicated."""
UNMARKED: Final = ("flat", None)


def _tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Any:
    def values(seed: int) -> State:
        return {"x".join(map(str, s)) or "scalar": noise(str(s), s, dtype, seed) for s in shapes}

    return values


_EVEN: Final = [(16, 8), (8, 16), (32, 24)]
_UNEVEN: Final = [(7, 3), (3, 7), (9, 2), (17, 5), (2, 11), (5,), (3, 5, 2)]
_TINY: Final = [(1, 1), (1, 2), (2, 1), (1, 9), (1,)]


def _dtypes(seed: int) -> State:
    # Not float16's noise: on its way to a device torch_xla makes its signalling NaNs quiet.
    kinds = (torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    state: State = {}
    for dtype in kinds:
        name = str(dtype).removeprefix("torch.")
        state[f"rows.{name}"] = noise(name, (9, 3), dtype, seed)
        state[f"whole.{name}"] = noise(name, (2, 3), dtype, seed + 1)
        state[f"scalar.{name}"] = noise(name, (), dtype, seed + 2)
    return state


@dataclasses.dataclass
class Position:
    """An object of a class that no unpickler knows by itself."""

    epoch: int
    row: int


def _mixed(seed: int) -> State:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return {
        "model": {
            "layers": [
                {"weight": noise(f"layer {i}", (12, 5), torch.float32, seed)} for i in (0, 1)
            ],
            "norm": noise("norm", (5,), torch.bfloat16, seed),
        },
        "host": noise("host", (6, 6), torch.float64, seed),
        "steps": torch.tensor(seed),
        "extra": {"step": seed, "nested": {"name": f"run {seed}", "none": None}, "empty": {}},
        "position": Position(seed, seed + 1),
        "pair": (seed, f"text {seed}"),
        "history": [1.5, float(seed)],
        "rng": generator.get_state(),
    }


KINDS: Final[dict[str, Kind]] = {
    "tiled": Kind(_tensors(_EVEN), {"": Marks(ROWS, COLUMNS)}),
    "two dimensions": Kind(_tensors(_EVEN), {"": Marks(GRID, TURNED)}),
    "uneven": Kind(_tensors(_UNEVEN), {"": Marks(ROWS, COLUMNS)}),
    "uneven in two dimensions": Kind(_tensors(_UNEVEN), {"": Marks(GRID, TURNED)}),
    # torch_xla can't mark it in other ways.
    "empty": Kind(_tensors([(0, 3)]), {"": Marks(ROWS, ROWS)}),
    "tiny": Kind(_tensors(_TINY), {"": Marks(ROWS, GRID)}),
    "partially replicated": Kind(_tensors(_EVEN + _UNEVEN), {"": Marks(HALF, OTHER_HALF)}),
    "from partially replicated": Kind(_tensors(_EVEN + _UNEVEN), {"": Marks(OTHER_HALF, ROWS)}),
    "replicated": Kind(_tensors(_EVEN + _UNEVEN), {"": Marks(WHOLE, ROWS)}),
    "to replicated": Kind(_tensors(_EVEN + _UNEVEN), {"": Marks(ROWS, WHOLE)}),
    "unsharded": Kind(_tensors([*_EVEN, *_UNEVEN]), {"": Marks(UNMARKED, GRID)}),
    "to unsharded": Kind(_tensors([*_EVEN, *_UNEVEN]), {"": Marks(GRID, UNMARKED)}),
    "dtypes": Kind(
        _dtypes,
        {
            "rows": Marks(ROWS, COLUMNS),
            "whole": Marks(UNMARKED, ROWS),
            "scalar": Marks(UNMARKED, UNMARKED),
        },
    ),
    "wrapped": Kind(_tensors(_EVEN + _UNEVEN), {"": Marks(ROWS, GRID)}, wrapped=True),
    "nested, objects and tensors of the host": Kind(
        _mixed,
        {
            "model.layers.0": Marks(ROWS, GRID),
            "model.layers.1": Marks(HALF, COLUMNS),
            "model.norm": Marks(UNMARKED, UNMARKED),
            "steps": Marks(UNMARKED, UNMARKED),
        },
    ),
}


def _marks(kind: Kind, path: str) -> Marks | None:
    fitting = [start for start in kind.marks if path.startswith(start)]
    return kind.marks[max(fitting, key=len)] if fitting else None


class Layout:
    """Devices of this process."""

    def __init__(self) -> None:
        import numpy as np
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        count = xr.global_runtime_device_count()
        self.devices = count
        self._meshes = {
            name: xs.Mesh(np.arange(count), shape, ("x", "y"))
            for name, shape in meshes(count).items()
        }

    def mark(self, tensor: torch.Tensor, mesh: str, spec: Spec) -> torch.Tensor:
        """An XLA tensor with that sharding; the wrapper, where it is one."""
        import torch_xla.distributed.spmd as xs

        if spec is None or not tensor.dim():
            return tensor
        fitting = (*spec, *[None] * tensor.dim())[: tensor.dim()]
        wrapped: torch.Tensor = xs.mark_sharding(tensor, self._meshes[mesh], fitting)
        return wrapped

    def place(self, kind: Kind, seed: int, which: str) -> State:
        """The state, laid over the devices."""
        placed = self._place(kind, kind.values(seed), which, "")
        assert isinstance(placed, dict)
        return placed

    def _place(self, kind: Kind, value: Any, which: str, path: str) -> Any:
        if isinstance(value, dict):
            return {
                k: self._place(kind, v, which, f"{path}.{k}".lstrip(".")) for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._place(kind, v, which, f"{path}.{i}") for i, v in enumerate(value)]
        marks = _marks(kind, path)
        if not isinstance(value, torch.Tensor) or marks is None:
            return value
        tensor = value.to("xla")
        mesh, spec = getattr(marks, which)
        wrapped = self.mark(tensor, mesh, spec)
        return wrapped if kind.wrapped else tensor


def on_host(value: Any) -> Any:
    """A copy of the state with its tensors on the host, where shards are put together bit for bit."""
    if any(map(is_sharded, tensors(value))):
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla.sync()
        xm.wait_device_ops()
    return _on_host(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A gather by .cpu() computes something, by which subnormals become zeros.
        return _whole(value) if is_sharded(value) else plain(value).detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _on_host(inner) for key, inner in value.items()}
    return list(map(_on_host, value)) if isinstance(value, list) else value


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    import torch_xla

    bindings = torch_xla._XLAC
    (shards,) = bindings._get_local_shards([plain(tensor)])
    (places,) = bindings._get_local_shard_replica_and_indices([plain(tensor)])
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (replica, place) in zip(shards, places, strict=True):
        part = shard[tuple(slice(0, index.stop - index.start) for index in place)]
        if replica:
            same = torch.equal(part.contiguous().view(torch.uint8), bytes_at(whole, place))
            assert same, f"replica {replica} at {place} is another"
        whole[tuple(place)] = part
    return whole


def bytes_at(tensor: torch.Tensor, place: list[slice]) -> torch.Tensor:
    """The bits of a part of a tensor."""
    return tensor[tuple(place)].contiguous().view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The XLA tensor in a wrapper."""
    inner: torch.Tensor = getattr(tensor, "global_tensor", tensor)
    return inner


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether devices hold different parts of it."""
    if tensor.device.type != "xla":
        return False
    import torch_xla

    tiled, partial = 3, 5
    return torch_xla._XLAC._get_xla_sharding_type(plain(tensor)) in (tiled, partial)


def tensors(value: Any) -> list[torch.Tensor]:
    """The XLA tensors of a state, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.device.type == "xla" else []
    inner = list(value.values()) if isinstance(value, dict) else value
    return [t for v in inner for t in tensors(v)] if isinstance(inner, list) else []


def shardings(value: Any) -> list[str]:
    """The sharding of each of :func:`tensors`."""
    import torch_xla

    specs: list[str] = torch_xla._XLAC._get_xla_sharding_specs(list(map(plain, tensors(value))))
    return specs
