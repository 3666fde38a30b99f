"""``pannier ls``: the checkpoints below a root, as storage has them."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from pannier.attempts.listing import Checkpoint, list_checkpoints
from pannier.cli import output
from pannier.cli.errors import end_negative
from pannier.cli.options import CheckpointPattern, Location, output_options
from pannier.cli.storage import open_answering, store_options
from pannier.cli.table import Column, Fit, Table
from pannier.common.locations import Pattern
from pannier.maintenance.retention_run import read_record

Kept = Mapping[str, Mapping[str, Sequence[str]]]
"""Reasons by job and name of a checkpoint."""


@click.command("ls")
@click.argument("root", type=Location())
@click.option(
    "--pattern",
    type=CheckpointPattern(),
    metavar="PATTERN",
    help="Only directories of these names below ROOT, which may have shell wildcards, like checkpoint-*/dcp; no "
    "others are listed.  [default: all at any depth]",
)
@store_options
@output_options
def command(
    *,
    root: str,
    pattern: Pattern | None,
    storage_options: dict[str, Any],
    wide: bool,
    as_json: bool,
) -> None:
    """List the checkpoints below ROOT, a directory or URL, oldest first.

    Exit status 1 when there are none.

    \b
    committed   it is whole and can be loaded
    removing    its removal has begun: it can't be loaded any more
    foreign     it has a .metadata that Pannier didn't write
    aborted     every attempt ended without a checkpoint
    undecided   an attempt is running, or waits for its daemons to restart

    The JSON is a stable contract: per line "checkpoint" (its id), "state" (as
    above), "attempt" (or null), "bytes" (of its data files), "time" (when it
    was committed, else last written; Unix time in seconds), "job" and "metrics"
    (of a committed one; null: not finite), and "kept_for" (the rules by which the last retention kept it).
    """
    found, kept = asyncio.run(_list(root, pattern, storage_options))
    if not found:
        end_negative(
            f"no checkpoints below {root}" + (f" match {pattern.text}" if pattern else ""),
            "ROOT is the checkpoint_id without its last name, or any directory above it; is it the "
            "right one, and was a save committed yet (`pannier status`)?",
        )
    if as_json:
        for checkpoint in found:
            output.print_json(_fields(root, checkpoint, kept))
        return
    table = Table(
        Column("checkpoint", fit=Fit.PATH),
        Column("state"),
        Column("bytes", right=True),
        Column("time", drop=2),
        Column("job", drop=1),
        Column("kept for", drop=3, fit=Fit.TEXT),
        Column("attempt", drop=4),
    )
    for checkpoint in found:
        table.add_row(
            checkpoint.name or ".",
            output.word(checkpoint.state.value),
            output.size(checkpoint.size),
            output.ago(checkpoint.time),
            checkpoint.job,
            ", ".join(_reasons(kept, checkpoint)),
            checkpoint.attempt or "",
        )
    output.show(table, wide=wide)


def _fields(root: str, checkpoint: Checkpoint, kept: Kept) -> dict[str, Any]:
    named = dataclasses.asdict(checkpoint)
    return {
        "checkpoint": f"{root.rstrip('/')}/{checkpoint.name}".rstrip("/"),
        "state": checkpoint.state.value,
        "attempt": named["attempt"],
        "bytes": named["size"],
        "time": named["time"],
        "job": named["job"],
        "metrics": output.finite(named["metrics"]),
        "kept_for": _reasons(kept, checkpoint),
    }


def _reasons(kept: Kept, checkpoint: Checkpoint) -> list[str]:
    return list(kept.get(checkpoint.job, {}).get(checkpoint.name, ()))


async def _list(
    root: str, pattern: Pattern | None, options: dict[str, Any]
) -> tuple[list[Checkpoint], Kept]:
    """The checkpoints, and the reasons why retention kept them, by job and name."""
    async with open_answering(root, options) as store:
        return await list_checkpoints(store, pattern), (await read_record(store)).kept
