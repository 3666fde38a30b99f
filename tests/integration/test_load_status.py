"""A running load as operators see it: on both daemons, by rank, with whom it waits for and who died."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from pannier.v1 import load_status_pb2, save_pb2, status_pb2, status_pb2_grpc
from pannier.wire import addresses
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S

LOADING, LOADED, FAILED = (
    load_status_pb2.LOAD_STATE_LOADING,
    load_status_pb2.LOAD_STATE_LOADED,
    load_status_pb2.LOAD_STATE_FAILED,
)
READING = load_status_pb2.LOAD_PHASE_READING


def trainer() -> None:
    """Saves once, then loads, each time when the planner of every rank finds its gate open."""
    import os
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import DefaultLoadPlanner

    from pannier import client

    place, gates = os.environ["PLACE"], Path(os.environ["GATES"])
    dist.init_process_group("gloo")

    class Gate(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):  # type: ignore[no-untyped-def]
            while not (gates / str(number)).exists():
                time.sleep(0.01)
            return super().resolve_tensor(read_item)

    def state(value: float):  # type: ignore[no-untyped-def]
        return {f"{rank}": torch.full((1000,), value) for rank in range(2)}

    client.save(state(1.0), checkpoint_id=place)
    for number in range(2):
        while number and dist.get_rank() and not (gates / "call").exists():
            time.sleep(0.01)
        loaded = state(0.0)
        client.load(loaded, checkpoint_id=place, planner=Gate())
        assert loaded["1"].sum() == 1000
        print(f"loaded {number}", flush=True)
    client.close()


class Scene:
    """Two ranks on two hosts whose loads wait for :meth:`open`."""

    def __init__(self, daemons: Daemons, directory: Path) -> None:
        self.daemons = daemons
        self.place = str(directory / "run" / "step-7")
        self.gates = directory / "gates"
        self.gates.mkdir()
        self.all = (daemons.coordinator.address, *(each.address for each in daemons.sidecars))

    def open(self, gate: int | str) -> None:
        (self.gates / str(gate)).touch()

    def await_load(
        self,
        address: str,
        condition: Callable[[load_status_pb2.LoadStatus], bool],
        *,
        name: str = "",
    ) -> load_status_pb2.LoadStatus:
        """The first status of a load, else of the newest one, that meets a condition."""
        deadline, last = time.monotonic() + BOUND_S, None
        with grpc.insecure_channel(address, options=addresses.channel_options()) as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            while time.monotonic() < deadline:
                try:
                    request = status_pb2.GetLoadRequest(id=name or self.place)
                    last = stub.GetLoad(request, timeout=BOUND_S).load
                    if condition(last):
                        return last
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise
                time.sleep(0.02)
        raise AssertionError(f"{address} didn't show that: {last}")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Daemons(tmp_path, sidecars=2) as daemons:
        yield Scene(daemons, tmp_path)


def test_a_load_is_followed_by_rank_until_it_has_loaded_or_a_rank_died(scene: Scene) -> None:
    coordinator, first, second = scene.all
    with start_ranks(
        trainer,
        2,
        {"PLACE": scene.place, "GATES": str(scene.gates)},
        torchrun=False,
        rank_env=lambda rank: scene.daemons.env(rank),
    ) as ranks:

        def reads(load: load_status_pb2.LoadStatus) -> bool:
            return len(load.ranks) == 2 and all(each.phase == READING for each in load.ranks)

        running = scene.await_load(coordinator, reads)
        assert (running.state, running.job, running.group_size) == (LOADING, "test", 2)
        assert running.attempt
        assert all(each.bytes_total for each in running.ranks)
        for number, address in enumerate((first, second)):
            own = scene.await_load(address, lambda load: bool(load.attempt))
            assert own.id == running.id, "all daemons have one name for it"
            assert [each.rank for each in own.ranks] == [number]
        shown = pannier("status", "--address", coordinator).out
        assert f"  {running.id}" in shown
        assert "  LOADING  " in shown

        scene.open(0)
        for rank in range(2):
            ranks.wait_for("loaded 0", rank=rank)
        for address in scene.all:
            ended = scene.await_load(address, lambda load: load.state == LOADED, name=running.id)
            assert {each.source for each in ended.sources} <= {
                "own spool",
                "bucket",
                "node-0",
                "node-1",
            }
            assert ended.bytes_read > 0
            assert not ended.waiting_on.text

        # A rank that doesn't call load is named, by its host, before any deadline.
        for address in (coordinator, first):
            entered = scene.await_load(
                address,
                lambda load: load.id != running.id and "host" in load.waiting_on.text,
            )
            assert entered.waiting_on.text.startswith("rank 1 (host ")
            assert entered.waiting_on.text.endswith(" to call load")
            assert entered.state == LOADING
        scene.open("call")

        # A stopped rank is named, a killed one fails the load.
        scene.await_load(coordinator, lambda load: load.id != running.id and reads(load))
        ranks.processes[1].pause()
        for address in (coordinator, second):
            stalled = scene.await_load(address, lambda load: "last seen" in load.waiting_on.text)
            assert list(stalled.waiting_on.ranks) == [1]
            assert stalled.state == LOADING
        ranks.processes[1].kill()

        def names_the_dead(load: load_status_pb2.LoadStatus) -> bool:
            return any(each.kind == save_pb2.FAILURE_KIND_LOST for each in load.failures)

        for address in (coordinator, second):
            failed = scene.await_load(address, names_the_dead)
            assert failed.state == FAILED
            [lost] = [each for each in failed.failures if each.kind == save_pb2.FAILURE_KIND_LOST]
            assert lost.rank == 1
            assert f"process {ranks.processes[1].pid} of rank 1 on host " in lost.message
            assert lost.message.endswith("died while it loaded")
        assert pannier("watch", failed.id, "--address", second).code == 1
        ranks.kill()
