"""``pannier up``: runs the supervisor with the command lines of a sidecar and its coordinator.

Both are copies of this process, which has imported what both need: the imports take as long as all the rest
of their start.
"""

import gc
import importlib
import json
import logging
import os
import pkgutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import filelock
from click.core import ParameterSource

from pannier.cli.errors import NEGATIVE, complain
from pannier.cli.options import (
    Address,
    HttpAddress,
    Seconds,
    Size,
    log_format_option,
    option,
    peers_option,
    replicas_options,
    restore_budget_option,
    storage_options,
    tls_options,
    upload_options,
)
from pannier.supervisor.binding import leave_binding
from pannier.supervisor.process_title import set_process_title
from pannier.supervisor.runtime_directory import AlreadyRunningError, UnsafeDirectoryError
from pannier.supervisor.up import Supervisor


@click.command("up")
@option(
    "--runtime-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Holds sockets, logs and the lock.  [default: one per user, below /tmp]",
)
@option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Holds data files until they are in storage: all ranks of the host twice while two saves "
    "are in flight.  [default: below /dev/shm when a quarter of the host's memory or 4 GiB is free "
    "there, else below the runtime directory]",
)
@option(
    "--coordinator",
    type=Address(),
    help="Use the coordinator that listens there, as a job on several hosts must, and run the "
    "sidecar alone.  [default: run one here]",
)
@option(
    "--listen",
    type=Address(),
    metavar="HOST:PORT",
    help="Have the coordinator also listen here, for the sidecars of other hosts; TLS is required "
    "except on loopback.",
)
@option(
    "--insecure-listen",
    is_flag=True,
    help="Let it listen without TLS, where anyone who can connect may save, abort and read checkpoints.",
)
@tls_options
@option("--spool-budget", type=Size(), metavar="SIZE", help="Most bytes the spool may hold.")
@peers_option
# The name in the certificates that the client makes for embedded daemons.
@click.option("--peers-name", hidden=True)
@restore_budget_option
@replicas_options
@option("--memory", type=Size(), metavar="SIZE", help="Most bytes of upload buffers.")
@upload_options
@option(
    "--idle-exit",
    type=Seconds(),
    metavar="SECONDS",
    help="Exit after this long without a client or anything to upload; with --listen, on any "
    "host.  [default: never]",
)
@option(
    "--grace",
    type=Seconds(),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, time to finish uploads; the rest stays in the spool for the next start.",
)
@option("--allow", multiple=True, metavar="ROOT", help="Only accept checkpoints below it.")
@option("--planner", multiple=True, metavar="MODULE:CLASS", help="See `pannier coordinator`.")
@storage_options
@option("--host", help="Name of this host in status and errors.  [default: the hostname]")
@log_format_option
# Not from the environment: all embedded daemons that trainers start would use the same ports.
@click.option(
    "--metrics",
    type=HttpAddress(),
    metavar="[HOST:]PORT",
    help="Have the coordinator serve its status page and metrics here, and the sidecar its own on the "
    "next port; see `pannier coordinator`.",
)
@click.option("--discard", is_flag=True, hidden=True)
def command(
    *,
    runtime_dir: Path | None,
    spool: Path | None,
    coordinator: str | None,
    listen: str | None,
    grace: float,
    planner: tuple[str, ...],
    log_format: str,
    metrics: str | None,
    discard: bool,
    **settings: Any,
) -> None:
    """Run one sidecar and one coordinator on this host, supervised.

    Clients start it themselves when no sidecar is configured. The daemons
    listen on unix sockets of this user, the coordinator with --listen on TCP as
    well. A daemon that crashes is started again; when idle, all exit
    (--idle-exit). A trainer whose environment configures other storage is
    refused; flags given here hold for all trainers.
    """
    from pannier.common.daemon_record import DaemonRecord, decisive_variables
    from pannier.wire import addresses

    directory = (runtime_dir or addresses.runtime_dir()).absolute()
    sidecar = addresses.parse_address(
        addresses.embedded_sidecar(directory), setting="--runtime-dir"
    )
    own_coordinator = addresses.parse_address(
        addresses.embedded_coordinator(directory), setting="--runtime-dir"
    )
    if coordinator is not None and planner:
        raise click.UsageError(
            "--planner (PANNIER_PLANNER) is for the coordinator, and --coordinator "
            f"(PANNIER_COORDINATOR) names one at {coordinator}: give it to that one"
        )
    if coordinator is not None and listen is not None:
        raise click.UsageError(
            f"--listen={listen} is for the coordinator, and --coordinator names one at "
            f"{coordinator}: give only one of them"
        )
    common = ["--embedded", "--log-format", log_format]
    common += _flags(settings, "allow", "storage_options", "host", *_TLS)
    idle = _flags(settings, "idle_exit")
    ctx = click.get_current_context()
    if settings["replicas"] and not settings["peers"]:
        if ctx.get_parameter_source("replicas") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                "--replicas 1 needs --peers HOST:PORT, where the sidecars of other hosts send their replicas to"
            )
        # PANNIER_REPLICAS is set for trainers; these daemons serve jobs on this host alone, or no other host
        # reaches them.
        settings["replicas"] = 0
    variables = decisive_variables(os.environ)
    for name in ctx.params:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            variables[f"PANNIER_{name.upper()}"] = None
    if idle:
        # A rank has started them; those of a person stay where they were put.
        leave_binding()
    supervisor = Supervisor(
        directory,
        coordinator=partial(
            _run,
            *("coordinator", "--address", own_coordinator),
            *common,
            *_flags({"planner": planner, "listen": listen}, "planner", "listen"),
            *_flags({"metrics": metrics}, "metrics"),
            *(["--insecure-listen"] if settings["insecure_listen"] else []),
            *(idle if listen else []),
        )
        if coordinator is None
        else None,
        sidecar=partial(
            _run,
            *("sidecar", "--address", sidecar),
            *("--coordinator", coordinator or own_coordinator),
            *("--grace", str(grace), *([] if spool is None else ["--spool", str(spool)])),
            *common,
            *_flags(settings, "spool_budget", "memory", "peers", "peers_name", "restore_budget"),
            *_flags(settings, "upload_threads", "upload_limit"),
            *_flags(settings, "replicas", "replicas_limit", "failure_domain"),
            *(["--insecure-listen"] if settings["insecure_listen"] and settings["peers"] else []),
            *_flags({"metrics": metrics and _next_port(metrics)}, "metrics"),
            *([] if listen else idle),
        ),
        shared=listen is not None,
        record=DaemonRecord.of_this_process(variables, exits_idle=bool(idle)),
        grace_s=grace,
    )
    _set_up_logging(log_format)
    _import_shared()
    try:
        status = supervisor.run()
    except AlreadyRunningError as error:
        complain(str(error))
        status = NEGATIVE
    except UnsafeDirectoryError as error:
        raise click.UsageError(str(error)) from error
    if discard and supervisor.idle:
        _discard(directory, spool)
    ctx.exit(status)


def _discard(directory: Path, spool: Path | None) -> None:
    """Removes all files of daemons that won't be started again, except their log.

    A daemon that was signalled exits like an idle one: what it has not uploaded stays, with the record by
    which the job's next start finds it.
    """
    from pannier.common import daemon_record
    from pannier.sidecar.spool import leftovers
    from pannier.wire import addresses

    spool = spool or daemon_record.recorded_spool(directory)
    lock = filelock.FileLock(directory / daemon_record.START_LOCK, mode=0o600)
    try:
        with lock.acquire(timeout=0):
            if spool is not None and not leftovers.discard(spool):
                return
            for path in directory.iterdir():
                if path.name != addresses.LOG and path.is_file():
                    path.unlink(missing_ok=True)
    except filelock.Timeout:
        logging.getLogger(__name__).info("they are being started again: their files stay")


def _run(*words: str) -> NoReturn:
    """Runs ``pannier WORDS`` in a copy of this process."""
    from pannier.cli.main import main

    set_process_title("pannier", *_shown(words))
    main(words)


def _shown(words: Sequence[str]) -> list[str]:
    """Without storage options: they may be credentials, and all users of a host see its command lines."""
    return [
        "..." if flag == "--storage-options" else word
        for flag, word in zip(["", *words], words, strict=False)
    ]


def _import_shared() -> None:
    """Imports what both daemons need, before they are forked."""
    from pannier import daemon

    for module in pkgutil.iter_modules(daemon.__path__, f"{daemon.__name__}."):
        importlib.import_module(module.name)
    # Otherwise the first garbage collection of each child would copy the shared memory.
    gc.collect()
    gc.freeze()


def _set_up_logging(format: str) -> None:
    if format == "text":
        logging.basicConfig(level=logging.INFO, format="%(asctime)s up: %(message)s")
        return
    from pannier.daemon.logging import set_up_logging

    set_up_logging(format, daemon="up")


_LAST_PORT = 65535
_TLS = ("tls_cert", "tls_key", "tls_ca")


def _next_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    if int(port) == _LAST_PORT:
        raise click.UsageError(
            f"--metrics={address}: the sidecar needs the next port, and there is none"
        )
    return f"{host}:{int(port) + 1}"


def _flags(settings: dict[str, Any], *names: str) -> list[str]:
    """Command-line arguments for these settings; none for those that are not set."""
    words = []
    for name in names:
        value = settings[name]
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if one is not None and one != {}:
                text = json.dumps(one) if isinstance(one, dict) else str(one)
                words += ["--" + name.replace("_", "-"), text]
    return words
