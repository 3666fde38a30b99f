"""``pannier retain``: applies retention rules by hand, as the coordinator does after each commit."""

import asyncio
import socket
from typing import Any

import click
from rich.text import Text

from pannier.cli import output
from pannier.cli.options import Location, option, policy_of, retention_options, storage_options
from pannier.maintenance.retention_run import Outcome, retain
from pannier.storage import open_store


@click.command("retain")
@click.argument("root", type=Location())
@option("--job", required=True, help="The job whose checkpoints: the trainers' PANNIER_JOB.")
@retention_options
@storage_options
@click.option("--dry-run", is_flag=True, help="Only list what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per checkpoint.")
def command(
    *,
    root: str,
    job: str,
    storage_options: dict[str, Any],
    dry_run: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Remove the checkpoints of a job directly below ROOT that no rule keeps.

    The newest checkpoint, those without a number in their names, and those being
    read or written always stay; without --keep-newest, --keep-every or --keep-best
    all do. Other jobs' checkpoints are never removed.

    The JSON is a stable contract: per line "checkpoint" (its id), "time" (Unix
    time of the commit), "metrics", "kept_for" (the rules that keep it; empty:
    it was removed, or would be) and "bytes" (removed).
    """
    policy = policy_of(settings)
    outcomes = asyncio.run(
        retain(
            lambda url: open_store(url, storage_options=storage_options),
            root,
            policy,
            job=job,
            host=socket.gethostname(),
            dry_run=dry_run,
        )
    )
    if as_json:
        for outcome in outcomes:
            output.print_json(_fields(root, outcome))
        return
    out = output.console()
    if not outcomes:
        out.print(f"no checkpoints of job {job} below {root}")
        return
    gone = "would be removed" if dry_run else "removed"
    table = output.table("", "bytes", "time", "checkpoint", "why", right=["bytes"])
    for outcome in outcomes:
        checkpoint, stays = outcome.checkpoint, bool(outcome.reasons)
        table.add_row(
            Text("stays" if stays else gone, style="green" if stays else "red"),
            output.size(checkpoint.size if stays else outcome.removed),
            output.ago(checkpoint.time),
            Text(checkpoint.name),
            Text(outcome.why if stays else "no rule keeps it"),
        )
    out.print(table)


def _fields(root: str, outcome: Outcome) -> dict[str, Any]:
    checkpoint = outcome.checkpoint
    return {
        "checkpoint": f"{root.rstrip('/')}/{checkpoint.name}",
        "time": checkpoint.time,
        "metrics": dict(checkpoint.metrics),
        "kept_for": list(outcome.reasons),
        "bytes": outcome.removed,
    }
