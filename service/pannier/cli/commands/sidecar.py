"""``pannier sidecar``: flags in, a checked SidecarConfig out to the daemon."""

from pathlib import Path
from typing import Any

import click

from pannier.cli.options import (
    Address,
    Seconds,
    Size,
    daemon_options,
    option,
    peers_option,
    replicas_options,
    restore_budget_option,
    upload_options,
)

DEFAULT_ADDRESS = "unix:///run/pannier/sidecar.sock"


@click.command("sidecar")
@option(
    "--address",
    type=Address(),
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Where trainers reach it: unix:///path or host:port. With --jobs, for operators only.",
)
@option(
    "--coordinator",
    type=Address(),
    help="Where the job's coordinator listens: unix:///path or host:port. With --jobs, the default for jobs "
    "whose files name none.",
)
@option(
    "--jobs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Serve several jobs, each with its own token and in a process of its own: those with a file "
    "<job>.json here, as described above. Read again every second.",
)
@option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Holds data files until they are in storage; tmpfs or a fast local disk.  [default: below "
    "/dev/shm when a quarter of the host's memory or 4 GiB is free there, else beside the socket; none with --jobs]",
)
@option(
    "--spool-budget",
    type=Size(),
    metavar="SIZE",
    help="Most bytes the spool may hold, like 64GiB. With --jobs, of each job whose file names no "
    "spool_budget.  [default: what its file system has]",
)
@option(
    "--memory",
    type=Size(),
    default="192MiB",
    show_default=True,
    metavar="SIZE",
    help="Most bytes of upload buffers. With --jobs, of each job whose file names no memory.",
)
@upload_options
@peers_option
@option(
    "--peers-name",
    metavar="NAME",
    help="A name that the certificates of all peers have, where one is for all of a job's hosts.  [default: "
    "each has the host of its --peers]",
)
@restore_budget_option
@replicas_options
@option(
    "--nice",
    type=click.IntRange(0, 19),
    default=10,
    show_default=True,
    metavar="NUMBER",
    help="Its niceness (nice(1)), so that trainers have priority where cores are short.",
)
@option(
    "--grace",
    type=Seconds(),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, time to finish uploads; the rest stays in the spool for the next start.",
)
@option(
    "--idle-exit",
    type=Seconds(),
    metavar="SECONDS",
    help="Exit after this long without a client or anything to upload; without a coordinator, also if "
    "outcomes of saves are unknown.  [default: never]",
)
@click.option(
    "--discard",
    is_flag=True,
    help="On exit, remove its files from the spool unless some are not in storage yet: where no other "
    "sidecar follows on that spool. Not with --jobs.",
)
@daemon_options
def command(*, discard: bool, **settings: Any) -> None:
    """Run the daemon that carries this host's checkpoints to storage.

    Trainers on this host hand it their data files; it uploads them, confirms
    their checksums and reports to the coordinator. A journal in the spool records
    its contents: however the sidecar ended, the next one that is started on the
    same --spool resumes the uploads. Storage credentials and endpoints come from the
    environment, as gcsfs and s3fs read them.

    With --jobs, each job has a sidecar process of its own, which is started again
    when it ends; --address, --health and --metrics cover all of them. A job's trainers
    connect to jobs/<job>/sidecar.sock beside the socket at --address and send
    the job's token (PANNIER_TOKEN_FILE). The job's file is a JSON object that only
    its owner may write:

    \b
      "tokens"        the valid ones: several while one replaces another
      "allow"         roots that the job's checkpoints must lie below
      "coordinator"   the job's own; default: that of --coordinator
      "spool_budget"  most bytes of the job's spool, like "64GiB"; default:
                      --spool-budget
      "memory"        most bytes of its upload buffers; default: --memory
    """
    from pannier.common import daemon_record
    from pannier.sidecar.config import SidecarConfig
    from pannier.sidecar.main import run
    from pannier.sidecar.spool import leftovers

    ctx = click.get_current_context()
    if discard and settings["jobs"] is not None:
        raise click.UsageError("--discard doesn't go with --jobs: each job has a spool of its own")
    config = SidecarConfig(**daemon_settings(settings))
    status = run(config)
    spool = config.spool or daemon_record.recorded_spool(config.runtime_dir)
    if discard and status == 0 and spool is not None:
        leftovers.discard(spool)
    ctx.exit(status)


def daemon_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Flags as the fields of a daemon's config: an absent one keeps the field's default."""
    renamed = {
        "idle_exit": "idle_exit_s",
        "grace": "grace_s",
        "grace_superseded": "grace_superseded_s",
        "suspect_after": "suspect_after_s",
    }
    return {renamed.get(name, name): value for name, value in settings.items() if value is not None}
