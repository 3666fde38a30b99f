"""Saves in turn, by ranks without trainers, while daemons are killed: see test_crash_points.

In: two sidecars' addresses and a root. Out: the outcome of each save that began, as storage shows it.
Every third save is failed by one of its ranks; every second of the others goes to one id, which is
overwritten, and is followed by one that claims its plan, if asked for. Runs in a separate thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf import json_format

from pannier.v1 import plan_pb2, records_pb2, sidecar_pb2
from pannier.wire import object_names
from pannier.wire.errors import (
    DeadlineError,
    InvalidRequestError,
    SaveAbortedError,
    UnavailableError,
)
from support.actors.hand import Hand, Party, plan_for_save
from support.actors.lease_holder import ingest_mapped
from support.processes.stretch import stretched

_SAVE_S = 90.0
"""Deadline of one save: several daemons may be killed meanwhile, and take a while to start."""
_LARGE = (5 << 20) // 4 * 4
"""Floats: more than the sidecar takes before it journals how much it holds."""

T = TypeVar("T")


@dataclass
class Made:
    """One save."""

    number: int
    id: str
    attempt: str = ""
    """Empty: its plan was never agreed."""
    handed_over: bool = False
    failed: bool = False
    """One of its ranks reported a failure."""
    mapped: bool = False
    """A rank's data went into the spool's own files."""
    outcome: "records_pb2.Outcome" = records_pb2.OUTCOME_UNSPECIFIED


class Saver:
    """Saves as long as its context lasts; :meth:`check` raises what went wrong."""

    def __init__(self, sidecars: Sequence[str], root: Path) -> None:
        self._sidecars = sidecars
        self._root = root
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.large = False
        """Whether the first rank's data is more than a few bytes."""
        self.mapped = False
        """Whether data goes into the spool's own files; what fails on purpose is streamed."""
        self.claims = False
        """Whether saves are made by the plans of earlier ones."""
        self.made: list[Made] = []

    def __enter__(self) -> "Saver":
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join(stretched(2 * _SAVE_S))
        assert not self._thread.is_alive(), f"save {self.made[-1]} hangs"

    def check(self) -> None:
        """Raises what ended it."""
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.save()
        except BaseException as problem:  # noqa: BLE001 - raised by check()
            self._problem = problem

    def save(self) -> Made:
        """One more, to its end."""
        number = len(self.made) + 1
        made = Made(number, str(self._root / ("again" if number % 3 == 1 else f"step-{number}")))
        made.failed = number % 3 == 0
        self.made.append(made)
        words = [_LARGE if self.large else 4, 4]
        with Party(self._sidecars, incarnation=f"inc{number}", words=words) as party:
            # One name in all saves, one that no other has.
            extra = {"meta.json": b"%d" % number, f"only/{number}.txt": b"of %d" % number}
            party.hands[0].extra = extra
            agreed = self._save(made, party)
            if self.claims and made.outcome == records_pb2.OUTCOME_COMMIT and number % 3 == 1:
                self._save_again(made, party, agreed)
        return made

    def _save_again(self, first: Made, party: Party, agreed: list[plan_pb2.FinalPlan]) -> None:
        """One more of the same incarnation, by the first one's plan."""
        made = Made(first.number, str(self._root / f"step-{first.number}"))
        self.made.append(made)
        deadline = time.monotonic() + stretched(_SAVE_S)
        made.handed_over = True
        for hand, given in zip(party.hands, agreed, strict=True):
            plan, claim = plan_for_save(given, 2), hand.claim(given, source=first.id)
            made.attempt = plan.attempt
            assert self._hand_over(made, hand, plan, deadline, claim)
        made.outcome = self._await_decision(made, deadline)
        assert made.outcome == records_pb2.OUTCOME_COMMIT, f"{made} was aborted"

    def _save(self, made: Made, party: Party) -> list[plan_pb2.FinalPlan]:
        """The ranks' plans."""
        deadline = time.monotonic() + stretched(_SAVE_S)
        plans = _at_once([_agreeing(deadline, hand, made.id) for hand in party.hands])
        agreed = [plan for plan in plans if plan is not None]
        if agreed:
            made.attempt = agreed[0].attempt
        if len(agreed) < len(party.hands):
            # It was aborted while it was planned; if a manifest was written, there is a decision.
            if agreed:
                made.outcome = self._await_decision(made, deadline)
                assert made.outcome == records_pb2.OUTCOME_ABORT
            return agreed
        parts = list(zip(party.hands, agreed, strict=True))
        # The failing rank comes last, so that there are objects to remove.
        ingested = [
            self._hand_over(made, hand, plan, deadline)
            for hand, plan in (reversed(parts) if made.failed else parts)
        ]
        made.handed_over = all(ingested)
        made.outcome = self._await_decision(made, deadline)
        wanted = records_pb2.OUTCOME_COMMIT if made.handed_over else records_pb2.OUTCOME_ABORT
        assert made.outcome == wanted, f"{made} ended otherwise than it should"
        return agreed

    def _hand_over(
        self,
        made: Made,
        hand: Hand,
        plan: plan_pb2.FinalPlan,
        deadline: float,
        claim: sidecar_pb2.CachedPlanClaim | None = None,
    ) -> bool:
        """Whether the rank is handed over."""
        context = hand.context(made.id, object_names.Attempt.parse(plan.attempt).number)

        def fail() -> None:
            hand.stream_all(context, plan)
            hand.fail(context, "boom")

        def ingest() -> bool:
            if self.mapped:
                made.mapped |= ingest_mapped(hand, context, plan, claim)
            else:
                hand.ingest(context, plan, claim)
            return True

        if made.failed and hand.rank == 0:
            _retry(deadline, hand, fail)
            return False
        try:
            return _retry(deadline, hand, ingest) is not None
        except InvalidRequestError as error:
            if "is committed" not in str(error):
                raise
            return True

    def _await_decision(self, made: Made, deadline: float) -> "records_pb2.Outcome":
        path = Path(made.id, object_names.decision(made.attempt))
        while not path.exists():
            assert time.monotonic() < deadline, f"{made} is not decided"
            time.sleep(0.02)
        return json_format.Parse(path.read_bytes(), records_pb2.Decision()).outcome


def _agreeing(
    deadline: float, hand: Hand, checkpoint_id: str
) -> Callable[[], plan_pb2.FinalPlan | None]:
    limits = {"timeout_s": stretched(_SAVE_S / 2), "save_timeout_s": stretched(_SAVE_S)}
    context = hand.context(checkpoint_id)
    return lambda: _retry(deadline, hand, lambda: hand.agree(context, **limits))


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def _retry(deadline: float, hand: Hand, call: Callable[[], T]) -> T | None:
    """As a client does: retries when its sidecar has died; None when the save has ended."""
    while True:
        try:
            return call()
        except SaveAbortedError:
            return None
        except (UnavailableError, DeadlineError, grpc.RpcError):
            if time.monotonic() > deadline:
                raise
        hand.disconnect()
        try:
            hand.connect()
        except UnavailableError:
            time.sleep(0.05)
