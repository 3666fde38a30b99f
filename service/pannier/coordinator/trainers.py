"""What sidecars tell of trainers, whether these take part in a save or not.

In: reports of a sidecar. Out: when each rank that a save waits for was last heard, and the
failure of saves that wait for a rank whose process is gone. Event loop only; no I/O.
"""

import time
from collections.abc import Iterable

from pannier.coordinator.registry import Registry
from pannier.coordinator.saves import Presence, Save, State
from pannier.v1 import coordinator_pb2, save_pb2
from pannier.wire import limits


def take(
    registry: Registry, sidecar: Presence, trainers: Iterable[coordinator_pb2.TrainerStatus]
) -> None:
    """Notes what a sidecar says of the trainers on its host, after what it says of their ranks."""
    told = {(each.job, each.incarnation, each.rank): each for each in trainers}
    if not told:
        return
    for save in registry.undecided():
        of = save.context.save
        for rank in save.parts:
            trainer = told.get((of.job, of.incarnation, rank))
            if trainer is not None:
                _note(save, rank, sidecar, trainer)


def _note(save: Save, rank: int, sidecar: Presence, trainer: coordinator_pb2.TrainerStatus) -> None:
    part = save.parts[rank]
    if part.spoken_for and part.sidecar is not None and part.sidecar.host != sidecar.host:
        return  # it lives on another host
    if trainer.gone:
        # Of one that had handed something in, its sidecar reports what became of that.
        unheard = part.phase <= save_pb2.RANK_PHASE_MISSING and part.receipt is None
        if unheard and not save.resumed and save.state in (State.PLANNING, State.STAGING):
            save.fail(
                save_pb2.FAILURE_KIND_LOST,
                f"{trainer.gone[: limits.MAX_NAME]} is gone: it ended before it took part in this save",
                rank,
            )
        return
    part.host = part.host or sidecar.host
    silent_s = limits.age(trainer.seconds_since_heard)
    heard = time.monotonic() - silent_s
    part.heard = heard if part.heard is None else max(part.heard, heard)
    part.told.seconds_since_heard = silent_s
