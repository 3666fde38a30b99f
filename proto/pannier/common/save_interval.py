"""How often to save: what a save costs training, and the interval between saves that loses the least time.

In: what saves and loads took, and the mean time between failures. Out: an :class:`Advice`, whose ``str()`` is one
human-readable line. Pure.

The model. ``async_save`` is called every ``interval``; the call keeps the training loop for ``stalled``, and the state
that it saved is safe ``safe`` seconds after the call. Failures come at random (a Poisson process), on average ``mtbf``
apart. After a failure the newest safe save is loaded, which takes ``restore``, and what was trained since its call is
repeated; saves and restores fail as well. From one safe save to the next it then takes on average

    mtbf * exp((restore + safe - stalled) / mtbf) * (exp(interval / mtbf) - 1)

That is Daly's expression for saves that stop training until they are safe, with one change: what a save needs in the
background counts like a longer restore. So it adds to the loss at each failure, and doesn't change the best interval.

- J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974)
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
  Computer Systems 22 (2006)

Left out, since it can't be measured from a save: slower steps while a save is in flight, the wait of an optimizer's
step for an overlapped copy, and the time until a failure is noticed and processes are started again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pannier.common.units import duration_text
from pannier.wire.errors import InvalidRequestError

RECENT: Final = 20
"""How many of the last saves and loads are used."""


@dataclass(frozen=True)
class SaveCost:
    """What a committed save took, or the medians of several; seconds from the training loop's call on."""

    stalled_s: float
    """How long the call kept the training loop, on the slowest rank."""
    ingested_s: float
    """Until the bytes were ingested: trainers that die later lose nothing of it."""
    durable_s: float
    """Until the checkpoint was committed: hosts that are lost later lose nothing of it."""


@dataclass(frozen=True)
class Loss:
    """Which shares of the time don't advance training, from 0 to 1."""

    saves: float
    """Training stands still for saves."""
    failures: float
    """Steps are repeated after failures, and checkpoints loaded."""

    @property
    def total(self) -> float:
        """Both."""
        return self.saves + self.failures


@dataclass(frozen=True)
class Advice:
    """What saves cost, and how often to save. ``str()`` of it is one human-readable line."""

    cost: SaveCost
    """Medians of recent saves."""
    saves: int
    """How many were measured. A first one alone is slower than later ones."""
    restore_s: float
    """Median of recent loads; without any, assumed to be ``cost.durable_s``."""
    restores: int
    """How many were measured."""
    mtbf_s: float | None
    """Mean time between failures, seconds; None: not given, and nothing below is known."""
    interval_s: float | None
    """Seconds from one ``async_save`` to the next that lose the least time; at least ``cost.durable_s``, so that
    a save is committed before the next begins."""
    loss: Loss | None
    """At this interval, where each failure loses a host, and with it what isn't durable."""
    loss_in_place: Loss | None
    """The same where only processes die, and what is ingested is committed without them."""

    def __str__(self) -> str:
        count = f"{self.saves} saves" if self.saves > 1 else "1 save, and the first is slower"
        cost = (
            f"a save costs {duration_text(self.cost.stalled_s)} of training and is durable after "
            f"{duration_text(self.cost.durable_s)} ({count})"
        )
        restore = "no load was measured"
        if self.restores:
            loads = f"{self.restores} load{'s' if self.restores > 1 else ''}"
            restore = f"a restore takes {duration_text(self.restore_s)} ({loads})"
        if self.mtbf_s is None or self.interval_s is None or self.loss is None:
            return f"{cost}; {restore}"
        if not self.restores:
            restore += (
                f": a restore is assumed to take {duration_text(self.restore_s)}, as a save does until it "
                "is durable"
            )
        limit = ", as soon as the last save is durable" if self.is_limited else ""
        return (
            f"save every {duration_text(self.interval_s)}{limit}: {cost}; at one failure in "
            f"{duration_text(self.mtbf_s)}, each of a whole host, {_percent(self.loss.saves)} of the time is lost "
            f"to saves, {_percent(self.loss.failures)} to repeated steps and restores; {restore}"
        )

    @property
    def is_limited(self) -> bool:
        """Whether a shorter interval would lose less, but saves aren't durable sooner."""
        return self.interval_s == self.cost.durable_s


def advise(
    saves: Sequence[SaveCost], restores: Sequence[float], mtbf_s: float | None = None
) -> Advice | None:
    """Advice by the medians of what recent saves and loads took; None: without any save.

    Args:
        restores: seconds of each load.
        mtbf_s: mean time between failures of the whole job, seconds.

    Raises InvalidRequestError: ``mtbf_s`` is below 1, or not finite.
    """
    if mtbf_s is not None and not 1 <= mtbf_s < math.inf:
        raise InvalidRequestError(
            f"a mean time between failures of {mtbf_s:g} s: give that of the whole job, at least 1 s"
        )
    if not saves:
        return None
    cost = SaveCost(
        stalled_s=_median(save.stalled_s for save in saves),
        ingested_s=_median(save.ingested_s for save in saves),
        durable_s=_median(save.durable_s for save in saves),
    )
    restore_s = _median(restores) if restores else cost.durable_s
    interval_s = loss = loss_in_place = None
    if mtbf_s is not None:
        interval_s = max(best_interval(cost.stalled_s, mtbf_s), cost.durable_s)
        loss, loss_in_place = (
            expected_loss(interval_s, cost.stalled_s, safe_s, restore_s, mtbf_s)
            for safe_s in (cost.durable_s, cost.ingested_s)
        )
    return Advice(
        cost, len(saves), restore_s, len(restores), mtbf_s, interval_s, loss, loss_in_place
    )


def best_interval(stalled_s: float, mtbf_s: float) -> float:
    """Seconds from one save to the next that lose the least time: Daly's higher-order estimate.

    Its first term is Young's ``sqrt(2 * stalled * mtbf)``.
    """
    if stalled_s >= 2 * mtbf_s:
        return stalled_s + mtbf_s
    ratio = stalled_s / (2 * mtbf_s)
    return math.sqrt(2 * stalled_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def expected_loss(
    interval_s: float, stalled_s: float, safe_s: float, restore_s: float, mtbf_s: float
) -> Loss:
    """What is lost with a save every ``interval_s``, by the module's model; ``interval_s`` > ``stalled_s``.

    Args:
        safe_s: seconds from the call on until the save survives the failure.
    """
    period = interval_s / mtbf_s
    delay = (restore_s + max(0.0, safe_s - stalled_s)) / mtbf_s
    # The interval divided by the average time from one safe save to the next: the share that isn't lost to failures.
    running = -period * math.exp(-delay - period) / math.expm1(-period)
    return Loss(saves=running * stalled_s / interval_s, failures=1 - running)


def _median(values: Iterable[float]) -> float:
    """The lower one of an even number: of two saves the first, which starts daemons and plans, takes longer."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _percent(share: float) -> str:
    percent = 100 * share
    if percent < 0.01:
        return "less than 0.01 %"
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.2g} %"
