"""How the keys of a state fit those of a checkpoint: what is missing, not read or narrowed, and keys that aren't text.

In: the values of a state dict, the checkpoint's metadata, the planner and its plans. Out: hints and counts for the
caller; objects under keys that aren't text are put where they were, which DCP's planner doesn't. Pure, but for the
planner's mappings and the state; for one load of one rank.
"""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from pannier.client import torch_compat
from pannier.client.restore.load_result import Keys, LoadResult
from pannier.client.xla import planners

_log = logging.getLogger(__name__)

_SHOWN: Final = 5
_WRAPPERS: Final = frozenset(
    {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Parts that ``torch.compile``, data parallelism and activation checkpointing put into the keys of a module."""


def missing_hint(values: Mapping[str, Any], metadata: Metadata) -> str:
    """Stored keys with the same last parts as keys that the checkpoint lacks; empty: it lacks none, or has no such."""
    flat, _ = torch_compat.flatten_state_dict(dict(values))
    stored = metadata.state_dict_metadata
    missing = [key for key in flat if key not in stored]
    by_end: dict[tuple[str, ...], str] = {}
    bare: dict[tuple[str, ...], str] = {}
    for key in stored:
        parts = tuple(key.split("."))
        bare.setdefault(_bare(parts), key)
        for length in range(1, len(parts) + 1):
            by_end.setdefault(parts[-length:], key)
    similar = {}
    for key in missing[:_SHOWN]:
        if found := bare.get(_bare(tuple(key.split(".")))) or _same_end(key, by_end):
            similar[key] = found
    if not similar:
        return ""
    shown = ", ".join(f"{theirs!r} for {mine!r}" for mine, theirs in similar.items())
    lacks = f"{len(missing)} keys" if len(missing) > 1 else "1 key"
    return f"The checkpoint lacks {lacks} of the state, and has others with the same last parts: {shown}."


def _bare(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part in parts if part not in _WRAPPERS)


def _same_end(key: str, by_end: Mapping[tuple[str, ...], str]) -> str | None:
    parts = tuple(key.split("."))
    for length in range(len(parts), 0, -1):
        found = by_end.get(parts[-length:])
        if found is not None:
            # One common part is enough only if it is all of either key.
            return found if length > 1 or length in (len(parts), len(found.split("."))) else None
    return None


def unread(metadata: Metadata, plans: Iterable[LoadPlan]) -> Keys:
    """The stored keys that no rank's plan reads."""
    read = {item.storage_index.fqn for plan in plans for item in plan.items}
    return _keys(
        key
        for key, stored in metadata.state_dict_metadata.items()
        # A tensor without elements is in no plan.
        if key not in read and not (isinstance(stored, TensorStorageMetadata) and 0 in stored.size)
    )


def narrowed(planner: LoadPlanner, metadata: Metadata) -> Keys:
    """The tensors of the state whose dtype can't hold the stored one's values."""
    state = getattr(_bare_planner(planner), "state_dict", None)
    if not isinstance(state, Mapping):
        return Keys()
    stored = metadata.state_dict_metadata
    return _keys(
        key
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and isinstance(found := stored.get(key), TensorStorageMetadata)
        and found.properties.dtype is not value.dtype
        and _narrows(found.properties.dtype, value.dtype)
    )


def warn(result: LoadResult) -> None:
    """Warns of keys that were not read, and of tensors that were narrowed."""
    if result.unread.count:
        _log.warning(
            "%s: the load left %s, which no rank's state has", result.checkpoint_id, result.unread
        )
    if result.cast.count:
        _log.warning(
            "%s: values may have changed by the load into a narrower dtype than the stored one, of %s",
            result.checkpoint_id,
            result.cast,
        )


@functools.lru_cache
def _narrows(stored: torch.dtype, target: torch.dtype) -> bool:
    try:
        return torch.promote_types(stored, target) != target
    except RuntimeError:  # dtypes of 8 bits and less have no common one
        return target.itemsize <= stored.itemsize


def _keys(found: Iterable[str]) -> Keys:
    keys = sorted(found)
    return Keys(len(keys), tuple(keys[:_SHOWN]))


class OtherKeys:
    """Objects under keys that aren't text, as those of MultiStepLR's milestones.

    DCP's planner puts what it has read under the key's text, beside the old value.

    Args:
        planner: set up with ``values``; its mappings of such objects are replaced, until :meth:`restore`.
        values: of the state.
    """

    def __init__(self, planner: LoadPlanner, values: dict[str, Any]) -> None:
        self._values = values
        self._places: list[tuple[str, Any, Any]] = []
        """Each object's key at the top of ``values`` while it is read, its container and its key there."""
        bare = _bare_planner(planner)
        if not isinstance(bare, DefaultLoadPlanner) or not bare.flatten_state_dict:
            return
        found = [
            (fqn, container, key)
            for fqn, container, key in _places(values)
            if fqn in bare.mappings and not isinstance(bare.state_dict.get(fqn), torch.Tensor)
        ]
        if found and type(bare).load_bytes is not DefaultLoadPlanner.load_bytes:
            _log.warning(
                "%s.load_bytes decides where objects under keys that aren't strings are put, such as %r: DCP puts "
                "them under the key's text",
                type(bare).__name__,
                found[0][0],
            )
            return
        for fqn, container, key in found:
            alias = f"\0{fqn}"
            bare.mappings[fqn] = (alias,)
            self._places.append((alias, container, key))

    def restore(self) -> None:
        """Puts what was read where it was in the state."""
        for alias, container, key in self._places:
            if alias in self._values:
                container[key] = self._values.pop(alias)


def _places(
    container: Any, path: tuple[str, ...] = (), *, below_other: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """The flattened keys, containers and keys of what is below a key that isn't text."""
    is_mapping = isinstance(container, Mapping)
    for key, value in list(container.items() if is_mapping else enumerate(container)):
        other = below_other or (is_mapping and not isinstance(key, str))
        inner = (*path, str(key))
        if isinstance(value, Mapping | list):
            yield from _places(value, inner, below_other=other)
        if other and isinstance(container, MutableMapping | list):
            yield ".".join(inner), container, key


def _bare_planner(planner: LoadPlanner) -> LoadPlanner:
    return planner.planner if isinstance(planner, planners.LoadPlanner) else planner
