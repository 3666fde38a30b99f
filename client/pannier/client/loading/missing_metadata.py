"""What a directory without ``.metadata`` is, or one that is being removed: in words, for errors of loads."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from pannier.client.loading.catalog import attempts_at, newest
from pannier.client.loading.filesystem import MissingError, Place
from pannier.v1 import records_pb2
from pannier.wire import formats, object_names
from pannier.wire.errors import IntegrityError, PannierError, StorageError
from pannier.wire.failures import failures_text, shorten
from pannier.wire.records import parse_decision

_log = logging.getLogger(__name__)

_SHOWN: Final = 5
_RECORDS: Final = object_names.attempts_prefix().rstrip("/")


def describe_absence(place: Place, name: str = object_names.METADATA) -> str:
    """Why ``place`` is no checkpoint: says which attempts at one are under way or were aborted."""
    begin = f"{place.url} is no checkpoint: "
    try:
        entries = {entry.name for entry in place.list()}
    except MissingError:
        return begin + (_describe_retired(place) or "it doesn't exist")
    except StorageError as error:
        return f"{begin}it has no {name}, and what is there can't be listed: {error}"
    if not entries:
        return begin + (_describe_retired(place) or "the directory is empty or doesn't exist")
    begin += f"it has no {name}"
    if name == object_names.METADATA and f"__0{object_names.METADATA}" in entries:
        return (
            f"{begin}; it was saved with use_collectives=False, as a checkpoint per rank: load it "
            "with dcp.load(storage_reader=StorageReader(...)) and as many ranks"
        )
    if _RECORDS not in entries:
        if safetensors := formats.describe_safetensors(entries):
            return f"{place.url} has no {name}: {safetensors}"
        return (
            f"{begin} and no records of a save by Pannier, only {shorten(sorted(entries), _SHOWN)}"
        )
    try:
        newest_first = attempts_at(place)[:_SHOWN]
        attempts = [_describe_attempt(place, attempt.name) for attempt in newest_first]
    except StorageError as error:
        return f"{begin}, and the records of its attempts can't be read: {error}"
    return f"{begin}; attempts at it: {'; '.join(attempts) or 'none'}"


def check_not_removed(place: Place, attempt: str) -> None:
    """Raises MissingError when the removal of the attempt's checkpoint has begun.

    Retention looks for leases after it has written its mark. A reader must call this after it has
    written its lease, so that one of the two sees the other.
    """
    mark = place.find(object_names.removal_mark(attempt))
    if mark is None:
        return
    raise MissingError(
        f"{place.url} is being removed{_signed(mark)}{_advise(place)}. If that was interrupted, "
        "`pannier rm` ends it"
    )


def _signed(mark: bytes) -> str:
    """Who removes it and why, as the mark says."""
    signed = _parse(mark)
    if "reason" not in signed or "by" not in signed:
        return ""
    return f" by {signed['reason']} on {signed['by']}"


def _describe_retired(place: Place) -> str:
    """As :func:`describe_removal`, and what to load instead."""
    removal = describe_removal(place)
    return f"{removal}{_advise(place)}" if removal else ""


def describe_removal(place: Place) -> str:
    """That retention removed the checkpoint there, and when; empty when its record doesn't say so."""
    key = object_names.retention_record()
    try:
        removed = _parse(place.parent.read(key)).get("removed", [])
    except MissingError:
        return ""
    except StorageError as error:
        _log.warning("whether retention removed %s can't be read: %s", place.url, error)
        return ""
    for each in reversed(removed if isinstance(removed, list) else []):
        if isinstance(each, Mapping) and each.get("name") == place.name:
            at = each.get("time")
            when = time.gmtime(at if isinstance(at, int | float) else 0)
            shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", when)
            return f"retention (job {each.get('job')}) removed it at {shown}"
    return ""


def _parse(content: bytes) -> dict[str, Any]:
    """A JSON object that is there to be shown; empty when it is none."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _advise(place: Place) -> str:
    """What to load instead."""
    root = place.parent
    try:
        found = newest(root)
    except PannierError as error:
        return f"; which checkpoint is the newest below {root.url} can't be read: {error}"
    if found is None or found.checkpoint_id == place.url:
        return f"; there is no other checkpoint below {root.url}"
    return f"; the newest below {root.url} is {found.checkpoint_id}: load that"


def _describe_attempt(place: Place, attempt: str) -> str:
    key = object_names.decision(attempt)
    try:
        decision = parse_decision(place.read(key), attempt, f"{place.url}/{key}")
    except MissingError:
        return f"{attempt} is in progress (or its processes are gone)"
    except IntegrityError:
        return f"{attempt} has a damaged decision"
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        mark = place.find(object_names.removal_mark(attempt))
        if mark is None:
            return f"{attempt} is decided and about to be committed"
        return f"{attempt} was committed, and is being removed{_signed(mark)}"
    causes = failures_text(decision.failures)
    return f"{attempt} was aborted" + (f" ({causes})" if causes else "")
