"""``pannier watch``: follows one save; the exit status is its outcome."""

from contextlib import ExitStack
from pathlib import Path

import click
from rich.live import Live

from pannier.cli import output, save_view
from pannier.cli.errors import NEGATIVE, OK
from pannier.cli.options import output_options
from pannier.cli.progress import SaveProgress
from pannier.cli.status_client import TERMINAL, StatusClient, daemon_option
from pannier.common.message_json import as_dict
from pannier.v1 import save_pb2, status_pb2
from pannier.wire.errors import PannierError


@click.command("watch")
@click.argument("save", required=False)
@daemon_option
@output_options
def command(
    *, save: str | None, address: str | None, wide: bool, as_json: bool, **tls: Path | None
) -> None:
    """Follow one save until it is committed (exit status 0) or aborted (1).

    SAVE is an id from `pannier status` or a checkpoint id, which means its
    newest save; without it, the newest undecided save, else the newest. A terminal
    gets a bar per rank, or per host above 16 ranks: what is in storage of its bytes, how fast
    it is uploaded, and the time left. Ranks that make no progress are named.

    The JSON is a stable contract: one pannier.v1.SaveStatus per line, in the
    form that `pannier status --json` has.
    """
    last: save_pb2.SaveStatus | None = None
    progress, line = SaveProgress(), ""
    out = output.console()
    with StatusClient(address, **tls) as client, ExitStack() as stack:
        changes = client.watch_save(save or _newest(client))
        live = None
        if out.is_terminal and not as_json:
            live = stack.enter_context(Live(console=out, transient=True))
        for change in changes:
            last = change.save
            if as_json:
                output.print_json(as_dict(last))
                continue
            progress.update(last)
            if live is not None:
                live.update(progress.render(out.height), refresh=True)
            elif line != (line := progress.line()):
                output.say(line)
    if last is not None and not as_json:
        output.show(save_view.save_details(last), wide=wide)
    committed = last is not None and last.state == save_pb2.SAVE_STATE_COMMITTED
    click.get_current_context().exit(OK if committed else NEGATIVE)


def _newest(client: StatusClient) -> str:
    saves = client.list_saves(status_pb2.ListSavesRequest()).saves
    if not saves:
        raise PannierError(f"the daemon at {client.address} has no saves")
    under_way = [save for save in saves if save.state not in TERMINAL]
    return (under_way or saves)[0].id
