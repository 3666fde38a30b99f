"""What sidecars tell of trainers, whether these take part in a save or not.

In: reports of a sidecar. Out: when each rank that a save waits for was last heard, and the
failure of saves that wait for a rank whose process is gone. Event loop only; no I/O.
"""

from collections.abc import Iterable

from pannier.common import observer_clock
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Presence, Save, State
from pannier.v1 import coordinator_pb2, save_pb2
from pannier.wire import limits


def take(
    registry: Registry, sidecar: Presence, trainers: Iterable[coordinator_pb2.TrainerStatus]
) -> None:
    """Notes what a sidecar says of the trainers on its host, after what it says of their ranks."""
    told = list(trainers)
    for save in registry.undecided() if told else ():
        of = save.context.save
        for trainer in told:
            if (trainer.job, trainer.incarnation) == (of.job, of.incarnation) and (
                trainer.rank in save.parts
            ):
                _note(save, trainer.rank, sidecar, trainer)


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
    heard = observer_clock.now() - silent_s
    part.heard = heard if part.heard is None else max(part.heard, heard)
    part.told.seconds_since_heard = silent_s
