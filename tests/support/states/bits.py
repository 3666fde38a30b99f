"""Comparing state dicts bit for bit, and overwriting them where they lie."""

import dataclasses
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of this rank that a tensor of any kind consists of."""
    tensor = tensor.detach()
    if isinstance(tensor, ShardedTensor):
        return [part for shard in tensor.local_shards() for part in parts(shard.tensor)]
    if isinstance(tensor, DTensor):
        return parts(tensor.to_local())
    if isinstance(tensor, TwoTensor):
        return [tensor.a, tensor.b]
    return [tensor]


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a plain tensor in row-major order, as they are in memory."""
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    # Into fresh memory: clone() would keep the strides of a dense tensor.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return flat.view(torch.uint8).numpy().tobytes()


def differences(got: Any, want: Any, path: str = "") -> list[str]:
    """Where two values differ; empty when they are the same, bit for bit."""
    if isinstance(want, Stateful):
        want = want.state_dict()
    if isinstance(got, Stateful):
        got = got.state_dict()
    if isinstance(want, torch.Tensor):
        return list(_tensor_differences(got, want, path))
    if isinstance(want, io.BytesIO) and isinstance(got, io.BytesIO):
        return differences(got.getvalue(), want.getvalue(), path)
    if type(got) is not type(want):
        return [f"{path}: a {type(got).__name__} instead of a {type(want).__name__}"]
    if isinstance(want, Mapping):
        found = [f"{path}.{key}: missing" for key in want.keys() - got.keys()]
        found += [f"{path}.{key}: not expected" for key in got.keys() - want.keys()]
        for key in want.keys() & got.keys():
            found += differences(got[key], want[key], f"{path}.{key}")
        return found
    if isinstance(want, list | tuple):
        if len(got) != len(want):
            return [f"{path}: {len(got)} instead of {len(want)} elements"]
        return [
            text
            for index, (one, other) in enumerate(zip(got, want, strict=True))
            for text in differences(one, other, f"{path}[{index}]")
        ]
    if dataclasses.is_dataclass(want):
        return differences(vars(got), vars(want), path)
    return [] if got == want else [f"{path}: {got!r:.80} instead of {want!r:.80}"]


def _tensor_differences(got: Any, want: torch.Tensor, path: str) -> Iterator[str]:
    if not isinstance(got, torch.Tensor):
        yield f"{path}: a {type(got).__name__} instead of a tensor"
        return
    if got.shape != want.shape or got.dtype != want.dtype:
        yield f"{path}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
        return
    ours, theirs = parts(got), parts(want)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        yield f"{path}: local shapes {[tuple(part.shape) for part in ours]}"
        return
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if bits(one) != bits(other):
            shown, wanted = bits(one).hex()[:48], bits(other).hex()[:48]
            yield f"{path} part {index}: {shown}... instead of {wanted}..."
        if other.is_quantized and _quantizer(one) != _quantizer(other):
            yield f"{path}: quantized with {_quantizer(one)} instead of {_quantizer(other)}"


def _quantizer(tensor: torch.Tensor) -> list[Any]:
    if tensor.qscheme() == torch.per_tensor_affine:
        return [tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()]
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [tensor.qscheme(), scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis()]


def overwrite(value: Any) -> None:
    """Changes everything below ``value`` in place: all bytes of its tensors, and its objects."""
    _overwrite(value, set())


def _overwrite(value: Any, done: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        for part in parts(value):
            storage = part.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in done:
                done.add(storage.data_ptr())
                torch.tensor([], dtype=torch.uint8).set_(storage).bitwise_not_()
        return
    if id(value) in done:
        return
    done.add(id(value))
    if isinstance(value, dict):
        for child in value.values():
            _overwrite(child, done)
        for key, child in list(value.items()):
            if not _is_container(child):
                value[key] = "overwritten"
    elif isinstance(value, list | tuple):
        for child in value:
            _overwrite(child, done)
        if isinstance(value, list):
            value.append("overwritten")
    elif isinstance(value, io.BytesIO):
        value.seek(0)
        value.truncate()
    elif isinstance(value, torch.Generator):
        value.manual_seed(0)
    elif isinstance(value, Stateful) or dataclasses.is_dataclass(value):
        _overwrite(vars(value), done)


def _is_container(value: Any) -> bool:
    kinds = torch.Tensor | dict | list | tuple | io.BytesIO | torch.Generator | Stateful
    return isinstance(value, kinds) or dataclasses.is_dataclass(value)
