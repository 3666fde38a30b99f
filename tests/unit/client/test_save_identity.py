"""Who saves: the same words on all ranks, without a collective."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.multiprocessing import get_context  # type: ignore[attr-defined]

from pannier.client import latest, load
from pannier.client.config import Settings
from pannier.client.identity import Group, Identity, World
from pannier.client.process_group import is_alone
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.object_names import group_name, incarnation_record
from support.processes.stretch import BOUND_S
from support.storage.checkpoints import write

SIDECAR = "unix:///run/pannier/sidecar.sock"


def test_a_process_without_torch_distributed_is_a_world_of_one() -> None:
    world = World(alone=is_alone(no_dist=False))
    assert (world.rank, world.size) == (0, 1)
    who = world.identity(Settings())
    assert who.job.startswith("job-")
    assert who.host == socket.gethostname()
    assert world.group(None) == Group((0,), 0)
    assert world.identity(Settings()) is who
    assert World(alone=True).identity(Settings()).incarnation != who.incarnation


def test_numbers_count_by_group() -> None:
    world = World(alone=True)
    one, other = Group((0, 1), 0), Group((0, 2), 0)
    assert [world.next_number(one), world.next_number(one), world.next_number(other)] == [1, 2, 1]


def test_numbers_are_taken_once_by_threads_at_the_same_time() -> None:
    world = World(alone=True)
    taken: list[int] = []

    def take() -> None:
        taken.extend(world.next_number(Group((0,), 0)) for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 801))


def _rank(rank: int, size: int, path: str, scenario: str, answers: Any) -> None:
    os.environ["TEST_STORE"] = path
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        answers.put((rank, _SCENARIOS[scenario](rank)))
    except Exception as error:  # noqa: BLE001 - for the parent to look at
        answers.put((rank, (type(error).__name__, str(error))))
    dist.barrier()
    dist.destroy_process_group()


def _identity(rank: int) -> Identity:
    return World(alone=False).identity(Settings(sidecar=SIDECAR))


def _several(rank: int) -> list[Identity]:
    return [_identity(rank) for _ in range(3)]


def _jobs(rank: int) -> Identity:
    dist.barrier()
    return World(alone=False).identity(Settings(sidecar=SIDECAR, job=f"job-{rank}"))


def _one_host(rank: int) -> Any:
    daemons = World(alone=False).daemons(Settings(runtime_dir=_runtime_dir()))
    return daemons.directory, daemons.serves_others


def _coordinators(rank: int) -> Any:
    if rank == 1:
        dist.barrier()
    coordinator = "10.0.0.2:7070" if rank == 0 else None
    World(alone=False).identity(Settings(runtime_dir=_runtime_dir(), coordinator=coordinator))
    if rank == 0:
        dist.barrier()


def _runtime_dir() -> Path:
    return Path(os.environ["TEST_STORE"] + ".d")


def _groups(rank: int) -> tuple[Any, ...]:
    mine = dist.new_group([2, 0])
    other = dist.new_group([1])
    world = World(alone=False)
    try:
        group: Any = world.group(mine)
    except InvalidRequestError as error:
        group = str(error)
    del other
    return group, world.group(None)


def _seen(rank: int) -> Any:
    """Only the first rank looks; and loads send it to the others, too."""
    found = []
    for number, read in enumerate((latest, load), start=1):
        root = Path(os.environ["TEST_STORE"] + f".{number}")
        if rank == 0:
            write(root / incarnation_record(number), b"{}")
            dcp.save({"w": torch.ones(1)}, checkpoint_id=root / "step", no_dist=True)
        dist.barrier()
        if read is latest:
            latest(root)
        else:
            load({"w": torch.ones(1)}, checkpoint_id=root / "step")
        found.append(World(alone=False).seen_incarnation(str(root / "step")))
    latest(root)
    alone = World(alone=True)
    return found, alone.apart, alone.seen_incarnation(str(root / "step"))


_SCENARIOS: dict[str, Callable[[int], Any]] = {
    "identity": _identity,
    "several": _several,
    "jobs": _jobs,
    "one host": _one_host,
    "coordinators": _coordinators,
    "groups": _groups,
    "seen": _seen,
}


def run(scenario: str, size: int, tmp_path: Path) -> list[Any]:
    context = get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(r, size, str(tmp_path / "store"), scenario, answers))
        for r in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join(BOUND_S)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(size)]


def test_all_ranks_are_one_incarnation_of_one_job(tmp_path: Path) -> None:
    found = run("identity", 3, tmp_path)
    assert len({(who.job, who.incarnation) for who in found}) == 1
    assert [who.rank for who in found] == [0, 1, 2]
    assert len({who.client for who in found}) == 3


def test_every_client_of_the_process_group_is_an_incarnation_of_its_own(tmp_path: Path) -> None:
    one, other = run("several", 2, tmp_path)
    assert [who.incarnation for who in one] == [who.incarnation for who in other]
    assert len({who.incarnation for who in one}) == 3


def test_ranks_with_different_jobs_are_named(tmp_path: Path) -> None:
    found = run("jobs", 2, tmp_path)
    errors = [answer for answer in found if isinstance(answer, tuple)]
    assert len(errors) == 1
    assert errors[0][0] == "ConfigurationError"
    assert "PANNIER_JOB=job-" in errors[0][1]


def test_ranks_of_one_host_have_its_usual_daemons(tmp_path: Path) -> None:
    # No launcher set it: they exchange it.
    usual = tmp_path / "store.d"
    assert run("one host", 3, tmp_path) == [(usual, False)] * 3


def test_ranks_with_and_without_a_coordinator_are_named(tmp_path: Path) -> None:
    found = run("coordinators", 2, tmp_path)
    assert found[0] is None
    name, message = found[1]
    assert name == ConfigurationError.__name__
    for word in ("rank 1", "rank 0", "PANNIER_COORDINATOR"):
        assert word in message


def test_ranks_see_the_incarnations_that_the_first_of_them_has_found(tmp_path: Path) -> None:
    assert run("seen", 3, tmp_path) == [([1, 2], True, None)] * 3


def test_groups_are_sorted_global_ranks_and_outsiders_are_refused(tmp_path: Path) -> None:
    found = run("groups", 3, tmp_path)
    own = found[0][0].process_group
    assert found[0][0] == Group((0, 2), 0, own)
    assert found[2][0] == Group((0, 2), 2, own)
    # Another group of these ranks has another name.
    assert found[0][0].name == group_name([2, 0], own) != group_name([2, 0])
    assert found[0][0].is_coordinator
    assert not found[2][0].is_coordinator
    assert "rank 1" in found[1][0]
    assert all(group == Group((0, 1, 2), rank) for rank, (_, group) in enumerate(found))
