"""A played trainer's side of the mapped hand-over: leases of spool files, and their hand-over.

It writes through the descriptor and not through a mapping, so that a truncated file can't kill the test.
"""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire.errors import BusyError, InvalidRequestError, UnavailableError
from pannier.wire.file_layout import STAMP_BYTES
from support.actors.hand import Hand
from support.actors.ranks_by_hand import receipt_of
from support.actors.scripted import PLAN_ID, TIMEOUT_S, Trainer, attempt_of

PATIENCE_S = 3.0
"""How long the sidecar may take to notice that a lease holder has disconnected."""


@dataclass
class LeasedFile:
    """One leased file."""

    spool_file: str
    capacity: int
    fd: int

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino


class LeaseHolder:
    """Leases files for a :class:`Trainer`; a context manager, at whose end all leases are over."""

    def __init__(self, trainer: Trainer, sidecar: str) -> None:
        self.trainer = trainer
        self._path = sidecar.removeprefix("unix://") + ".fd"
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(TIMEOUT_S)
        self.leased: list[LeasedFile] = []

    def __enter__(self) -> "LeaseHolder":
        self.connection.connect(self._path)
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """The connection and all descriptors go, as when the process dies."""
        self.connection.close()
        for each in self.leased:
            os.close(each.fd)
        self.leased.clear()

    def reserve(self, *sizes: int) -> sidecar_pb2.ReserveResponse:
        who = self.trainer
        answer: sidecar_pb2.ReserveResponse = who.call(
            "Reserve",
            sidecar_pb2.ReserveRequest(
                job=who.job,
                incarnation=who.incarnation,
                rank=who.rank,
                client=who.client,
                sizes=sizes,
            ),
        )
        return answer

    def fetch(self, token: bytes, count: int) -> list[int]:
        """Descriptors of a lease; the caller closes them. Empty: the sidecar has none for that token.

        Raises EOFError: it has closed the connection.
        """
        self.connection.sendall(token)
        found: list[int] = []
        while len(found) < count:
            count_byte, fds, _, _ = socket.recv_fds(self.connection, 1, 64)
            if not count_byte:
                raise EOFError
            if count_byte == b"\0":
                break
            found += fds
        return found

    def lease(self, *sizes: int) -> list[LeasedFile]:
        """Files of at least these sizes, bytes; waits a moment for files that others have returned."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self.reserve(*sizes)
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        fds = self.fetch(answer.token, len(answer.files))
        new = [
            LeasedFile(file.spool_file, file.capacity, fd)
            for file, fd in zip(answer.files, fds, strict=True)
        ]
        self.leased += new
        return new

    def release(self, *leased: LeasedFile) -> None:
        who = self.trainer
        spool_files = [each.spool_file for each in leased]
        for each in leased:
            os.close(each.fd)
            self.leased.remove(each)
        request = sidecar_pb2.ReleaseRequest(
            job=who.job,
            incarnation=who.incarnation,
            rank=who.rank,
            client=who.client,
            spool_files=spool_files,
        )
        who.call("Release", request)


def staged(leased: LeasedFile, name: str, data: bytes) -> "Mapped":
    """Writes ``data`` there, behind a new stamp."""
    stamp = os.urandom(STAMP_BYTES)
    assert os.pwrite(leased.fd, stamp, leased.capacity) == STAMP_BYTES
    assert os.pwrite(leased.fd, data, 0) == len(data)
    return Mapped(name, len(data), leased.spool_file, stamp)


@dataclass
class Mapped:
    """One data file in a hand-over."""

    name: str
    size: int
    spool_file: str
    stamp: bytes = bytes(STAMP_BYTES)
    """That of a fresh file."""


def hand_over(
    trainer: Trainer,
    context: sidecar_pb2.SaveContext,
    files: Sequence[Mapped],
    *,
    attempt: str | None = None,
    plan_id: str = PLAN_ID,
    claim: sidecar_pb2.CachedPlanClaim | None = None,
    varying: Sequence[records_pb2.VaryingItem] = (),
    extra: records_pb2.Receipt | None = None,
) -> None:
    """All of the rank's files, which lie in the spool, but for ``extra``."""
    request = sidecar_pb2.HandOverRequest(
        context=context,
        attempt=attempt or attempt_of(context.save),
        plan_id=plan_id,
        claim=claim,
        files=[records_pb2.DataFile(name=each.name, size=each.size) for each in files],
        varying=varying,
        mapped=[
            sidecar_pb2.MappedFile(name=each.name, spool_file=each.spool_file, stamp=each.stamp)
            for each in files
        ],
    )
    if extra is not None:
        request.files.extend(extra.files)
        request.extra_files.extend(extra.extra_files)
    trainer.call("HandOver", request)


def ingest_mapped(
    hand: Hand,
    context: sidecar_pb2.SaveContext,
    plan: plan_pb2.FinalPlan,
    claim: sidecar_pb2.CachedPlanClaim | None = None,
) -> bool:
    """As :meth:`Hand.ingest`, but what is planned lies in the spool.

    False: it had to be streamed.

    The process disconnects right afterwards, as far as the sidecar knows of its leases.

    Raises UnavailableError: the sidecar went away.
    """
    receipt = receipt_of(plan, hand.rank)
    try:
        with LeaseHolder(hand, hand.address) as holder:
            leased = holder.lease(*[file.size for file in receipt.files])
            files = [
                staged(each, file.name, bytes(file.size))
                for each, file in zip(leased, receipt.files, strict=True)
            ]
            hand_over(
                hand,
                context,
                files,
                attempt=plan.attempt,
                plan_id="" if claim is not None else plan.plan_id,
                claim=claim,
                varying=receipt.varying,
                extra=hand.stream_extra(context, plan, claim),
            )
    except (OSError, EOFError) as error:
        raise UnavailableError(f"no descriptors: {error}") from error
    except InvalidRequestError:
        # A restarted sidecar doesn't know the lease, or not all of it.
        hand.ingest(context, plan, claim)
        return False
    return True


def spool_files(directory: Path) -> dict[int, Path]:
    """The files of a spool by inode."""
    return {path.stat().st_ino: path for path in directory.glob("*.data")}


def mapped_files(directory: Path) -> dict[Path, tuple[int, int]]:
    """What this very process has mapped of a spool: address and length by path."""
    found: dict[Path, tuple[int, int]] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, *_, path = line.split(maxsplit=5)
        if not path.startswith(f"{directory}/"):
            continue
        start, end = (int(number, 16) for number in area.split("-"))
        known = found.get(Path(path), (start, 0))
        found[Path(path)] = (min(start, known[0]), known[1] + end - start)
    return found
