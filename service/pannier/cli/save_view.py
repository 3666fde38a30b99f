"""Saves, human-readable: a table of several, the details of one. Pure."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from pannier.cli import output
from pannier.cli.table import Column, Fit, Table
from pannier.common.message_json import seconds_of
from pannier.v1 import save_pb2
from pannier.wire.errors import kind_name


def state_name(state: int) -> str:
    """``COMMITTED`` of ``SAVE_STATE_COMMITTED``."""
    return save_pb2.SaveState.Name(state).removeprefix("SAVE_STATE_")


def state_text(save: save_pb2.SaveStatus) -> Text:
    """The state in its colour; of an aborted save with the cause: ``ABORTED: storage``."""
    text = output.word(state_name(save.state))
    if save.state == save_pb2.SAVE_STATE_ABORTED and save.failures:
        text.append(f": {kind_name(save.failures[0].kind).lower().replace('_', ' ')}")
    return text


def phase_name(phase: int) -> str:
    """``DURABLE`` of ``RANK_PHASE_DURABLE``."""
    return save_pb2.RankPhase.Name(phase).removeprefix("RANK_PHASE_")


def durable_text(save: save_pb2.SaveStatus) -> str:
    """``1 of 2``, the ranks that are durable."""
    return f"{save.durable_ranks} of {save.group_size}"


def replicated_text(save: save_pb2.SaveStatus) -> str:
    """``1 of 2``, the ranks whose files another host has, too; empty: none are sent to another host."""
    if not (save.replicated_ranks or any(rank.replica_host for rank in save.ranks)):
        return ""
    return f"{save.replicated_ranks} of {save.group_size}"


def saves_table(saves: Iterable[save_pb2.SaveStatus]) -> Table:
    """One line per save."""
    made = Table(
        Column("checkpoint", fit=Fit.PATH),
        Column("state"),
        Column("durable"),
        Column("replicated", drop=4),
        Column("bytes", right=True),
        Column("waits for", drop=1, fit=Fit.TEXT),
        Column("began", drop=2),
        Column("save", drop=3),
    )
    for save in saves:
        made.add_row(
            save.checkpoint_id,
            state_text(save),
            durable_text(save) if save.ranks else "",
            replicated_text(save),
            output.size(save.bytes_total),
            save.waiting_on.text,
            output.ago(seconds_of(save.created_at)),
            save.id,
        )
    return made


def heading(save: save_pb2.SaveStatus) -> Text:
    """The last name of its checkpoint, its state and id; below, the whole checkpoint id, never broken."""
    name = save.checkpoint_id.rpartition("/")[2]
    return Text.assemble(
        *((name, "bold"), "  ", output.word(state_name(save.state)), "  ", save.id),
        *("\n", (save.checkpoint_id, "dim")),
        no_wrap=True,
        overflow="ignore",
    )


def save_details(save: save_pb2.SaveStatus) -> RenderableType:
    """One save with its ranks, the ranks that it waits for, and its failures."""
    parts: list[RenderableType] = [heading(save)]
    if times := _times(save):
        parts.append(Text(times, style="dim"))
    if replicated := replicated_text(save):
        parts.append(Text(f"replicated {replicated} ranks", style="dim"))
    if save.ranks:
        parts.append(_ranks_table(save))
    if save.waiting_on.text:
        parts.append(waiting(save.waiting_on.text, save.waiting_on.deadline_s))
    if save.note:
        parts.append(Text(save.note, style="dim"))
    for failure in save.failures:
        subject = f"rank {failure.rank} ({failure.host})" if failure.rank >= 0 else "save"
        parts.append(Text(f"{subject}: {kind_name(failure.kind)}: {failure.message}", style="red"))
    return Group(*parts)


def waiting(awaited: str, deadline_s: float) -> Text:
    """What a save or load waits for, and how much longer."""
    limit = f", at most {deadline_s:.0f} s more" if deadline_s > 0 else ""
    return Text(f"waiting for {awaited}{limit}", style="yellow")


def _times(save: save_pb2.SaveStatus) -> str:
    named = (
        ("planned", save.planned_s),
        ("ingested", save.ingested_s),
        ("durable", save.durable_s),
        ("committed", save.committed_s),
    )
    return ", ".join(f"{what} after {seconds:.2f} s" for what, seconds in named if seconds)


def _ranks_table(save: save_pb2.SaveStatus) -> Table:
    made = Table(
        Column("rank", right=True),
        Column("host", drop=1, fit=Fit.END),
        Column("phase"),
        Column("staged", right=True),
        Column("ingested", drop=5, right=True),
        Column("uploaded", right=True),
        Column("durable", drop=4, right=True),
        Column("replicated", drop=6, right=True),
        Column("to", drop=7, fit=Fit.END),
        Column("retries", drop=3, right=True),
        Column("last seen", drop=2, right=True),
        Column("problem", drop=1, fit=Fit.TEXT),
    )
    for rank in sorted(save.ranks, key=lambda rank: rank.rank):
        made.add_row(
            str(rank.rank),
            rank.host,
            output.word(phase_name(rank.phase)),
            output.size(rank.bytes_staged),
            output.size(rank.bytes_ingested),
            output.size(rank.bytes_uploaded),
            output.size(rank.bytes_durable),
            output.size(rank.bytes_replicated) if rank.replica_host else "",
            rank.replica_host,
            str(rank.retries),
            f"{rank.seconds_since_seen:.0f} s ago",
            rank.last_error,
        )
    return made
