"""``pannier retain``: applies retention rules by hand, as the coordinator does after each commit."""

import asyncio
import socket
from typing import Any

import click
from rich.text import Text

from pannier.attempts.listing import CheckpointState, list_checkpoints
from pannier.cli import output
from pannier.cli.errors import OK, UNREACHABLE, Failures, end_negative
from pannier.cli.options import (
    Location,
    option,
    output_options,
    policy_of,
    retention_options,
    retention_pattern,
)
from pannier.cli.storage import open_answering, store_options
from pannier.cli.table import Column, Fit, Table
from pannier.common.locations import CHILDREN, Pattern
from pannier.maintenance.retention_policy import Policy
from pannier.maintenance.retention_run import Outcome, retain
from pannier.storage import open_store


@click.command("retain")
@click.argument("root", type=Location())
@option("--job", help="The job whose checkpoints: the trainers' PANNIER_JOB. Needed.")
@retention_options
@retention_pattern("--pattern")
@store_options
@click.option("--dry-run", is_flag=True, help="Only list what would be done.")
@output_options
def command(
    *,
    root: str,
    job: str | None,
    storage_options: dict[str, Any],
    dry_run: bool,
    wide: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Remove the checkpoints of a job directly below ROOT, or where --pattern says, that no rule keeps.

    The newest checkpoint, those without a number in their names, and those being
    read or written always stay; without --keep-newest, --keep-every or --keep-best
    all do. Other jobs' checkpoints are never removed. `pannier ls ROOT` shows the jobs.
    A removal that an earlier run, or `pannier rm`, has begun is completed.
    Exit status 1 when the job has no checkpoints there, 3 when storage refused an
    operation: all else is removed.

    The JSON is a stable contract: per line "checkpoint" (its id), "time" (Unix
    time of the commit), "metrics" (null: not finite), "kept_for" (the rules that
    keep it; empty: it was removed, or would be) and "bytes" (removed).
    """
    if job is None:
        jobs = asyncio.run(_jobs(root, policy_of(settings).pattern, storage_options))
        raise click.UsageError(
            "--job is missing: whose checkpoints these rules are for, the trainers' PANNIER_JOB; below "
            f"{root} are checkpoints of {', '.join(jobs) or 'no job'}"
        )
    policy = policy_of(settings)
    outcomes = asyncio.run(_retain(root, policy, storage_options, job, dry_run))
    if not outcomes:
        jobs = asyncio.run(_jobs(root, policy.pattern, storage_options))
        where = "directly" if policy.pattern == CHILDREN else f"as {policy.pattern.text}"
        end_negative(
            f"no checkpoints of job {job} {where} below {root}",
            f"there are some of {', '.join(jobs)}"
            if jobs
            else f"`pannier ls {root}` shows the jobs",
        )
    if as_json:
        for outcome in outcomes:
            output.print_json(_fields(root, outcome))
    else:
        _print(outcomes, dry_run=dry_run, wide=wide)
    failures = Failures()
    for outcome in outcomes:
        if outcome.error is not None:
            failures.add(outcome.error)
    failures.report()
    click.get_current_context().exit(UNREACHABLE if failures else OK)


def _print(outcomes: list[Outcome], *, dry_run: bool, wide: bool) -> None:
    removed = "would be removed" if dry_run else "removed"
    table = Table(
        Column("checkpoint", fit=Fit.PATH),
        Column("outcome"),
        Column("bytes", right=True),
        Column("time", drop=1),
        Column("why", fit=Fit.TEXT),
    )
    for outcome in outcomes:
        checkpoint, stays = outcome.checkpoint, bool(outcome.reasons)
        table.add_row(
            checkpoint.name,
            Text("stays" if stays else removed, style="green" if stays else "red"),
            output.size(checkpoint.size if stays else outcome.removed),
            output.ago(checkpoint.time),
            outcome.why if stays else _why_removed(outcome),
        )
    output.show(table, wide=wide)


def _why_removed(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "no rule keeps it; some of its files are left"
    if outcome.checkpoint.state is CheckpointState.REMOVING:
        return "its removal had begun"
    return "no rule keeps it"


async def _retain(
    root: str, policy: Policy, options: dict[str, Any], job: str, dry_run: bool
) -> list[Outcome]:
    async with open_answering(root, options):
        return await retain(
            lambda url: open_store(url, storage_options=options, allow=(root,)),
            root,
            policy,
            job=job,
            host=socket.gethostname(),
            dry_run=dry_run,
        )


async def _jobs(root: str, pattern: Pattern, options: dict[str, Any]) -> list[str]:
    """The jobs with checkpoints below ``root`` that the pattern matches."""
    async with open_answering(root, options) as store:
        found = await list_checkpoints(store, pattern)
    return sorted({each.job for each in found if each.job})


def _fields(root: str, outcome: Outcome) -> dict[str, Any]:
    checkpoint = outcome.checkpoint
    return {
        "checkpoint": f"{root.rstrip('/')}/{checkpoint.name}",
        "time": checkpoint.time,
        "metrics": output.finite(checkpoint.metrics),
        "kept_for": list(outcome.reasons),
        "bytes": outcome.removed,
    }
