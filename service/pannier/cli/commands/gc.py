"""``pannier gc``: removes what crashes, aborts and overwrites left below a root."""

import asyncio
import posixpath
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click

from pannier.attempts.leases import store_time
from pannier.cli import output
from pannier.cli.errors import OK, UNREACHABLE, Failures
from pannier.cli.options import Location, Seconds, option, output_options
from pannier.cli.storage import open_answering, store_options
from pannier.cli.table import Column, Fit, Table
from pannier.maintenance.gc import (
    ABANDONED_AFTER_S,
    Kept,
    Reason,
    Removed,
    Rules,
    sweep,
    sweep_unfinished,
)
from pannier.maintenance.inspect import by_checkpoint
from pannier.maintenance.superseded import GRACE_S
from pannier.storage import check_no_link, open_store


@dataclass
class _Found:
    """Results, each with its checkpoint id."""

    removed: list[tuple[str, Removed]] = field(default_factory=list)
    kept: list[tuple[str, Kept]] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    complete: bool = True
    """No error ended the run early."""


@click.command("gc")
@click.argument("root", type=Location())
@store_options
@click.option("--dry-run", is_flag=True, help="Only list what would be removed; writes nothing.")
@option(
    "--grace",
    type=Seconds(zero=True),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the files of an overwritten checkpoint stay for readers without a lease, from "
    "the time when a coordinator or this command first found it overwritten.",
    envvar="PANNIER_GRACE_SUPERSEDED",
)
@option(
    "--abandoned-after",
    type=Seconds(zero=True),
    default=ABANDONED_AFTER_S,
    show_default=True,
    metavar="SECONDS",
    help="Time without a write after which an undecided save, an upload or a temporary file is removed, "
    "and so is the decision of an aborted save. Must be longer than any save takes.",
)
@output_options
def command(
    *,
    root: str,
    storage_options: dict[str, Any],
    dry_run: bool,
    grace: float,
    abandoned_after: float,
    wide: bool,
    as_json: bool,
) -> None:
    """Remove what crashed, aborted and overwritten saves left below ROOT.

    It keeps all that a committed checkpoint refers to, all files where .metadata
    wasn't committed by Pannier, and overwritten checkpoints that a reader has
    leased. A save whose ranks are all durable is left for `pannier recover`.
    The decision of an aborted save stays for --abandoned-after, so that a late
    process still finds it.
    Ages are by the store's clock; in a dry run, which writes nothing, by this host's.
    Exit status 3 when storage refused an operation: all else is removed.

    The JSON is a stable contract: per object that was or would be removed
    "action" (removed, would-remove), "checkpoint" (its id), "name", "attempt" (or
    null), "reason" (superseded, aborted, abandoned, removed, lease, upload,
    temporary) and "bytes"; per attempt that was kept "action" (kept),
    "checkpoint", "attempt" (null: the whole checkpoint), "reason" (text) and
    "bytes".
    """
    check_no_link(root)
    rules = Rules(grace_s=grace, abandoned_after_s=abandoned_after)
    found = _Found()
    try:
        asyncio.run(_collect(root, storage_options, rules, dry_run, found))
    finally:
        # After an error as well.
        if as_json:
            _print_json(found, dry_run)
        else:
            _print(root, found, dry_run, wide)
        found.failures.report()
    click.get_current_context().exit(UNREACHABLE if found.failures else OK)


def _print_json(found: _Found, dry_run: bool) -> None:
    for checkpoint, removed in found.removed:
        output.print_json(_fields(checkpoint, removed, dry_run))
    for checkpoint, kept in found.kept:
        output.print_json(
            {
                "action": "kept",
                "checkpoint": checkpoint,
                "attempt": kept.attempt or None,
                "reason": kept.why,
                "bytes": kept.size,
            }
        )


async def _collect(
    root: str, options: dict[str, Any], rules: Rules, dry_run: bool, found: _Found
) -> None:
    found.complete = False
    aborted: set[str] = set()
    undecided: set[str] = set()
    planned: set[str] = set()
    host = socket.gethostname()
    async with open_answering(root, options) as store:
        checkpoints = by_checkpoint(await store.list())
        unfinished = await store.list_unfinished()
        if not (checkpoints or unfinished):
            found.complete = True
            return
        now = time.time() if dry_run else await store_time(store)
        for directory in checkpoints:
            checkpoint = f"{root.rstrip('/')}/{directory}".rstrip("/")
            place = open_store(checkpoint, storage_options=options, allow=(root,))
            try:
                report = await sweep(place, rules, now=now, host=host, dry_run=dry_run)
                if report.removed and not dry_run:
                    await place.remove_directory()
            finally:
                await place.close()
            found.removed += [(checkpoint, removed) for removed in report.removed]
            found.kept += [(checkpoint, kept) for kept in report.kept]
            for error in report.errors:
                found.failures.add(error)
            aborted |= {posixpath.join(directory, attempt) for attempt in report.aborted}
            undecided |= {posixpath.join(directory, attempt) for attempt in report.undecided}
            planned |= {posixpath.join(directory, name) for name in report.planned}
        async for removed in sweep_unfinished(
            store,
            rules,
            aborted=aborted,
            undecided=undecided,
            planned=planned,
            now=now,
            dry_run=dry_run,
        ):
            found.removed.append((root, removed))
        found.complete = True


def _print(root: str, found: _Found, dry_run: bool, wide: bool) -> None:
    if not found.removed and not found.kept:
        if found.complete:
            output.say(f"nothing to remove below {root}")
        return
    if found.removed:
        groups: Counter[tuple[str, str, Reason]] = Counter()
        sizes: Counter[tuple[str, str, Reason]] = Counter()
        for checkpoint, removed in found.removed:
            group = (checkpoint, removed.attempt, removed.reason)
            groups[group] += 1
            sizes[group] += removed.size
        table = Table(
            Column("checkpoint", fit=Fit.PATH),
            Column("reason"),
            Column("objects", drop=1, right=True),
            Column("bytes", right=True),
            Column("attempt", drop=2),
        )
        for group, count in groups.items():
            checkpoint, attempt, reason = group
            table.add_row(checkpoint, reason.value, str(count), output.size(sizes[group]), attempt)
        output.say("would be removed:" if dry_run else "removed:")
        output.show(table, wide=wide)
    if found.kept:
        table = Table(
            Column("checkpoint", fit=Fit.PATH),
            Column("bytes", right=True),
            Column("reason", fit=Fit.TEXT),
            Column("attempt", drop=1),
        )
        for checkpoint, kept in found.kept:
            table.add_row(checkpoint, output.size(kept.size), kept.why, kept.attempt)
        output.say("kept:")
        output.show(table, wide=wide)


def _fields(checkpoint: str, removed: Removed, dry_run: bool) -> dict[str, Any]:
    return {
        "action": "would-remove" if dry_run else "removed",
        "checkpoint": checkpoint,
        "name": removed.name,
        "attempt": removed.attempt or None,
        "reason": removed.reason.value,
        "bytes": removed.size,
    }
