"""A reader's word that it is at a checkpoint's files, so that nobody removes them under it.

In: a place and the attempt that its ``.metadata`` names. Out: an object below ``.pannier/leases/``
that is written again while the reader reads, and removed at the end. What overwrites a checkpoint
keeps its files as long as the lease is fresh. A place that can't be written gets none: there, the
grace period protects. Blocking; one daemon thread per lease.
"""

import logging
import os
import socket
import threading
import time
import uuid
import weakref
from typing import Final

from google.protobuf import json_format

from pannier.client.interrupts import Event, shielded
from pannier.client.loading.filesystem import StorageDir
from pannier.v1 import records_pb2
from pannier.wire import object_names
from pannier.wire.errors import StorageError

_log = logging.getLogger(__name__)

RENEW_S: Final = 30.0
"""Seconds between renewals; without any, it expires after three times as many."""
IDLE_S: Final = 600.0
"""Seconds without a sign of its reader after which a lease is given up."""
_RELEASE_S: Final = 10.0
"""Until a released lease is removed, at most; then it expires."""
_unwritable: set[str] = set()
"""Places of which it was said that they can't be written."""


class Lease:
    """One lease, until :meth:`release`. Thread-safe."""

    def __init__(
        self, place: StorageDir, attempt: str, *, renew_s: float, idle_s: float | None
    ) -> None:
        holder = uuid.uuid4().hex
        self.key: Final = object_names.lease(attempt, holder[:16])
        message = records_pb2.Lease(
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            holder=holder,
            renew_s=renew_s,
        )
        self._content = json_format.MessageToJson(message).encode()
        self._place = place
        self._renew_s = renew_s
        self._idle_s = idle_s
        self._pid = os.getpid()
        self._heard = time.monotonic()
        self._ended = Event()
        place.write(self.key, self._content)
        self._thread = threading.Thread(target=self._keep, name="pannier-lease", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """The reader still reads."""
        self._heard = time.monotonic()

    def end(self) -> None:
        """Has it removed, without waiting for that."""
        self._ended.set()

    @shielded
    def release(self) -> None:
        """Removes it. A removal that fails is not told: the lease expires."""
        self._ended.set()
        # A forked child has the object, but not the thread: it is its parent's.
        if os.getpid() == self._pid:
            self._thread.join(_RELEASE_S)

    def _keep(self) -> None:
        while not self._ended.wait(self._renew_s):
            if self._idle_s is not None and time.monotonic() - self._heard > self._idle_s:
                _log.debug("%s/%s: its reader has not read for long", self._place.url, self.key)
                break
            try:
                self._place.write(self.key, self._content)
            except StorageError as error:
                _log.warning("a reader's lease was not renewed: %s", error)
        try:
            self._place.remove(self.key)
        except StorageError as error:
            _log.debug("a reader's lease is left to expire: %s", error)


@shielded
def take(place: StorageDir, attempt: str, *, reader: object, idle_s: float | None) -> Lease | None:
    """A lease of an attempt; None where none can be written.

    Args:
        place: the checkpoint.
        attempt: whose files are to be read.
        reader: the lease ends with this object, at the latest.
        idle_s: gives up without :meth:`Lease.touch` for so long; None: never.
    """
    try:
        lease = Lease(place, attempt, renew_s=RENEW_S, idle_s=idle_s)
    except StorageError as error:
        if place.url not in _unwritable:
            _unwritable.add(place.url)
            _log.debug("%s is read without a lease: %s", place.url, error)
        return None
    weakref.finalize(reader, lease.end).atexit = False
    return lease
