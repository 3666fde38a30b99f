"""Plain tensors of random bits, and the archives that torch.save makes."""

import io
from typing import Any

import torch


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits that the dtype can have."""
    noise = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=noise)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def saved(value: Any, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    sink = io.BytesIO()
    torch.save(value, sink, **options)
    return sink.getvalue()
