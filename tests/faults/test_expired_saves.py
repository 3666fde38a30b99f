"""Saves whose deadline passes before their hand-over arrives: no checkpoint holds the next save's content."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pannier.client import InDoubtError, PannierError
from pannier.client.engine import engine
from pannier.client.transport.sidecar_client import SidecarClient
from pannier.common import timeouts
from pannier.v1 import sidecar_pb2
from pannier.wire.errors import UnavailableError
from support.actors.lease_holder import mapped_files
from support.actors.mapped_clients import check, saving, state
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import ABORTED, COMMITTED, await_save

IN_TIME_S = stretched(12.0)


class LateHandOver:
    """One save's hand-over that this process gives up, and that arrives when the test says so.

    As with a sidecar that is stopped: it gets no report of the failure either. The hand-overs of
    later saves wait until it has arrived.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint_id = ""
        self.made = threading.Event()
        self.give_up = threading.Event()
        self.arrived = threading.Event()
        self._send = SidecarClient.hand_over
        self._request: tuple[SidecarClient, sidecar_pb2.HandOverRequest] | None = None
        fail = SidecarClient.fail

        async def hand_over(
            session: SidecarClient,
            request: sidecar_pb2.HandOverRequest,
            timeout: float,
            on_try: Any,
        ) -> None:
            if request.context.checkpoint_id == self.checkpoint_id:
                self._request = session, request
                self.made.set()
                await engine().in_thread(self.give_up.wait)
                raise UnavailableError("the sidecar is stopped")
            if self.made.is_set():
                await engine().in_thread(self.arrived.wait)
            await self._send(session, request, timeout)

        async def report(session: SidecarClient, request: sidecar_pb2.FailRequest) -> None:
            if request.context.checkpoint_id == self.checkpoint_id:
                raise UnavailableError("the sidecar is stopped")
            await fail(session, request)

        monkeypatch.setattr(SidecarClient, "hand_over", hand_over)
        monkeypatch.setattr(SidecarClient, "fail", report)

    def arrive(self) -> None:
        """The sidecar receives it."""
        assert self._request is not None
        session, request = self._request
        try:
            engine().call(lambda: self._send(session, request, BOUND_S))
        finally:
            self.arrived.set()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateHandOver]:
    monkeypatch.delenv("PANNIER_TRANSPORT", raising=False)
    monkeypatch.setattr(timeouts, "DECISION_S", 0.0)
    made = LateHandOver(monkeypatch)
    yield made
    made.give_up.set()
    made.arrived.set()


def test_a_late_hand_over_does_not_commit_what_the_next_save_has_staged(
    daemons: Daemons, tmp_path: Path, late: LateHandOver
) -> None:
    targets = [str(tmp_path / "root" / str(step)) for step in range(4)]
    with saving(daemons, max_in_flight=1) as client:
        client.save(state(1), checkpoint_id=targets[1])
        assert mapped_files(daemons.spool / "0")
        late.checkpoint_id = targets[2]
        expired = client.async_save(state(2), checkpoint_id=targets[2], timeout=IN_TIME_S)
        assert late.made.wait(BOUND_S)
        # Else it would abort the save in time.
        daemons.coordinator.kill()
        with pytest.raises(InDoubtError, match="may still be committed"):
            expired.result(BOUND_S)
        late.give_up.set()
        daemons.coordinator.start()
        following = client.async_save(state(3), checkpoint_id=targets[3])
        refused = ""
        try:
            late.arrive()
        except PannierError as error:
            refused = str(error)
        following.result(BOUND_S)
        if not refused:
            ended = await_save(
                daemons.coordinator_address, targets[2], lambda s: s.state in (ABORTED, COMMITTED)
            )
            if ended.state == COMMITTED:
                check(targets[2], 2)
    check(targets[3], 3)
    # This process has given its files up; the new coordinator may have aborted it before.
    assert not refused or re.search(
        "is no spool file that the rank has leased|was aborted", refused
    )
