"""Kinds of state that a checkpoint must bring back, each as a function of layout and seed.

``kind.build(layout, seed)`` gives the same values on any number of ranks, laid out for
that many: what one layout saves, another must load.
"""

import dataclasses
import enum
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

State = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """This rank's place among the ranks that save or load."""

    rank: int
    ranks: int
    writers: int = 0
    """How many ranks have saved what is loaded; 0 when saving."""
    _meshes: dict[Any, DeviceMesh] = field(default_factory=dict)

    def mesh(self, *names: str) -> DeviceMesh:
        """One dimension, or two of which the first is 2 for an even number of ranks."""
        if names not in self._meshes:
            first = 2 if self.ranks % 2 == 0 else 1
            shape = (self.ranks,) if len(names) == 1 else (first, self.ranks // first)
            self._meshes[names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return self._meshes[names]


@dataclass(frozen=True)
class Kind:
    name: str
    build: Callable[[Layout, int], State]
    planner: Callable[[], DefaultSavePlanner] | None = None
    load_planner: Callable[[], DefaultLoadPlanner] | None = None
    loaded: Callable[[Layout, int], State] | None = None
    """What loading gives, where that isn't what was saved."""
    most_bytes: int | None = None
    """Bound for the sum of the data files."""
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of ranks that have this layout."""

    def expected(self, layout: Layout, seed: int) -> State:
        return (self.loaded or self.build)(layout, seed)


def noise(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes as a tensor: among floats also infinities, subnormals and odd NaNs."""
    empty = torch.empty(shape, dtype=dtype)
    data = bytearray(random.Random(f"{name}/{seed}").randbytes(empty.nbytes))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return empty
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).view(shape)


def normal(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Ordinary numbers."""
    generator = torch.Generator().manual_seed(random.Random(f"{name}/{seed}").getrandbits(60))
    return torch.randn(shape, generator=generator, dtype=dtype)


def _plain(layout: Layout, seed: int) -> State:
    return {
        "matrix": noise("matrix", (33, 17), torch.float32, seed),
        "vector": noise("vector", (1001,), torch.float32, seed),
    }


def _big(layout: Layout, seed: int) -> State:
    # Larger than a message, a page and the alignment of large items.
    return {
        "big": noise("big", (5 << 20,), torch.uint8, seed),
        "odd": noise("odd", ((1 << 20) + 3,), torch.bfloat16, seed),
        **{f"small.{i}": noise(f"small{i}", (i,), torch.int16, seed) for i in range(60)},
    }


def _nested(layout: Layout, seed: int) -> State:
    return {
        "model": {"layers": [{"w": normal(f"l{i}", (3, 2), seed)} for i in range(3)]},
        "step": seed,
        "lr": seed / 7,
        "name": f"run-{seed}",
        "none": None,
        "flag": bool(seed % 2),
        "betas": (0.9, seed / 1000),
        "list": [1, seed, "x", [2, {"deep": normal("deep", (2,), seed)}]],
        "tuple": (normal("in a tuple", (2, 2), seed), {"a": seed}),
        "empty list": [],
        "ключ/with space": normal("key", (2,), seed),
    }


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Position:
    epoch: int
    history: list[int]
    noise: torch.Tensor


def _objects(layout: Layout, seed: int) -> State:
    return {
        "position": Position(seed, [seed, seed + 1], normal("object", (4,), seed)),
        "random": random.Random(seed).getstate(),
        "generator": torch.Generator().manual_seed(seed).get_state(),
        "bytes": seed.to_bytes(4, "big") * 1000,
        "set": {seed, seed + 1},
        "colour": Colour(1 + seed % 2),
        "dtype": torch.float16 if seed % 2 else torch.bfloat16,
        "size": torch.Size((seed, 2)),
    }


def _per_rank(layout: Layout, seed: int) -> State:
    # Each rank saves its own; a load gets all of them.
    ranks = range(layout.writers) if layout.writers else [layout.rank]
    return {
        f"rng.{rank}": {
            "state": [seed, rank],
            "tensor": noise(f"r{rank}", (rank,), torch.int32, seed),
        }
        for rank in ranks
    }


class Counter:
    """A Stateful whose tensors are new ones at each call."""

    def __init__(self, seed: int) -> None:
        self.count = seed
        self.base = normal("stateful", (3, 3), seed)

    def state_dict(self) -> State:
        return {"count": self.count, "sum": self.base + 1, "in": {"base": self.base}}

    def load_state_dict(self, state: State) -> None:
        self.count, self.base = state["count"], state["in"]["base"]


def _stateful(layout: Layout, seed: int) -> State:
    return {"counter": Counter(seed), "beside": normal("beside", (2,), seed)}


def _shapes(layout: Layout, seed: int) -> State:
    shapes = [(), (0,), (0, 5), (3, 0, 2), (1,), (1, 1, 1), (2, 3, 4, 5, 6)]
    return {str(shape): noise(str(shape), shape, torch.float64, seed) for shape in shapes}


def _strides(layout: Layout, seed: int) -> State:
    image = noise("image", (2, 3, 4, 5), torch.float32, seed)
    volume = noise("volume", (2, 3, 4, 5, 6), torch.float32, seed)
    matrix = noise("matrix", (6, 8), torch.int32, seed)
    return {
        "transposed": matrix.t(),
        "every other": matrix[::2, 1::3],
        "column": matrix[:, 3],
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_3d": volume.to(memory_format=torch.channels_last_3d),
        "permuted": volume.permute(4, 0, 2, 1, 3),
        "overlapping": noise("line", (20,), torch.float32, seed).as_strided((5, 4), (3, 1)),
    }


def _expanded(layout: Layout, seed: int) -> State:
    row = noise("row", (1, 7), torch.float32, seed)
    one = noise("one", (1,), torch.int64, seed)
    # Memory of its own where it is loaded into: torch refuses to write into an expanded tensor.
    own = (lambda t: t.clone(memory_format=torch.contiguous_format)) if layout.writers else _same
    return {"row": own(row.expand(5, 7)), "one": own(one.expand(3, 1, 4))}


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _views(layout: Layout, seed: int) -> State:
    base = noise("base", (4 << 20,), torch.float32, seed)
    return {"view": base[12345 : 12345 + 64], "window": base.view(2048, 2048)[7:9, 5:11]}


def _conj_neg(layout: Layout, seed: int) -> State:
    number = normal("complex", (4, 5), seed, torch.complex64)
    wide = normal("wide", (3, 2), seed, torch.complex128)
    state = {
        "conj": number.conj(),
        "conj transposed": number.mH,
        "neg": number.conj().imag,
        "both": torch._neg_view(number.conj()),
        "wide": wide[1:].conj(),
        "real": wide.conj().real,
    }
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    return state


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]


def _dtypes(layout: Layout, seed: int) -> State:
    return {
        f"{dtype} {shape}": noise(f"{dtype}", shape, dtype, seed)
        for dtype in DTYPES
        for shape in ((), (0, 3), (7, 3))
    }


def _parameters(layout: Layout, seed: int) -> State:
    weight = torch.nn.Parameter(normal("weight", (4, 3), seed))
    marked = torch.nn.Parameter(normal("marked", (3,), seed), requires_grad=False)
    marked.tensor_parallel = True  # as Megatron does
    if layout.writers:
        # torch loads into leaves only.
        computed = (weight * 2).detach()
    else:
        computed = weight * 2
        assert computed.grad_fn is not None
    return {"weight": weight, "marked": marked, "computed": computed}


def _tied(layout: Layout, seed: int) -> State:
    weight = noise("tied", (9, 4), torch.float32, seed)
    return {"embedding": weight, "head": weight, "rows": weight[2:5], "all": weight.view(-1)}


def quantized(seed: int) -> State:
    """Saved and loaded with one quantizer: torch copies the integers alone."""
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return {
        "tensor": torch.quantize_per_tensor(normal("qt", (5, 4), seed), 0.15, 3, torch.qint8),
        "unsigned": torch.quantize_per_tensor(normal("qu", (7,), seed), 0.05, 128, torch.quint8),
        "channel": torch.quantize_per_channel(
            normal("qc", (3, 4), seed), scales, zeros, 0, torch.qint8
        ),
        "beside": normal("beside", (3,), seed),
    }


def _quantized(layout: Layout, seed: int) -> State:
    return quantized(seed)


def _wrapper(layout: Layout, seed: int) -> State:
    pair = TwoTensor(normal("a", (3, 4), seed), normal("b", (3, 4), seed))
    return {"pair": pair, "beside": normal("beside", (3,), seed)}


class Halving(DefaultSavePlanner):
    """Stores wide floats as bfloat16, which its plan doesn't say."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        if isinstance(object, torch.Tensor) and object.dtype is torch.float32:
            return object.to(torch.bfloat16)
        return object


def _transformed(layout: Layout, seed: int) -> State:
    return {
        "wide": normal("wide", (6, 5), seed),
        "exact": normal("exact", (6, 5), seed, torch.float64),
        "step": seed,
    }


def _halved(layout: Layout, seed: int) -> State:
    state = _transformed(layout, seed)
    return {**state, "wide": state["wide"].to(torch.bfloat16).float()}


class Renaming(DefaultSavePlanner):
    """Leaves keys out, and looks values up elsewhere than in the state dict."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        kept = [item for item in plan.items if not item.index.fqn.startswith("skip")]
        self.plan = dataclasses.replace(plan, items=kept)
        return self.plan

    def lookup_object(self, index: Any) -> Any:
        value = super().lookup_object(index)
        return value + 1 if index.fqn == "count" else value

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


def _renamed(layout: Layout, seed: int) -> State:
    state = {"keep": normal("keep", (3,), seed), "count": torch.tensor(seed), "step": seed}
    return state if layout.writers else {**state, "skip.me": normal("skip", (3,), seed)}


def _renamed_loaded(layout: Layout, seed: int) -> State:
    state = _renamed(layout, seed)
    return {**state, "count": state["count"] + 1}


def _flat(layout: Layout, seed: int) -> State:
    # Not flattened: a nested value is one object.
    return {"weight": normal("weight", (5, 2), seed), "nested": {"a": [seed, {"b": seed}]}}


def _lowest(layout: Layout, seed: int) -> State:
    return {f"w{i}": noise(f"w{i}", (64,), torch.float32, seed) for i in range(6)}


def _buffers(layout: Layout, seed: int) -> State:
    return {"a buffer": io.BytesIO(seed.to_bytes(8, "big") * 5), "x": normal("x", (2,), seed)}


PLAIN = [
    Kind("plain tensors", _plain),
    Kind("big tensors", _big),
    Kind("nested", _nested),
    Kind("objects", _objects),
    Kind("byte buffers", _buffers),
    Kind("per-rank keys", _per_rank),
    Kind("stateful", _stateful),
    Kind("shapes", _shapes),
    Kind("strides", _strides),
    Kind("expanded", _expanded),
    Kind("small views", _views, most_bytes=20_000),
    Kind("conj and neg", _conj_neg),
    Kind("dtypes", _dtypes),
    Kind("parameters", _parameters),
    Kind("tied", _tied),
    Kind("quantized", _quantized),
    Kind("wrapper subclass", _wrapper),
    Kind("transform_object", _transformed, planner=Halving, loaded=_halved),
    Kind("create_local_plan", _renamed, planner=Renaming, loaded=_renamed_loaded),
    Kind(
        "not flattened",
        _flat,
        planner=lambda: DefaultSavePlanner(flatten_state_dict=False),
        # With flattening of sharded tensors torch loads objects into a copy that it forgets.
        load_planner=lambda: DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        ),
    ),
    Kind(
        "lowest rank",
        _lowest,
        planner=lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    ),
]
