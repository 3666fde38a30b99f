"""Bars of progress, one per rank or host: how far it is, its rate, and the time left.

In: bytes by label, as they come. Out: renderables for :mod:`rich`. Not thread-safe.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from pannier.cli import output
from pannier.cli.table import shorten_start

_MOST_RANKS: Final = 16
"""With more, there is a bar per host."""
_RATE_S: Final = 5.0
"""The rate is that of so many last seconds."""
_LABEL: Final = 22
ALL: Final = "all"


class _Rank(Protocol):
    """What the status of a rank has."""

    rank: int
    host: str


_R = TypeVar("_R", bound=_Rank)


def reading_bar() -> Progress:
    """The bar of a command that reads a checkpoint, on standard error; none where that is no terminal.

    It is gone at the end.
    """
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Bars:
    """See the module.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
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

    def update(self, label: str, *, done: int, total: int, state: str) -> None:
        """How far a bar is, in bytes; a total of 0 isn't known."""
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=None, state=state)
        self._bars.update(self._tasks[label], total=total or None, completed=done, state=state)

    def render(self, room: int) -> list[RenderableType]:
        """As many bars as there is room for, those that are least far first; below, that of all."""
        parts: list[RenderableType] = []
        tasks = {task.description: task for task in self._bars.tasks}
        whole = tasks.pop(ALL, None)
        bars = list(tasks.values())
        room = max(1, room)
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
        return parts


def rows_of(ranks: Iterable[_R]) -> dict[str, list[_R]]:
    """Ranks by the label of their bar."""
    rows: dict[str, list[_R]] = {}
    listed = sorted(ranks, key=lambda rank: rank.rank)
    for rank in listed:
        if len(listed) > _MOST_RANKS:
            label = shorten_start(rank.host or "unknown host", _LABEL)
        else:
            number = f"rank {rank.rank}"
            label = f"{number}  {shorten_start(rank.host, _LABEL - len(number) - 2)}"
        rows.setdefault(label, []).append(rank)
    if rows:
        rows[ALL] = listed
    return rows


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
