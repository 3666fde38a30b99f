"""The report that retention leaves beside checkpoints: what its last runs removed, what they kept and why.

In: JSON that any program may have written. Out: a :class:`RetentionRecord`. It is for messages and listings
alone: a part of another shape is dropped, and nothing that is removed or kept depends on it. Pure.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

_LATEST: Final = 253402300799.0
"""End of the year 9999, Unix time: later ones can't be shown."""


@dataclass(frozen=True)
class RemovedCheckpoint:
    """A checkpoint that retention has removed."""

    name: str
    """Relative to the root."""
    job: str
    bytes: int
    time: float
    """Unix time, seconds."""


@dataclass(frozen=True)
class RetentionRecord:
    """The report of the last runs below one root."""

    kept: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """Reasons why the last run kept a checkpoint, by job and name."""
    removed: Sequence[RemovedCheckpoint] = ()
    """Oldest first."""
    pattern: str = "*"
    """Of the last run."""

    @classmethod
    def parse(cls, content: bytes) -> "RetentionRecord":
        """The record in ``content``, as far as it has the shape of one."""
        try:
            # RecursionError: nested too deeply.
            found = _mapping(json.loads(content))
        except (ValueError, RecursionError):
            return cls()
        removed = found.get("removed")
        pattern = found.get("pattern")
        return cls(
            {
                job: {name: _texts(reasons) for name, reasons in _mapping(names).items()}
                for job, names in _mapping(found.get("kept")).items()
            },
            [
                entry
                for each in (removed if isinstance(removed, list) else ())
                if (entry := _removed(_mapping(each))) is not None
            ],
            pattern if isinstance(pattern, str) else "*",
        )

    def serialize(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), indent=1).encode()


def _mapping(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _texts(found: Any) -> list[str]:
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _removed(found: dict[str, Any]) -> RemovedCheckpoint | None:
    name, job, size, time = (found.get(key) for key in ("name", "job", "bytes", "time"))
    if not (isinstance(name, str) and isinstance(job, str)):
        return None
    if not (isinstance(size, int) and isinstance(time, int | float)):
        return None
    if not (math.isfinite(time) and 0 <= time <= _LATEST):
        return None
    return RemovedCheckpoint(name, job, size, time)
