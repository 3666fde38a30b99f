"""Why a directory is no checkpoint, or none any more: for errors.

In: a directory in storage. Out: its attempts in progress and aborted ones, who removes or removed the checkpoint, and
what to load instead. Blocking.
"""

import json
import logging
import re
import time
from typing import Any, Final

from pannier.client.loading.catalog import PerRankError, attempts_at, newest
from pannier.client.loading.filesystem import MissingError, StorageDir
from pannier.common.locations import CHILDREN, Pattern
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import IntegrityError, InvalidRequestError, PannierError, StorageError
from pannier.wire.failures import failures_text, shorten
from pannier.wire.records import MOST_RECORD, describe_safetensors, parse_decision
from pannier.wire.retention_record import RetentionRecord

_log = logging.getLogger(__name__)

_RECORDS: Final = object_names.attempts_prefix().rstrip("/")
_SHOWN: Final = 5
_LEVELS: Final = 4
"""Levels of directories above a checkpoint that are searched for the record of its retention."""
_RANK_METADATA: Final = re.compile(rf"__\d+{re.escape(object_names.METADATA)}")


def absence_error(directory: StorageDir, name: str = object_names.METADATA) -> MissingError:
    """Why ``directory`` is no checkpoint, with its attempts in progress and aborted ones."""
    begin = f"{directory.url} is no checkpoint: "
    try:
        entries = {entry.name for entry in directory.list()}
    except MissingError:
        return MissingError(begin + (_describe_retired(directory) or "it doesn't exist"))
    except StorageError as error:
        return MissingError(f"{begin}it has no {name}, and what is there can't be listed: {error}")
    if not entries:
        if directory.is_file():
            return MissingError(
                f"{begin}it is a file. Give the directory that was saved to; a file of torch.save is read by "
                "torch.load"
            )
        why = _describe_retired(directory) or "the directory is empty or doesn't exist"
        return MissingError(begin + why)
    begin += f"it has no {name}"
    if name == object_names.METADATA and any(map(_RANK_METADATA.fullmatch, entries)):
        return PerRankError(
            f"{begin}; it was saved with use_collectives=False, as a checkpoint per rank: load it "
            "with dcp.load(storage_reader=StorageReader(...)) and as many ranks"
        )
    if _RECORDS not in entries:
        if safetensors := describe_safetensors(entries):
            return MissingError(f"{directory.url} has no {name}: {safetensors}")
        return MissingError(
            f"{begin} and no records of a save by Pannier, only {shorten(sorted(entries), _SHOWN)}"
        )
    try:
        newest_first = attempts_at(directory)[:_SHOWN]
        attempts = [_describe_attempt(directory, attempt.name) for attempt in newest_first]
    except StorageError as error:
        return MissingError(f"{begin}, and the records of its attempts can't be read: {error}")
    return MissingError(f"{begin}; attempts at it: {'; '.join(attempts) or 'none'}")


def check_not_removed(directory: StorageDir, attempt: str) -> None:
    """Raises MissingError when the removal of the attempt's checkpoint has begun.

    Retention writes its mark and then looks for leases. A reader must write its lease and then call
    this: so one of the two sees the other.
    """
    mark = directory.find(object_names.removal_mark(attempt))
    if mark is None:
        return
    raise MissingError(
        f"{directory.url} is being removed{_signed(mark)}{_advise(directory)}. If that was interrupted, "
        "`pannier rm` completes it"
    )


def _signed(mark: bytes) -> str:
    """What removes the checkpoint, and on which host, from the mark; empty: not known."""
    signed = _parse(mark)
    if "reason" not in signed or "by" not in signed:
        return ""
    return f" by {signed['reason']} on {signed['by']}"


def _describe_retired(directory: StorageDir) -> str:
    """As :func:`describe_removal`, with what to load instead."""
    removal = describe_removal(directory)
    return f"{removal}{_advise(directory)}" if removal else ""


def describe_removal(directory: StorageDir) -> str:
    """When retention removed the checkpoint of this directory; empty: it has no record of that."""
    root, _, record = _find_retention(directory)
    name = directory.url.removeprefix(root.url).lstrip("/")
    for each in reversed(record.removed):
        if each.name == name:
            shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each.time))
            return f"retention (job {each.job}) removed it at {shown}"
    return ""


def _find_retention(directory: StorageDir) -> tuple[StorageDir, Pattern, RetentionRecord]:
    """The root and the pattern by which retention finds this checkpoint, and its record there.

    The directory above, with an empty record, unless there is a record there or further above.
    """
    root, name = directory.parent, directory.name
    for _ in range(_LEVELS):
        try:
            record = RetentionRecord.parse(root.find(object_names.retention_record()) or b"")
            pattern = Pattern(record.pattern)
        except (StorageError, InvalidRequestError) as error:
            _log.warning("can't read whether retention removed %s: %s", directory.url, error)
            break
        if record != RetentionRecord() and pattern.matches(name):
            return root, pattern, record
        if not root.parent.name:
            break
        root, name = root.parent, f"{root.name}/{name}"
    return directory.parent, CHILDREN, RetentionRecord()


def _parse(content: bytes) -> dict[str, Any]:
    """A JSON object, for messages; empty when it can't be parsed."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _advise(directory: StorageDir) -> str:
    """What to load instead."""
    root, pattern, _ = _find_retention(directory)
    try:
        found = newest(root, pattern)
    except PannierError as error:
        return f"; the newest checkpoint below {root.url} can't be found: {error}"
    if found is None or found.checkpoint_id == directory.url:
        return f"; there is no other checkpoint below {root.url}"
    return f"; the newest below {root.url} is {found.checkpoint_id}: load that"


def _describe_attempt(directory: StorageDir, attempt: str) -> str:
    key = object_names.decision(attempt)
    try:
        decision = parse_decision(
            directory.read(key, MOST_RECORD), attempt, f"{directory.url}/{key}"
        )
    except MissingError:
        return f"{attempt} is in progress (or its processes are dead)"
    except IntegrityError:
        return f"{attempt} has a damaged decision"
    if decision.outcome == records_pb2.OUTCOME_COMMIT:
        mark = directory.find(object_names.removal_mark(attempt))
        if mark is None:
            return f"{attempt} has a COMMIT decision and is about to be committed"
        return f"{attempt} was committed, and is being removed{_signed(mark)}"
    causes = failures_text(decision.failures)
    return f"{attempt} was aborted" + (f" ({causes})" if causes else "")
