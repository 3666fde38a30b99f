"""What a directory without ``.metadata`` is: in words, for the error of whoever wanted to load it."""

from typing import Final

from google.protobuf import json_format

from pannier.client.places import MissingError, Place
from pannier.v1 import records_pb2
from pannier.wire import identity
from pannier.wire.errors import InvalidRequestError, StorageError

_SHOWN: Final = 5
_RECORDS: Final = identity.attempts_prefix().rstrip("/")


def describe_absence(place: Place, name: str = identity.METADATA) -> str:
    """Why ``place`` is no checkpoint: says which attempts at one are under way or were aborted."""
    begin = f"{place.url} is no checkpoint: "
    try:
        entries = {entry.name for entry in place.list()}
    except MissingError:
        return begin + "it doesn't exist"
    except StorageError as error:
        return f"{begin}it has no {name}, and what is there can't be listed: {error}"
    if not entries:
        return begin + "the directory is empty or doesn't exist"
    begin += f"it has no {name}"
    if name == identity.METADATA and f"__0{identity.METADATA}" in entries:
        return (
            f"{begin}; it was saved with use_collectives=False, as a checkpoint per rank: load it "
            "with dcp.load(storage_reader=StorageReader(...)) and as many ranks"
        )
    if _RECORDS not in entries:
        return f"{begin} and no records of a save by Pannier, only {_shorten(sorted(entries))}"
    try:
        attempts = [_describe_attempt(place, attempt) for attempt in _attempts(place)]
    except StorageError as error:
        return f"{begin}, and the records of its attempts can't be read: {error}"
    return f"{begin}; attempts at it: {'; '.join(attempts) or 'none'}"


def _attempts(place: Place) -> list[str]:
    """Newest first."""
    found = []
    for entry in place.child(_RECORDS).list():
        try:
            found.append(identity.Attempt.parse(entry.name))
        except InvalidRequestError:
            continue  # something else's
    return [attempt.name for attempt in sorted(found, reverse=True)[:_SHOWN]]


def _describe_attempt(place: Place, attempt: str) -> str:
    try:
        content = place.read(identity.decision(attempt))
        decision = json_format.Parse(content, records_pb2.Decision(), ignore_unknown_fields=True)
    except MissingError:
        return f"{attempt} is in progress (or its processes are gone)"
    except (json_format.ParseError, UnicodeDecodeError):
        return f"{attempt} has a damaged decision"
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        return f"{attempt} is decided and about to be committed"
    causes = [
        (f"rank {cause.rank}: " if cause.rank >= 0 else "") + cause.message
        for cause in decision.failures[:_SHOWN]
    ]
    return f"{attempt} was aborted" + (f" ({', '.join(causes)})" if causes else "")


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
