"""Plans as tests write them: columns from lists, and changed in place."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from google.protobuf.message import Message

from pannier.v1 import plan_pb2
from pannier.wire.plan_columns import decode_column, encode_column

FLOAT32 = plan_pb2.TensorProperties(
    dtype="float32", layout="strided", memory_format="contiguous_format"
)


def columns(**values: Sequence[int]) -> dict[str, bytes]:
    """Fields of a message, by name."""
    return {name: encode_column(numbers) for name, numbers in values.items()}


def make_items(
    fqns: Sequence[str], properties: Sequence[plan_pb2.TensorProperties], **values: Sequence[int]
) -> plan_pb2.Items:
    tables = plan_pb2.ItemTables(fqns=fqns, properties=properties)
    return plan_pb2.Items(tables=tables.SerializeToString(deterministic=True), **columns(**values))


def tables_of(items: plan_pb2.Items) -> plan_pb2.ItemTables:
    return plan_pb2.ItemTables.FromString(items.tables)


def keys_of(local: plan_pb2.LocalPlan, final: plan_pb2.FinalPlan) -> list[str]:
    """What the final plan gives to a rank with this local plan."""
    fqns, own = tables_of(local.items).fqns, decode_column(local.items.fqn)
    return [fqns[own[position]] for position in decode_column(final.positions)]


@contextmanager
def changed_column(message: Message, name: str) -> Iterator[list[int]]:
    """``with changed_column(items, "hint") as hints:`` writes the list back."""
    values = decode_column(getattr(message, name))
    yield values
    setattr(message, name, encode_column(values))


@contextmanager
def changed_tables(items: plan_pb2.Items) -> Iterator[plan_pb2.ItemTables]:
    tables = tables_of(items)
    yield tables
    items.tables = tables.SerializeToString(deterministic=True)
