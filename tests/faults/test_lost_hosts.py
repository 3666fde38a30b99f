"""Hosts and trainers that die for good, or wake up late: what was handed over is committed.

Trainers are played here: that their connections end is all that a sidecar sees of SIGKILL.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pannier.v1 import save_pb2
from support.actors.hand import Party
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemon, Daemons, await_serving
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import ABORTED, COMMITTED, all_in, await_save
from support.storage.bucket import check_whole, decisions_alone, hold_up, listed
from support.storage.gcs_server import GcsServer

INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)
LARGE = 2 << 20
"""Floats of a rank whose data file is uploaded in pieces."""


@pytest.fixture(scope="module")
def coordinator(server: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("coordinator")
    with Daemons(directory, sidecars=0, environment=server.env) as made:
        yield made.coordinator


class Hosts:
    """Two hosts with a sidecar each, at the same coordinator."""

    def __init__(self, sidecars: list[Daemon], coordinator: Daemon, server: GcsServer) -> None:
        self.sidecars = sidecars
        self.coordinator = coordinator
        self.server = server

    def start(self) -> None:
        for sidecar in self.sidecars:
            sidecar.start(ready=False)
        for sidecar in self.sidecars:
            await_serving(sidecar.address, process=sidecar.process)

    def party(self, **settings: Any) -> Party:
        """One rank on each host."""
        return Party([sidecar.address for sidecar in self.sidecars], **settings)

    def await_receipt(self, place: str, rank: int) -> None:
        """Returns when the rank's receipt is in storage."""
        text = f"/receipts/{rank}"
        wait_until(lambda: any(text in name for name in listed(self.server, place)))

    def ended(self, checkpoint_id: str, timeout: float = BOUND_S) -> save_pb2.SaveStatus:
        """How the coordinator says that the save has ended."""
        return await_save(
            self.coordinator.address,
            checkpoint_id,
            lambda s: s.state in (COMMITTED, ABORTED),
            timeout=timeout,
        )


@pytest.fixture
def hosts(server: GcsServer, coordinator: Daemon, tmp_path: Path) -> Iterator[Hosts]:
    with Daemons(tmp_path, sidecars=2, environment=server.env, start=False) as daemons:
        for sidecar in daemons.sidecars:
            place = sidecar.arguments.index("--coordinator") + 1
            sidecar.arguments[place] = coordinator.address
        yield Hosts(daemons.sidecars, coordinator, server)
    server.clear()


@pytest.mark.slow
def test_a_host_that_had_uploaded_everything_and_died_for_good_does_not_block_the_commit(
    hosts: Hosts,
) -> None:
    target = "gs://bucket/uploaded/step-1"
    # Its receipt is in storage, but it sent no report.
    hosts.sidecars[1].environment["PANNIER_CRASH_AT"] = "sidecar.stored.before"
    hosts.start()
    with hosts.party(incarnation="uploaded") as ranks:
        agreed = ranks.agree(target, 1)
        ranks.hands[1].ingest(ranks.hands[1].context(target), agreed[1])
        hosts.sidecars[1].process.wait(BOUND_S)
        hosts.await_receipt("uploaded/step-1", 1)
        ranks.hands[1].die()
        ranks.hands[0].ingest(ranks.hands[0].context(target), agreed[0])
        assert hosts.ended(target).state == COMMITTED
    check_whole(hosts.server, target)


@pytest.mark.slow
def test_a_new_incarnation_of_another_size_ends_the_older_ones_saves(hosts: Hosts) -> None:
    ingested, half, fresh = (f"gs://bucket/elastic/step-{step}" for step in (1, 2, 3))
    hosts.start()
    hold_up(hosts.server)
    with hosts.party(incarnation="older", words=[LARGE, 4]) as ranks:
        ranks.save(ingested, 1)
        hosts.await_receipt("elastic/step-1", 1)
        ranks.ingest(half, 2, {0: ranks.agree(half, 2)[0]})
        # Rank 1's host dies for good, and the job is started again without it.
        hosts.sidecars[1].kill()
    with Party([hosts.sidecars[0].address], incarnation="newer") as alone:
        alone.save(fresh, 1)
        assert hosts.ended(fresh).state == COMMITTED
    status = hosts.ended(half)
    assert status.state == ABORTED
    assert [(failure.rank, failure.host) for failure in status.failures] == [(1, "node-1")]
    assert "restarted (incarnation number 2)" in status.failures[0].message
    wait_until(lambda: decisions_alone(hosts.server, "elastic/step-2"))
    hosts.server.clear()
    assert hosts.ended(ingested).state == COMMITTED
    for target in (ingested, fresh):
        check_whole(hosts.server, target)


@pytest.mark.slow
def test_a_stopped_sidecar_that_wakes_up_after_the_abort_leaves_nothing(hosts: Hosts) -> None:
    place = "late/step-1"
    target = f"gs://bucket/{place}"
    hosts.start()
    with hosts.party(incarnation="late") as ranks:
        agreed = ranks.agree(target, 1)
        # The server has the request of rank 1's data file, and takes its time.
        hosts.server.fault(kind="delay", method="POST", path="uploadType", seconds=BOUND_S)
        ranks.hands[1].ingest(ranks.hands[1].context(target), agreed[1])
        wait_until(lambda: hosts.server.faults()[0]["hits"] == 1)
        hosts.sidecars[1].pause()
        ranks.hands[0].fail(ranks.hands[0].context(target), "boom")
        assert hosts.ended(target).state == ABORTED
        wait_until(lambda: decisions_alone(hosts.server, place))
        # What was on its way arrives after everything was removed.
        before = len(hosts.server.requests())
        hosts.server.release()
        # Or it has been removed again.
        wait_until(
            lambda: (
                any(name.endswith(".distcp") for name in listed(hosts.server, place))
                or any(
                    method == "DELETE" and ".distcp" in path
                    for method, path, _ in hosts.server.requests()[before:]
                )
            )
        )
        hosts.sidecars[1].resume()
        wait_until(lambda: decisions_alone(hosts.server, place))


@pytest.mark.slow
def test_trainers_that_die_before_they_are_ingested_end_the_save_at_once_and_by_name(
    hosts: Hosts,
) -> None:
    target = "gs://bucket/dead/step-1"
    hosts.start()
    with hosts.party(incarnation="dead") as ranks:
        ranks.ingest(target, 1, {0: ranks.agree(target, 1)[0]})
        ranks.hands[1].die()
        status = hosts.ended(target)
    assert status.state == ABORTED
    # Not by the deadline, which has a failure of another kind.
    assert status.failures[0].kind == save_pb2.FAILURE_KIND_LOST
    assert [(failure.rank, failure.host) for failure in status.failures] == [(1, "node-1")]
    wait_until(lambda: decisions_alone(hosts.server, "dead/step-1"))

    target = "gs://bucket/dead/step-2"
    with hosts.party(incarnation="alldead") as ranks:
        ranks.agree(target, 1)
    status = hosts.ended(target)
    assert status.state == ABORTED
    assert {failure.rank for failure in status.failures} <= {0, 1}
    wait_until(lambda: decisions_alone(hosts.server, "dead/step-2"))


@pytest.mark.slow
def test_one_trainer_that_dies_when_it_is_ingested_is_not_missed(hosts: Hosts) -> None:
    target = "gs://bucket/ingested/step-1"
    hosts.start()
    with hosts.party(incarnation="ingested") as ranks:
        agreed = ranks.agree(target, 1)
        ranks.hands[1].ingest(ranks.hands[1].context(target), agreed[1])
        ranks.hands[1].die()
        time.sleep(1)
        ranks.hands[0].ingest(ranks.hands[0].context(target), agreed[0])
        assert hosts.ended(target).state == COMMITTED
    check_whole(hosts.server, target)


@pytest.mark.slow
def test_a_host_that_is_lost_before_it_is_durable_is_named_at_the_deadline(hosts: Hosts) -> None:
    target = "gs://bucket/losthost/step-1"
    hosts.start()
    hold_up(hosts.server)
    with hosts.party(incarnation="losthost", words=[4, LARGE]) as ranks:
        ranks.save(target, 1, save_timeout_s=stretched(20))
        await_save(hosts.coordinator.address, target, INGESTED)
        hosts.sidecars[1].kill()
        ranks.hands[1].die()
        # Visible before it is given up.
        unresponsive = await_save(
            hosts.coordinator.address,
            target,
            lambda s: (
                re.search(
                    r"rank 1 \(host node-1, whose sidecar does not respond, last seen ([5-9]|\d\d) s",
                    s.waiting_on.text,
                )
                is not None
            ),
        )
        assert unresponsive.state not in (COMMITTED, ABORTED)
        status = hosts.ended(target)
    assert status.state == ABORTED
    (failure,) = status.failures
    assert (failure.rank, failure.host) == (1, "node-1")
    assert failure.kind == save_pb2.FAILURE_KIND_DEADLINE
    wait_until(lambda: decisions_alone(hosts.server, "losthost/step-1"))
