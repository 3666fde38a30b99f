"""Ranks of a job as clients without torch: real plans, data files of zeros.

Lighter than trainers; each step of a save is a separate call.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pannier.v1 import plan_pb2, records_pb2, save_pb2, sidecar_pb2
from pannier.wire import object_names, plan_codec
from pannier.wire.errors import UnavailableError
from support.actors.ranks_by_hand import local_plan, receipt_of, tensor
from support.actors.scripted import TIMEOUT_S, Trainer, data_file
from support.processes.stretch import BOUND_S


class Hand(Trainer):
    """One rank's client, with a tensor of ``words`` floats."""

    def __init__(self, address: str, *, words: int = 4, **who: object) -> None:
        super().__init__(address, **who)  # type: ignore[arg-type]
        self.address = address
        self.client = f"{self.incarnation}-{self.rank}"
        self._plan = local_plan([tensor(f"w{self.rank}", words)])

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

    def reuse_plan(
        self,
        context: sidecar_pb2.SaveContext,
        given: plan_pb2.FinalPlan,
        *,
        timeout_s: float = TIMEOUT_S,
        save_timeout_s: float = 60,
    ) -> plan_pb2.FinalPlan:
        """Claims the plan of an earlier save; hands in the full plan when that is requested.

        Retries while the sidecar can't be reached.
        """
        final = plan_for_save(given, context.save.number)
        request = sidecar_pb2.PlanRequest(
            context=context,
            digest=plan_codec.plan_digest(self._plan),
            timeout_s=timeout_s,
            save_timeout_s=save_timeout_s,
            cached_plan_id=given.plan_id,
            attempt=final.attempt,
        )
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer: sidecar_pb2.PlanResponse = self.call("Plan", request, timeout_s + BOUND_S)
                break
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        if answer.full_plan_requested:
            return self.agree(context, timeout_s=timeout_s, save_timeout_s=save_timeout_s)
        assert answer.plan == plan_pb2.FinalPlan(plan_id=answer.plan.plan_id, attempt=final.attempt)
        final.plan_id = answer.plan.plan_id
        return final

    def ingest(self, context: sidecar_pb2.SaveContext, plan: plan_pb2.FinalPlan) -> None:
        """Streams all that is planned and hands it over."""
        files = self.stream_all(context, plan)
        request = sidecar_pb2.HandOverRequest(
            context=context, attempt=plan.attempt, plan_id=plan.plan_id, files=files
        )
        request.varying.extend(receipt_of(plan, self.rank).varying)
        self.call("HandOver", request)

    def stream_all(
        self, context: sidecar_pb2.SaveContext, plan: plan_pb2.FinalPlan
    ) -> list[records_pb2.DataFile]:
        """Streams all that is planned."""
        return [self._send(context, plan, file) for file in receipt_of(plan, self.rank).files]

    def _send(
        self,
        context: sidecar_pb2.SaveContext,
        plan: plan_pb2.FinalPlan,
        file: records_pb2.DataFile,
    ) -> records_pb2.DataFile:
        header = sidecar_pb2.FileHeader(
            context=context, attempt=plan.attempt, name=file.name, size=file.size
        )
        data = bytes(file.size)
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
            try:
                hand.connect()
            except UnavailableError:
                # The sidecar was killed just now: wait for the next one.
                hand.connect()
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

    def reuse_plan(
        self, checkpoint_id: str, number: int, given: Mapping[int, plan_pb2.FinalPlan]
    ) -> dict[int, plan_pb2.FinalPlan]:
        """All ranks claim their plans of an earlier save."""
        with ThreadPoolExecutor(len(self.hands)) as threads:
            answers = {
                hand.rank: threads.submit(
                    hand.reuse_plan, hand.context(checkpoint_id, number), given[hand.rank]
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
