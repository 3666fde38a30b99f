"""A newer incarnation of a job has begun: what the older one had not handed over won't come.

In: saves whose attempt is known. Out: suspects, for ranks of older incarnations that were not
ingested and that no sidecar speaks for; the conductor acquits or fails them once it has looked for
their receipts in storage. What is ingested goes on. Of a rank whose sidecar is attached, that one
says whether its trainer lives. Event loop only; no I/O.
"""

from typing import Final

from pannier.common import observer_clock
from pannier.coordinator.saves.registry import Registry
from pannier.coordinator.saves.save import Save, State
from pannier.v1 import save_pb2
from pannier.wire import object_names

RETURN_S: Final = 10.0
"""A sidecar that was restarted beside the new incarnation has attached by then."""


class Succession:
    """The newest incarnation of every job under every root."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._newest: dict[tuple[str, str], int] = {}
        self._seen: set[str] = set()
        """Undecided saves whose place in the order was looked at."""
        registry.listen(self._changed)

    def _changed(self, save: Save) -> None:
        if save.ended:
            self._seen.discard(save.key)
        elif save.attempt is not None and save.key not in self._seen:
            self._seen.add(save.key)
            self._rank(save, save.attempt.incarnation_number)

    def _rank(self, save: Save, number: int) -> None:
        if save.context.apart:
            return
        line = _line(save)
        newest = self._newest.get(line, 0)
        if number > newest:
            self._newest[line] = number
            for other in self._registry.undecided():
                older = other.attempt is not None and other.attempt.incarnation_number < number
                if older and not other.context.apart and _line(other) == line:
                    self._judge_later(other, number)
        elif number < newest:
            self._judge_later(save, newest)

    def _judge_later(self, save: Save, newer: int) -> None:
        observer_clock.call_later(RETURN_S, self._judge, save, newer)

    def _judge(self, save: Save, newer: int) -> None:
        # A save that is still planned is waited for by calls, which end with their trainers.
        if save.state is State.PLANNING:
            return
        for part in save.parts.values():
            if part.phase < save_pb2.RANK_PHASE_INGESTED and not part.spoken_for:
                save.suspect(
                    save_pb2.Failure(
                        rank=part.rank,
                        host=part.host,
                        kind=save_pb2.FAILURE_KIND_LOST,
                        message=f"the job was started again (incarnation number {newer}) before "
                        "this rank had handed its part over, and no sidecar speaks for it",
                    )
                )


def _line(save: Save) -> tuple[str, str]:
    root, _ = object_names.split_checkpoint_id(save.context.checkpoint_id)
    return save.context.save.job, root
