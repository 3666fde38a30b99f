"""Files of the spool that are lent to trainers, who map them and stage into them.

In: sizes that a client asks for, and what becomes of its connection. Out: slabs that stay the
client's until it gives them back or is gone. A loan ends with the connection over which the
descriptors went (:mod:`pannier.sidecar.spool.fd_server`), which the kernel closes with its process. Each
descriptor carries a shared lock that ends with the last process, and the last mapping, that holds
it: only when nobody does is a slab anybody else's. Thread-safe.
"""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pannier.sidecar.save_state import RankSave
from pannier.sidecar.spool.spool import Slab, Spool
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import BusyError, InvalidRequestError
from pannier.wire.file_layout import STAMP_BYTES

_log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16
_FETCH_S: Final = 30.0
"""A loan whose descriptors nobody has fetched by then is over."""
_ENDING_S: Final = 10.0
"""How long a file may stay busy after its save's verdict: uploads are cut off in between."""

Owner = tuple[str, str, int]
"""Job, incarnation, rank."""


@dataclass(eq=False)
class _Loan:
    """What one call of Reserve lent."""

    owner: Owner
    client: str
    number: int
    slabs: dict[str, Slab]
    """By the name in messages."""
    token: bytes
    made_at: float
    connection: object | None = None
    """Over which the descriptors went; None: not yet."""
    busy: dict[str, RankSave] = field(default_factory=dict)
    """By name, to whom the content of those belongs that the sidecar hasn't let go of."""
    over: bool = False
    """The borrower is gone."""


class Lending:
    """The loans of one spool.

    Args:
        wanted: called with the clients that hold idle files, when others need the room.
    """

    def __init__(
        self, spool: Spool, wanted: Callable[[set[str]], None] = lambda clients: None
    ) -> None:
        self._spool = spool
        self._wanted = wanted
        self._life = secrets.token_hex(4)
        """Names of an earlier sidecar's loans are never taken for ours."""
        self._lock = threading.Lock()
        self._given = threading.Condition(self._lock)
        """Rung whenever a save has let go of a lent file."""
        self._count = 0
        self._loans: set[_Loan] = set()
        self._by_name: dict[str, tuple[_Loan, Slab]] = {}
        self._by_slab: dict[Slab, tuple[_Loan, str]] = {}
        self._held: list[Slab] = []
        """Wanted by nobody, but somebody may still write into them."""

    def reserve(
        self, owner: Owner, client: str, sizes: Sequence[int], spare: int = 0
    ) -> sidecar_pb2.ReserveResponse:
        """Lends files of at least these sizes, bytes, with any content.

        Args:
            client: id of the client object.
            spare: bytes of room that must be left.

        Raises:
            BusyError: the spool has no room now; who holds idle files was asked to give them back.
            PannierError: the spool can't be written.
        """
        slabs: list[Slab] = []
        try:
            for size in sizes:
                slabs.append(self._spool.take(owner[0], size + STAMP_BYTES, spare=spare))
        except BaseException as error:
            for slab in slabs:
                self.give(slab)
            if isinstance(error, BusyError):
                self.ask_for_room()
            raise
        with self._lock:
            self._count += 1
            names = [f"{self._life}-{self._count}-{index}" for index in range(len(slabs))]
            loan = _Loan(
                owner,
                client,
                self._count,
                dict(zip(names, slabs, strict=True)),
                secrets.token_bytes(TOKEN_BYTES),
                time.monotonic(),
            )
            self._loans.add(loan)
            for name, slab in loan.slabs.items():
                self._by_name[name] = (loan, slab)
                self._by_slab[slab] = (loan, name)
        return sidecar_pb2.ReserveResponse(
            files=[
                sidecar_pb2.LentFile(slab=name, capacity=slab.stageable)
                for name, slab in loan.slabs.items()
            ],
            token=loan.token,
        )

    def fetched(self, token: bytes, connection: object) -> list[int]:
        """Fresh descriptors of the loan with that token, each locked; the caller closes them.

        The loan lasts as long as ``connection`` does. Empty: there is no such loan to be fetched.
        """
        with self._lock:
            loan = next(
                (
                    each
                    for each in self._loans
                    if each.connection is None and secrets.compare_digest(each.token, token)
                ),
                None,
            )
            if loan is None:
                return []
            loan.connection = connection
        descriptors: list[int] = []
        try:
            for slab in loan.slabs.values():
                # Opened anew: a lock is the open file's, not the descriptor's.
                fd = os.open(f"/proc/self/fd/{slab.fd}", os.O_RDWR | os.O_CLOEXEC)
                descriptors.append(fd)
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return descriptors

    def gone(self, connection: object) -> None:
        """The borrower at the other end of ``connection`` has no more to do with its loans."""
        with self._lock:
            loans = [loan for loan in self._loans if loan.connection is connection]
        for loan in loans:
            self._end(loan)

    def release(self, owner: Owner, names: Sequence[str]) -> None:
        """A borrower has unmapped these; names that aren't its own are passed over."""
        free = []
        with self._lock:
            for name in names:
                loan, slab = self._by_name.get(name, (None, None))
                if loan is None or slab is None or loan.owner != owner:
                    continue
                del self._by_name[name]
                del loan.slabs[name]
                if not loan.slabs:
                    self._loans.discard(loan)
                # One that is busy is given back when its save has ended.
                del self._by_slab[slab]
                if name not in loan.busy:
                    free.append(slab)
        for slab in free:
            self.give(slab)

    def claim(self, rank: RankSave, name: str, size: int) -> Slab:
        """The slab that holds ``size`` bytes of a data file of ``rank``; the caller gives it back.

        Waits a moment for one whose save has ended, but isn't cleared away yet.

        Raises InvalidRequestError: it isn't lent to that rank now, is another data file, or is shorter.
        """
        owner = (rank.save.id.job, rank.save.id.incarnation, rank.rank)
        with self._lock:
            self._given.wait_for(lambda: not self._is_ending(name), _ENDING_S)
            loan, slab = self._by_name.get(name, (None, None))
            if loan is None or slab is None or loan.owner != owner:
                raise InvalidRequestError(
                    f"{rank.label}: {name!r} is no file of the spool that this sidecar has lent to "
                    "the rank since it was started"
                )
            if name in loan.busy:
                raise InvalidRequestError(
                    f"{rank.label}: the lent file {name} already holds a data file of a save that "
                    "hasn't ended"
                )
            if size > slab.stageable:
                raise InvalidRequestError(
                    f"{rank.label}: {size} bytes are said to be in the lent file {name}, which has "
                    f"{slab.stageable}"
                )
            loan.busy[name] = rank
        return slab

    def give(self, slab: Slab) -> None:
        """Takes a slab back whose content nobody needs or reads: its borrower's again, or free."""
        with self._lock:
            loan, name = self._by_slab.get(slab, (None, ""))
            if loan is not None and not loan.over:
                loan.busy.pop(name, None)
                self._given.notify_all()
                return
            if loan is not None:
                self._forget(loan, name)
            if _held(slab):
                self._held.append(slab)
                return
        self._spool.give(slab)

    def idle(self, owner: Owner) -> int:
        """Bytes that the rank has been lent and that hold nothing of a save."""
        with self._lock:
            return sum(
                slab.capacity
                for loan in self._loans
                if loan.owner == owner
                for name, slab in loan.slabs.items()
                if name not in loan.busy
            )

    def lent(self) -> tuple[int, int]:
        """Bytes that are lent, and bytes that a process still holds though its loan is over."""
        with self._lock:
            return (
                sum(slab.capacity for slab in self._by_slab),
                sum(slab.capacity for slab in self._held),
            )

    def unused(self) -> int:
        """Bytes that are lent and hold nothing of a save."""
        with self._lock:
            return sum(
                slab.capacity
                for loan in self._loans
                for name, slab in loan.slabs.items()
                if name not in loan.busy
            )

    def ask_for_room(self) -> None:
        """Asks the clients that hold idle files to give them back."""
        with self._lock:
            clients = {loan.client for loan in self._loans if loan.slabs.keys() - loan.busy.keys()}
        if clients:
            self._wanted(clients)

    def tick(self) -> None:
        """Looks after what was never fetched, and what has been let go. To be called now and then."""
        now = time.monotonic()
        with self._lock:
            late = [
                loan
                for loan in self._loans
                if loan.connection is None and now - loan.made_at > _FETCH_S
            ]
            held, self._held = self._held, []
        for loan in late:
            self._end(loan)
        for slab in held:
            self.give(slab)

    def _end(self, loan: _Loan) -> None:
        with self._lock:
            loan.over = True
            idle = [slab for name, slab in loan.slabs.items() if name not in loan.busy]
            if loan.busy:
                _log.info(
                    "the trainer of rank %d of job %s is gone; %d files of its saves go on",
                    *(loan.owner[2], loan.owner[0], len(loan.busy)),
                )
            if not loan.slabs:
                self._loans.discard(loan)
        for slab in idle:
            self.give(slab)

    def _is_ending(self, name: str) -> bool:
        """Whether a file's save is over, so that its next use is right but early."""
        loan, _ = self._by_name.get(name, (None, None))
        rank = loan.busy.get(name) if loan is not None else None
        return rank is not None and rank.save.verdict is not None

    def _forget(self, loan: _Loan, name: str) -> None:
        slab = loan.slabs.pop(name)
        loan.busy.pop(name, None)
        del self._by_name[name]
        del self._by_slab[slab]
        if not loan.slabs:
            self._loans.discard(loan)


def _held(slab: Slab) -> bool:
    """Whether a process holds a descriptor or a mapping that the slab was lent by."""
    try:
        fcntl.flock(slab.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(slab.fd, fcntl.LOCK_UN)
    return False
