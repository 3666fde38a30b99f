"""What torch saved on some ranks, ``client.load`` and ``StorageReader`` read on others."""

from pathlib import Path

import pytest

from support.processes.ranks import run_in_turn, run_ranks
from support.storage.gcs_server import GcsServer


def save() -> None:
    """Saves by torch alone."""
    import os

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from support.states.sharded import make_state

    dist.init_process_group("gloo")
    writer = FileSystemWriter(os.environ["PLACE"], thread_count=2)
    dcp.save(make_state(seed=1), storage_writer=writer)
    dist.destroy_process_group()


def read() -> None:
    """Reads with both, and compares bit for bit."""
    import os

    import pytest
    import torch.distributed.checkpoint as dcp

    from pannier.client.loading.load import load
    from pannier.client.loading.storage_reader import StorageReader
    from pannier.client.restore import sources
    from support.processes.worlds import worlds
    from support.states.bits import differences
    from support.states.sharded import make_state

    place = os.environ["PLACE"]
    for _ in worlds(*map(int, os.environ["WORLDS"].split())):
        want = make_state(seed=1)
        got = make_state(seed=2)
        assert differences(got, want)
        load(got, checkpoint_id=place)
        assert differences(got, want) == []
        got = make_state(seed=2)
        dcp.load(got, storage_reader=StorageReader(place, memory_bytes=10_000))
        assert differences(got, want) == []
        got = make_state(seed=2)
        with pytest.MonkeyPatch.context() as patch:
            # As if all tensors were large.
            patch.setattr(sources, "LOCAL_REQUEST_BYTES", 100)
            patch.setattr(sources, "REMOTE_REQUEST_BYTES", 100)
            load(got, checkpoint_id=place)
        assert differences(got, want) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four ranks."""
    path = tmp_path_factory.mktemp("root") / "step-1"
    run_ranks(save, 4, {"PLACE": str(path)}, torchrun=False)
    return path


def test_any_number_of_ranks_reads_it(checkpoint: Path) -> None:
    run_ranks(read, 3, {"PLACE": str(checkpoint), "WORLDS": "3 2 1"}, torchrun=False)


def test_from_a_bucket(checkpoint: Path, tmp_path: Path) -> None:
    import fsspec

    with GcsServer(tmp_path / "gcs") as server:
        fs = fsspec.filesystem("gs", endpoint_url=server.url, token="anon")
        for file in checkpoint.iterdir():
            fs.pipe_file(f"bucket/run/step-1/{file.name}", file.read_bytes())
        env = {"PLACE": "gs://bucket/run/step-1", "WORLDS": "2", **server.env}
        run_ranks(read, 2, env, torchrun=False)
        reads = [path for _, path, _ in server.requests() if "metadata" in path]
    # Each client.load reads it once for both ranks, dcp.load on each.
    assert len([path for path in reads if "alt=media" in path or "/download/" in path]) == 2 + 2


def each_group_loads_by_itself() -> None:
    import os

    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from pannier.client.loading.load import load
    from pannier.client.loading.storage_reader import StorageReader
    from pannier.client.ranks.load_error import LoadError
    from pannier.wire.errors import InvalidRequestError, StorageError
    from support.states.sharded import full_weight

    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    ranks = [0] if rank == 0 else [1, 2]
    mesh = DeviceMesh.from_group(groups[rank > 0], "cpu", torch.tensor(ranks))
    got = {"weight": distribute_tensor(torch.zeros(11, 6), mesh, [Shard(1)])}
    load(got, checkpoint_id=os.environ["PLACE"], process_group=groups[rank > 0])
    assert torch.equal(got["weight"].full_tensor(), full_weight(1))
    with pytest.raises(InvalidRequestError, match=f"rank {rank} is not in this process group"):
        load(got, checkpoint_id=os.environ["PLACE"], process_group=groups[rank == 0])

    if rank == 0:
        return

    class Unreadable(StorageReader):
        def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
            raise StorageError("no storage today")

    # Errors of two types are one LoadError, by global rank.
    reader = Unreadable(os.environ["PLACE"]) if rank == 2 else None
    with pytest.raises(LoadError, match=r"rank 1: nonsense:.*; rank 2: no storage today") as caught:
        load(got, reader, checkpoint_id="nonsense://x", process_group=groups[1])
    kinds = {number: type(error) for number, (error, _) in caught.value.failures.items()}
    assert kinds == {1: InvalidRequestError, 2: StorageError}
    # Its traceback holds this frame, and so the process group.
    del caught


def what_fails_on_one_rank_fails_on_all_by_name() -> None:
    import os

    import pytest
    import torch
    import torch.distributed as dist

    from pannier.client.loading.filesystem import MissingError
    from pannier.client.loading.load import load
    from pannier.client.ranks.load_error import LoadError
    from pannier.wire.errors import InvalidRequestError
    from support.states.sharded import make_state

    rank, place = dist.get_rank(), os.environ["PLACE"]
    state = make_state(seed=2)
    extra = {"mine": torch.zeros(1)} if rank == 1 else {}
    with pytest.raises(LoadError, match=r"rank 1: .*Missing key.*mine") as caught:
        load({**state, **extra}, checkpoint_id=place)
    assert list(caught.value.failures) == [1]
    # Its traceback holds this frame, and so the process group: gloo's threads must not
    # outlive the interpreter.
    del caught

    with pytest.raises(InvalidRequestError, match="rank 1: nonsense:// is an unknown scheme"):
        load(state, checkpoint_id="nonsense://x" if rank == 1 else place)

    with pytest.raises(InvalidRequestError, match=f"rank 0: {place}, rank 1: {place}-2"):
        load(state, checkpoint_id=f"{place}-2" if rank == 1 else place)

    with pytest.raises(MissingError, match="is no checkpoint: it doesn't exist"):
        load(state, checkpoint_id=f"{place}-2")

    # And goes on.
    load(state, checkpoint_id=place)


def dcp_load_refuses_two_generations() -> None:
    """A checkpoint is replaced after some ranks have read ``.metadata``, before others do."""

    import os
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import Metadata

    from pannier.client.loading.storage_reader import StorageReader

    rank, place = dist.get_rank(), os.environ["ROOT"] + "/step-1"
    if rank == 0:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=place, no_dist=True)
    dist.barrier()

    class Slow(StorageReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if rank == 1:
                dist.barrier()
                dist.barrier()
                return super().read_metadata()
            metadata = super().read_metadata()
            # Rank 2 has read it, too.
            dist.barrier()
            if rank == 0:
                dcp.save({"w": torch.zeros(3)}, checkpoint_id=place, no_dist=True)
            dist.barrier()
            return metadata

    state = {"w": torch.full((3,), 5.0)}
    with pytest.raises(CheckpointException, match=r"ranks \[0, 2\] read .*ranks \[1\] read"):
        dcp.load(state, storage_reader=Slow(place))
    assert torch.equal(state["w"], torch.full((3,), 5.0))
    dcp.load(state, storage_reader=StorageReader(place))
    assert torch.equal(state["w"], torch.zeros(3))


def an_overwritten_checkpoint_is_one_generation_for_all_ranks_of_a_load() -> None:
    """It is replaced once one rank has read ``.metadata`` for all; files have names of their own, as Pannier's have."""

    import os
    import pickle
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan

    from pannier.client.loading.load import load

    rank, place = dist.get_rank(), Path(os.environ["ROOT"]) / "one-generation"

    def save(value: float) -> None:
        new = place.with_name("new")
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=new, no_dist=True)
        (data,) = new.glob("*.distcp")
        metadata = pickle.loads((new / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = f"{value}.distcp"
        (new / ".metadata").write_bytes(pickle.dumps(metadata))
        place.mkdir(exist_ok=True)
        data.rename(place / f"{value}.distcp")
        (new / ".metadata").rename(place / ".metadata")

    if rank == 0:
        save(1)
    dist.barrier()

    class Replacing(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            # All ranks are beyond the step at which they get .metadata.
            if rank == 0:
                save(2)
            dist.barrier()
            return super().create_local_plan()

    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=place, planner=Replacing())
    assert torch.equal(state["w"], torch.ones(3))
    load(state, checkpoint_id=place)
    assert torch.equal(state["w"], torch.full((3,), 2.0))


SCENARIOS = (
    (3, each_group_loads_by_itself),
    (2, what_fails_on_one_rank_fails_on_all_by_name),
    (3, dcp_load_refuses_two_generations),
    (3, an_overwritten_checkpoint_is_one_generation_for_all_ranks_of_a_load),
)


@pytest.fixture(scope="module")
def passed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    root = tmp_path_factory.mktemp("several")
    return run_in_turn(SCENARIOS, {"PLACE": str(checkpoint), "ROOT": str(root)})


@pytest.mark.parametrize("scenario", [scenario.__name__ for _, scenario in SCENARIOS])
def test_on_several_ranks(passed: set[str], scenario: str) -> None:
    assert scenario in passed, "see the ranks' output where they were started"
