"""A sidecar's saves and its journal against a model: any order of calls, outcomes, kills, restarts."""

import asyncio
import os
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pannier.sidecar.replicas.held_replicas import HeldReplicas
from pannier.sidecar.restore.local_copies import LocalCopies
from pannier.sidecar.save_registry import SaveRegistry
from pannier.sidecar.save_state import Phase
from pannier.sidecar.spool.data_file import DataFile
from pannier.sidecar.spool.journal import NAME, encode
from pannier.sidecar.spool.journal_state import JournalState
from pannier.sidecar.spool.mapped_files import MappedFiles
from pannier.sidecar.spool.recovery import recover
from pannier.sidecar.spool.spool import Spool
from pannier.v1 import journal_pb2, records_pb2, save_pb2
from pannier.wire.chunk_codec import Checksums
from pannier.wire.errors import InDoubtError, InvalidRequestError, SaveAbortedError
from support.actors.ranks_by_hand import context
from support.processes.daemons import memory_directory

T = TypeVar("T")
SIZE = 100
FILE = "__i1-a1-g00000000-s1_0_0.distcp"
COMMITTED, ABORTED = save_pb2.SAVE_STATE_COMMITTED, save_pb2.SAVE_STATE_ABORTED
RANKS = st.sampled_from([0, 1])
KINDS = st.sampled_from([save_pb2.FAILURE_KIND_LOST, save_pb2.FAILURE_KIND_CLIENT])


@dataclass
class ModelRank:
    """What the model knows of a rank."""

    phase: Phase = Phase.STREAMING
    held: int = 0
    """Bytes that a restarted sidecar must still have."""
    receipt: records_pb2.Receipt | None = None


class NoUploads:
    """Uploads are done by rules."""

    def start(self, *arguments: object) -> None: ...

    def finish(self, *arguments: object) -> None: ...

    def clean_up(self, *arguments: object) -> None: ...


class Sidecar(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = memory_directory()
        self.loop = asyncio.new_event_loop()
        self.number = 1
        self.ranks: dict[int, ModelRank] = {}
        """Of the present save, by rank."""
        self.outcome: Any = None
        self.cleared = False
        self._start()

    def _start(self) -> None:
        self.spool = Spool(self.directory, None)
        self.journal = JournalState(self.directory)
        self.saves = SaveRegistry()
        self.saves.add_listener(self.journal.on_change)
        uploads: Any = NoUploads()
        mapped = MappedFiles(self.spool)
        copies = LocalCopies(mapped, self.journal, self.saves)
        parts = (self.saves, self.spool, mapped, self.journal, copies, uploads)
        replicas = HeldReplicas(*parts, "node-0")
        self.waiting = self._run(
            recover(self.journal, self.spool, self.saves, uploads, copies, mapped, replicas)
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def _kill(self) -> None:
        """All that the kernel does for a killed process, which has written its records."""
        self._run(self.journal.settle())
        self.journal._journal.close(remove=False)
        for file in self.spool._files:
            os.close(file.fd)
        os.close(self.spool._directory_fd)

    def teardown(self) -> None:
        self._kill()
        self.loop.close()
        shutil.rmtree(self.directory)

    def _context(self, rank: int) -> Any:
        return context(rank, f"/x/step-{self.number}", number=self.number)

    def _over(self, rank: int) -> bool:
        model = self.ranks.get(rank)
        return self.outcome is not None or (model is not None and model.phase is Phase.FAILED)

    def _some(self, phase: Phase) -> bool:
        """Whether a rank is there and may go on."""
        phases = [model.phase for model in self.ranks.values()]
        return self.outcome is None and phase in phases

    # What trainers do.

    @rule(rank=RANKS)
    def open(self, rank: int) -> None:
        try:
            part = self.saves.enter(self._context(rank))
            self.saves.check(part)
        except (SaveAbortedError, InDoubtError, InvalidRequestError):
            assert self._over(rank)
            return
        assert not self._over(rank)
        if rank in self.ranks:
            return
        spool_file = self.spool.take("job", SIZE)
        file = DataFile(FILE, SIZE, spool_file, label="it")
        self.saves.add_file(part, "i1-a1-g00000000-s1", file)
        self._run(self.journal.record_opened(part, file))
        self.ranks[rank] = ModelRank()

    def _receive(self, rank: int, count: int) -> Any:
        part = self.saves.find(self._context(rank))
        assert part is not None
        file = part.files[FILE]
        data = bytes([self.number]) * count
        os.pwrite(file.spool_file.fd, data, 0)
        file.restore(Checksums().followed_by(memoryview(data)))
        return part

    @precondition(lambda self: self._some(Phase.STREAMING))
    @rule(rank=RANKS, count=st.integers(1, SIZE - 1), noted=st.booleans())
    def send(self, rank: int, count: int, noted: bool) -> None:
        model = self.ranks.get(rank)
        if model is None or self._over(rank) or model.phase is not Phase.STREAMING:
            return
        if count <= model.held:
            return
        part = self._receive(rank, count)
        if noted:
            self._run(self.journal.record_held(part, part.files[FILE]))
            model.held = count

    @precondition(lambda self: self._some(Phase.STREAMING))
    @rule(rank=RANKS, recorded_only=st.booleans())
    def hand_over(self, rank: int, recorded_only: bool) -> None:
        model = self.ranks.get(rank)
        if model is None or self._over(rank) or model.phase is not Phase.STREAMING:
            return
        part = self._receive(rank, SIZE)
        sums = part.files[FILE].checksums
        block_bytes, column = sums.columns()
        files = [
            records_pb2.DataFile(
                name=FILE,
                size=SIZE,
                crc32c=sums.whole,
                block_bytes=block_bytes,
                block_crc32c=column,
            )
        ]
        model.receipt = records_pb2.Receipt(
            attempt="i1-a1-g00000000-s1", plan_id="p", rank=rank, files=files
        )
        self._run(self.journal.record_ingested(part, model.receipt))
        model.phase, model.held = Phase.INGESTED, SIZE
        if recorded_only:
            # It dies before it can say so.
            self._restart(b"")
        else:
            self.saves.hand_over(part, model.receipt)

    @rule(rank=RANKS, kind=KINDS)
    def fail(self, rank: int, kind: Any) -> None:
        model = self.ranks.get(rank)
        part = self.saves.find(self._context(rank))
        if part is None or model is None:
            return
        safe = model.phase is Phase.DURABLE or (
            kind == save_pb2.FAILURE_KIND_LOST and model.phase is Phase.INGESTED
        )
        assert self.saves.fail(part, kind, "boom") is not (self._over(rank) or safe)
        if not (self._over(rank) or safe):
            model.phase = Phase.FAILED

    # What becomes of it.

    @precondition(lambda self: self._some(Phase.INGESTED))
    @rule(rank=RANKS)
    def store(self, rank: int) -> None:
        model = self.ranks.get(rank)
        if model is None or self._over(rank) or model.phase is not Phase.INGESTED:
            return
        part = self.saves.find(self._context(rank))
        assert part is not None
        part.files[FILE].upload.restore_durable(SIZE)
        self._run(self.journal.record_durable(part, part.files[FILE]))
        self._run(self.journal.record_stored(part))
        self.saves.mark_durable(part)
        model.phase = Phase.DURABLE

    @precondition(lambda self: self.ranks)
    @rule(commit=st.booleans(), in_time=st.integers(0, 4))
    def decide(self, commit: bool, in_time: int) -> None:
        phases = {model.phase for model in self.ranks.values()}
        if phases != {Phase.DURABLE} if commit else in_time and Phase.FAILED not in phases:
            return
        status = save_pb2.SaveStatus(
            save=self._context(0).save, state=COMMITTED if commit else ABORTED
        )
        # A second outcome changes nothing.
        self.saves.apply_status(status)
        self.outcome = self.outcome or status.state

    @precondition(lambda self: self.outcome is not None)
    @rule()
    def clear_away(self) -> None:
        for rank in self.ranks:
            part = self.saves.find(self._context(rank))
            if part is not None and self.outcome == ABORTED:
                self._run(self.journal.forget(part))
        self.number += 1
        self.ranks, self.outcome = {}, None

    # Kills.

    @rule(torn=st.binary(max_size=30))
    def kill(self, torn: bytes) -> None:
        self._restart(torn)

    @rule(cut=st.integers(1, 20))
    def kill_while_it_writes(self, cut: int) -> None:
        record = encode([journal_pb2.JournalRecord(part=99)])
        self._restart(record[:-cut])

    def _restart(self, torn: bytes) -> None:
        self._kill()
        if torn:
            with (self.directory / NAME).open("ab") as file:
                file.write(torn)
        self._start()
        if self.outcome == COMMITTED:
            # Nothing is left to do.
            self.number += 1
            self.ranks, self.outcome = {}, None
        streaming = {
            rank
            for rank, model in self.ranks.items()
            if model.phase is Phase.STREAMING and self.outcome is None
        }
        assert {part.rank for part in self.waiting} == streaming
        for rank, model in self.ranks.items():
            part = self.saves.find(self._context(rank))
            assert part is not None, f"rank {rank} is forgotten"
            if self.outcome is None and model.phase is not Phase.FAILED:
                assert part.files[FILE].held == model.held

    @invariant()
    def is_as_the_model_says(self) -> None:
        for rank, model in self.ranks.items():
            part = self.saves.find(self._context(rank))
            assert part is not None
            if self.outcome is None:
                assert part.phase is model.phase, (rank, part.phase, model.phase)
                if model.phase in (Phase.INGESTED, Phase.DURABLE):
                    assert part.receipt == model.receipt
            said = part.save.outcome
            assert (said.state if said is not None else None) == self.outcome


TestSidecar = Sidecar.TestCase
TestSidecar.settings = settings(
    max_examples=20, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
