"""What an attempt's records in storage say: parsers that clients and services share. Pure.

In: the bytes of a record. Out: the message. Knows nothing of stores.
"""

from collections.abc import Mapping

from google.protobuf import json_format

from pannier.v1 import records_pb2, save_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError


def parse_decision(
    data: bytes, attempt: str, where: str, save: save_pb2.SaveId | None = None
) -> records_pb2.Decision:
    """The decision of an attempt.

    Args:
        attempt: whose it is, by its name in storage.
        where: the object's name, for errors.
        save: whose attempt it is, when the caller knows its job, too.

    Raises IntegrityError when it is damaged, or another attempt's or save's.
    """
    try:
        decision = json_format.Parse(data, records_pb2.Decision(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    # Carrying it out removes or installs the attempt that it names.
    if decision.attempt != attempt:
        raise IntegrityError(f"{where} is damaged: it names {decision.attempt!r}")
    own = save if save is not None else object_names.Attempt.parse(attempt).save
    object_names.check_record(where, attempt, decision.save, own)
    if decision.outcome not in (records_pb2.OUTCOME_COMMIT, records_pb2.OUTCOME_ABORT):
        raise IntegrityError(f"{where} is damaged: it says neither COMMIT nor ABORT")
    return decision


def fits(decision: records_pb2.Decision, size: int, checksum: int | None) -> bool:
    """Whether a ``.metadata`` of this size and crc32c (None: not known) is what was decided."""
    return (
        decision.outcome == records_pb2.OUTCOME_COMMIT
        and decision.metadata_size == size
        and checksum in (None, decision.metadata_crc32c)
    )


def match(
    decisions: Mapping[str, records_pb2.Decision], size: int, checksum: int
) -> records_pb2.Decision | None:
    """The newest COMMIT whose ``.metadata`` has this size and checksum."""
    fitting = [name for name, decision in decisions.items() if fits(decision, size, checksum)]
    return decisions[max(fitting, key=object_names.Attempt.parse)] if fitting else None
