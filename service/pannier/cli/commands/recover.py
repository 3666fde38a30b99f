"""``pannier recover``: commits or cleans up interrupted saves from storage alone."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import click

from pannier.cli import output
from pannier.cli.errors import NEGATIVE, OK
from pannier.cli.options import Location, output_options, storage_options
from pannier.cli.table import Column, Fit, Table
from pannier.maintenance.inspect import by_checkpoint
from pannier.maintenance.recover import (
    End,
    Found,
    Outcome,
    find_interrupted,
    finish_attempt,
    predict_outcome,
)
from pannier.storage import open_store
from pannier.v1 import records_pb2
from pannier.wire.errors import ConfigurationError


@click.command("recover")
@click.argument("place", type=Location())
@storage_options
@click.option(
    "--abort",
    is_flag=True,
    help="Also abort attempts with missing receipts: the data that only their hosts' spools hold is "
    "lost, and the attempt's objects are removed.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be done.")
@output_options
def command(
    *,
    place: str,
    storage_options: dict[str, Any],
    abort: bool,
    dry_run: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """Finish interrupted saves at PLACE, a checkpoint id or a root.

    An attempt whose ranks are all durable is committed; one whose COMMIT is
    decided gets its .metadata; the remains of an aborted one are removed. Needs
    no daemon, and is safe beside a daemon that works on the same attempt. For any
    other attempt it lists the ranks whose receipts are missing: start the sidecars
    of their hosts again on the same spools, or abort the attempt with --abort.

    --dry-run changes nothing, and lists how each attempt would end.

    Exit status 1 when an attempt remains undecided. Committing needs numpy, and
    torch for what torch planned itself (StorageWriter), unless a coordinator has
    already built the metadata.

    The JSON is a stable contract: per line "checkpoint" (its id), "attempt",
    "found" (complete, commit, abort, undecided, damaged), "end" (committed, aborted,
    removed, undecided), "dry_run" (true when nothing was changed), "missing" (a
    list of objects with "rank" and "host"), "reason" (text, may be empty) and "time"
    (when the attempt was last written to; Unix time in seconds).
    """
    outcomes = asyncio.run(_recover(place, storage_options, abort, dry_run))
    if as_json:
        for checkpoint, outcome in outcomes:
            output.print_json({**_fields(checkpoint, outcome), "dry_run": dry_run})
    else:
        _print(place, outcomes, "would be" if dry_run else "now", wide=wide)
    undecided = any(outcome.end is End.UNDECIDED for _, outcome in outcomes)
    click.get_current_context().exit(NEGATIVE if undecided else OK)


async def _recover(
    place: str, options: dict[str, Any], abort: bool, dry_run: bool
) -> list[tuple[str, Outcome]]:
    store = open_store(place, storage_options=options)
    try:
        checkpoints = by_checkpoint(await store.list())
    finally:
        await store.close()
    outcomes = []
    for directory, objects in checkpoints.items():
        checkpoint = f"{place.rstrip('/')}/{directory}".rstrip("/")
        store = open_store(checkpoint, storage_options=options)
        try:
            for interrupted in await find_interrupted(store, objects):
                if dry_run:
                    outcome = predict_outcome(interrupted, abort=abort)
                else:
                    outcome = await finish_attempt(
                        store, interrupted, build=_build, host=socket.gethostname(), abort=abort
                    )
                outcomes.append((checkpoint, outcome))
        finally:
            await store.close()
    return outcomes


async def _build(manifest: bytes, receipts: Sequence[records_pb2.Receipt]) -> bytes:
    try:
        from pannier.coordinator.commit.metadata import build_checked
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"all ranks are durable, but the commit needs {error.name}, which isn't installed here: run `pip "
            "install 'pannier[torch]'`, or start a coordinator and the job's sidecars"
        ) from error
    return await asyncio.to_thread(build_checked, manifest, receipts)


def _print(place: str, outcomes: list[tuple[str, Outcome]], when: str, *, wide: bool) -> None:
    if not outcomes:
        output.say(f"no interrupted saves at {place}")
        return
    table = Table(
        Column("checkpoint", fit=Fit.PATH),
        Column("found"),
        Column(when),
        Column("last written", drop=1),
        Column("problem", fit=Fit.TEXT),
        Column("attempt", drop=2),
    )
    for checkpoint, outcome in outcomes:
        table.add_row(
            checkpoint,
            outcome.attempt.found.value,
            output.word(outcome.end.value),
            output.ago(outcome.attempt.modified),
            outcome.reason,
            outcome.attempt.attempt,
        )
    output.show(table, wide=wide)
    waiting = [
        outcome
        for _, outcome in outcomes
        if outcome.end is End.UNDECIDED and outcome.attempt.found is Found.UNDECIDED
    ]
    if waiting:
        output.say(
            "A save may be running, or its sidecars' spools hold the rest: start the sidecars again on "
            "the same spools. If the spools are lost, abort the attempt with --abort."
        )


def _fields(checkpoint: str, outcome: Outcome) -> dict[str, Any]:
    found = outcome.attempt
    hosts = dict(found.members)
    return {
        "checkpoint": checkpoint,
        "attempt": found.attempt,
        "found": found.found.value,
        "end": outcome.end.value,
        "missing": [{"rank": rank, "host": hosts[rank]} for rank in found.missing],
        "reason": outcome.reason,
        "time": found.modified,
    }
