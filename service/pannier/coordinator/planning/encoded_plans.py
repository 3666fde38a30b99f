"""Local plans as they come from the wire: cut into columns, which planning decodes all at once.

In: a serialised PlanRequest. Out: the request without its plan, and the plan's columns as bytes. To
make a message of each plan only to write its columns out again takes as long as all that is planned.
Event loop only.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from pannier.coordinator.planning import varints
from pannier.v1 import plan_pb2, sidecar_pb2
from pannier.wire.errors import InvalidRequestError
from pannier.wire.limits import MAX_ITEMS

_IN_REQUEST: Final = sidecar_pb2.PlanRequest.DESCRIPTOR.fields_by_name["plan"].number
_IN_PLAN: Final = {field.name: field.number for field in plan_pb2.LocalPlan.DESCRIPTOR.fields}
_IN_ITEMS: Final = {field.name: field.number for field in plan_pb2.Items.DESCRIPTOR.fields}
_OF_ITEMS: Final = {number: name for name, number in _IN_ITEMS.items()}
_LISTS: Final = max(_IN_ITEMS["fqns"], _IN_ITEMS["properties"])
_KEPT: Final = 16


class UnreadPlan:
    """One rank's local plan.

    Args:
        data: of which ``data[start:end]`` is the plan, serialised in the order of field numbers, as
            protobuf does.

    Raises ValueError, IndexError, DecodeError when it isn't.
    """

    def __init__(self, data: bytes, start: int = 0, end: int | None = None) -> None:
        end = len(data) if end is None else end
        fields, rest = varints.spans(data, start, end, before=_IN_PLAN["mappings"])
        self.around = _around(data, rest, end)
        """Mappings and options; plans with the same ones share the message."""
        begin, end = fields.get(_IN_PLAN["items"], (rest, rest))
        self.lists, begin = _lists(data, begin, end)
        """Keys and properties as they are serialised."""
        columns, _ = varints.spans(data, begin, end)
        self.columns = {
            _OF_ITEMS[number]: _shared(number, data, *span) for number, span in columns.items()
        }
        for name in ("head", "body", "tail"):
            number = _IN_PLAN[name]
            self.columns[name] = _shared(-number, data, *fields.get(number, (rest, rest)))

    @property
    def options(self) -> plan_pb2.PlannerOptions:
        """Of its planner."""
        return self.around.options

    @property
    def mappings(self) -> list[plan_pb2.FlattenMapping]:
        """Flatten mappings, in order."""
        return list(self.around.mappings)

    @property
    def count(self) -> int:
        """How many items it has: a kind takes one byte."""
        return len(self.columns.get("kind", b""))

    def read(self) -> plan_pb2.LocalPlan:
        """The message."""
        columns = [(_IN_ITEMS[n], c) for n, c in self.columns.items() if n in _IN_ITEMS]
        slots = [(_IN_PLAN[n], c) for n, c in self.columns.items() if n not in _IN_ITEMS]
        items = self.lists + b"".join(varints.field(*each) for each in sorted(columns))
        plan = plan_pb2.LocalPlan.FromString(
            varints.field(_IN_PLAN["items"], items)
            + b"".join(varints.field(*each) for each in sorted(slots))
        )
        plan.MergeFrom(self.around)
        return plan


LocalPlan = plan_pb2.LocalPlan | UnreadPlan


def unread(plan: LocalPlan) -> UnreadPlan:
    """The plan as columns."""
    if isinstance(plan, UnreadPlan):
        return plan
    return UnreadPlan(plan.SerializeToString(deterministic=True))


@dataclass
class PlanCall:
    """A request, and its plan; or why it can't be read."""

    request: sidecar_pb2.PlanRequest
    """Without the plan."""
    plan: UnreadPlan | None
    error: InvalidRequestError | None = None

    def forget(self) -> None:
        """Lets go of the request: the call waits, and so do those of thousands of ranks."""
        self.request = sidecar_pb2.PlanRequest()
        self.plan = None


def parse_call(data: bytes) -> PlanCall:
    """The deserialiser of ``Plan``; an exception here would reach the caller without its message."""
    try:
        try:
            return _parse(data)
        except (ValueError, IndexError):
            # In another order than protobuf's own, perhaps.
            whole = sidecar_pb2.PlanRequest.FromString(data)
            return _parse(whole.SerializeToString(deterministic=True))
    except (ValueError, IndexError, DecodeError) as error:
        refused = InvalidRequestError(f"a request of {len(data)} bytes is malformed: {error}")
        return PlanCall(sidecar_pb2.PlanRequest(), None, refused)


def _parse(data: bytes) -> PlanCall:
    start, content, end = varints.find(data, _IN_REQUEST)
    if start == end:
        return PlanCall(sidecar_pb2.PlanRequest.FromString(data), None)
    request = sidecar_pb2.PlanRequest.FromString(data[:start] + data[end:])
    if request.HasField("plan"):
        raise ValueError("it has two plans")
    plan = UnreadPlan(data, content, end)
    error = None
    if plan.count > MAX_ITEMS:
        error = InvalidRequestError(
            f"{plan.count} items of a rank's plan: at most {MAX_ITEMS} are allowed"
        )
    return PlanCall(request, plan, error)


_arounds: OrderedDict[bytes, plan_pb2.LocalPlan] = OrderedDict()
_latest = b""
"""Of ``_arounds``."""


def _around(data: bytes, begin: int, end: int) -> plan_pb2.LocalPlan:
    """Most ranks of a job have the same."""
    global _latest
    # Compared in place: it is large.
    if len(_latest) != end - begin or not data.startswith(_latest, begin, end):
        _latest = data[begin:end]
    message = _arounds.get(_latest)
    if message is None:
        message = plan_pb2.LocalPlan.FromString(_latest)
        _arounds[_latest] = message
        while len(_arounds) > _KEPT:
            _arounds.popitem(last=False)
    return message


_last = b""


def _lists(data: bytes, begin: int, end: int) -> tuple[bytes, int]:
    """Keys and properties, which come first, and where they end.

    The same object for ranks that have the same.
    """
    global _last
    at = begin + len(_last)
    # What follows is another field, so that the lists end there.
    if not (_last and data.startswith(_last, begin, end) and at < end and data[at] >> 3 > _LISTS):
        _last, at = varints.leading(data, begin, end, upto=_LISTS)
    return _last, at


_columns: dict[int, bytes] = {}


def _shared(number: int, data: bytes, begin: int, end: int) -> bytes:
    """A column; the same object as the last one of its number, if that is equal."""
    known = _columns.get(number)
    if known is None or len(known) != end - begin or not data.startswith(known, begin, end):
        known = _columns[number] = data[begin:end]
    return known
