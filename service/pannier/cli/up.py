"""``pannier up``: flags in, the command lines of one sidecar and one coordinator out to the supervisor."""

import json
import logging
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import click

from pannier.cli.failures import NEGATIVE
from pannier.cli.options import Seconds, Size, option, storage_options
from pannier.cli.supervisor import AlreadyRunningError, Supervisor, UnsafeDirectoryError

_ROOM = 1 << 30
"""Bytes that /dev/shm must have free to hold the spool."""


@click.command("up")
@option(
    "--runtime-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Holds sockets, logs and the lock.  [default: one per user, below XDG_RUNTIME_DIR or /tmp]",
)
@option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Holds data files until they are in storage.  [default: below /dev/shm if it has room, "
    "else below the runtime directory]",
)
@option("--spool-budget", type=Size(), metavar="SIZE", help="Most bytes the spool may hold.")
@option("--memory", type=Size(), metavar="SIZE", help="Most bytes of upload buffers.")
@option(
    "--idle-exit",
    type=Seconds(),
    metavar="SECONDS",
    help="Exit after this long without a client or anything to upload.  [default: never]",
)
@option(
    "--grace",
    type=Seconds(),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, time to finish uploads.",
)
@option("--allow", multiple=True, metavar="ROOT", help="Only accept checkpoints below it.")
@option("--planner", multiple=True, metavar="MODULE:CLASS", help="See `pannier coordinator`.")
@storage_options
@option("--host", help="Name of this host in status and errors.  [default: the hostname]")
def command(
    *,
    runtime_dir: Path | None,
    spool: Path | None,
    grace: float,
    planner: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run one sidecar and one coordinator on this host, supervised.

    Clients start it by themselves when no sidecar is configured. The daemons
    listen on unix sockets that only this user can open. One that crashes is
    started again; when the sidecar leaves for idleness, all do.
    """
    from pannier.wire import addresses

    directory = (runtime_dir or addresses.runtime_dir()).absolute()
    sidecar = addresses.parse_address(
        addresses.embedded_sidecar(directory), setting="--runtime-dir"
    )
    coordinator = addresses.parse_address(
        addresses.embedded_coordinator(directory), setting="--runtime-dir"
    )
    spool = spool or default_spool(directory, addresses.runtime_dir())
    common = ["--embedded", *_flags(settings, "allow", "storage_options", "host")]
    supervisor = Supervisor(
        directory,
        coordinator=[
            *(*_PANNIER, "coordinator", "--address", coordinator),
            *common,
            *_flags({"planner": planner}, "planner"),
        ],
        sidecar=[
            *(*_PANNIER, "sidecar", "--address", sidecar, "--coordinator", coordinator),
            *("--spool", str(spool), "--grace", str(grace)),
            *common,
            *_flags(settings, "spool_budget", "memory", "idle_exit"),
        ],
        grace_s=grace,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s up: %(message)s")
    try:
        status = supervisor.run()
    except AlreadyRunningError as error:
        click.echo(f"error: {error}", err=True)
        status = NEGATIVE
    except UnsafeDirectoryError as error:
        raise click.UsageError(str(error)) from error
    click.get_current_context().exit(status)


_PANNIER = [sys.executable, "-m", "pannier.cli"]


def _flags(settings: dict[str, Any], *names: str) -> list[str]:
    """Command-line words for these settings; none for those that are not set."""
    words = []
    for name in names:
        value = settings[name]
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if one is not None and one != {}:
                text = json.dumps(one) if isinstance(one, dict) else str(one)
                words += ["--" + name.replace("_", "-"), text]
    return words


def default_spool(directory: Path, usual: Path) -> Path:
    """Where the embedded sidecar of the runtime directory ``directory`` spools.

    On tmpfs, one per user; a runtime directory other than the ``usual`` one has
    a spool of its own.
    """
    from pannier.wire.version import WIRE_VERSION

    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        space = os.statvfs(memory)
        if space.f_bavail * space.f_frsize >= _ROOM:
            name = f"pannier-{os.getuid()}-v{WIRE_VERSION}"
            if directory != usual.absolute() or "PANNIER_RUNTIME_DIR" in os.environ:
                name += f"-{zlib.crc32(os.fsencode(directory)):08x}"
            return memory / name
    return directory / "spool"
