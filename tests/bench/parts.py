"""What every part has in common: its arguments, its rows, and how it prints them.

A part is a module with a ``main()``. Run by hand it prints a table; ``run.py`` starts it with
``--json`` and reads the last line of its output. Progress goes to standard error.
"""

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

MIB: Final = 1 << 20
GIB: Final = 1 << 30
WARM_UP: Final = 2
"""Saves of a process that aren't counted: daemons start, memory is touched."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    target: str
    """Empty: for comparison only."""
    result: str
    met: bool | None = None
    """None: there is no target, or it could not be measured; ``result`` says why."""
    detail: str = ""


def megabytes(text: str) -> int:
    """Bytes of ``64M`` or ``4G`` (powers of two)."""
    units = {"K": 1 << 10, "M": MIB, "G": GIB}
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in units else (text, "")
    return int(float(number) * units.get(unit, 1))


def arguments(
    doc: str | None, *, size: int = GIB, quick: int = 64 * MIB, saves: int = 5
) -> argparse.ArgumentParser:
    """The parser of a part; it may add arguments of its own.

    Args:
        doc: the module's.
        size, quick: bytes of the state, and with ``--quick``.
        saves: how many are counted.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object in the last line")
    parser.add_argument("--quick", action="store_true", help="small sizes, for development")
    parser.add_argument(
        "--bytes",
        type=megabytes,
        help=f"of the state (default {sized(size)}, quick {sized(quick)})",
    )
    parser.add_argument("--tensors", type=int, default=200, help="of the state (default 200)")
    parser.add_argument("--saves", type=int, help=f"that are counted (default {saves}, quick 3)")
    parser.add_argument(
        "--transport", choices=("mapped", "streamed", "auto"), default="auto", help="default auto"
    )
    parser.set_defaults(usual=(size, saves), quickly=(quick, 3))
    return parser


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> Any:
    """The options, with the defaults that depend on ``--quick``.

    From now on SIGTERM is an exit that cleans up.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parser.parse_args(words)
    size, saves = options.quickly if options.quick else options.usual
    options.bytes = options.bytes or size
    options.saves = options.saves or saves
    return options


def sized(count: float) -> str:
    """Bytes for people."""
    if count >= 0.995 * GIB:
        return f"{count / GIB:.3g} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


def finish(options: Any, rows: Sequence[Row], figures: dict[str, Any]) -> None:
    """Prints what was measured.

    Args:
        options: of :func:`parsed`.
        rows: for the table.
        figures: everything else that is worth keeping; goes to ``bench.json``.
    """
    if options.json:
        answer = {"rows": [dataclasses.asdict(row) for row in rows], "figures": figures}
        print(json.dumps(answer), flush=True)
    else:
        console = Console(width=150)
        console.print(table(rows))
        console.print_json(json.dumps(figures))


def table(rows: Sequence[Row], title: str | None = None) -> Table:
    """The rows, for a terminal."""
    out = Table(title=title)
    for column in ("what", "target", "result", ""):
        out.add_column(column)
    for row in rows:
        result = f"{row.result}\n[dim]{row.detail}[/dim]" if row.detail else row.result
        out.add_row(row.what, row.target, result, met_text(row), end_section=True)
    return out


def met_text(row: Row) -> str:
    """``met``, ``not met`` or nothing."""
    return {True: "met", False: "not met", None: ""}[row.met]


def say(text: str) -> None:
    """Progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
