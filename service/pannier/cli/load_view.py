"""Loads, human-readable: a table of several, the details of one, and one while it is watched.

In: statuses. Out: renderables for :mod:`rich`, or a line of a log. Not thread-safe.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from pannier.cli import output, save_view
from pannier.cli.bars import ALL, Bars, rows_of
from pannier.cli.table import Column, Fit, Table
from pannier.common.message_json import seconds_of
from pannier.v1 import load_status_pb2
from pannier.wire.errors import kind_name

_OTHER_LINES: Final = 8
_LOADED: Final = load_status_pb2.LOAD_PHASE_LOADED
_FAILED: Final = load_status_pb2.LOAD_PHASE_FAILED


def state_name(state: int) -> str:
    """``LOADED`` of ``LOAD_STATE_LOADED``."""
    return load_status_pb2.LoadState.Name(state).removeprefix("LOAD_STATE_")


def phase_name(phase: int) -> str:
    """``READING`` of ``LOAD_PHASE_READING``."""
    return load_status_pb2.LoadPhase.Name(phase).removeprefix("LOAD_PHASE_")


def loads_table(loads: Iterable[load_status_pb2.LoadStatus]) -> Table:
    """One line per load."""
    made = Table(
        Column("load of", fit=Fit.PATH),
        Column("state"),
        Column("read", right=True),
        Column("took", drop=4, right=True),
        Column("from", drop=3, fit=Fit.TEXT),
        Column("waits for", drop=1, fit=Fit.TEXT),
        Column("began", drop=2),
        Column("load"),
    )
    for load in loads:
        made.add_row(
            load.checkpoint_id,
            output.word(state_name(load.state)),
            output.size(load.bytes_read),
            f"{load.seconds:.1f} s",
            sources_text(load.sources),
            load.waiting_on.text,
            output.ago(seconds_of(load.created_at)),
            load.id,
        )
    return made


def _place(source: str) -> str:
    return "storage" if source == "bucket" else source


def sources_text(sources: Iterable[load_status_pb2.LoadSource]) -> str:
    """``14.2 GiB own spool, 1.0 GiB node-3``."""
    return ", ".join(f"{output.size(each.bytes)} {_place(each.source)}" for each in sources)


def heading(load: load_status_pb2.LoadStatus) -> Text:
    """The last name of its checkpoint, its state and id; below, the whole checkpoint id, never broken."""
    name = load.checkpoint_id.rpartition("/")[2]
    return Text.assemble(
        *((name, "bold"), "  ", output.word(state_name(load.state)), "  ", load.id),
        *("\n", (load.checkpoint_id, "dim")),
        no_wrap=True,
        overflow="ignore",
    )


def load_details(load: load_status_pb2.LoadStatus) -> RenderableType:
    """One load with its ranks, what it waits for, and its failures."""
    parts: list[RenderableType] = [heading(load), Text(_summary(load), style="dim")]
    if load.ranks:
        parts.append(_ranks_table(load))
    parts += _below(load)
    return Group(*parts)


def _below(load: load_status_pb2.LoadStatus) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if load.waiting_on.text:
        parts.append(save_view.waiting(load.waiting_on.text, load.waiting_on.deadline_s))
    for failure in load.failures:
        subject = f"rank {failure.rank} ({failure.host})" if failure.rank >= 0 else "load"
        parts.append(Text(f"{subject}: {kind_name(failure.kind)}: {failure.message}", style="red"))
    return parts


def _summary(load: load_status_pb2.LoadStatus) -> str:
    parts = [f"{load.seconds:.1f} s", sources_text(load.sources) or "nothing read yet"]
    events = (
        ("retry", "retries", load.retries),
        ("hedge", "hedges", load.hedges),
        ("rejected block", "rejected blocks", load.rejected_blocks),
    )
    parts += [f"{count} {one if count == 1 else many}" for one, many, count in events if count]
    return "; ".join(parts)


def _ranks_table(load: load_status_pb2.LoadStatus) -> Table:
    made = Table(
        Column("rank", right=True),
        Column("host", drop=1, fit=Fit.END),
        Column("phase"),
        Column("read", right=True),
        Column("of", drop=2, right=True),
        Column("from", drop=3, fit=Fit.TEXT),
        Column("retries", drop=6, right=True),
        Column("hedges", drop=5, right=True),
        Column("rejected", drop=4, right=True),
        Column("last seen", drop=2, right=True),
        Column("waits for", drop=1, fit=Fit.TEXT),
    )
    for rank in load.ranks:
        made.add_row(
            str(rank.rank),
            rank.host,
            output.word(phase_name(rank.phase)),
            output.size(_read(rank)),
            output.size(rank.bytes_total) if rank.bytes_total else "",
            sources_text(rank.sources),
            str(rank.retries),
            str(rank.hedges),
            str(rank.rejected_blocks),
            f"{rank.seconds_since_seen:.0f} s ago",
            rank.waiting_for,
        )
    return made


class LoadProgress:
    """One load while it is watched.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bars = Bars(clock)
        self._load = load_status_pb2.LoadStatus()

    def update(self, load: load_status_pb2.LoadStatus) -> None:
        """Takes the next status."""
        self._load = load
        rows = rows_of(load.ranks)
        self._bars.keep(rows)
        for label, ranks in rows.items():
            total = sum(rank.bytes_total for rank in ranks)
            loaded = all(rank.phase == _LOADED for rank in ranks)
            # A rank may need only a part of an archive.
            done = total if loaded else min(total, sum(map(_read, ranks)))
            state = "" if label == ALL else _state(ranks)
            self._bars.update(label, done=done, total=total, state=state)

    def render(self, height: int) -> RenderableType:
        """The load now, in ``height`` lines."""
        bars = self._bars.render(height - _OTHER_LINES)
        return Group(heading(self._load), *bars, *_below(self._load))

    def line(self) -> str:
        """The load now, as a line of a log, which changes rarely."""
        load = self._load
        line = f"{load.id} {state_name(load.state)}"
        if load.bytes_total and load.state == load_status_pb2.LOAD_STATE_LOADING:
            line += f": {10 * min(10, 10 * load.bytes_read // load.bytes_total)} % read"
        waits = load.waiting_on
        # Without the seconds, which change all the time.
        awaited = f"ranks {list(waits.ranks)}" if waits.ranks else waits.text
        return f"{line}, waiting for {awaited}" if awaited else line


def _state(ranks: list[load_status_pb2.RankLoadStatus]) -> str:
    """The ranks' common phase; if their phases differ, how many have loaded; FAILED if any has failed."""
    phases = [rank.phase for rank in ranks]
    if len(set(phases)) == 1 or _FAILED in phases:
        return phase_name(_FAILED if _FAILED in phases else phases[0])
    return f"{phases.count(_LOADED)} of {len(phases)}"


def _read(rank: load_status_pb2.RankLoadStatus) -> int:
    return sum(source.bytes for source in rank.sources)
