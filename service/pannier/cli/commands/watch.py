"""``pannier watch``: follows one save or load; the exit status is its outcome."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.live import Live

from pannier.cli import load_view, output, save_view
from pannier.cli.errors import NEGATIVE, OK
from pannier.cli.options import output_options
from pannier.cli.progress import SaveProgress
from pannier.cli.status_client import (
    TERMINAL,
    StatusClient,
    UnknownNameError,
    as_named,
    daemon_option,
)
from pannier.common.message_json import as_dict
from pannier.v1 import load_status_pb2, save_pb2, status_pb2
from pannier.wire.errors import PannierError, VersionMismatchError


@click.command("watch")
@click.argument("save", required=False)
@daemon_option
@output_options
def command(
    *, save: str | None, address: str | None, wide: bool, as_json: bool, **tls: Path | None
) -> None:
    """Follow one save until it is committed (exit status 0) or aborted (1), or one load
    until it has loaded (0) or failed (1). A save of `client.prepare` ends once its plan
    is made (0).

    SAVE is an id from `pannier status`, of a save or a load, or a checkpoint id or its end, like
    step-60, which means its newest save, else its newest load; without it, the newest undecided save, else the newest
    load that runs, else the newest save. A terminal gets a bar per rank, or per host above 16
    ranks: what is in storage of its bytes, or read of them, how fast, and the time left. Ranks
    that make no progress are named.

    The JSON is a stable contract: one pannier.v1.SaveStatus, or LoadStatus, per line, in the
    form that `pannier status --json` has.
    """
    last: Any = None
    line = ""
    out = output.console()
    with StatusClient(address, **tls) as client, ExitStack() as stack:
        changes = _changes(client, as_named(save) if save else _newest(client))
        live = None
        if out.is_terminal and not out.is_dumb_terminal and not as_json:
            live = stack.enter_context(Live(console=out, transient=True))
        progress: SaveProgress | load_view.LoadProgress | None = None
        for last in changes:
            if as_json:
                output.print_json(as_dict(last))
                continue
            if progress is None:
                progress = _progress(last)
            progress.update(last)
            if live is not None:
                live.update(progress.render(out.height), refresh=True)
            elif line != (line := progress.line()):
                output.say(line)
    if last is not None and not as_json:
        output.show(_details(last), wide=wide)
    click.get_current_context().exit(OK if _is_good(last) else NEGATIVE)


def _changes(client: StatusClient, name: str) -> Iterator[Any]:
    """The statuses of a save, or else of a load."""
    is_save = False
    try:
        for change in client.watch_save(name):
            is_save = True
            yield change.save
    except UnknownNameError as unknown:
        if is_save:
            # A restarted daemon doesn't know the save any more.
            raise
        try:
            yield from (change.load for change in client.watch_load(name))
        except (UnknownNameError, VersionMismatchError):
            # An older daemon shows no loads.
            raise unknown from None


def _progress(status: Any) -> SaveProgress | load_view.LoadProgress:
    return SaveProgress() if _is_save(status) else load_view.LoadProgress()


def _details(status: Any) -> RenderableType:
    if _is_save(status):
        return save_view.save_details(status)
    return load_view.load_details(status)


def _is_save(status: Any) -> bool:
    return isinstance(status, save_pb2.SaveStatus)


def _is_good(status: Any) -> bool:
    if _is_save(status):
        return status.state in (save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_PREPARED)
    return status is not None and bool(status.state == load_status_pb2.LOAD_STATE_LOADED)


def _newest(client: StatusClient) -> str:
    listed = client.list_saves(status_pb2.ListSavesRequest())
    undecided = [save.id for save in listed.saves if save.state not in TERMINAL]
    running = [load.id for load in listed.loads if load.state == load_status_pb2.LOAD_STATE_LOADING]
    # Of a prepared one only the plan was made.
    ended = sorted(listed.saves, key=lambda save: save.state == save_pb2.SAVE_STATE_PREPARED)
    saves = [save.id for save in ended]
    for names in (undecided, running, saves, [load.id for load in listed.loads]):
        if names:
            return names[0]
    raise PannierError(f"the daemon at {client.address} has no saves")
