"""What a sidecar's process has once, however many jobs it serves.

In: its settings. Out: the event loop on which uploads and links run, places for uploads, the room that
all spools share, and what operators are told of all jobs together.
"""

import asyncio
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from pannier.daemon.status_registry import StatusRegistry
from pannier.sidecar.config import SidecarConfig
from pannier.sidecar.metrics import Tally
from pannier.sidecar.multi_job.budget import Commons
from pannier.sidecar.upload.concurrency import Slots


class Shared:
    """Of one process. Its parts say which threads may use them."""

    def __init__(self, config: SidecarConfig) -> None:
        several = config.jobs is not None
        self.life = uuid.uuid4().hex
        """A coordinator takes links with the same one for those of one sidecar."""
        # A job that is alone has the sidecar's budget as its own.
        self.commons = Commons(config.spool_budget if several else None)
        self.slots = Slots(config.memory)
        self.tally = Tally()
        self.status_registry = StatusRegistry()
        """The saves of all jobs."""
        self.loop: asyncio.AbstractEventLoop
        """While :meth:`running`."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """The loop turns, in a thread of its own."""
        self.loop = loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="pannier-loop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
