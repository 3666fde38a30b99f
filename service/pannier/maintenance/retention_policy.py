"""Which checkpoints of a job are kept: rules and checkpoints in, the reasons to keep each out. Pure.

The policy applies to the checkpoints that its pattern matches. The newest step is always kept, so that the
job can resume; so are checkpoints whose name has no step, since a person chose it. Without a limiting rule,
all are kept.
"""

import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pannier.attempts.listing import Checkpoint, CheckpointState
from pannier.common.locations import CHILDREN, Pattern
from pannier.wire import object_names
from pannier.wire.errors import ConfigurationError

_BEST: Final = re.compile(r"(.+?):(min|max)(?::([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Best:
    """The ``count`` best by a metric that ``async_save(metrics=...)`` was given."""

    metric: str
    lowest: bool = True
    """Whether less is better."""
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Best":
        """From ``METRIC:min`` or ``METRIC:max``, optionally with ``:N``. Raises ConfigurationError."""
        match = _BEST.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"--keep-best {text!r} is not METRIC:min or METRIC:max, with :N for more than one"
            )
        return cls(match[1], match[2] == "min", int(match[3] or 1))

    def __str__(self) -> str:
        return f"{self.metric}:{'min' if self.lowest else 'max'}:{self.count}"


@dataclass(frozen=True)
class Policy:
    """The rules; a checkpoint that none keeps may be removed. Raises ConfigurationError."""

    newest: int | None = None
    """Number of newest steps to keep, in the order of their saves; checkpoints whose names have the same
    numbers (a model's, its optimizer's) are of one step, those without numbers of none."""
    every: int | None = None
    """Keeps steps that are multiples of this: :meth:`~pannier.common.locations.Pattern.step`."""
    best: tuple[Best, ...] = ()
    always: tuple[str, ...] = ()
    """Names to keep, or of directories above them, with shell wildcards."""
    pattern: Pattern = CHILDREN
    """Which directories below the root are checkpoints."""

    def __post_init__(self) -> None:
        for option, value in (("--keep-newest", self.newest), ("--keep-every", self.every)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{option} {value} is not a positive number")

    @property
    def limits(self) -> bool:
        """Whether any rule allows removals."""
        return self.newest is not None or self.every is not None or bool(self.best)


@dataclass(frozen=True)
class PolicyResult:
    """A committed checkpoint and the rules that keep it; without any it may be removed."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]


def apply_policy(
    policy: Policy, checkpoints: Iterable[Checkpoint], *, job: str, committed: str | None = None
) -> list[PolicyResult]:
    """A result for each committed checkpoint of the job that the pattern matches, oldest first.

    Those whose removal has begun come before the others; no rule keeps or counts them, since they can't be
    loaded any more.

    Args:
        committed: the attempt whose commit triggers the run. Saves may be committed in another order
            than they began: neither it nor a newer one is removed before a later commit.

    Checkpoints of other jobs, uncommitted attempts and what the pattern doesn't match have no result and
    are never touched.
    """
    own = sorted(
        (each for each in checkpoints if each.job == job and policy.pattern.matches(each.name)),
        key=lambda each: each.order,
    )
    removing = [each for each in own if each.state is CheckpointState.REMOVING]
    own = [each for each in own if each.state is CheckpointState.COMMITTED]
    if not policy.limits:
        return [PolicyResult(each, ("no rule limits them",)) for each in own]
    best = {rule: _best(rule, own) for rule in policy.best}
    occasion = _occasion(own, committed) if committed is not None else None
    results = []
    ages: dict[tuple[int, ...], int] = {}
    for checkpoint in reversed(own):
        found = policy.pattern.step(checkpoint.name)
        numbers = policy.pattern.numbers(checkpoint.name)
        age = ages.setdefault(numbers, len(ages)) if numbers else math.inf
        reasons = [f"matches {each}" for each in policy.always if _has_name(checkpoint, each)]
        if age < (policy.newest or 1):
            reasons.append("newest" if age == 0 else f"newest {policy.newest}")
        elif checkpoint.attempt == committed:
            reasons.append("committed last")
        elif occasion is not None and checkpoint.order > occasion:
            reasons.append("newer than the one committed last")
        if found is None:
            reasons.append("its name has no step")
        elif policy.every is not None and found % policy.every == 0:
            reasons.append(f"every {policy.every}")
        reasons += [f"best {rule}" for rule, names in best.items() if checkpoint.name in names]
        results.append(PolicyResult(checkpoint, tuple(reasons)))
    return [*(PolicyResult(each, ()) for each in removing), *results[::-1]]


def _occasion(own: Sequence[Checkpoint], committed: str) -> tuple[bool, tuple[float | str, ...]]:
    """The first parts of :attr:`Checkpoint.order` of the attempt whose commit triggers the run."""
    attempt = object_names.Attempt.parse(committed)
    # The attempt's checkpoint may have been overwritten a moment ago: then all of its incarnation are newer.
    attempt = next((each.parsed for each in own if each.attempt == committed), attempt)
    known = [
        each.began
        for each in own
        if each.attempt and each.parsed.incarnation == attempt.incarnation
    ]
    # Where the attempt's incarnation has nothing else below the root, nothing is removed this time.
    unknown = 0.0 if any(each.began is not None for each in own) else None
    return True, object_names.order_key(attempt, known[0] if known else unknown)


def _has_name(checkpoint: Checkpoint, wanted: str) -> bool:
    """Whether a name with shell wildcards is the checkpoint's, or that of a directory above it."""
    parts = checkpoint.name.split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(each, wanted) for each in above)


def _best(rule: Best, checkpoints: Sequence[Checkpoint]) -> set[str]:
    """Names of the best; of equal ones the newer."""
    ranked = [
        (each.metrics[rule.metric], age, each.name)
        for age, each in enumerate(reversed(checkpoints))
        if not math.isnan(each.metrics.get(rule.metric, math.nan))
    ]
    ranked.sort(key=lambda entry: (entry[0] if rule.lowest else -entry[0], entry[1]))
    return {name for _, _, name in ranked[: rule.count]}
