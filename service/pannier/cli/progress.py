"""A save while it is watched: a bar per rank or host, its rate and time left, and what is late.

In: its statuses, as they come. Out: a renderable for :mod:`rich`, or a line of a log. Not thread-safe.
"""

import time
from collections.abc import Callable
from typing import Final

from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from pannier.cli import output, save_view
from pannier.cli.table import shorten_start
from pannier.common import timeouts
from pannier.common.wait_text import Awaited, waiting_text
from pannier.v1 import save_pb2

_MOST_RANKS: Final = 16
"""With more, there is a bar per host."""
_RATE_S: Final = 5.0
"""The rate is that of so many last seconds."""
_LABEL: Final = 22
_OTHER_LINES: Final = 8
"""Of the terminal's, below and above the bars."""
_ALL: Final = "all"


class SaveProgress:
    """One save's progress.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars = Progress(
            _Cell(lambda task: task.description),
            _Cell(lambda task: output.word(task.fields["state"])),
            BarColumn(None, table_column=Column(ratio=1)),
            _Cell(_percent, right=True),
            _Cell(_rate, right=True),
            _Cell(_time_left, right=True),
            auto_refresh=False,
            expand=True,
            get_time=clock,
            speed_estimate_period=_RATE_S,
        )
        self._tasks: dict[str, TaskID] = {}
        self._moved: dict[int, tuple[tuple[int, ...], float]] = {}
        """By rank, its last progress and when that was observed."""
        self._save = save_pb2.SaveStatus()

    def update(self, save: save_pb2.SaveStatus) -> None:
        """The next status."""
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
        for label, ranks in _rows(save).items():
            self._update_bar(label, ranks)

    def _update_bar(self, label: str, ranks: list[save_pb2.RankStatus]) -> None:
        total = sum(map(_bytes, ranks))
        done = sum(map(_uploaded, ranks))
        if not total and all(rank.phase == save_pb2.RANK_PHASE_DURABLE for rank in ranks):
            # Ranks without data, which only write a receipt.
            total = done = 1
        state = "" if label == _ALL else _state(ranks)
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=None, state=state)
        self._bars.update(self._tasks[label], total=total or None, completed=done, state=state)

    def render(self, height: int) -> RenderableType:
        """The save now, in ``height`` lines."""
        parts: list[RenderableType] = [save_view.heading(self._save)]
        tasks = {task.description: task for task in self._bars.tasks}
        whole = tasks.pop(_ALL, None)
        bars = list(tasks.values())
        room = max(1, height - _OTHER_LINES)
        if len(bars) > room:
            bars.sort(key=lambda task: task.percentage)
        if bars:
            shown = bars[:room] + ([whole] if whole is not None and len(bars) > 1 else [])
            parts.append(self._bars.make_tasks_table(shown))
        if len(bars) > room:
            least = bars[room].percentage
            parts.append(
                Text(f"and {len(bars) - room} more, at {least:.0f} % and above", style="dim")
            )
        if late := self.late():
            parts.append(save_view.waiting(late, self._save.waiting_on.deadline_s))
        return Group(*parts)

    def line(self) -> str:
        """The save now, as a line of a log; few changes make another one."""
        save = self._save
        line = f"{save.id} {save_view.state_name(save.state)}: "
        line += f"{save_view.durable_text(save)} ranks durable"
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
        """What the save waits for although it should have moved by now; empty: all goes on."""
        if not self._save.waiting_on.ranks:
            # Storage or a daemon that doesn't respond.
            return self._save.waiting_on.text
        known = {rank.rank: rank for rank in self._save.ranks}
        awaited = []
        for number in self._late_ranks():
            rank = known.get(number, save_pb2.RankStatus())
            awaited.append(Awaited(number, rank.host, rank.seconds_since_seen or None))
        return waiting_text(awaited)

    def _late_ranks(self) -> list[int]:
        before = self._clock() - timeouts.UNRESPONSIVE_S
        return [rank for rank in self._save.waiting_on.ranks if self._moved[rank][1] <= before]


class _Cell(ProgressColumn):
    """A text of a task."""

    def __init__(self, text: Callable[[Task], str | Text], *, right: bool = False) -> None:
        super().__init__(Column(no_wrap=True, justify="right" if right else "left"))
        self._text = text

    def render(self, task: Task) -> Text:
        """The text now."""
        text = self._text(task)
        return Text(text) if isinstance(text, str) else text


def _percent(task: Task) -> str:
    return f"{task.percentage:.0f} %" if task.total is not None else ""


def _rate(task: Task) -> str:
    return f"{output.size(task.speed)}/s" if task.speed and not task.finished else ""


def _time_left(task: Task) -> str:
    left = task.time_remaining
    return "" if left is None or task.finished else f"{output.duration(left)} left"


def _rows(save: save_pb2.SaveStatus) -> dict[str, list[save_pb2.RankStatus]]:
    """Ranks by the label of their bar."""
    rows: dict[str, list[save_pb2.RankStatus]] = {}
    for rank in sorted(save.ranks, key=lambda rank: rank.rank):
        if len(save.ranks) > _MOST_RANKS:
            label = shorten_start(rank.host or "unknown host", _LABEL)
        else:
            number = f"rank {rank.rank}"
            label = f"{number}  {shorten_start(rank.host, _LABEL - len(number) - 2)}"
        rows.setdefault(label, []).append(rank)
    if rows:
        rows[_ALL] = list(save.ranks)
    return rows


def _state(ranks: list[save_pb2.RankStatus]) -> str:
    """The phase of one rank; of several, how many are durable, or FAILED."""
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
