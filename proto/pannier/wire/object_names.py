"""Names of saves, groups, attempts and the objects of a checkpoint in storage.

All names in buckets and logs are built here, so that the attempt of an object follows from its name
alone. Pure; any thread.
"""

import hashlib
import posixpath
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import total_ordering
from itertools import pairwise
from typing import Protocol

from pannier.v1 import save_pb2
from pannier.wire.errors import IntegrityError, InvalidRequestError

METADATA = ".metadata"
"""DCP's metadata object: a checkpoint exists if and only if it does."""

_PRIVATE = ".pannier"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WORD = r"[a-z0-9]{1,32}"
_TOKEN = re.compile(_WORD)
_NUMBER = r"0|[1-9][0-9]{0,11}"
_GROUP = re.compile(r"g[0-9a-f]{8}")
_ATTEMPT = re.compile(rf"i({_NUMBER})-({_WORD})-({_GROUP.pattern})-s({_NUMBER})")
"""One spelling per attempt: names are also compared as text."""
_FILE = re.compile(r"objects|extra|0|[1-9][0-9]{0,5}")
LARGEST_NUMBER = 10**12 - 1
_LONGEST_EXTRA = 255
_RECORD_DIGITS = 12
_RECORD = re.compile(rf"[0-9]{{{_RECORD_DIGITS}}}")
_TERM = re.compile(rf"({_RECORD.pattern})-([1-9][0-9]{{0,15}})")


def group_name(ranks: Sequence[int], process_group: str = "") -> str:
    """Name of the group of these global ranks, in any order.

    Args:
        process_group: sets it apart from other groups of the same ranks.
    """
    text = ",".join(str(rank) for rank in sorted(ranks))
    if process_group:
        text += f" {process_group}"
    return "g" + hashlib.sha256(text.encode()).hexdigest()[:8]


def check_job(job: str) -> None:
    """Raises InvalidRequestError when a job's name is malformed."""
    if not _JOB.fullmatch(job):
        raise InvalidRequestError(
            f"job name {job!r} is not valid: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )


def check_incarnation(incarnation: str) -> None:
    """Raises InvalidRequestError when the id of an incarnation is malformed."""
    if not _TOKEN.fullmatch(incarnation):
        raise InvalidRequestError(
            f"incarnation {incarnation!r} is not 1 to 32 lower-case letters and digits"
        )


def check_save_id(save: save_pb2.SaveId) -> None:
    """Raises InvalidRequestError when a field of ``save`` is malformed."""
    check_job(save.job)
    check_incarnation(save.incarnation)
    if not _GROUP.fullmatch(save.group):
        raise InvalidRequestError(f"group {save.group!r} is not 'g' and 8 hexadecimal digits")
    if not 1 <= save.number <= LARGEST_NUMBER:
        raise InvalidRequestError(f"save number {save.number} is not within 1 to {LARGEST_NUMBER}")


def check_record(where: str, attempt: str, found: save_pb2.SaveId, save: save_pb2.SaveId) -> None:
    """Raises IntegrityError unless a record below ``attempt``, of save ``found``, belongs to ``save``.

    Args:
        where: the record's URL.
        save: the expected save. An empty job matches any: an attempt's name has no job, and an
            attempt without a manifest may be aborted without knowing it.
    """
    same_job = not (found.job and save.job) or found.job == save.job
    if not (
        same_job and Attempt.parse(attempt).is_of(found) and Attempt.parse(attempt).is_of(save)
    ):
        raise IntegrityError(
            f"{where} is a record of save {save_text(found)}, not of {save_text(save).lstrip('/')} "
            f"(attempt {attempt}): was it copied here? Remove it, or save to another checkpoint id"
        )


def save_text(save: save_pb2.SaveId) -> str:
    """A save's identity as text, as in status and on the command line."""
    return f"{save.job}/{save.incarnation}/{save.group}/{save.number}"


class AttemptRecord(Protocol):
    """The manifest or the decision of an attempt."""

    @property
    def attempt(self) -> str:
        """Its name."""

    @property
    def ordinal(self) -> int:
        """See :attr:`Attempt.ordinal`."""


@total_ordering
@dataclass(frozen=True)
class Attempt:
    """Identity of an attempt, and its order: a greater one is newer.

    The incarnation's random id makes names unique. Its number gives the order; it comes from the
    root's records, which may be lost. Within an incarnation the ordinal gives the order, which only the
    attempt's manifest and decision have: attempts that are compared must come from :meth:`of`, unless
    they are of one group.
    """

    incarnation_number: int
    number: int
    group: str
    incarnation: str
    """Its random id."""
    ordinal: int = field(default=0, compare=False)
    """Rises over the attempts of an incarnation, of all its groups, in the order in which its coordinators
    begin them; for those of one group also with the number. 0: not known, or an earlier version's."""

    def __lt__(self, other: "Attempt") -> bool:
        return order_key(self) < order_key(other)

    @classmethod
    def of(cls, record: AttemptRecord) -> "Attempt":
        """The attempt of a manifest or decision. Raises InvalidRequestError."""
        return replace(cls.parse(record.attempt), ordinal=record.ordinal)

    @property
    def name(self) -> str:
        """As in object names: ``i3-5f0c2ab19d3e4870-g1a2b3c4d-s12``."""
        return f"i{self.incarnation_number}-{self.incarnation}-{self.group}-s{self.number}"

    @property
    def save(self) -> save_pb2.SaveId:
        """The save of this attempt, without the job, which an attempt's name doesn't have."""
        return save_pb2.SaveId(incarnation=self.incarnation, group=self.group, number=self.number)

    @classmethod
    def parse(cls, name: str) -> "Attempt":
        """Inverse of :attr:`name`. Raises InvalidRequestError."""
        match = _ATTEMPT.fullmatch(name)
        if match is None:
            raise InvalidRequestError(f"{name!r} is not the name of an attempt")
        return cls(int(match[1]), int(match[4]), match[3], match[2])

    def is_of(self, save: save_pb2.SaveId) -> bool:
        """Whether it is an attempt of ``save``; jobs aren't compared."""
        return (self.incarnation, self.group, self.number) == (
            save.incarnation,
            save.group,
            save.number,
        )


def order_key(
    attempt: Attempt, began: float | None = None
) -> tuple[float, str, int, int, str, str]:
    """Sort key of an attempt among others; a greater one is newer.

    Args:
        began: when its incarnation wrote its first manifest, by the store's clock; None: all compared attempts
            are of checkpoints in one directory. Each directory numbers incarnations separately, so their
            numbers don't order checkpoints of several directories. It must be given for all
            attempts that are compared, or for none.
    """
    if began is None:
        number = attempt.incarnation_number
        return number, "", attempt.ordinal, attempt.number, attempt.group, attempt.incarnation
    return began, attempt.incarnation, attempt.ordinal, attempt.number, attempt.group, ""


def unnamed_job() -> str:
    """A unique name for one start of a job that has none."""
    return f"job-{secrets.token_hex(4)}"


def is_unnamed(job: str) -> bool:
    """Whether a job's name is one of :func:`unnamed_job`, so that its next start has another one."""
    return re.fullmatch(r"job-[0-9a-f]{8}", job) is not None


def is_attempt(name: str) -> bool:
    """Whether ``name`` is the name of an attempt."""
    return _ATTEMPT.fullmatch(name) is not None


def own_attempt(save_id: object) -> str:
    """The attempt whose ``.metadata`` has this ``save_id``; empty when Pannier didn't write it."""
    return save_id if isinstance(save_id, str) and is_attempt(save_id) else ""


def attempt_of(key: str) -> str:
    """Attempt of a data file or record, by its key relative to the checkpoint id; empty for others."""
    top, _, rest = key.partition("/")
    if rest:
        name = rest.partition("/")[0] if top == _PRIVATE else ""
    else:
        name = top.removeprefix("__").partition("_")[0] if top.startswith("__") else ""
    return name if is_attempt(name) else ""


def data_prefix(attempt: str) -> str:
    """Prefix of the names of an attempt's data files, and of no others."""
    return f"__{attempt}_"


def data_suffixes(attempt: str, names: Sequence[str]) -> list[str]:
    """The names of an attempt's data files without its prefix. Raises InvalidRequestError for others."""
    prefix = data_prefix(attempt)
    if not all(name.startswith(prefix) for name in names):
        raise InvalidRequestError(
            f"data files of {attempt} must begin with {prefix}: {list(names[:4])}"
        )
    return [name.removeprefix(prefix) for name in names]


def data_suffix(rank: int, index: int) -> str:
    """Rest of the name of a rank's ``index``-th data file, without the attempt."""
    return f"{rank}_{index}.distcp"


def objects_suffix(rank: int) -> str:
    """Rest of the name of a rank's objects file, without the attempt."""
    return f"{rank}_objects.distcp"


def extra_suffix(rank: int) -> str:
    """Rest of the name of a rank's extra file, without the attempt."""
    return f"{rank}_extra.distcp"


def data_file(attempt: str, rank: int, index: int) -> str:
    """Name of a rank's ``index``-th data file of planned slots."""
    return data_prefix(attempt) + data_suffix(rank, index)


def objects_file(attempt: str, rank: int) -> str:
    """Name of a rank's objects file: its archives of unplanned size."""
    return data_prefix(attempt) + objects_suffix(rank)


def extra_file(attempt: str, rank: int) -> str:
    """Name of a rank's extra file: the bytes of the small files that it adds to the checkpoint."""
    return data_prefix(attempt) + extra_suffix(rank)


def check_extra_name(name: str) -> None:
    """Raises InvalidRequestError unless a file of this name may be added to a checkpoint."""
    parts = name.split("/")
    allowed = (
        0 < len(name.encode()) <= _LONGEST_EXTRA
        and name.isprintable()
        and all(part not in ("", ".", "..") and not part.startswith(_PRIVATE) for part in parts)
        and not any(map(attempt_of, parts))
        and not parts[-1].endswith((METADATA, ".distcp"))
    )
    if not allowed:
        raise InvalidRequestError(
            f"{name[:_LONGEST_EXTRA]!r} can't be the name of an extra file: give a path relative to "
            f"the checkpoint, of at most {_LONGEST_EXTRA} bytes, without '..', that neither begins with "
            f"{_PRIVATE} nor ends with {METADATA} or .distcp"
        )


def find_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Two equal names, or a name and a directory of that name; None: there are none."""
    paths = sorted(name.split("/") for name in names)
    for one, other in pairwise(paths):
        if other[: len(one)] == one:
            return "/".join(one), "/".join(other)
    return None


def check_data_file(name: str, attempt: str, rank: int) -> None:
    """Raises InvalidRequestError unless ``name`` is a data file of that rank in that attempt."""
    Attempt.parse(attempt)
    prefix, suffix = f"__{attempt}_{rank}_", ".distcp"
    middle = name[len(prefix) : -len(suffix)]
    if not (name.startswith(prefix) and name.endswith(suffix) and _FILE.fullmatch(middle)):
        raise InvalidRequestError(
            f"{name!r} is not a data file of rank {rank} in attempt {attempt}"
        )


def attempts_prefix() -> str:
    """Prefix of the records of a checkpoint's attempts."""
    return f"{_PRIVATE}/"


def attempt_prefix(attempt: str) -> str:
    """Prefix of an attempt's records."""
    return f"{_PRIVATE}/{attempt}/"


def manifest(attempt: str) -> str:
    """The global plan of an attempt."""
    return f"{_PRIVATE}/{attempt}/manifest"


def receipt(attempt: str, rank: int) -> str:
    """A rank's receipt."""
    return f"{_PRIVATE}/{attempt}/receipts/{rank}"


def receipts_prefix(attempt: str) -> str:
    """Prefix of an attempt's receipts."""
    return f"{_PRIVATE}/{attempt}/receipts/"


def decision(attempt: str) -> str:
    """The object that ends an attempt."""
    return f"{_PRIVATE}/{attempt}/decision"


def metadata_candidate(attempt: str) -> str:
    """The bytes of ``.metadata`` after the attempt's commit."""
    return f"{_PRIVATE}/{attempt}/metadata"


def superseded_mark(attempt: str) -> str:
    """Mark: a newer attempt's ``.metadata`` replaced this one's. The grace period counts from it."""
    return f"{_PRIVATE}/{attempt}/superseded"


def removal_mark(attempt: str) -> str:
    """Mark: the attempt's checkpoint is being removed and must not be installed again."""
    return f"{_PRIVATE}/{attempt}/removal"


def is_remains(attempt: str, keys: Collection[str]) -> bool:
    """Whether marks are all that is left of an attempt.

    It was removed: marks are written after its decision, and what removes an attempt may have gone on while
    another process wrote one. Of a save in progress there is no mark.
    """
    return bool(keys) and {*keys} <= {superseded_mark(attempt), removal_mark(attempt)}


def leases_prefix() -> str:
    """Prefix of the leases of readers."""
    return f"{_PRIVATE}/leases/"


def lease(attempt: str, token: str) -> str:
    """One reader's lease of an attempt."""
    return f"{_PRIVATE}/leases/{attempt}-{token}"


def leased_attempt(key: str) -> str:
    """Inverse of :func:`lease`; empty for anything else."""
    attempt, _, token = key.removeprefix(leases_prefix()).rpartition("-")
    return attempt if token and is_attempt(attempt) else ""


def clock(token: str) -> str:
    """A temporary object that shows the store's time."""
    return f"{_PRIVATE}/clock-{token}"


def probe(token: str) -> str:
    """A temporary object that shows whether a store works."""
    return f"{_PRIVATE}/probe-{token}"


def is_temporary(key: str) -> bool:
    """Whether the object is one of :func:`clock` or :func:`probe`."""
    return key.startswith((f"{_PRIVATE}/clock-", f"{_PRIVATE}/probe-"))


def retention_record() -> str:
    """A root's record of the last retention run: what was kept and removed, and why."""
    return f"{_PRIVATE}/retention"


def incarnations_prefix() -> str:
    """Prefix of a root's numbered incarnations."""
    return f"{_PRIVATE}/incarnations/"


def incarnation_record(number: int) -> str:
    """The record of the incarnation with this number."""
    return f"{incarnations_prefix()}{number:0{_RECORD_DIGITS}d}"


def incarnation_number(key: str) -> int:
    """Inverse of :func:`incarnation_record`, also of its last component; 0 for anything else."""
    name = key.removeprefix(incarnations_prefix())
    return int(name) if _RECORD.fullmatch(name) else 0


def term_record(number: int, term: int) -> str:
    """The record of a term: a coordinator that orders attempts of the incarnation with this number."""
    return f"{incarnation_record(number)}-{term}"


def term_of(key: str) -> tuple[int, int]:
    """Inverse of :func:`term_record`; zeros for anything else."""
    match = _TERM.fullmatch(key.removeprefix(incarnations_prefix()))
    return (int(match[1]), int(match[2])) if match is not None else (0, 0)


def split_checkpoint_id(checkpoint_id: str) -> tuple[str, str]:
    """``(root, name)`` of a checkpoint id: its parent, below which attempts are ordered, and its name.

    Raises InvalidRequestError when there is no parent, the id contains ``..``, or it is a
    directory of records.
    """
    scheme, separator, path = checkpoint_id.rpartition("://")
    absolute = path.startswith("/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    least = 1 if scheme in ("", "file", "memory") else 2
    if ".." in parts or len(parts) < least or (not separator and not absolute):
        raise InvalidRequestError(
            f"checkpoint id {checkpoint_id!r} is not an absolute path or a URL with a name below a "
            "root, like /checkpoints/step-100 or gs://bucket/run/step-100"
        )
    if _PRIVATE in parts:
        raise InvalidRequestError(
            f"checkpoint id {checkpoint_id!r} is Pannier's directory of records: choose another "
            f"name than {_PRIVATE}"
        )
    root = posixpath.join("/" if absolute else "", *parts[:-1])
    return f"{scheme}{separator}{root}", parts[-1]
