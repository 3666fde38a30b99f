"""``pannier coordinator``: flags in, a checked CoordinatorConfig out to the daemon.

The only subcommand that needs numpy, and torch for some plans.
"""

from typing import Any

import click

from pannier.cli.commands.sidecar import daemon_settings
from pannier.cli.options import (
    Address,
    Seconds,
    daemon_options,
    option,
    policy_of,
    retention_options,
    retention_pattern,
)

DEFAULT_ADDRESS = "unix:///run/pannier/coordinator.sock"


@click.command("coordinator")
@option(
    "--address",
    type=Address(),
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Where sidecars reach it: unix:///path or host:port.",
)
@option(
    "--planner",
    multiple=True,
    metavar="MODULE:CLASS",
    help="A planner class that overrides global planning and is trusted to run here; may be "
    "given several times (separated by spaces in the variable). An embedded coordinator needs none.",
)
@option(
    "--suspect-after",
    type=Seconds(),
    default=5,
    show_default=True,
    metavar="SECONDS",
    help="Time without heartbeats after which a rank is shown as unresponsive.",
)
@option(
    "--grace-superseded",
    type=Seconds(zero=True),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="How long the files of an overwritten checkpoint stay for readers without a lease.",
)
@option(
    "--idle-exit",
    type=Seconds(),
    metavar="SECONDS",
    help="Exit after this long without a trainer or an undecided save on any host.  "
    "[default: never]",
)
@retention_options
@retention_pattern("--retention-pattern")
@daemon_options
def command(**settings: Any) -> None:
    """Run the daemon that plans and commits a job's checkpoints.

    One per job. It keeps nothing on disk: killed and started again anywhere, it
    resumes from the sidecars' reports and the objects in storage.

    With --keep-newest, --keep-every or --keep-best, it removes after each commit
    the job's checkpoints in the same directory that no rule keeps, or below the
    same root with --retention-pattern. `pannier retain --dry-run` lists them. The newest checkpoint, those without a number in
    their names, and those being read or written always stay.
    """
    try:
        from pannier.coordinator.config import CoordinatorConfig
        from pannier.coordinator.server import run
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise click.UsageError(
            f"the coordinator needs {error.name}: pip install 'pannier[torch]'"
        ) from error

    ctx = click.get_current_context()
    settings["retention"] = policy_of(settings)
    ctx.exit(run(CoordinatorConfig(**daemon_settings(settings))))
