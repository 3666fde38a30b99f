"""Ranks of a job as clients without torch: real plans, data files of zeros.

Lighter than trainers; each step of a save is a separate call.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names, plan_codec
from pannier.wire.errors import UnavailableError
from support.actors.ranks_by_hand import extra_receipt, local_plan, receipt_of, tensor
from support.actors.scripted import TIMEOUT_S, Trainer, data_file
from support.actors.scripted_sidecar import wait_until
from support.processes.stretch import BOUND_S


class Hand(Trainer):
    """One rank's client, with a tensor of ``words`` floats."""

    def __init__(self, address: str, *, words: int = 4, **who: object) -> None:
        super().__init__(address, **who)  # type: ignore[arg-type]
        self.address = address
        self.client = f"{self.incarnation}-{self.rank}"
        self._plan = local_plan([tensor(f"w{self.rank}", words)])
        self.extra: dict[str, bytes] = {}
        """Small files that go with its saves."""

    def agree(
        self,
        context: sidecar_pb2.SaveContext,
        *,
        timeout_s: float = TIMEOUT_S,
        save_timeout_s: float = 60,
    ) -> plan_pb2.FinalPlan:
        """Returns when all ranks' plans are agreed."""
        request = sidecar_pb2.PlanRequest(
            context=context,
            plan=self._plan,
            digest=plan_codec.plan_digest(self._plan),
            timeout_s=timeout_s,
            save_timeout_s=save_timeout_s,
        )
        answer: sidecar_pb2.PlanResponse = self.call("Plan", request, timeout_s + BOUND_S)
        return answer.plan

    def claim(self, given: plan_pb2.FinalPlan, *, source: str = "") -> sidecar_pb2.CachedPlanClaim:
        """The claim of the part that an earlier save, to the checkpoint id ``source``, gave."""
        return sidecar_pb2.CachedPlanClaim(
            part=given.part,
            digest=plan_codec.plan_digest(self._plan),
            attempt=given.attempt if source else "",
            checkpoint_id=source,
            timeout_s=TIMEOUT_S,
        )

    def ingest(
        self,
        context: sidecar_pb2.SaveContext,
        plan: plan_pb2.FinalPlan,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
    ) -> None:
        """Streams all that is planned and hands it over, by a claim or a confirmed plan."""
        files = self.stream_all(context, plan, claim)
        extra = self.stream_extra(context, plan, claim)
        request = sidecar_pb2.HandOverRequest(
            context=context,
            attempt=plan.attempt,
            plan_id="" if claim is not None else plan.plan_id,
            claim=claim,
            files=[*files, *extra.files],
            extra_files=extra.extra_files,
        )
        request.varying.extend(receipt_of(plan, self.rank).varying)
        self.call("HandOver", request)

    def stream_all(
        self,
        context: sidecar_pb2.SaveContext,
        plan: plan_pb2.FinalPlan,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
    ) -> list[records_pb2.DataFile]:
        """Streams all that is planned."""
        return [
            self._send(context, plan, file, claim) for file in receipt_of(plan, self.rank).files
        ]

    def stream_extra(
        self,
        context: sidecar_pb2.SaveContext,
        plan: plan_pb2.FinalPlan,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
    ) -> records_pb2.Receipt:
        """Streams :attr:`extra`; a receipt of that alone."""
        receipt, data = extra_receipt(plan.attempt, self.rank, self.extra)
        for file in receipt.files:
            self._send(context, plan, file, claim, data)
        return receipt

    def _send(
        self,
        context: sidecar_pb2.SaveContext,
        plan: plan_pb2.FinalPlan,
        file: records_pb2.DataFile,
        claim: sidecar_pb2.CachedPlanClaim | None,
        data: bytes = b"",
    ) -> records_pb2.DataFile:
        header = sidecar_pb2.FileHeader(
            context=context, attempt=plan.attempt, name=file.name, size=file.size, claim=claim
        )
        data = data or bytes(file.size)
        with self.stream(header) as stream:
            held = stream.committed()
            for offset in range(held, len(data), 1 << 20):
                stream.send(data[offset : offset + (1 << 20)], offset)
            while held < len(data):
                held = stream.committed()
        return data_file(file.name, data)

    def fail(self, context: sidecar_pb2.SaveContext, message: str) -> None:
        """Reports that this rank failed."""
        failure = save_pb2.Failure(
            rank=self.rank, host=self.host, kind=save_pb2.FAILURE_KIND_CLIENT, message=message
        )
        self.call("Fail", sidecar_pb2.FailRequest(context=context, failure=failure))


def plan_for_save(given: plan_pb2.FinalPlan, number: int) -> plan_pb2.FinalPlan:
    """A rank's final plan with the file names of its group's save with this number."""
    final = plan_pb2.FinalPlan()
    final.CopyFrom(given)
    old = object_names.Attempt.parse(given.attempt)
    final.attempt = dataclasses.replace(old, number=number).name
    for file in final.files:
        name = file.name.removeprefix(object_names.data_prefix(old.name))
        file.name = object_names.data_prefix(final.attempt) + name
    return final


def _connects(hand: Hand) -> bool:
    """False: its sidecar was killed just now; the next one is waited for."""
    try:
        hand.connect()
    except UnavailableError:
        return False
    return True


class Party:
    """All ranks of one incarnation; a context manager that connects them, and then disconnects them.

    Args:
        sidecars: the address of each rank's sidecar; rank n runs on host ``node-<n>``.
        words: floats of the ranks' tensors.
    """

    def __init__(
        self, sidecars: Sequence[str], *, incarnation: str = "inc1", words: Sequence[int] = ()
    ) -> None:
        ranks = tuple(range(len(sidecars)))
        self.hands = [
            Hand(
                address,
                rank=rank,
                ranks=ranks,
                host=f"node-{rank}",
                incarnation=incarnation,
                words=words[rank] if words else 4,
            )
            for rank, address in enumerate(sidecars)
        ]

    def __enter__(self) -> "Party":
        for hand in self.hands:
            wait_until(lambda hand=hand: _connects(hand))  # type: ignore[misc]
        return self

    def __exit__(self, *details: object) -> None:
        for hand in self.hands:
            hand.die()

    def agree(
        self, checkpoint_id: str, number: int, **timeouts: float
    ) -> dict[int, plan_pb2.FinalPlan]:
        """Plans of all ranks."""
        with ThreadPoolExecutor(len(self.hands)) as threads:
            answers = {
                hand.rank: threads.submit(
                    hand.agree, hand.context(checkpoint_id, number), **timeouts
                )
                for hand in self.hands
            }
        return {rank: answer.result() for rank, answer in answers.items()}

    def ingest(
        self, checkpoint_id: str, number: int, agreed: Mapping[int, plan_pb2.FinalPlan]
    ) -> None:
        """All ranks whose plans are given hand their parts over."""
        for rank, plan in agreed.items():
            hand = self.hands[rank]
            hand.ingest(hand.context(checkpoint_id, number), plan)

    def save(self, checkpoint_id: str, number: int, **timeouts: float) -> None:
        """Returns when all ranks are ingested."""
        self.ingest(checkpoint_id, number, self.agree(checkpoint_id, number, **timeouts))
