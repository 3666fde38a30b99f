"""The sidecar process: settings in, an exit status out. The main thread runs the event loop."""

import asyncio
import os

from pannier.common import tracing
from pannier.common.malloc import keep_freed_memory
from pannier.daemon.listeners import raise_descriptor_limit
from pannier.daemon.logging import set_up_logging
from pannier.daemon.signals import StopSignals
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.multi_job.host import MultiJobSidecar
from pannier.sidecar.server import Sidecar


def run(config: SidecarConfig) -> int:
    """Runs a sidecar until SIGTERM, SIGINT or its idle exit; returns the exit status.

    The status is 1 when it must be restarted because its spool was removed.

    Raises ConfigurationError when it can't start.
    """
    set_up_logging(config.log_format, daemon="sidecar", host=config.host)
    raise_descriptor_limit()
    # Before there are threads: each keeps the niceness it was started with.
    os.nice(config.nice)
    keep_freed_memory()
    tracing.set_up("pannier-sidecar", **{"host.name": config.host})
    return asyncio.run(_run(config))


async def _run(config: SidecarConfig) -> int:
    async with StopSignals() as stop:
        if config.jobs is not None:
            async with MultiJobSidecar(config) as sidecars:
                await sidecars.wait(stop)
                await sidecars.drain(stop)
            return 0
        async with Sidecar(config) as sidecar:
            await sidecar.wait(stop)
            await sidecar.drain(stop)
            return 1 if sidecar.spool_removed else 0
