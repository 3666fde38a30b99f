"""``pannier recover``: commits or cleans up interrupted saves from storage alone."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from pannier.cli import output
from pannier.cli.errors import NEGATIVE, OK, UNREACHABLE, Failures
from pannier.cli.options import Location, output_options
from pannier.cli.storage import open_answering, store_options
from pannier.cli.table import Column, Fit, Table
from pannier.maintenance.inspect import by_checkpoint
from pannier.maintenance.recover import (
    End,
    Found,
    Interrupted,
    Outcome,
    find_interrupted,
    finish_attempt,
    predict_outcome,
)
from pannier.storage import StorageError, Store, check_no_link, open_store
from pannier.v1 import records_pb2
from pannier.wire.errors import ConfigurationError


@dataclass
class _Results:
    """Outcomes, each with its checkpoint id."""

    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    complete: bool = False
    """All checkpoints were examined, without a storage error."""


@click.command("recover")
@click.argument("place", type=Location())
@store_options
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

    Exit status 1 when an attempt remains undecided, 3 when storage refused an
    operation: all other attempts are finished. Committing needs numpy, and torch
    for what torch planned itself (StorageWriter), unless a coordinator has already
    built the metadata.

    The JSON is a stable contract: per line "checkpoint" (its id), "attempt",
    "found" (complete, commit, abort, undecided, damaged), "end" (committed, aborted,
    removed, undecided), "dry_run" (true when nothing was changed), "missing" (a
    list of objects with "rank" and "host"), "reason" (text, may be empty) and "time"
    (when the attempt was last written to; Unix time in seconds).
    """
    check_no_link(place)
    results = _Results()
    try:
        asyncio.run(_recover(place, storage_options, abort, dry_run, results))
    finally:
        # After an error as well.
        if as_json:
            for checkpoint, outcome in results.outcomes:
                output.print_json({**_fields(checkpoint, outcome), "dry_run": dry_run})
        else:
            _print(place, results, "would be" if dry_run else "now", wide=wide)
        results.failures.report()
    undecided = any(outcome.end is End.UNDECIDED for _, outcome in results.outcomes)
    status = UNREACHABLE if results.failures else NEGATIVE if undecided else OK
    click.get_current_context().exit(status)


async def _recover(
    place: str, options: dict[str, Any], abort: bool, dry_run: bool, results: _Results
) -> None:
    async with open_answering(place, options) as store:
        checkpoints = by_checkpoint(await store.list())
    for directory, objects in checkpoints.items():
        checkpoint = f"{place.rstrip('/')}/{directory}".rstrip("/")
        store = open_store(checkpoint, storage_options=options, allow=(place,))
        try:
            for interrupted in await find_interrupted(store, objects):
                outcome = await _finish(store, interrupted, abort, dry_run, results.failures)
                results.outcomes.append((checkpoint, outcome))
        except StorageError as error:
            results.failures.add(error)
        finally:
            await store.close()
    results.complete = not results.failures


async def _finish(
    store: Store, interrupted: Interrupted, abort: bool, dry_run: bool, failures: Failures
) -> Outcome:
    try:
        if dry_run:
            return await predict_outcome(store, interrupted, abort=abort)
        return await finish_attempt(
            store, interrupted, build=_build, host=socket.gethostname(), abort=abort
        )
    except StorageError as error:
        failures.add(error)
        return Outcome(interrupted, End.UNDECIDED, str(error))


async def _build(manifest: bytes, receipts: Sequence[records_pb2.Receipt]) -> bytes:
    try:
        from pannier.coordinator.commit.metadata import build_checked
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"all ranks are durable, but the commit needs {error.name}, which isn't installed here: run `pip "
            "install 'pannier[torch]'`, or start a coordinator and the job's sidecars"
        ) from error
    return await asyncio.to_thread(build_checked, manifest, receipts)


def _print(place: str, results: _Results, when: str, *, wide: bool) -> None:
    outcomes = results.outcomes
    if not outcomes:
        if results.complete:
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
