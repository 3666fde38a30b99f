"""``dcp.save`` through ``StorageWriter``, with real daemons; read back by torch alone."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from pannier.client import Client, StorageReader, StorageWriter
from pannier.client.config import load_settings
from pannier.client.loading.filesystem import MissingError
from pannier.wire.errors import InvalidRequestError, PannierError, UnavailableError
from support.processes.daemons import Daemons
from support.processes.ranks import run_in_turn, run_ranks
from support.processes.stretch import BOUND_S
from support.states.bits import differences
from support.states.contents import without_strides
from support.storage.gcs_server import GcsServer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def make_state(seed: int) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(600, 900, generator=noise),
        "half": torch.randn(33, 7, generator=noise).bfloat16(),
        "scalar": torch.tensor(seed + 0.5),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(6, 8, generator=noise).t()[1::2],
        "deep": {"step": seed, "names": ["a", str(seed)]},
    }


def read(path: Path) -> dict[str, Any]:
    """By torch alone."""
    state = make_state(-1)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def cause(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """What one rank raised."""
    ((error, _),) = caught.value.failures.values()
    return error


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """One pair for all tests here: what one does to a save must not matter to the next."""
    with Daemons(tmp_path_factory.mktemp("daemons")) as running:
        yield running


def test_a_checkpoint_is_committed_when_save_returns(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    writer = StorageWriter(path, client=client)
    assert writer.checkpoint_id == str(path)
    metadata = dcp.save(make_state(1), storage_writer=writer)
    assert differences(read(path), make_state(1)) == []
    stored: Metadata = pickle.loads((path / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            without_strides(entry.properties)
    assert stored == metadata
    assert {info.relative_path for info in stored.storage_data.values()} == {
        file.name for file in path.glob("*.distcp")
    }


def test_a_writer_is_used_again_and_replaces(client: Client, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step-1", client=client)
    for seed in (1, 2):
        dcp.save(make_state(seed), storage_writer=writer)
        assert differences(read(tmp_path / "step-1"), make_state(seed)) == []
    dcp.save(make_state(3), checkpoint_id=tmp_path / "step-2", storage_writer=writer)
    assert writer.checkpoint_id == str(tmp_path / "step-2")
    assert differences(read(tmp_path / "step-1"), make_state(2)) == []
    assert differences(read(tmp_path / "step-2"), make_state(3)) == []


@pytest.mark.filterwarnings("ignore:The argument order of save has been changed")
def test_dcp_save_takes_it_by_position(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    dcp.save(make_state(1), StorageWriter(path, client=client))
    assert differences(read(path), make_state(1)) == []
    client.save(make_state(2), StorageWriter(path, client=client))
    assert differences(read(path), make_state(2)) == []


def test_has_the_public_attributes_of_torchs_writers(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    writer, torchs = StorageWriter(path, client=client), FileSystemWriter(path)
    assert (writer.path, type(writer.path)) == (torchs.path, type(torchs.path))
    assert StorageWriter("gs://bucket/run/step-1", client=client).path == "gs://bucket/run/step-1"
    assert writer.save_id == ""
    seen = set()
    for seed in (1, 2):
        dcp.save(make_state(seed), storage_writer=writer)
        assert writer.save_id == StorageReader(path).read_metadata().storage_meta.save_id
        seen.add(writer.save_id)
    assert len(seen) == 2
    writer.reset(tmp_path / "step-2")
    assert (writer.path, writer.save_id) == (tmp_path / "step-2", "")


def test_takes_turns_with_async_save(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "last"
    for seed in (1, 3, 5):
        dcp.save(make_state(seed), storage_writer=StorageWriter(path, client=client))
        assert differences(read(path), make_state(seed)) == []
        client.save(make_state(seed + 1), checkpoint_id=path)
        assert differences(read(path), make_state(seed + 1)) == []


def test_torchs_async_save_works(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    state = make_state(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        response = dcp.async_save(state, storage_writer=StorageWriter(path, client=client))
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        future.result(BOUND_S)
    finally:
        torch.distributed.destroy_process_group()
    assert differences(read(path), make_state(1)) == []


def test_to_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        GcsServer(tmp_path / "gcs") as server,
        Daemons(tmp_path / "daemons", environment=server.env) as beside,
    ):
        for name, value in {**beside.env(), **server.env}.items():
            monkeypatch.setenv(name, value)
        with Client(load_settings()) as client:
            url = "gs://bucket/run/step-1"
            dcp.save(make_state(1), storage_writer=StorageWriter(url, client=client))
            got = make_state(2)
            dcp.load(got, storage_reader=StorageReader(url), no_dist=True)
            assert differences(got, make_state(1)) == []
            assert client.latest("gs://bucket/run") == url


# What is refused, or fails: nothing is committed, and the next save works.


def check_next_works(client: Client, path: Path) -> None:
    with pytest.raises(MissingError):
        StorageReader(path).read_metadata()
    dcp.save(make_state(9), storage_writer=StorageWriter(path, client=client))
    assert differences(read(path), make_state(9)) == []
    client.save(make_state(10), checkpoint_id=path)
    assert differences(read(path), make_state(10)) == []


class Failing(DefaultSavePlanner):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.method == "finish_plan":
            raise ZeroDivisionError("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.method == "resolve_data" and write_item.index.fqn == "half":
            raise ZeroDivisionError("resolve_data")
        return super().resolve_data(write_item)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("finish_plan", "finish_plan"), ("resolve_data", r"resolve_data\n'half' can't be saved")],
)
def test_a_planner_that_raises_ends_the_save(
    method: str, expected: str, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "step-1"
    writer = StorageWriter(path, client=client)
    with pytest.raises(CheckpointException, match=expected) as caught:
        dcp.save(make_state(1), storage_writer=writer, planner=Failing(method))
    assert isinstance(cause(caught), ZeroDivisionError)
    check_next_works(client, path)


def test_an_item_is_resolved_once(client: Client, tmp_path: Path) -> None:
    seen: list[str] = []

    class Recording(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            seen.append(write_item.index.fqn)
            return super().resolve_data(write_item)

    writer = StorageWriter(tmp_path / "step-1", client=client)
    metadata = dcp.save(make_state(1), storage_writer=writer, planner=Recording())
    assert sorted(seen) == sorted(metadata.state_dict_metadata)


def test_what_the_planner_makes_of_it_is_stored(client: Client, tmp_path: Path) -> None:
    class Halving(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            value = super().transform_object(write_item, object)
            return value.half() if isinstance(value, torch.Tensor) else value

    path = tmp_path / "step-1"
    dcp.save(make_state(1), storage_writer=StorageWriter(path, client=client), planner=Halving())
    got = {"large": torch.zeros(600, 900)}
    dcp.load(got, checkpoint_id=path, no_dist=True)
    assert torch.equal(got["large"], make_state(1)["large"].half().float())


def test_torchs_plan_cache_is_refused(client: Client, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step-1", client=client)
    for _ in range(2):
        with pytest.raises(CheckpointException) as caught:
            dcp.save(
                make_state(1),
                storage_writer=writer,
                planner=DefaultSavePlanner(enable_plan_caching=True),
            )
        assert isinstance(cause(caught), InvalidRequestError)
        assert "enable_plan_caching" in str(cause(caught))
    check_next_works(client, tmp_path / "step-1")


def test_a_planner_that_drops_our_note_is_refused(client: Client, tmp_path: Path) -> None:
    class Dropping(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return SavePlan(new_plan.items)

    writer = StorageWriter(tmp_path / "step-1", client=client)
    with pytest.raises(CheckpointException, match="storage_data"):
        dcp.save(make_state(1), storage_writer=writer, planner=Dropping())
    check_next_works(client, tmp_path / "step-1")


def test_planner_data_that_has_no_place_is_refused(client: Client, tmp_path: Path) -> None:
    class Adding(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = [1, 2]
            return plans, metadata

    writer = StorageWriter(tmp_path / "step-1", client=client)
    with pytest.raises(CheckpointException, match="planner_data of type list"):
        dcp.save(make_state(1), storage_writer=writer, planner=Adding())
    check_next_works(client, tmp_path / "step-1")


def test_saving_without_collectives_is_refused(client: Client, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step-1", client=client)
    with pytest.raises(InvalidRequestError, match="use_collectives=False"):
        dcp.save(make_state(1), storage_writer=writer, use_collectives=False)
    check_next_works(client, tmp_path / "step-1")


def test_another_process_is_refused(client: Client, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step-1", client=client)
    with pytest.raises(InvalidRequestError, match="PROCESS"):
        pickle.dumps(writer)


def test_a_place_that_can_not_be_written_is_named(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = StorageWriter(tmp_path / "file" / "run" / "step-1", client=client)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(make_state(1), storage_writer=writer)
    assert isinstance(cause(caught), PannierError)
    assert str(tmp_path / "file") in str(cause(caught))
    check_next_works(client, tmp_path / "step-1")


@pytest.mark.parametrize("path", ["", "gs://bucket", "/", "gs://bucket/../x"])
def test_a_malformed_id_is_refused_at_once(path: str) -> None:
    with pytest.raises(InvalidRequestError):
        StorageWriter(path)
    assert not StorageWriter.validate_checkpoint_id(path)


def test_no_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANNIER_SIDECAR", f"unix://{tmp_path}/none.sock")
    with Client(load_settings()) as client, pytest.raises(CheckpointException) as caught:
        dcp.save(make_state(1), storage_writer=StorageWriter(tmp_path / "s", client=client))
    assert isinstance(cause(caught), UnavailableError)


# Several ranks.


@pytest.mark.slow
def test_any_number_of_ranks_reads_what_three_wrote(daemons: Daemons, tmp_path: Path) -> None:
    def save() -> None:
        import os

        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        from pannier import client
        from support.states.sharded import make_state

        dist.init_process_group("gloo")
        writer = client.StorageWriter(os.environ["PLACE"])
        for seed in (5, 1):
            dcp.save(make_state(seed), storage_writer=writer)
            client.save(make_state(seed + 1), checkpoint_id=os.environ["PLACE"] + "-own")
        client.close()
        dist.destroy_process_group()

    def read() -> None:
        import os

        import torch.distributed.checkpoint as dcp

        from support.processes.worlds import worlds
        from support.states.bits import differences
        from support.states.sharded import make_state

        for _ in worlds(2, 1):
            for place, seed in ((os.environ["PLACE"], 1), (os.environ["PLACE"] + "-own", 2)):
                got = make_state(7)
                dcp.load(got, checkpoint_id=place)
                assert differences(got, make_state(seed)) == [], place

    env = {"PLACE": str(tmp_path / "step-1"), **daemons.env()}
    run_ranks(save, 3, env, torchrun=False)
    run_ranks(read, 2, env, torchrun=False)


def test_torchs_async_save_in_another_process_is_refused(client: Client, tmp_path: Path) -> None:
    script = """
        import os

        import pytest
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        from pannier import client

        # torch starts its process by importing this file.
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            response = dcp.async_save(
                {"w": torch.ones(2)},
                storage_writer=client.StorageWriter(os.environ["PLACE"]),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            future = getattr(response, "upload_completion", response)
            with pytest.raises(Exception, match="can't leave its process"):
                future.result(60)
            dist.destroy_process_group()
    """
    env = {"PLACE": str(tmp_path / "s"), "PANNIER_SIDECAR": client.settings.sidecar or ""}
    run_ranks(script, 1, env, torchrun=False)


def groups_save_by_themselves() -> None:
    import os

    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from pannier import client

    rank, root = dist.get_rank(), os.environ["ROOT"]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, own = groups[rank % 2], rank % 2
    state = {"w": torch.full((4,), float(own)), "mine": own}
    writer = client.StorageWriter(f"{root}/group-{own}", process_group=group)
    dcp.save(state, storage_writer=writer, process_group=group)
    got = {"w": torch.zeros(4), "mine": -1}
    dcp.load(got, checkpoint_id=f"{root}/group-{own}", process_group=group)
    assert got["mine"] == own
    assert torch.equal(got["w"], state["w"])
    dist.barrier()

    # A writer for other ranks than those that save.
    whole = client.StorageWriter(f"{root}/wrong")
    with pytest.raises(CheckpointException, match=r"process_group=..., no_dist=..."):
        dcp.save(state, storage_writer=whole, process_group=group)
    with pytest.raises(CheckpointException, match=r"process_group=..., no_dist=..."):
        dcp.save(state, storage_writer=writer, no_dist=True)

    # Each rank its own, as if there were no others.
    alone = client.StorageWriter(f"{root}/rank-{rank}", no_dist=True)
    dcp.save({"mine": rank}, storage_writer=alone, no_dist=True)
    got = {"mine": -1}
    dcp.load(got, checkpoint_id=f"{root}/rank-{rank}", no_dist=True)
    assert got == {"mine": rank}
    dist.barrier()
    assert not os.path.exists(f"{root}/wrong/.metadata")
    # All together, and the numbers are in step.
    dcp.save({"all": 1}, storage_writer=client.StorageWriter(f"{root}/all"))
    client.save({"all": 2}, checkpoint_id=f"{root}/all", process_group=group) if own else None
    dist.barrier()
    client.save({"all": 3}, checkpoint_id=f"{root}/together")
    client.close()


def one_ranks_failure_is_everybodys_and_the_next_save_works() -> None:
    import os
    from typing import Any

    import pytest
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from pannier import client
    from support.states.bits import differences
    from support.states.sharded import make_state

    class Failing(DefaultSavePlanner):
        def __init__(self, method: str) -> None:
            super().__init__()
            self.method = method

        def fail(self, method: str) -> None:
            if dist.get_rank() == 1 and self.method == method:
                raise ZeroDivisionError(method)

        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            self.fail("set_up_planner")
            super().set_up_planner(*args, **kwargs)

        def create_local_plan(self) -> Any:
            self.fail("create_local_plan")
            return super().create_local_plan()

        def finish_plan(self, new_plan: Any) -> Any:
            self.fail("finish_plan")
            return super().finish_plan(new_plan)

        def resolve_data(self, write_item: Any) -> Any:
            self.fail("resolve_data")
            return super().resolve_data(write_item)

    rank, root = dist.get_rank(), os.environ["ROOT"]
    writer = client.StorageWriter(f"{root}/step")
    methods = ["set_up_planner", "create_local_plan", "finish_plan", "resolve_data"]
    for seed, method in enumerate(methods):
        with pytest.raises(CheckpointException, match=method):
            dcp.save(make_state(1), storage_writer=writer, planner=Failing(method))
        if seed == 0:
            assert not os.path.exists(f"{root}/step/.metadata")
        dist.barrier()
        dcp.save(make_state(seed), storage_writer=writer)
        client.save(make_state(seed), checkpoint_id=f"{root}/own")
        got = make_state(9)
        dcp.load(got, checkpoint_id=f"{root}/step")
        assert differences(got, make_state(seed)) == [], method
        dist.barrier()

    # Ranks that contradict each other.
    writer = client.StorageWriter(f"{root}/{'here' if rank else 'there'}")
    with pytest.raises(CheckpointException, match=r"rank 1 saves .*/here"):
        dcp.save(make_state(1), storage_writer=writer)
    if rank == 1:
        client.default_client().open_save(f"{root}/x", timeout_s=60)
    writer = client.StorageWriter(f"{root}/again")
    with pytest.raises(CheckpointException, match=r"rank 1 joined another save than rank"):
        dcp.save(make_state(1), storage_writer=writer)
    assert not os.path.exists(f"{root}/here/.metadata")
    assert not os.path.exists(f"{root}/there/.metadata")


def a_rank_that_never_writes_is_named_at_the_deadline() -> None:
    import os
    import time
    from typing import Any

    import pytest
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from pannier import client
    from pannier.wire.errors import SaveAbortedError

    rank = dist.get_rank()
    writer = client.StorageWriter(f"{os.environ['ROOT']}/never", timeout=12)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": rank}, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, plan)
    if rank == 0:
        plans, metadata = planner.create_global_plan(plans)
        (plan, _) = writer.prepare_global_plan(plans)
        began = time.monotonic()
        results = writer.write_data(planner.finish_plan(plan), planner).value()
        with pytest.raises(SaveAbortedError) as caught:
            writer.finish(metadata, [results])
        assert list(caught.value.failures) == [1], caught.value
        assert time.monotonic() - began > 2
    dist.barrier()
    assert not os.path.exists(f"{os.environ['ROOT']}/never/.metadata")


SCENARIOS = (
    (4, groups_save_by_themselves),
    (3, one_ranks_failure_is_everybodys_and_the_next_save_works),
    (2, a_rank_that_never_writes_is_named_at_the_deadline),
)


@pytest.fixture(scope="module")
def passed(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    root = tmp_path_factory.mktemp("several")
    return run_in_turn(SCENARIOS, {"ROOT": str(root), **daemons.env()})


@pytest.mark.parametrize("scenario", [scenario.__name__ for _, scenario in SCENARIOS])
def test_on_several_ranks(passed: set[str], scenario: str) -> None:
    assert scenario in passed, "see the ranks' output where they were started"
