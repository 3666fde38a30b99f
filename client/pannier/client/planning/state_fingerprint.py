"""The structure of a state dict, without its values; finds the values of states with the same structure.

In: state dicts with their ``Stateful`` values expanded. Out: for a state with the structure of
an earlier one, the value of each item that a ``DefaultSavePlanner`` would plan, in its
order, without planning. Everything that the plan depends on is compared: keys, types and
lengths of containers; of each tensor its dtype, shape, layout, ``requires_grad``, kind of
device, distribution over ranks or over XLA's devices, and the part of a global tensor that it
declares to be; of other objects only their position. A value that has methods by which it describes
itself to DCP has no rule: what they answer may change. Strides, conj and neg bits, and
identities may differ: the copy handles them. ``pin_memory``, which no reader uses, stays as
it was planned.

A state with values that this module has no rule for has no fingerprint; DCP plans it, which is
always correct, only slower.
"""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import attrgetter, eq
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from pannier.client import torch_compat
from pannier.client.xla import runtime, shard_tensors

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict})
ATOMS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
"""Types whose values DCP always pickles as objects."""
_OWN_ITEMS: Final = "__create_write_items__"
"""Values with this method make their own items."""
_OWN_METHODS: Final = (_OWN_ITEMS, "__create_chunk_list__", "__get_tensor_shard__")
"""Methods of ``torch.distributed._checkpointable``: what they answer can't be compared without planning."""
_HOST_FACTS: Final = attrgetter("dtype", "shape", "requires_grad", "layout", "is_cpu")
_FACTS: Final = attrgetter("dtype", "shape", "requires_grad", "layout", "device.type")


_DESCRIBE_SHARDS: Final = hasattr(dcp, "CheckpointableTensor")
"""Whether this torch treats a plain tensor with these attributes as shards of a global one."""
_SHARD_ATTRIBUTES: Final = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_OWN_DESCRIPTION: Final = frozenset({*_OWN_METHODS, *_SHARD_ATTRIBUTES})


class _Kind(enum.Enum):
    PLAIN = enum.auto()
    DTENSOR = enum.auto()
    SHARDED = enum.auto()
    MAPPING = enum.auto()
    LIST = enum.auto()
    OBJECT = enum.auto()
    UNKNOWN = enum.auto()


class _NotUnderstoodError(Exception):
    """The state dict holds a value that this module has no rule for."""


class StateFingerprint:
    """The structure of one state dict. Immutable.

    Raises _NotUnderstoodError; see :func:`fingerprint`.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        paths: list[tuple[str, ...]] = []
        self._root = _Node(state, (), paths)
        leaves: list[Any] = []
        if torch_compat.uses_old_flattening() or not self._root.collect(state, leaves):
            raise _NotUnderstoodError
        kinds = [_leaf_kind(leaf) for leaf in leaves]
        self._objects = _positions(kinds, _Kind.OBJECT)
        self._shards = _ShardFacts(leaves, kinds)
        self._xla = _XlaFacts(leaves)
        parts = self._parts(leaves)
        self._even = not self._xla.positions and all(len(part) == 1 for part in parts)
        fqns = [".".join(path) for path in paths]
        self.fqns = [fqn for fqn, part in zip(fqns, parts, strict=True) for _ in part]
        """Key of each item's value."""
        self._tensors = _TensorFacts([value for part in parts for value in part])

    def values(self, state: Mapping[str, Any]) -> list[Any] | None:
        """The value of each item; None when the structure differs.

        Tensors are this rank's plain ones, not detached; those of XLA's devices are
        :class:`pannier.client.xla.shard_tensors.ShardView`; objects are the state's own.
        """
        try:
            with torch_compat.without_torch_functions():
                return self._values(state)
        except (RuntimeError, NotImplementedError):
            # A tensor that has no shape, for example.
            return None

    def _values(self, state: Mapping[str, Any]) -> list[Any] | None:
        leaves: list[Any] = []
        if torch_compat.uses_old_flattening() or not self._root.collect(state, leaves):
            return None
        if not all(map(_is_object, map(leaves.__getitem__, self._objects))):
            return None
        if not self._shards.match(leaves) or not self._xla.match(leaves):
            return None
        if self._even:
            self._shards.replace_by_local(leaves)
        else:
            leaves = [value for part in self._parts(leaves) for value in part]
        return leaves if self._tensors.match(leaves, plain=not self._shards.positions) else None

    def _parts(self, leaves: list[Any]) -> list[list[Any]]:
        """The values of each leaf's items."""
        parts = [[leaf] for leaf in leaves]
        for i in self._shards.dtensors:
            parts[i] = (
                torch_compat.local_tensors(leaves[i]) if torch_compat.in_mesh(leaves[i]) else []
            )
        for i in self._shards.sharded:
            parts[i] = torch_compat.local_tensors(leaves[i])
        for i, sharding in zip(self._xla.positions, self._xla.shardings, strict=True):
            parts[i] = list(sharding.views(i, leaves[i]))
        return parts


class _ShardFacts:
    """How leaves are distributed over ranks: DTensors, ShardedTensors and checkpointable tensors."""

    def __init__(self, leaves: list[Any], kinds: list[_Kind]) -> None:
        self.dtensors = _positions(kinds, _Kind.DTENSOR)
        self.sharded = _positions(kinds, _Kind.SHARDED)
        self.positions = [*self.dtensors, *self.sharded]
        """Positions of the leaves that are replaced by local tensors in the values."""
        self._plain = _positions(kinds, _Kind.PLAIN)
        self._grad = torch.is_grad_enabled()
        self._described = _described_shards(leaves, self._plain)
        if None in self._described.values() or self._describe_themselves(leaves):
            raise _NotUnderstoodError
        self._dtensor_facts = torch_compat.dtensor_facts([leaves[i] for i in self.dtensors])
        self._sharded_facts = [torch_compat.sharded_facts(leaves[i]) for i in self.sharded]

    def match(self, leaves: list[Any]) -> bool:
        if self.positions and not self._match_distributed(leaves):
            return False
        return self._described == _described_shards(leaves, self._plain)

    def _match_distributed(self, leaves: list[Any]) -> bool:
        # With gradients disabled, a DTensor's local part doesn't require one.
        if self.dtensors and self._grad != torch.is_grad_enabled():
            return False
        return (
            self._dtensor_facts == torch_compat.dtensor_facts([leaves[i] for i in self.dtensors])
            and self._sharded_facts == [torch_compat.sharded_facts(leaves[i]) for i in self.sharded]
            and not self._describe_themselves(leaves)
        )

    def _describe_themselves(self, leaves: list[Any]) -> bool:
        """Whether a distributed leaf, or the local tensor of a DTensor, describes itself to DCP."""
        if self.dtensors and not torch_compat.dtensors_are_planned_by_torch():
            return True
        own = map(vars, map(leaves.__getitem__, self.positions))
        if not all(map(_OWN_DESCRIPTION.isdisjoint, own)):
            return True
        local = map(torch_compat.LOCAL_TENSOR, map(leaves.__getitem__, self.dtensors))
        return _DESCRIBE_SHARDS and any(map(hasattr, local, repeat(_SHARD_ATTRIBUTES[0])))

    def replace_by_local(self, leaves: list[Any]) -> None:
        """Replaces each distributed leaf by this rank's tensor, if every leaf has exactly one part."""
        for i in self.positions:
            leaves[i] = torch_compat.local_tensors(leaves[i])[0]


class _XlaFacts:
    """Tensors of XLA's devices, and how each is sharded over them."""

    def __init__(self, leaves: list[Any]) -> None:
        self.positions = list(_xla_positions(leaves))
        tensors = [leaves[i] for i in self.positions]
        self._facts = list(map(_FACTS, tensors))
        shardings = None if _have_own_methods(tensors) else _shardings(tensors)
        if shardings is None:
            raise _NotUnderstoodError
        self.shardings = shardings

    def match(self, leaves: list[Any]) -> bool:
        if not self.positions:
            return True
        tensors = [leaves[i] for i in self.positions]
        if list(map(_FACTS, tensors)) != self._facts or _have_own_methods(tensors):
            return False
        # Pending work may give a tensor another sharding.
        runtime.settle()
        return not shard_tensors.have_changed(tensors, self.shardings)


class _TensorFacts:
    """Which values are tensors, all of them plain, and what describes each."""

    def __init__(self, values: list[Any]) -> None:
        self._positions = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._all_tensors = len(self._positions) == len(values)
        tensors = [values[i] for i in self._positions]
        if not _PLAIN.issuperset(map(type, tensors)) or _have_own_methods(tensors):
            raise _NotUnderstoodError
        on_host = all(tensor.is_cpu for tensor in tensors)
        self._facts_of = _HOST_FACTS if on_host else _FACTS
        self._facts = list(map(self._facts_of, tensors))

    def match(self, values: list[Any], *, plain: bool) -> bool:
        """``plain``: the types of the tensors are known to be right."""
        tensors = values if self._all_tensors else [values[i] for i in self._positions]
        if not plain and not _PLAIN.issuperset(map(type, tensors)):
            return False
        # One by one: ten thousand new tuples at once would start the garbage collector.
        same = all(map(eq, map(self._facts_of, tensors), self._facts))
        return same and len(tensors) == len(self._facts) and not _have_own_methods(tensors)


def fingerprint(state: Mapping[str, Any]) -> StateFingerprint | None:
    """The fingerprint of a state dict that was planned; None if a value has no rule here."""
    try:
        with torch_compat.without_torch_functions():
            return StateFingerprint(state)
    except (_NotUnderstoodError, RuntimeError, NotImplementedError):
        return None


class _Node:
    """A container: its keys, and what it holds."""

    __slots__ = ("_children", "_is_mapping", "_key_types", "_keys", "_objects", "_types")

    def __init__(
        self, container: Any, path: tuple[str, ...], paths: list[tuple[str, ...]], depth: int = 0
    ) -> None:
        if depth > 100:
            raise _NotUnderstoodError
        self._is_mapping = isinstance(container, Mapping)
        values = list(container.values()) if self._is_mapping else list(container)
        self._keys = list(container) if self._is_mapping else []
        self._key_types = list(map(type, self._keys))
        if not {str, int, bool}.issuperset(self._key_types):
            # Equal keys of other types may have different texts, as 0.0 and -0.0.
            raise _NotUnderstoodError
        self._types = list(map(type, values))
        self._children: list[tuple[int, _Node]] = []
        self._objects: set[int] = set()
        for at, value in enumerate(values):
            part = str(self._keys[at]) if self._is_mapping else str(at)
            kind = _leaf_kind(value)
            if kind is _Kind.UNKNOWN:
                raise _NotUnderstoodError
            if kind in (_Kind.MAPPING, _Kind.LIST):
                self._children.append((at, _Node(value, (*path, part), paths, depth + 1)))
                continue
            paths.append((*path, part))
            if kind is _Kind.OBJECT:
                self._objects.add(at)

    def collect(self, container: Any, out: list[Any]) -> bool:
        """Appends the leaves, in order; False when the container's structure differs."""
        if self._is_mapping:
            keys = list(container)
            if keys != self._keys or list(map(type, keys)) != self._key_types:
                return False
            values = list(container.values())
        else:
            values = container
        types = list(map(type, values))
        if types != self._types and not self._allows(types):
            return False
        begin = 0
        for at, child in self._children:
            out += values[begin:at]
            if not child.collect(values[at], out):
                return False
            begin = at + 1
        out += values[begin:] if begin else values
        return True

    def _allows(self, types: list[type]) -> bool:
        """Whether only objects have other types; :func:`_is_object` checks these later."""
        return len(types) == len(self._types) and all(
            one is other or (at in self._objects and _kind(one) in (_Kind.OBJECT, _Kind.LIST))
            for at, (one, other) in enumerate(zip(types, self._types, strict=True))
        )


def _kind(kind: type) -> _Kind:
    """How DCP treats values of a type; a list may be an object, too."""
    found = _kinds.get(kind)
    if found is None:
        if issubclass(kind, torch.Tensor | Mapping | list) or hasattr(kind, _OWN_ITEMS):
            return _Kind.UNKNOWN
        if len(_kinds) < _MOST_KINDS:
            _kinds[kind] = _Kind.OBJECT
        return _Kind.OBJECT
    return found


_MOST_KINDS: Final = 1000
_kinds: Final[dict[type, _Kind]] = {
    torch.Tensor: _Kind.PLAIN,
    torch.nn.Parameter: _Kind.PLAIN,
    DTensor: _Kind.DTENSOR,
    torch_compat.ShardedTensor: _Kind.SHARDED,
    list: _Kind.LIST,
    **dict.fromkeys(_MAPPINGS, _Kind.MAPPING),
}


def _leaf_kind(value: Any) -> _Kind:
    kind = _kind(type(value))
    if kind is _Kind.LIST and _is_terminal(value):
        return _Kind.OBJECT
    if kind is _Kind.OBJECT and not _is_object(value):
        return _Kind.UNKNOWN
    return kind


def _is_object(value: Any) -> bool:
    """Whether DCP pickles the whole value, which is of kind object or a list."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if kind is list:
        return _is_terminal(value)
    # By isinstance as well: DCP takes a proxy of a tensor or mapping for what it stands for.
    return (
        _kind(kind) is _Kind.OBJECT
        and not isinstance(value, torch.Tensor | Mapping | list)
        and not hasattr(value, _OWN_ITEMS)
    )


def _have_own_methods(tensors: list[torch.Tensor]) -> bool:
    one, two, three = _OWN_METHODS
    return (
        any(map(hasattr, tensors, repeat(one)))
        or any(map(hasattr, tensors, repeat(two)))
        or any(map(hasattr, tensors, repeat(three)))
    )


def _is_terminal(values: list[Any]) -> bool:
    """As DCP: whether a list holds neither tensors nor mappings nor lists of such."""
    if ATOMS.issuperset(map(type, values)):
        return True
    return not any(
        isinstance(value, torch.Tensor | Mapping)
        or (isinstance(value, list) and not _is_terminal(value))
        for value in values
    )


def _described_shards(leaves: list[Any], plain: Iterable[int]) -> dict[int, tuple[Any, ...] | None]:
    """The shards that DCP's ``CheckpointableTensor`` values among the plain tensors declare, by position.

    None for a tensor whose attributes are not sequences of integers.
    """
    if not _DESCRIBE_SHARDS:
        return {}
    # Few tensors have the first attribute: the other attributes are checked only for these.
    first, *others = _SHARD_ATTRIBUTES
    return {
        i: _shard_facts(leaves[i])
        for i in plain
        if hasattr(leaves[i], first) and all(hasattr(leaves[i], name) for name in others)
    }


def _shard_facts(tensor: Any) -> tuple[Any, ...] | None:
    # A copy: the tensor's own may be lists, which may change.
    shape, *parts = (getattr(tensor, name) for name in _SHARD_ATTRIBUTES)
    try:
        return (tuple(shape), *(tuple(map(tuple, each)) for each in parts))
    except TypeError:
        return None


def _xla_positions(leaves: Iterable[Any]) -> Iterable[int]:
    if runtime.is_loaded():
        for i, leaf in enumerate(leaves):
            if type(leaf) in _PLAIN and leaf.device.type == "xla":
                yield i


def _shardings(tensors: list[torch.Tensor]) -> list[shard_tensors.Sharding] | None:
    if not tensors:
        return []
    runtime.settle()
    return shard_tensors.shardings(tensors)


def _positions(kinds: Iterable[_Kind], wanted: _Kind) -> list[int]:
    return [i for i, kind in enumerate(kinds) if kind is wanted]
