"""Coordinators that are killed, stopped, cut off or doubled: what is in storage settles it."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pannier.v1 import coordinator_pb2_grpc, save_pb2, sidecar_pb2
from support.actors.hand import Party
from support.actors.scripted_sidecar import wait_until
from support.network.relay import Relay
from support.processes.cli import pannier
from support.processes.daemons import Daemon, Daemons, await_serving
from support.processes.stretch import BOUND_S, stretched
from support.processes.watching import ABORTED, COMMITTED, all_in, await_save
from support.storage.bucket import (
    check_whole,
    decisions_alone,
    generations,
    hold_up,
    listed,
    remove,
)
from support.storage.gcs_server import GcsServer

DURABLE = all_in(save_pb2.RANK_PHASE_DURABLE)
LARGE = 2 << 20
"""Floats of a rank whose data file is uploaded in pieces."""
LIVES = ["manifest.after", "decision.after"]
"""Where one coordinator after the other dies; one place at a time: :mod:`test_crash_points`."""


@pytest.fixture
def daemons(server: GcsServer, tmp_path: Path) -> Iterator[Daemons]:
    """Two hosts, of which nothing is started yet."""
    with Daemons(tmp_path, sidecars=2, environment=server.env, start=False) as made:
        yield made
    server.clear()


def party(daemons: Daemons, **settings: Any) -> Party:
    """One rank on each host."""
    return Party([sidecar.address for sidecar in daemons.sidecars], **settings)


@pytest.mark.slow
def test_a_save_is_committed_though_one_coordinator_after_the_other_is_killed(
    daemons: Daemons, server: GcsServer
) -> None:
    target = "gs://bucket/lives/step-1"
    coordinator = daemons.coordinator

    def live(point: str) -> None:
        coordinator.environment["PANNIER_CRASH_AT"] = f"coordinator.{point}" if point else ""
        coordinator.start()

    for sidecar in daemons.sidecars:
        sidecar.start(ready=False)
    live(LIVES[0])
    with party(daemons) as ranks, ThreadPoolExecutor(1) as threads:
        agreed = threads.submit(ranks.agree, target, 1)
        for number, point in enumerate(LIVES, 1):
            assert coordinator.process.wait(BOUND_S) == -signal.SIGKILL, point
            live(LIVES[number] if number < len(LIVES) else "")
            if number == 1:
                # The ranks that got no answer get one, by the plan that stands.
                ranks.ingest(target, 1, agreed.result(BOUND_S))
        assert await_save(coordinator.address, target, lambda s: s.state == COMMITTED)
    check_whole(server, target)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["coordinator", "all daemons"])
def test_a_save_outlives_its_plan_and_is_committed_by_daemons_that_were_killed_since(
    killed: str, daemons: Daemons, server: GcsServer
) -> None:
    place = f"after-plan-{killed.replace(' ', '-')}/step-1"
    target = f"gs://bucket/{place}"
    all_daemons = [daemons.coordinator, *daemons.sidecars]
    for daemon in all_daemons:
        daemon.start(ready=False)
    for daemon in all_daemons:
        await_serving(daemon.address, process=daemon.process)
    hold_up(server)
    plan_s = stretched(10)
    began = time.monotonic()
    with party(daemons, words=[LARGE, 4]) as ranks:
        ranks.save(target, 1, timeout_s=plan_s, save_timeout_s=stretched(60))
    again = all_daemons if killed == "all daemons" else [daemons.coordinator]
    for daemon in again:
        daemon.kill()
    wait_until(lambda: time.monotonic() > began + plan_s)
    for daemon in again:
        daemon.start()
    # Nothing but the uploads is waited for, by a coordinator that came after the plan's deadline.
    await_save(
        daemons.coordinator.address, target, lambda s: s.state == save_pb2.SAVE_STATE_UPLOADING
    )
    assert f"{place}/.metadata" not in listed(server, place)
    server.clear()
    assert ended(daemons.coordinator, target).state == COMMITTED
    check_whole(server, target)


@pytest.mark.slow
def test_recover_ends_what_daemons_that_are_gone_for_good_have_left(
    daemons: Daemons, server: GcsServer
) -> None:
    half, whole = "gs://bucket/gone/step-1", "gs://bucket/gone/step-2"
    daemons.coordinator.environment["PANNIER_CRASH_AT"] = "coordinator.candidate.before"
    for daemon in (*daemons.sidecars, daemons.coordinator):
        daemon.start(ready=False)
    await_serving(daemons.coordinator.address, process=daemons.coordinator.process)
    with party(daemons) as ranks:
        ranks.ingest(half, 1, {0: ranks.agree(half, 1)[0]})
        wait_until(lambda: any("/receipts/0" in name for name in listed(server, "gone/step-1")))
        ranks.save(whole, 2)
        assert daemons.coordinator.process.wait(BOUND_S) == -signal.SIGKILL
        for sidecar in daemons.sidecars:
            sidecar.kill()
    result = pannier("recover", "gs://bucket/gone", "--json", env=server.env)
    assert result.code == 1, result
    outcomes = {line["checkpoint"]: line for line in result.json_lines()}
    assert outcomes[half]["end"] == "undecided"
    assert outcomes[half]["missing"] == [{"rank": 1, "host": "node-1"}]
    assert outcomes[whole]["end"] == "committed"
    check_whole(server, whole)
    result = pannier("recover", half, "--abort", env=server.env)
    assert result.code == 0, result
    assert decisions_alone(server, "gone/step-1")


class Split:
    """Two hosts whose links lead to one of two coordinators."""

    def __init__(self, daemons: Daemons, server: GcsServer, logs: Path) -> None:
        self.daemons = daemons
        self.server = server
        self.new = daemons.coordinator
        self._logs = logs
        self._stack = ExitStack()
        self._old: Daemon | None = None
        self.links: list[Relay] = []
        for index, sidecar in enumerate(daemons.sidecars):
            link = Relay(daemons.directory / f"l{index}.sock", self.new.address)
            place = sidecar.arguments.index("--coordinator") + 1
            sidecar.arguments[place] = link.address
            self.links.append(self._stack.enter_context(link))

    def start_old(self, pause_at: str) -> Daemon:
        """A coordinator that is stopped there; all links lead to it."""
        address = f"unix://{self.daemons.directory}/old.sock"
        arguments = ["coordinator", "--address", address]
        environment = {**self.new.environment, "PANNIER_PAUSE_AT": f"coordinator.{pause_at}"}
        old = Daemon("old coordinator", address, arguments, environment, self._logs)
        self._old = old
        old.start()
        self.lead_to(old)
        return old

    def lead_to(self, coordinator: Daemon) -> None:
        """As a network does that was repaired: no process reaches the other one any more."""
        for link in self.links:
            link.lead_to(coordinator.address)

    def end_old(self) -> None:
        self.lead_to(self.new)
        if self._old is not None:
            self._old.close()
            self._old = None

    def close(self) -> None:
        self.end_old()
        self._stack.close()


@pytest.fixture(scope="module")
def splittable(server: GcsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """Two hosts and the newer coordinator."""
    logs = tmp_path_factory.mktemp("split")
    with Daemons(logs, sidecars=2, environment=server.env, start=False) as daemons:
        made = Split(daemons, server, logs)
        try:
            all_daemons = (made.new, *daemons.sidecars)
            for daemon in all_daemons:
                daemon.start(ready=False)
            for daemon in all_daemons:
                await_serving(daemon.address, process=daemon.process)
            yield made
        finally:
            made.close()


@pytest.fixture
def split(splittable: Split) -> Iterator[Split]:
    yield splittable
    splittable.end_old()
    splittable.server.clear()


def await_stopped(daemon: Daemon) -> None:
    """Returns when it has stopped itself."""
    process = psutil.Process(daemon.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def say_failed(coordinator: Daemon, ranks: Party, checkpoint_id: str) -> None:
    """Rank 1 reports to this coordinator alone that its part failed."""
    context = ranks.hands[1].context(checkpoint_id)
    failure = save_pb2.Failure(rank=1, kind=save_pb2.FAILURE_KIND_CLIENT, message="boom")
    request = sidecar_pb2.FailRequest(context=context, failure=failure)
    with grpc.insecure_channel(coordinator.address) as channel:
        coordinator_pb2_grpc.CoordinatorStub(channel).Fail(request, timeout=BOUND_S)


def ended(daemon: Daemon, checkpoint_id: str) -> save_pb2.SaveStatus:
    """How the coordinator says that the save has ended."""
    return await_save(daemon.address, checkpoint_id, lambda s: s.state in (COMMITTED, ABORTED))


@pytest.mark.slow
def test_a_coordinator_that_was_stopped_while_it_planned_follows_the_one_that_planned_since(
    split: Split,
) -> None:
    target = "gs://bucket/planned-twice/step-1"
    old = split.start_old("manifest.before")
    with (
        party(split.daemons, incarnation="plannedtwice") as ranks,
        ThreadPoolExecutor(1) as threads,
    ):
        agreed = threads.submit(ranks.agree, target, 1)
        await_stopped(old)
        split.lead_to(split.new)
        plans = agreed.result(BOUND_S)
        old.resume()
        await_save(old.address, target, lambda s: s.state == save_pb2.SAVE_STATE_STAGING)
        # Long enough for the old one to miss those that don't call it any more.
        time.sleep(1.5)
        ranks.ingest(target, 1, plans)
        assert ended(split.new, target).state == COMMITTED
    status = ended(old, target)
    assert status.state == COMMITTED
    assert "COMMIT was decided by another coordinator" in status.note
    check_whole(split.server, target)


@pytest.mark.slow
def test_a_stopped_coordinator_does_not_commit_what_another_has_aborted(split: Split) -> None:
    target = "gs://bucket/aborted-first/step-1"
    old = split.start_old("decision.before")
    with party(split.daemons, incarnation="abortedfirst") as ranks:
        ranks.save(target, 1)
        await_stopped(old)
        say_failed(split.new, ranks, target)
        assert ended(split.new, target).state == ABORTED
        split.lead_to(split.new)
        old.resume()
        status = ended(old, target)
    assert status.state == ABORTED
    assert [failure.message for failure in status.failures] == ["boom"]
    assert "ABORT was decided by another coordinator" in status.note
    wait_until(lambda: decisions_alone(split.server, "aborted-first/step-1"))


@pytest.mark.slow
def test_a_stopped_coordinator_does_not_abort_what_another_has_committed(split: Split) -> None:
    target = "gs://bucket/committed-first/step-1"
    old = split.start_old("decision.before")
    hold_up(split.server)
    with party(split.daemons, incarnation="committedfirst", words=[LARGE, 4]) as ranks:
        ranks.save(target, 1)
        say_failed(old, ranks, target)
        await_stopped(old)
        split.server.clear()
        split.lead_to(split.new)
        assert ended(split.new, target).state == COMMITTED
        before = listed(split.server, "committed-first/step-1")
        old.resume()
        status = ended(old, target)
    assert status.state == COMMITTED
    assert "COMMIT was decided by another coordinator" in status.note
    assert "this coordinator follows (here: rank 1" in old.log()
    assert listed(split.server, "committed-first/step-1") == before
    check_whole(split.server, target)


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["replaced", "removed"])
def test_a_stopped_coordinator_does_not_bring_a_checkpoint_back(
    split: Split, meanwhile: str
) -> None:
    place = f"{meanwhile}/step-1"
    target = f"gs://bucket/{place}"
    old = split.start_old("metadata.before")
    with party(split.daemons, incarnation=meanwhile) as ranks:
        ranks.save(target, 1)
        await_stopped(old)
        split.lead_to(split.new)
        assert ended(split.new, target).state == COMMITTED
        if meanwhile == "replaced":
            ranks.save(target, 2)
            status = await_save(split.new.address, target, lambda s: s.state == COMMITTED)
            assert status.save.number == 2
        else:
            remove(split.server, place)
        before = generations(split.server, place)
        old.resume()
        status = ended(old, target)
    after = generations(split.server, place)
    # Either one may have noted meanwhile that the first attempt is superseded.
    marks = {name for name in after.keys() - before.keys() if name.endswith("/superseded")}
    assert {name: after[name] for name in after.keys() - marks} == before
    if meanwhile == "replaced":
        assert status.state == COMMITTED
        check_whole(split.server, target)
    else:
        assert before == {}
        assert status.state == ABORTED
        assert "was removed from" in status.failures[0].message
