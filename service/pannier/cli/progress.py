"""A save while it is watched: a bar per rank or host, its rate and time left, and late ranks.

In: the save's statuses, as they come. Out: a renderable for :mod:`rich`, or a line of a log. Not thread-safe.
"""

import time
from collections.abc import Callable
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from pannier.cli import save_view
from pannier.cli.bars import ALL, Bars, rows_of
from pannier.common import timeouts
from pannier.common.wait_text import Awaited, waiting_text
from pannier.v1 import save_pb2

_OTHER_LINES: Final = 8
"""Lines of the terminal above and below the bars."""


class SaveProgress:
    """One save's progress.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars = Bars(clock)
        self._moved: dict[int, tuple[tuple[int, ...], float]] = {}
        """By rank, its last progress and when that was observed."""
        self._save = save_pb2.SaveStatus()

    def update(self, save: save_pb2.SaveStatus) -> None:
        """Takes the next status."""
        self._save = save
        now = self._clock()
        for rank in save.ranks:
            done = (rank.phase, rank.bytes_staged, rank.bytes_ingested, rank.bytes_uploaded)
            last = self._moved.get(rank.rank)
            if last is None:
                self._moved[rank.rank] = done, now - rank.seconds_since_seen
            elif last[0] != done:
                self._moved[rank.rank] = done, now
        for number in save.waiting_on.ranks:
            # A sidecar lists its own host's ranks only.
            self._moved.setdefault(number, ((), now))
        rows = rows_of(save.ranks)
        self._bars.keep(rows)
        for label, ranks in rows.items():
            self._update_bar(label, ranks)

    def _update_bar(self, label: str, ranks: list[save_pb2.RankStatus]) -> None:
        total = sum(map(_bytes, ranks))
        done = sum(map(_uploaded, ranks))
        if not total and all(rank.phase == save_pb2.RANK_PHASE_DURABLE for rank in ranks):
            # Ranks without data, which only write a receipt.
            total = done = 1
        state = "" if label == ALL else _state(ranks)
        self._bars.update(label, done=done, total=total, state=state)

    def render(self, height: int) -> RenderableType:
        """The save now, in ``height`` lines."""
        parts: list[RenderableType] = [save_view.heading(self._save)]
        replicated = save_view.replicated_text(self._save)
        parts += self._bars.render(height - _OTHER_LINES - bool(replicated))
        if replicated:
            parts.append(Text(f"replicated {replicated} ranks", style="dim"))
        if late := self.late():
            parts.append(save_view.waiting(late, self._save.waiting_on.deadline_s))
        return Group(*parts)

    def line(self) -> str:
        """The save now, as a line of a log, which changes rarely."""
        save = self._save
        line = f"{save.id} {save_view.state_name(save.state)}: "
        line += f"{save_view.durable_text(save)} ranks durable"
        if replicated := save_view.replicated_text(save):
            line += f", {replicated} replicated"
        total = sum(map(_bytes, save.ranks))
        if save.state == save_pb2.SAVE_STATE_UPLOADING and total:
            tenths = 10 * sum(map(_uploaded, save.ranks)) // total
            line += f", {10 * tenths} % uploaded"
        # Without the seconds, which change all the time.
        if late := self._late_ranks():
            line += f", waiting for ranks {late}"
        elif save.waiting_on.text and not save.waiting_on.ranks:
            line += f", waiting for {save.waiting_on.text}"
        return line

    def late(self) -> str:
        """What the save waits for that should have made progress by now; empty: nothing is late."""
        if not self._save.waiting_on.ranks:
            # Storage or a daemon that doesn't respond.
            return self._save.waiting_on.text
        late = self._late_ranks()
        if late == list(self._save.waiting_on.ranks):
            # The daemon knows more, for instance that a sidecar does not respond.
            return self._save.waiting_on.text
        known = {rank.rank: rank for rank in self._save.ranks}
        awaited = []
        for number in late:
            rank = known.get(number, save_pb2.RankStatus())
            awaited.append(Awaited(number, rank.host, rank.seconds_since_seen or None))
        return waiting_text(awaited)

    def _late_ranks(self) -> list[int]:
        before = self._clock() - timeouts.UNRESPONSIVE_S
        return [rank for rank in self._save.waiting_on.ranks if self._moved[rank][1] <= before]


def _state(ranks: list[save_pb2.RankStatus]) -> str:
    """The ranks' common phase; if their phases differ, how many are durable; FAILED if any has failed."""
    phases = [rank.phase for rank in ranks]
    if len(set(phases)) == 1 or save_pb2.RANK_PHASE_FAILED in phases:
        failed = save_pb2.RANK_PHASE_FAILED
        return save_view.phase_name(failed if failed in phases else phases[0])
    return f"{phases.count(save_pb2.RANK_PHASE_DURABLE)} of {len(phases)}"


def _bytes(rank: save_pb2.RankStatus) -> int:
    return max(rank.bytes_staged, rank.bytes_ingested, rank.bytes_durable)


def _uploaded(rank: save_pb2.RankStatus) -> int:
    durable = rank.phase == save_pb2.RANK_PHASE_DURABLE
    return _bytes(rank) if durable else max(rank.bytes_uploaded, rank.bytes_durable)
