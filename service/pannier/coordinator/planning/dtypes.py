"""What the coordinator knows of torch's dtypes without importing torch, which takes seconds.

In: names, as ``str(dtype)`` has them after ``torch.``. Out: sizes of elements. Any thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from pannier.wire.errors import ConfigurationError

ITEM_BYTES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys((f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, for the dtypes of torch 2.9 to 2.15."""


class Dtype(NamedTuple):
    """A dtype of torch."""

    name: str
    itemsize: int
    """Bytes."""


def dtype_named(name: str) -> Dtype:
    """Needs torch for a name that isn't known here.

    Raises InvalidRequestError when torch doesn't know it either.
    """
    size = ITEM_BYTES.get(name)
    if size is not None:
        return Dtype(name, size)
    with torch_for(f"the dtype {name!r}"):
        from pannier.wire import plan_codec
    dtype = plan_codec.dtype_named(name)
    return Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)


@contextmanager
def torch_for(what: str) -> Iterator[None]:
    """Around imports of torch. Raises ConfigurationError where it isn't installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ConfigurationError(
            f"the coordinator needs torch for {what}: pip install torch where it runs"
        ) from error
