"""Pickles DCP's metadata so that every supported torch and Python reads it.

In: torch's ``Metadata`` or a part of it. Out: the same bytes from every torch and Python that writes
them. Pure; any thread.
"""

import copyreg
import io
import pickle
from typing import Any, Final

from torch.distributed.checkpoint.metadata import TensorProperties

from pannier.coordinator.commit.torch_pickles import PROTOCOL
from pannier.wire.plan_codec import MemoryFormat

_PROPERTIES: Final = 5
"""Fields of ``TensorProperties`` that torch up to 2.14 reads; 2.15 appends ``strides``."""


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = properties.__getstate__()  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state[:_PROPERTIES]  # type: ignore[attr-defined]


def _reduce_member(member: Any) -> tuple[Any, ...]:
    return type(member), (member.value,)


class MetadataPickler(pickle.Pickler):
    """Writes what differs between versions in its oldest form."""

    dispatch_table = {  # noqa: RUF012
        **copyreg.dispatch_table,
        TensorProperties: _reduce_properties,
        # Python 3.11.2 (Debian 12) would pickle the member as a call of getattr.
        MemoryFormat: _reduce_member,
    }


def dump_metadata(value: Any, *, fast: bool = False) -> bytes:
    """The pickle of a ``Metadata`` or a part of it; ``fast``: without memo references."""
    out = io.BytesIO()
    pickler = MetadataPickler(out, protocol=PROTOCOL)
    pickler.fast = fast
    pickler.dump(value)
    return out.getvalue()
