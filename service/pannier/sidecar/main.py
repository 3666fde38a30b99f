"""The sidecar process: settings in, an exit status out. The main thread runs the event loop."""

import asyncio
import logging
import os

from pannier.common import tracing
from pannier.daemon.listeners import keep_grpc_thread, raise_descriptor_limit
from pannier.daemon.logging import set_up_logging
from pannier.daemon.malloc import keep_freed_memory
from pannier.daemon.signals import StopSignals
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.job_config import JobConfig
from pannier.sidecar.multi_job.supervisor import LEAVE, JobSupervisor
from pannier.sidecar.server import Sidecar


def run(config: SidecarConfig) -> int:
    """Runs a sidecar, or one for each job, until SIGTERM, SIGINT or its idle exit; returns the exit status.

    The status is 1 when it must be restarted because its spool was removed.

    Raises ConfigurationError when it can't start.
    """
    if config.jobs is None:
        return _serve(config, None)
    set_up_logging(config.log_format, daemon="sidecar", host=config.host)
    return JobSupervisor(config, _serve).run()


def _serve(config: SidecarConfig, job: JobConfig | None) -> int:
    if job is not None:
        # Inherited from the supervisor: those handlers don't name the job.
        logging.getLogger().handlers.clear()
    set_up_logging(
        config.log_format, daemon="sidecar", host=config.host, job=job.name if job else ""
    )
    raise_descriptor_limit()
    # Before there are threads: each keeps the niceness it was started with.
    os.nice(config.nice)
    keep_freed_memory()
    with tracing.exporting("pannier-sidecar", **{"host.name": config.host}):
        return asyncio.run(_run(config, job))


async def _run(config: SidecarConfig, job: JobConfig | None) -> int:
    keep_grpc_thread()
    async with StopSignals() as stop, Sidecar(config, job=job) as sidecar:
        if sidecar.auth is not None:
            asyncio.get_running_loop().add_signal_handler(LEAVE, sidecar.auth.leave)
        await sidecar.wait(stop)
        await sidecar.drain(stop)
        return 1 if sidecar.spool_removed else 0
