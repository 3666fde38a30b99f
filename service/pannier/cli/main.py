"""The root of the command line. In: ``sys.argv``. Out: a subcommand's output and an exit status.

Subcommands are imported on use, so that ``--help`` is quick.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import click

from pannier.cli.errors import EXIT_STATUSES, OK, report_errors
from pannier.wire.variables import misspelt
from pannier.wire.version import package_version

_DAEMONS: Final = ("sidecar", "coordinator", "up")
_SUMMARIES: Final = {
    "sidecar": "Run the daemon that carries this host's checkpoints to storage.",
    "coordinator": "Run the daemon that plans and commits a job's checkpoints.",
    "up": "Run one sidecar and one coordinator on this host, supervised.",
    "down": "End the embedded daemons of this user on this host.",
    "status": "Show saves and their progress.",
    "health": "Check whether a daemon lives and takes saves.",
    "doctor": "Check everything that a save from this host needs.",
    "watch": "Follow one save until it is committed or aborted.",
    "ls": "List the checkpoints below a root in storage.",
    "recover": "Commit or clean up interrupted saves from storage alone.",
    "retain": "Remove the checkpoints of a job that no retention rule keeps.",
    "rm": "Remove one checkpoint.",
    "gc": "Remove what crashed, aborted and overwritten saves left behind.",
    "verify": "Re-read a checkpoint and compare it with its receipts.",
    "export": "Write a checkpoint's tensors as safetensors files.",
}


class _Commands(click.Group):
    """Subcommand ``x`` is ``command`` in module ``pannier.cli.commands.x``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUMMARIES:
            return None
        command: click.Command = importlib.import_module(f"pannier.cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command; names similar ones when there is none of that name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            similar = difflib.get_close_matches(args[0], _SUMMARIES)
            if not similar:
                raise
            names = " or ".join(f"`pannier {name}`" for name in similar)
            message = f"No such command {args[0]!r}. Did you mean {names}?"
            raise click.UsageError(message, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a reader of the output that has exited is no error (`pannier ls … | head`)."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Otherwise the interpreter's last flush fails, too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(OK) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_STATUSES,
    no_args_is_help=False,
)
@click.version_option(package_version(), prog_name="pannier")
def cli() -> None:
    """Pannier carries PyTorch distributed checkpoints to storage while training goes on.

    Most options can also be given as environment variables; --help of a
    command names them.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the ``pannier`` script: runs a command, and exits with its status.

    Args:
        arguments: default: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not set(words[:1]).intersection(_DAEMONS):
        # Otherwise gRPC also prints the errors that are reported here.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for text in misspelt(os.environ):
        click.echo(f"warning: {text}", err=True)
    with report_errors():
        code = cli.main(words, prog_name="pannier", standalone_mode=False)
    sys.exit(code if isinstance(code, int) else 0)
