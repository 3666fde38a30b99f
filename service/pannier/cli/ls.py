"""``pannier ls``: the checkpoints below a root, as storage has them."""

import asyncio
import dataclasses
from typing import Any

import click
from rich.text import Text

from pannier.cli import render
from pannier.cli.options import Location, storage_options
from pannier.records.listing import Checkpoint, Standing, list_checkpoints
from pannier.storage import open_store


@click.command("ls")
@click.argument("root", type=Location())
@storage_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per checkpoint.")
def command(*, root: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """List the checkpoints below ROOT, a directory or URL, oldest first.

    \b
    committed   it is whole and can be loaded
    foreign     it has a .metadata that Pannier didn't write
    aborted     every attempt ended without a checkpoint
    undecided   an attempt is under way, or waits for its daemons' return

    The JSON is a stable contract: per line "checkpoint" (its id), "state" (as
    above), "attempt" (or null), "bytes" (of its data files) and "time" (when it
    was committed, else last written; Unix time in seconds).
    """
    found = asyncio.run(_list(root, storage_options))
    if as_json:
        for checkpoint in found:
            render.print_json(_fields(root, checkpoint))
        return
    out = render.console()
    if not found:
        out.print(f"no checkpoints below {root}")
        return
    table = render.table("state", "attempt", "bytes", "time", "checkpoint", right=["bytes"])
    colours = {Standing.COMMITTED: "green", Standing.ABORTED: "red", Standing.UNDECIDED: "yellow"}
    for checkpoint in found:
        table.add_row(
            Text(checkpoint.standing.value, style=colours.get(checkpoint.standing, "")),
            checkpoint.attempt or "",
            render.size(checkpoint.size),
            render.ago(checkpoint.time),
            Text(checkpoint.name or "."),
        )
    out.print(table)


def _fields(root: str, checkpoint: Checkpoint) -> dict[str, Any]:
    named = dataclasses.asdict(checkpoint)
    return {
        "checkpoint": f"{root.rstrip('/')}/{checkpoint.name}".rstrip("/"),
        "state": checkpoint.standing.value,
        "attempt": named["attempt"],
        "bytes": named["size"],
        "time": named["time"],
    }


async def _list(root: str, options: dict[str, Any]) -> list[Checkpoint]:
    store = open_store(root, storage_options=options)
    try:
        return await list_checkpoints(store)
    finally:
        await store.close()
