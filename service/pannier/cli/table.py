"""Tables that fit the terminal. In: rows. Out: a renderable for :mod:`rich`.

Where the width doesn't suffice, a path loses its first directories and a host its first letters, then
columns are left out, the least used first. Nothing else is cut: text wraps.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GAP: Final = 2
_LONGEST_NAME: Final = 32
"""A longer last name of a path may wrap."""
_SHORTEST_END: Final = 16
_SHORTEST_TEXT: Final = 24


class Fit(enum.Enum):
    """How a cell gets narrower."""

    WHOLE = enum.auto()
    """Not at all."""
    PATH = enum.auto()
    """Without its first directories: ``…/step-30``."""
    END = enum.auto()
    """Without its first letters: ``…pool-2-x7k4``."""
    TEXT = enum.auto()
    """By wrapping."""


@dataclass(frozen=True)
class Column:
    """The head of a column."""

    name: str
    drop: int = 0
    """Left out in this order, the highest first; 0: never."""
    fit: Fit = Fit.WHOLE
    right: bool = False


class Table:
    """Rows under columns, of which those without any content are left out."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """One cell per column."""
        assert len(cells) == len(self._columns), cells
        self._rows.append(tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells: list[tuple[Text, ...]] = list(zip(*self._rows, strict=True)) or [()] * len(
            self._columns
        )
        shown = [
            _Shown(column, cells[index])
            for index, column in enumerate(self._columns)
            if not column.drop or any(cell.plain for cell in cells[index])
        ]
        dropped = []
        while _total([each.least for each in shown]) > options.max_width:
            least_used = max(shown, key=lambda each: each.column.drop)
            if not least_used.column.drop:
                break
            shown.remove(least_used)
            dropped.append(least_used.column.name)
        made = rich_table.Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
        left = options.max_width - _total([each.least for each in shown])
        for each in shown:
            width = min(each.natural, each.least + max(0, left))
            left -= width - each.least
            each.add_to(made, width)
        for row in zip(*(each.cells for each in shown), strict=True):
            made.add_row(*row)
        yield made
        if dropped:
            yield Text(f"-o wide shows also: {', '.join(reversed(dropped))}", style="dim")


def _total(widths: list[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


class _Shown:
    """One column with its cells and widths."""

    def __init__(self, column: Column, cells: tuple[Text, ...]) -> None:
        self.column = column
        self.cells = cells
        head = cell_len(column.name)
        self.natural = max([head, *(cell.cell_len for cell in cells)])
        least = _LEAST[column.fit]
        self.least = max([head, *(min(cell.cell_len, least(cell.plain)) for cell in cells)])

    def add_to(self, made: rich_table.Table, width: int) -> None:
        """Adds the column, and makes the cells fit."""
        if self.column.fit is Fit.PATH:
            self.cells = tuple(
                Text(shorten_path(cell.plain, width), cell.style) for cell in self.cells
            )
        elif self.column.fit is Fit.END:
            self.cells = tuple(
                Text(shorten_start(cell.plain, width), cell.style) for cell in self.cells
            )
        made.add_column(
            self.column.name,
            width=width,
            justify="right" if self.column.right else "left",
            no_wrap=self.column.fit is Fit.WHOLE,
            overflow="fold",
        )


def shorten_path(path: str, width: int) -> str:
    """``path``, or as many of its last names as ``width`` allows, at least one: ``…/run/step-30``."""
    if cell_len(path) <= width:
        return path
    names = path.split("/")
    for first in range(1, len(names)):
        short = "/".join(["…", *names[first:]])
        if cell_len(short) <= width:
            return short
    return names[-1]


def shorten_start(text: str, width: int) -> str:
    """``text``, or ``…`` and its last letters."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


_LEAST: Final[dict[Fit, Callable[[str], int]]] = {
    Fit.WHOLE: cell_len,
    Fit.PATH: lambda path: min(cell_len(shorten_path(path, 0)) + 2, _LONGEST_NAME),
    Fit.END: lambda _: _SHORTEST_END,
    Fit.TEXT: lambda _: _SHORTEST_TEXT,
}
