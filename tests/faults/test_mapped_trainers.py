"""Trainers that stage into the sidecar's own files: whichever process dies, stops or misbehaves, every promise holds."""

import fcntl
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from pannier.client.staging.host_copy import HostCopies
from pannier.common.fault_points import VARIABLE
from pannier.v1 import save_pb2
from support.actors.lease_holder import mapped_files, spool_files
from support.actors.mapped_clients import MIB, await_reuse, check, saving, state, transport
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import ABORTED, all_in, await_save, listed
from support.states.dcp_readers import plain_load
from support.storage.bucket import hold_up
from support.storage.gcs_server import GcsServer

INGESTED = all_in(save_pb2.RANK_PHASE_INGESTED)


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the transport of the other tests."""
    monkeypatch.delenv("PANNIER_TRANSPORT", raising=False)


# Trainers that die or stop.

DYING = """
import os, signal, time
from pathlib import Path
import torch
from pannier import client
from pannier.client.saves.save import Save

async def send(self):
    await self._staged
    print("staged", flush=True)
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

Save._send = send
client.async_save({"w": torch.full((8 << 18,), 1.0)}, checkpoint_id=os.environ["TARGET"])
"""


def test_a_trainer_killed_after_staging_is_named_and_its_files_are_not_leased_while_they_are_held(
    daemons: Daemons, tmp_path: Path
) -> None:
    target, go = str(tmp_path / "root" / "1"), tmp_path / "go"
    environment = daemons.env(TARGET=target, GO=str(go))
    with start_ranks(DYING, 1, environment, torchrun=False) as ranks, ExitStack() as held:
        ranks.wait_for("staged")
        files = spool_files(daemons.spool / "0")
        assert files
        fds = []
        for path in files.values():
            # As a process does that got the descriptor from the trainer.
            file = held.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            fds.append(file)
        before = [file.read() for file in fds]
        go.touch()
        assert ranks.processes[0].wait(BOUND_S) == -signal.SIGKILL
        ended = await_save(daemons.coordinator_address, target, lambda s: s.state == ABORTED)
        (failure,) = ended.failures
        assert failure.rank == 0
        assert f"process {ranks.processes[0].pid} of rank 0" in failure.message
        with saving(daemons) as client:
            # They would have fitted.
            for step in range(2, 5):
                client.save(state(step), checkpoint_id=str(tmp_path / "root" / str(step)))
                ours = {path.stat().st_ino for path in mapped_files(daemons.spool / "0")}
                assert ours
                assert not ours & files.keys()
        for file, content in zip(fds, before, strict=True):
            file.seek(0)
            assert file.read() == content
    await_reuse(daemons, set(files), 8 * MIB)
    check(str(tmp_path / "root" / "4"), 4)


STOPPING = """
import os, signal, time
from pathlib import Path
import torch
from pannier import client
from pannier.client.staging.host_copy import HostCopies

copies = HostCopies.run

def run(self):
    if stops:
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        print("wakes", flush=True)
    copies(self)

HostCopies.run = run

def save(step, **arguments):
    global stops
    stops = step == 2
    # Of a new structure, so that the coordinator knows of the save before it is staged.
    names = "abx" if step == 2 else "abc"
    state = {name: torch.full((1 << 20,), float(step)) for name in names}
    try:
        target = f"{os.environ['ROOT']}/stopping-{step}"
        handle = client.async_save(state, checkpoint_id=target, **arguments)
        handle.result(60)
        print("save", step, "committed", handle.status().transport, flush=True)
    except client.PannierError as error:
        print(f"save {step} failed: {error}\\n", end="", flush=True)

save(1)
save(2, timeout=12)
while not Path(os.environ["GO"]).exists():
    time.sleep(0.01)
save(3)
"""


@pytest.fixture
def storage(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """Without faults; this process reads from it, too."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    yield server
    server.clear()


@pytest.mark.slow
def test_a_trainer_that_stops_while_it_stages_and_wakes_up_late_writes_into_nobodys_file(
    storage: GcsServer, tmp_path: Path
) -> None:
    """Nor does it keep the spool's room once it runs again."""
    root = "gs://bucket/stopping"
    # Its two sets of files, those of two saves, and too little for a third.
    flags = ("--spool-budget", str(56 * MIB))
    go = tmp_path / "go"
    with Daemons(tmp_path, environment=storage.env, sidecar_arguments=flags) as daemons:
        environment = {**daemons.env(ROOT=root, GO=str(go)), **storage.env}
        with start_ranks(STOPPING, 1, environment, torchrun=False) as ranks:
            trainer = ranks.processes[0]
            ranks.wait_for("save 1 committed mapped")
            ranks.wait_for("stops")
            stopped = set(spool_files(daemons.spool / "0"))
            await_save(
                daemons.coordinator_address,
                f"{root}/stopping-2",
                lambda s: s.state == ABORTED,
            )
            assert psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED
            hold_up(storage)
            with saving(daemons, "another", max_in_flight=3) as client:
                handles = []
                for step in (11, 12):
                    handles.append(
                        client.async_save(state(step, 12), checkpoint_id=f"{root}/{step}")
                    )
                    await_save(daemons.sidecar_address, f"{root}/{step}", INGESTED)
                ours = {path.stat().st_ino for path in mapped_files(daemons.spool / "0")}
                assert not ours & stopped
                # What the stopped one has leased is all that is left.
                handles.append(client.async_save(state(13, 12), checkpoint_id=f"{root}/13"))
                wait_until(lambda: handles[2].status().waiting_on.startswith("room ("))
                trainer.resume()
                ranks.wait_for("wakes")
                ranks.wait_for("save 2 failed")
                # The coordinator's report, or its own if that comes too late.
                assert re.search(r"rank 0 .*its deadline( of 12 s)? passed", ranks.output(0))
                await_save(daemons.sidecar_address, f"{root}/13", INGESTED)
                storage.clear()
                for handle in handles:
                    handle.result(BOUND_S)
            go.touch()
            ranks.wait_for("save 3 committed")
            ranks.wait(BOUND_S).check()
    for step in (11, 12, 13):
        check(f"{root}/{step}", step, 12)
    loaded = {name: torch.zeros(1 << 20) for name in "abc"}
    plain_load(loaded, f"{root}/stopping-3")
    assert all(bool((tensor == 3).all()) for tensor in loaded.values())


FORKING = """
import os, time
import torch
from torch.utils.data import DataLoader
from pannier import client

if __name__ == "__main__":
    for step in (1, 2):
        client.save({"w": torch.full((8 << 18,), 1.0)}, checkpoint_id=f"{os.environ['ROOT']}/{step}")
    forked = os.fork()
    if not forked:
        time.sleep(600)
    loader = DataLoader(
        [1, 2, 3], num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    batches = iter(loader)
    next(batches)
    client.save({"w": torch.full((8 << 18,), 3.0)}, checkpoint_id=f"{os.environ['ROOT']}/3")
    print(f"pids: {forked} {batches._workers[0].pid}\\n", end="", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_children_of_a_dead_trainer_hold_none_of_its_files(
    daemons: Daemons, tmp_path: Path
) -> None:
    environment = daemons.env(ROOT=str(tmp_path / "root"))
    with start_ranks(FORKING, 1, environment, torchrun=False) as ranks, ExitStack() as cleaning:
        ranks.wait_for("pids:", timeout=60)
        pids = ranks.output(0).partition("pids:")[2].split()[:2]
        children = [psutil.Process(int(pid)) for pid in pids]
        for child in children:
            cleaning.callback(child.kill)
            # The worker would notice that its parent is dead.
            child.suspend()
        files = set(spool_files(daemons.spool / "0"))
        assert files
        ranks.processes[0].signal(signal.SIGKILL)
        ranks.processes[0].wait(BOUND_S)
        await_reuse(daemons, files, 8 * MIB)
        assert [child.status() for child in children] == [psutil.STATUS_STOPPED] * 2


# Sidecars that die.


def test_what_is_staged_when_the_sidecar_dies_is_streamed_to_the_next(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = HostCopies.run

    def run(self: HostCopies) -> None:
        copies(self)
        daemons.sidecar.restart()

    with saving(daemons) as client:
        client.save(state(1), checkpoint_id=str(tmp_path / "1"))
        target = str(tmp_path / "2")
        with monkeypatch.context() as patch:
            patch.setattr(HostCopies, "run", run)
            handle = client.async_save(state(2), checkpoint_id=target)
        handle.result(BOUND_S)
        said = handle.status().transport
        assert said.startswith("streamed: it was mapped, but ")
        assert "is no spool file that the rank has leased" in said
        assert transport(daemons, target) == said
        check(target, 2)
        # It borrows from the new one.
        for step in (3, 4):
            target = str(tmp_path / str(step))
            handle = client.async_save(state(step), checkpoint_id=target)
            handle.result(BOUND_S)
            assert handle.status().transport == transport(daemons, target) == "mapped"
            check(target, step)


@pytest.mark.slow
def test_a_sidecar_that_dies_while_it_takes_the_files_over_goes_on_with_them(
    daemons: Daemons, tmp_path: Path
) -> None:
    """Of two files it may know none, one, or both, and have read all of them or nothing."""
    points = (
        "sidecar.opened.before",
        "sidecar.opened.after:2",
        "sidecar.held.before",
        "sidecar.held.after",
        "sidecar.ingested.before",
        "sidecar.ingested.synced",
    )
    with saving(daemons) as client:
        for step, point in enumerate(points):
            daemons.sidecar.stop()
            daemons.sidecar.environment[VARIABLE] = point
            daemons.sidecar.start()
            target = str(tmp_path / str(step))
            handle = client.async_save(state(step), checkpoint_id=target)
            assert daemons.sidecar.process.wait(BOUND_S) == -signal.SIGKILL, point
            daemons.sidecar.environment[VARIABLE] = ""
            daemons.sidecar.start()
            handle.result(BOUND_S)
            check(target, step)
    assert daemons.sidecar.stop() == 0
    daemons.sidecar.start()
    (copy,) = listed(daemons.sidecar_address).local_copies
    assert copy.checkpoint_id == target
    assert len(list((daemons.spool / "0").glob("*.data"))) == copy.files


# Room.


def test_idle_files_are_given_back_when_others_need_the_room(tmp_path: Path) -> None:
    """Two clients with two arenas each don't fit; both go on, and what was streamed says why."""
    flags = ("--spool-budget", str(30 * MIB))
    with (
        Daemons(tmp_path, sidecar_arguments=flags) as daemons,
        saving(daemons, "one") as one,
        saving(daemons, "two") as two,
    ):
        said = []
        for turn in range(3):
            for name, client in (("one", one), ("two", two)):
                targets = [str(tmp_path / f"{name}-{turn}-{part}") for part in range(2)]
                handles = [
                    client.async_save(state(turn), checkpoint_id=target) for target in targets
                ]
                for handle, target in zip(handles, targets, strict=True):
                    handle.result(BOUND_S)
                    check(target, turn)
                    said.append(handle.status().transport)
                    assert transport(daemons, target) == said[-1]
        assert set(said[:2]) == {"mapped"}
        streamed = [each for each in said if each != "mapped"]
        assert streamed
        assert all("streamed: the spool" in each and "full" in each for each in streamed)
        # What was released is leased again.
        assert said[-1] == "mapped" or said[-2] == "mapped"
