"""``pannier rm``: removes one checkpoint so that no late process can restore it."""

import asyncio
import socket
import time
from typing import Any

import click

from pannier.cli import output
from pannier.cli.errors import end_negative
from pannier.cli.options import Location, json_option
from pannier.cli.storage import open_answering, store_options
from pannier.common.units import counted
from pannier.maintenance.delete_checkpoint import (
    RemovalPlan,
    RemovedObjects,
    name_readers,
    plan_removal,
    remove_checkpoint,
)
from pannier.storage import check_no_link


@click.command("rm")
@click.argument("checkpoint_id", type=Location())
@store_options
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@json_option
def command(
    *, checkpoint_id: str, storage_options: dict[str, Any], yes: bool, as_json: bool
) -> None:
    """Remove the checkpoint CHECKPOINT_ID with all its ended saves.

    It removes .metadata first, then the data files, then the records; when
    interrupted, run it again. A running save to that id stays, and may commit.
    Processes that are reading the checkpoint fail; the confirmation names those with
    a lease. Exit status 1 when there is no checkpoint of Pannier's. --json needs --yes.

    The JSON is a stable contract: "checkpoint", "attempts" (removed ones),
    "objects" (their number), "bytes", and "undecided" (attempts that stay).
    """
    if as_json and not yes:
        raise click.UsageError("--json can't ask for confirmation: give --yes as well")
    check_no_link(checkpoint_id)
    plan, gone = asyncio.run(_remove(checkpoint_id, storage_options, yes))
    size = sum(info.size for info in gone.objects)
    if as_json:
        output.print_json(
            {
                "checkpoint": checkpoint_id,
                "attempts": plan.attempts,
                "objects": len(gone.objects),
                "bytes": size,
                "undecided": plan.undecided,
            }
        )
        return
    output.say(
        f"removed {checkpoint_id}: {counted(len(gone.objects), 'object')}, {output.size(size)}"
    )
    if plan.undecided:
        output.say(
            f"kept: {', '.join(plan.undecided)}, undecided: a save may be running; see "
            "`pannier recover` and `pannier gc`"
        )


async def _remove(
    checkpoint_id: str, options: dict[str, Any], yes: bool
) -> tuple[RemovalPlan, RemovedObjects]:
    async with open_answering(checkpoint_id, options) as store:
        plan = await plan_removal(store)
        if not yes:
            _confirm(_question(checkpoint_id, plan))
        gone = await remove_checkpoint(store, plan, host=socket.gethostname())
        await store.remove_directory()
    return plan, gone


def _confirm(question: str) -> None:
    try:
        confirmed = click.confirm(question, err=True)
    except click.Abort:  # no answer can be read
        confirmed = False
        output.say("", err=True)
    if not confirmed:
        end_negative("nothing was removed", "with --yes, `pannier rm` doesn't ask")


def _question(checkpoint_id: str, plan: RemovalPlan) -> str:
    standing = plan.seen.standing
    what = f"committed by {standing.name}" if standing is not None else "not committed"
    # By this host's clock, which may differ from the store's: a hint only.
    readers = plan.readers(time.time())
    reading = f" It is being read by {name_readers(readers)}." if readers else ""
    return (
        f"{checkpoint_id} ({what}; {counted(len(plan.attempts), 'save')}, {output.size(plan.size)})."
        f"{reading} Remove it for good?"
    )
