"""Bars of progress, one per rank or host: how far it is, its rate, and the time left.

In: bytes by label, as they come. Out: renderables for :mod:`rich`. Not thread-safe.
"""

from collections.abc import Callable, Collection, Iterable
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
"""Seconds over which the rate is measured."""
_LABEL: Final = 22
_UNKNOWN: Final = "unknown host"
ALL: Final = "all"


class _Rank(Protocol):
    """The fields of a rank's status that are used here."""

    rank: int
    host: str


_R = TypeVar("_R", bound=_Rank)


def reading_bar() -> Progress:
    """The bar of a command that reads a checkpoint, on standard error; none where that is no terminal.

    It disappears at the end.
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
        """Sets how far a bar is, in bytes; with a ``total`` of 0, the total isn't known."""
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=None, state=state)
        self._bars.update(self._tasks[label], total=total or None, completed=done, state=state)

    def keep(self, labels: Iterable[str]) -> None:
        """Removes all other bars: the labels depend on the hosts that are known by now."""
        for label in self._tasks.keys() - labels:
            self._bars.remove_task(self._tasks.pop(label))

    def render(self, room: int) -> list[RenderableType]:
        """As many bars as there is room for, the least advanced ones first; below, the bar of all."""
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
    """Ranks by the label of their bar; no two hosts have the same one."""
    rows: dict[str, list[_R]] = {}
    listed = sorted(ranks, key=lambda rank: rank.rank)
    if len(listed) > _MOST_RANKS:
        labels = _host_labels({rank.host or _UNKNOWN for rank in listed}, _LABEL)
        for rank in listed:
            rows.setdefault(labels[rank.host or _UNKNOWN], []).append(rank)
    elif listed:
        room = _LABEL - len(f"rank {listed[-1].rank}  ")
        labels = _host_labels({rank.host for rank in listed}, room)
        for rank in listed:
            rows[f"rank {rank.rank}  {shorten_start(labels[rank.host], room)}"] = [rank]
    if rows:
        rows[ALL] = listed
    return rows


def _host_labels(hosts: Collection[str], width: int) -> dict[str, str]:
    """A label for each host: in the first of these forms in which all fit and differ, else its whole name."""
    forms: tuple[Callable[[str], str], ...] = (
        lambda host: host,
        _first_label,
        lambda host: shorten_start(_first_label(host), width),
        lambda host: shorten_start(host, width),
    )
    for form in forms:
        labels = {host: form(host) for host in hosts}
        fit = all(len(label) <= width for label in labels.values())
        if fit and len(set(labels.values())) == len(labels):
            return labels
    return {host: host for host in hosts}


def _first_label(host: str) -> str:
    return host.partition(".")[0]


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
