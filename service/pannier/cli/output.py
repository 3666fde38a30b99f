"""Output of commands: human-readable text, wrapped for the terminal, and JSON for programs.

A pipe gets lines of any length, as ``-o wide`` does, unless ``COLUMNS`` is set.
"""

import json
import math
import os
import textwrap
import time
from collections.abc import Mapping
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.text import Text

from pannier.common.units import size_text

_ANY_WIDTH: Final = 1 << 20
_COLOURS: Final = {
    **dict.fromkeys(("COMMITTED", "DURABLE", "LOADED", "committed"), "green"),
    **dict.fromkeys(("ABORTED", "FAILED", "aborted"), "red"),
    **dict.fromkeys(("IN_DOUBT", "undecided", "removing"), "yellow"),
    "MISSING": "bold reverse magenta",
}
size = size_text
_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60))


def print_json(value: Any) -> None:
    """One line of JSON."""
    click.echo(json.dumps(value))


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics for JSON, which knows no infinity: None instead."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def console(*, wide: bool = False, err: bool = False) -> Console:
    """Standard output or error; what is printed there has no markup."""
    out = Console(highlight=False, markup=False, emoji=False, stderr=err)
    if wide or not (out.is_terminal or "COLUMNS" in os.environ):
        out.width = _ANY_WIDTH
    return out


def show(renderable: RenderableType, *, wide: bool = False) -> None:
    """Prints a table or the like, without the spaces that :mod:`rich` puts at the ends of lines."""
    out = console(wide=wide)
    with out.capture() as captured:
        out.print(renderable, crop=False)
    for line in captured.get().splitlines():
        click.echo(line.rstrip(), color=out.is_terminal)


def say(text: str, *, err: bool = False) -> None:
    """Prints sentences, wrapped between words: an address that is longer than a line can still be copied."""
    width = console(err=err).width
    for line in text.splitlines():
        click.echo(
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False), err=err
        )


def word(name: str) -> Text:
    """The name of a state or phase in its colour."""
    return Text(name, style=_COLOURS.get(name, ""))


def duration(seconds: float) -> str:
    """``3 min``."""
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ago(unix_time: float) -> str:
    """``3 min ago``; empty when the time isn't known."""
    return f"{duration(max(0.0, time.time() - unix_time))} ago" if unix_time else ""
