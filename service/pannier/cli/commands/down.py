"""``pannier down``: ends the embedded daemons of a runtime directory, the sidecar first."""

from pathlib import Path

import click

from pannier.cli.errors import NEGATIVE, complain
from pannier.cli.options import Seconds, option
from pannier.common import timeouts


@click.command("down")
@option(
    "--runtime-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Runtime directory of the daemons.  [default: this user's, below /tmp]",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=timeouts.DAEMONS_STOP_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait until they have exited.",
)
def command(*, runtime_dir: Path | None, timeout: float) -> None:
    """End the embedded daemons of this user on this host.

    The sidecar finishes what it can upload within the --grace of `pannier up`.
    The rest stays in the spool: the next start of the daemons uploads it.

    Exit status 0: none run any more; 1: they have not exited in time.
    """
    from pannier.common import daemon_record
    from pannier.common.daemon_process import is_supervised
    from pannier.supervisor.runtime_directory import UnsafeDirectoryError
    from pannier.supervisor.up import stop
    from pannier.wire import addresses

    directory = (runtime_dir or addresses.runtime_dir()).absolute()
    try:
        stopped = stop(directory, timeout)
    except UnsafeDirectoryError as error:
        raise click.UsageError(str(error)) from error
    except TimeoutError as error:
        complain(str(error))
        click.get_current_context().exit(NEGATIVE)
    done = "the daemons have exited" if stopped else "no daemons run"
    click.echo(f"{done}: {directory}")
    usual = addresses.usual_dirs() if runtime_dir is None else []
    for other in (*addresses.job_dirs(directory), *usual):
        if other != directory and is_supervised(other):
            whose = f" ({record.description})" if (record := daemon_record.read(other)) else ""
            click.echo(
                f"other daemons run in {other}{whose}: `pannier down --runtime-dir {other}` ends them"
            )
