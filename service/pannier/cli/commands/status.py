"""``pannier status``: a daemon's saves and loads, as tables or as JSON."""

from pathlib import Path
from typing import Any

import click

from pannier.cli import load_view, output, save_view
from pannier.cli.options import Duration, output_options
from pannier.cli.save_advice import GroupAdvice, advice_of
from pannier.cli.status_client import (
    StatusClient,
    UnknownNameError,
    as_named,
    daemon_option,
    embedded_sidecars,
)
from pannier.common.message_json import as_dict, seconds_of
from pannier.v1 import save_pb2, status_pb2
from pannier.wire.errors import VersionMismatchError

_STATES = [
    name.removeprefix("SAVE_STATE_").lower()
    for name, number in save_pb2.SaveState.items()
    if number != save_pb2.SAVE_STATE_UNSPECIFIED
]


@click.command("status")
@click.argument("save", required=False)
@daemon_option
@click.option("--job", help="Only saves of this job.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(_STATES, case_sensitive=False),
    metavar="STATE",
    help=f"Only saves in this state: {', '.join(_STATES)}; may be given several times.",
)
@click.option(
    "--limit", type=click.IntRange(1, 10000), default=20, show_default=True, help="Most saves."
)
@click.option(
    "--mtbf",
    type=Duration(),
    help="Mean time between failures of the whole job, with its unit, like 6h or 2d12h: also show how "
    "often to save, so that the least time is lost.",
)
@output_options
def command(
    *,
    save: str | None,
    address: str | None,
    job: str | None,
    states: tuple[str, ...],
    limit: int,
    mtbf: float | None,
    wide: bool,
    as_json: bool,
    **tls: Path | None,
) -> None:
    """Show saves and loads and their progress; with SAVE, one of them with its ranks.

    SAVE is an id from the lists, of a save or a load, or a checkpoint id or its end, like
    step-60, which means its newest save, else its newest load.

    Below the list of saves is what a save costs, for each job and group of ranks: medians
    of its committed saves in the list. Loads are shown while they run and for an hour
    after, at most 64 that have ended, unless --state is given.

    The JSON is a stable contract: pannier.v1.ListSavesResponse, with SAVE
    pannier.v1.GetSaveResponse, or GetLoadResponse of a load, in proto3's JSON form with the
    protos' field names, every field present, and 64-bit integers as numbers. With --mtbf it
    has "advice" besides, a list with an object for each job and group: "job",
    "group", "ranks" (how many), "saves" (how many were measured), "cost" (their
    "stalled_s", "ingested_s", "durable_s"), "restore_s", "restores" (0: none was
    measured), "mtbf_s", "interval_s", "loss" and "loss_in_place" (shares of the
    time lost to "saves" and "failures", where a failure loses the host, and
    where only processes die).
    """
    if address is None:
        address, *others = embedded_sidecars()
        for other in others:
            output.say(
                f"hint: this user has another sidecar: pannier status --address {other}", err=True
            )
    with StatusClient(address, **tls) as client:
        if save is not None:
            found = _find(client, as_named(save))
            if isinstance(found, status_pb2.GetLoadResponse):
                if as_json:
                    output.print_json(as_dict(found))
                else:
                    output.show(load_view.load_details(found.load), wide=wide)
                return
            advice = advice_of([found.save], mtbf_s=mtbf)
            if as_json:
                output.print_json(_with_advice(as_dict(found), advice, mtbf))
            else:
                output.show(save_view.save_details(found.save), wide=wide)
                _say_advice(advice, mtbf)
            return
        listed = client.list_saves(
            status_pb2.ListSavesRequest(
                job=job or "",
                states=[f"SAVE_STATE_{state.upper()}" for state in states],
                limit=limit,
            )
        )
    advice = advice_of(listed.saves, listed.loads, mtbf)
    if as_json:
        output.print_json(_with_advice(as_dict(listed), advice, mtbf))
        return
    jobs = sorted({each.save.job for each in listed.saves} | {each.job for each in listed.loads})
    of = f", {len(jobs)} jobs" if len(jobs) > 1 else f", job {jobs[0]}" if jobs else ""
    name = f"{listed.daemon or 'daemon'} on {listed.host}{of}"
    output.say(f"{name}: {listed.daemon_state}, pannier {listed.version}")
    for wait in listed.training_waits:
        output.say(f"training waits: {wait.summary}")
    if listed.oldest_upload_s:
        waiting = f"{output.size(listed.bytes_queued)} to upload"
        limited = f"; --upload-limit, {output.size(listed.upload_limit)}/s, is what limits"
        output.say(
            f"{waiting}, the oldest for {listed.oldest_upload_s:.0f} s"
            f"{limited if listed.upload_limited else ''}"
        )
    if listed.spool_bytes:
        held = f", {output.size(listed.spool_held_bytes)} held by stopped processes"
        output.say(
            f"spool: {output.size(listed.spool_bytes)}, of these "
            f"{output.size(listed.spool_leased_bytes)} mapped by trainers"
            f"{held if listed.spool_held_bytes else ''}"
            f"; {output.size(listed.spool_free_bytes)} free"
        )
    if listed.memory_limit:
        output.say(
            f"memory limit of the sidecar: {output.size(listed.memory_limit)}, "
            f"{output.size(listed.memory_used)} in use, its spool included"
        )
    for copy in listed.local_copies:
        output.say(f"here for loads: {output.size(copy.bytes)} of {copy.checkpoint_id}")
    for gone in listed.evicted_copies if wide else ():
        what = f"{output.size(gone.bytes)} of {gone.checkpoint_id}"
        output.say(
            f"no longer here: {what}: {gone.reason}, {output.ago(seconds_of(gone.evicted_at))}"
        )
    if listed.saves:
        output.show(save_view.saves_table(listed.saves), wide=wide)
    else:
        output.say("no saves")
    if listed.loads:
        output.show(load_view.loads_table(listed.loads), wide=wide)
    _say_advice(advice, mtbf)


def _find(
    client: StatusClient, name: str
) -> status_pb2.GetSaveResponse | status_pb2.GetLoadResponse:
    """A save, or else a load."""
    try:
        return client.get_save(name)
    except UnknownNameError as unknown:
        try:
            return client.get_load(name)
        except (UnknownNameError, VersionMismatchError):
            # An older daemon shows no loads.
            raise unknown from None


def _with_advice(
    answer: dict[str, Any], advice: list[GroupAdvice], mtbf: float | None
) -> dict[str, Any]:
    return answer if mtbf is None else {**answer, "advice": [each.fields() for each in advice]}


def _say_advice(advice: list[GroupAdvice], mtbf: float | None) -> None:
    for each in advice:
        output.say(str(each))
    if mtbf is not None and not advice:
        output.say("how often to save isn't known yet: no committed save here was measured")
