"""A reader's lease of a checkpoint's files, so that they are not removed while it reads.

In: a checkpoint directory and the attempt that its ``.metadata`` names. Out: an object below
``.pannier/leases/`` that is renewed while the reader reads, and removed at the end. Files of a
replaced checkpoint stay as long as there is a fresh lease. Where the reader may not write there is
no lease: the files stay for the grace period. Blocking; one daemon thread per lease.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
import weakref
from typing import Final

from google.protobuf import json_format

from pannier.client.engine import engine
from pannier.client.interrupts import shielded
from pannier.client.loading.filesystem import StorageDir
from pannier.common import timeouts
from pannier.common.deadline import set_within
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import StorageError

_log = logging.getLogger(__name__)

_unwritable: set[str] = set()
"""Directories that can't be written, as logged."""


class Lease:
    """One lease, until :meth:`release`. Thread-safe."""

    def __init__(
        self, directory: StorageDir, attempt: str, *, renew_s: float, idle_s: float | None
    ) -> None:
        holder = uuid.uuid4().hex
        self.key: Final = object_names.lease(attempt, holder[:16])
        self._content = records_pb2.Lease(
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            holder=holder,
            renew_s=renew_s,
        )
        self._directory = directory
        self._renew_s = renew_s
        self._idle_s = idle_s
        self._pid = os.getpid()
        self._last_touch = time.monotonic()
        self._engine = engine()
        self._ended = asyncio.Event()
        self._removed = asyncio.Event()
        self._write()
        self._engine.start(self._keep)

    def touch(self) -> None:
        """Records that the reader still reads."""
        self._last_touch = time.monotonic()

    def end(self) -> None:
        """Ends it without waiting for its removal."""
        self._engine.post(self._ended.set)

    def release(self) -> None:
        """Ends it and waits for its removal. A removal that fails is not raised: the lease expires."""
        # A forked child's is the parent's.
        if os.getpid() == self._pid:
            self._engine.call(self._release)

    def _write(self) -> None:
        self._directory.write(self.key, json_format.MessageToJson(self._content).encode())

    async def _release(self) -> None:
        self._ended.set()
        await set_within(timeouts.LEASE_RELEASE_S, self._removed)

    async def _keep(self) -> None:
        while not await set_within(self._renew_s, self._ended):
            if self._idle_s is not None and time.monotonic() - self._last_touch > self._idle_s:
                _log.debug("%s/%s: no read for %g s", self._directory.url, self.key, self._idle_s)
                break
            self._content.renewals += 1
            try:
                await self._engine.in_thread(self._write)
            except StorageError as error:
                _log.warning("a reader's lease was not renewed: %s", error)
        try:
            await self._engine.in_thread(lambda: self._directory.remove(self.key))
        except StorageError as error:
            _log.debug("a reader's lease is left to expire: %s", error)
        finally:
            self._removed.set()


@shielded
def take(
    directory: StorageDir, attempt: str, *, reader: object, idle_s: float | None
) -> Lease | None:
    """Takes a lease of an attempt's files; None: it can't be written.

    Args:
        directory: the checkpoint.
        attempt: whose files are to be read.
        reader: the lease ends with this object, at the latest.
        idle_s: ends it after so many seconds without :meth:`Lease.touch`; None: never.
    """
    try:
        lease = Lease(directory, attempt, renew_s=timeouts.LEASE_RENEW_S, idle_s=idle_s)
    except StorageError as error:
        if directory.url not in _unwritable:
            _unwritable.add(directory.url)
            _log.debug("%s is read without a lease: %s", directory.url, error)
        return None
    weakref.finalize(reader, lease.end).atexit = False
    return lease
