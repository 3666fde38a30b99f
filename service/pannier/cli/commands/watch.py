"""``pannier watch``: follows one save; the exit status is its outcome."""

from pathlib import Path

import click
from rich.live import Live

from pannier.cli import output
from pannier.cli.errors import NEGATIVE, OK
from pannier.cli.status_client import TERMINAL, StatusClient, daemon_option
from pannier.v1 import save_pb2, status_pb2
from pannier.wire.errors import PannierError


@click.command("watch")
@click.argument("save", required=False)
@daemon_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per change instead.")
def command(*, save: str | None, address: str | None, as_json: bool, **tls: Path | None) -> None:
    """Follow one save until it is committed (exit status 0) or aborted (1).

    SAVE is an id from `pannier status` or a checkpoint id, which means its
    newest save; without it, the newest undecided save, else the newest.

    The JSON is a stable contract: one pannier.v1.SaveStatus per line, in the
    form that `pannier status --json` has.
    """
    last: save_pb2.SaveStatus | None = None
    out = output.console()
    with StatusClient(address, **tls) as client:
        changes = client.watch_save(save or _newest(client))
        if as_json:
            for change in changes:
                last = change.save
                output.print_json(output.as_json(last))
        elif out.is_terminal:
            with Live(console=out, refresh_per_second=10) as live:
                for change in changes:
                    last = change.save
                    live.update(output.save_details(last))
        else:
            for change in changes:
                line = _line(change.save)
                if last is None or line != _line(last):
                    click.echo(line)
                last = change.save
            if last is not None:
                out.print(output.save_details(last))
    committed = last is not None and last.state == save_pb2.SAVE_STATE_COMMITTED
    click.get_current_context().exit(OK if committed else NEGATIVE)


def _newest(client: StatusClient) -> str:
    saves = client.list_saves(status_pb2.ListSavesRequest()).saves
    if not saves:
        raise PannierError(f"the daemon at {client.address} has no saves")
    under_way = [save for save in saves if save.state not in TERMINAL]
    return (under_way or saves)[0].id


def _line(save: save_pb2.SaveStatus) -> str:
    """One change as a line of a log file."""
    done = sum(rank.phase == save_pb2.RANK_PHASE_DURABLE for rank in save.ranks)
    line = f"{save.id} {output.state_name(save.state)}: {done} of {len(save.ranks)} ranks durable"
    if save.waiting_on.text:
        # Without the seconds, which change all the time.
        line += f", waiting for ranks {list(save.waiting_on.ranks)}"
    return line
