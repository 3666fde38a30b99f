"""Messages as tables for people and as JSON for programs."""

import json
import time
from collections.abc import Iterable
from typing import Any

import click
from google.protobuf import json_format, message
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pannier.common.sizes import size_text
from pannier.v1 import save_pb2
from pannier.wire.failures import kind_name

_COLOURS = {"COMMITTED": "green", "ABORTED": "red", "FAILED": "red", "IN_DOUBT": "yellow"}
_COLOURS |= {"DURABLE": "green", "MISSING": "yellow", "OK": "green"}

size = size_text


def as_json(value: message.Message) -> dict[str, Any]:
    """The message in proto3's JSON form with the protos' field names and no field left out.

    64-bit integers are strings there, as in grpcurl's output.
    """
    return json_format.MessageToDict(
        value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_json(value: Any) -> None:
    """One line of JSON."""
    click.echo(json.dumps(value))


def console() -> Console:
    """Standard output; a pipe gets wide lines without colours."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=200)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table; columns named in ``right`` are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        last = column in ("checkpoint", "problem")
        made.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=not last,
        )
    return made


def word(name: str) -> Text:
    """A state's or phase's name in its colour."""
    return Text(name, style=_COLOURS.get(name, ""))


def state_name(state: int) -> str:
    """``COMMITTED`` of ``SAVE_STATE_COMMITTED``."""
    return save_pb2.SaveState.Name(state).removeprefix("SAVE_STATE_")


def phase_name(phase: int) -> str:
    """``DURABLE`` of ``RANK_PHASE_DURABLE``."""
    return save_pb2.RankPhase.Name(phase).removeprefix("RANK_PHASE_")


def ago(unix_time: float) -> str:
    """``3 min ago``; empty when the time isn't known."""
    if not unix_time:
        return ""
    seconds = max(0.0, time.time() - unix_time)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def saves_table(saves: Iterable[save_pb2.SaveStatus]) -> Table:
    """One line per save."""
    made = table("save", "state", "ranks durable", "bytes", "began", "checkpoint", right=["bytes"])
    for save in saves:
        durable = sum(rank.phase == save_pb2.RANK_PHASE_DURABLE for rank in save.ranks)
        made.add_row(
            Text(save.id),
            word(state_name(save.state)),
            f"{durable} of {len(save.ranks)}" if save.ranks else "",
            size(save.bytes_total),
            ago(save.created_at),
            Text(save.checkpoint_id),
        )
    return made


def save_details(save: save_pb2.SaveStatus) -> RenderableType:
    """One save with its ranks, the ranks that it waits for, and its failures."""
    head = Text.assemble(
        (save.id, "bold"), "  ", word(state_name(save.state)), f"  {save.checkpoint_id}"
    )
    parts: list[RenderableType] = [head]
    if times := _times(save):
        parts.append(Text(times, style="dim"))
    if save.ranks:
        parts.append(_ranks_table(save))
    if save.waiting_on.text:
        waiting = f"waiting for {save.waiting_on.text}"
        if save.waiting_on.deadline_s > 0:
            waiting += f", at most {save.waiting_on.deadline_s:.0f} s more"
        parts.append(Text(waiting, style="yellow"))
    if save.note:
        parts.append(Text(save.note, style="dim"))
    for failure in save.failures:
        subject = f"rank {failure.rank} ({failure.host})" if failure.rank >= 0 else "save"
        parts.append(Text(f"{subject}: {kind_name(failure.kind)}: {failure.message}", style="red"))
    return Group(*parts)


def _times(save: save_pb2.SaveStatus) -> str:
    named = (
        ("planned", save.planned_s),
        ("ingested", save.ingested_s),
        ("durable", save.durable_s),
        ("committed", save.committed_s),
    )
    return ", ".join(f"{what} after {seconds:.2f} s" for what, seconds in named if seconds)


def _ranks_table(save: save_pb2.SaveStatus) -> Table:
    numbers = ["rank", "staged", "ingested", "uploaded", "durable", "retries", "last seen"]
    made = table(
        *("rank", "host", "phase", "staged", "ingested", "uploaded", "durable", "retries"),
        *("last seen", "problem"),
        right=numbers,
    )
    for rank in sorted(save.ranks, key=lambda rank: rank.rank):
        made.add_row(
            str(rank.rank),
            Text(rank.host),
            word(phase_name(rank.phase)),
            size(rank.bytes_staged),
            size(rank.bytes_ingested),
            size(rank.bytes_uploaded),
            size(rank.bytes_durable),
            str(rank.retries),
            f"{rank.seconds_since_seen:.0f} s ago",
            Text(rank.last_error),
        )
    return made
