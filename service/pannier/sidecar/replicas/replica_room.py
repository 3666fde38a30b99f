"""Room in the spool for the replica that is being opened, which makes way for this host's own ranks.

In: sizes of its files. Out: spool files for all of them, or none. One replica is opened at a time. On the
event loop.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from pannier.sidecar.spool.spool import Spool, SpoolFile
from pannier.storage.io_threads import reservation_threads
from pannier.wire.errors import BusyError


class ReplicaRoom:
    """See the module.

    Args:
        host: the name of this host.
    """

    def __init__(self, spool: Spool, host: str) -> None:
        self._spool = spool
        self._host = host
        self.opening = asyncio.Lock()
        """Held while a replica is opened: until its room is taken or free again."""
        self.contested = 0
        """Ranks of this host that wait for the room that is being taken."""

    async def take(self, job: str, sizes: Sequence[int]) -> list[SpoolFile]:
        """Spool files, all or none; nothing is evicted for them.

        Raises as :meth:`Spool.take` and :meth:`check`.
        """
        files: list[SpoolFile] = []
        try:
            for size in sizes:
                self.check()
                take = partial(self._spool.take, job, size)
                files.append(await reservation_threads.run(take, undo=self._spool.give))
        except BaseException:
            # They are free again before another replica, or a rank of this host, takes its files.
            give = partial(reservation_threads.run, self._spool.give, closing=True)
            await asyncio.gather(*map(give, files), return_exceptions=True)
            raise
        return files

    def check(self) -> None:
        """Raises BusyError while ranks of this host wait for the room."""
        if self.contested:
            raise BusyError(f"ranks of {self._host} need the spool's room: it takes no replica now")

    async def contest(self) -> bool:
        """The replica that is being opened gives its room back; False: there is none."""
        if not self.opening.locked():
            return False
        self.contested += 1
        try:
            async with self.opening:
                return True
        finally:
            self.contested -= 1
