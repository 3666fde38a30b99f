"""Ranks that load together stay in step: what fails or is missing on one of them is known on all, by name."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes.ranks import run_in_turn, start_ranks
from support.processes.stretch import BOUND_S


def a_rank_that_never_calls_load_is_named_and_the_next_load_works() -> None:
    import os
    import socket

    import pytest
    import torch
    import torch.distributed as dist

    from pannier import client
    from support.processes.stretch import stretched

    rank, place = dist.get_rank(), os.environ["PLACE"]
    state = {"w": torch.zeros(6)}
    at_end = rf"load of {place}: after \d+ s still waiting for rank 2 \(host .*\) to call load"
    # All have imported what load needs.
    dist.barrier()
    if rank != 2:
        with pytest.raises(client.LoadError, match=at_end) as caught:
            client.load(state, checkpoint_id=place, timeout=stretched(5.0))
        assert [*caught.value.failures] == [2]
        assert caught.value.failures[2].host == socket.gethostname()
        assert caught.value.failures[2].kind == "DEADLINE"
        del caught
    dist.barrier()
    if rank == 2:
        # The load that it missed is over, and the others' next one is of another checkpoint.
        with pytest.raises(client.LoadError, match=r"waiting for rank 2 \(host .*\) to call load"):
            client.load(state, checkpoint_id=place + "-other", timeout=stretched(1.0))
    for _ in range(2):
        state = {"w": torch.zeros(6)}
        client.load(state, checkpoint_id=place)
        assert torch.equal(state["w"], torch.arange(6.0))


def a_rank_that_left_loads_out_or_has_wrong_arguments_is_in_step_at_the_next_one() -> None:
    import os
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist

    from pannier import client
    from pannier.common import timeouts
    from support.processes.stretch import stretched

    rank, place = dist.get_rank(), os.environ["PLACE"]

    def load(timeout: float = stretched(60.0)) -> None:
        state = {"w": torch.zeros(6)}
        client.load(state, checkpoint_id=place, timeout=timeout)
        assert torch.equal(state["w"], torch.arange(6.0))

    load()
    for _ in range(2):
        if rank == 0:
            with pytest.raises(client.LoadError, match=r"waiting for rank 1 \(host .*\) to call"):
                load(stretched(0.5))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "LOAD_REJOIN_S", stretched(60.0))
        for _ in range(2):
            load()
            dist.barrier()
    for culprit in range(2):
        refused = rf"rank {culprit}: timeout=-1"
        with pytest.raises(client.InvalidRequestError, match=refused):
            load(-1.0 if rank == culprit else stretched(60.0))
        state: Any = [torch.zeros(6)] if rank == culprit else {"w": torch.zeros(6)}
        with pytest.raises(client.InvalidRequestError, match=rf"rank {culprit}: state_dict=list"):
            client.load(state, checkpoint_id=place, timeout=stretched(60.0))
    load()


def what_raises_at_any_step_ends_the_load_on_all_ranks() -> None:
    import os
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from pannier import client
    from pannier.client.loading import storage_reader
    from pannier.client.loading.load import load

    rank, place = dist.get_rank(), os.environ["PLACE"]

    class OwnError(ValueError):
        """One that no pickle can make again."""

        def __init__(self, step: str, number: int) -> None:
            super().__init__(f"{step} fails on rank {number}")

    def fail(step: str) -> None:
        if step == failing and rank == culprit:
            raise OwnError(step, rank)

    class Planner(DefaultLoadPlanner):
        def set_up_planner(self, *arguments: Any) -> None:
            fail("set_up_planner")
            super().set_up_planner(*arguments)

        def create_global_plan(self, plans: Any) -> Any:
            fail("create_global_plan")
            return super().create_global_plan(plans)

        def finish_plan(self, plan: Any) -> Any:
            fail("finish_plan")
            return super().finish_plan(plan)

    class Reader(storage_reader.StorageReader):
        def resolve(self, **arguments: Any) -> bytes:
            fail("resolve")
            return super().resolve(**arguments)

    class Object:
        def state_dict(self) -> dict[str, Any]:
            fail("state_dict")
            return {"b": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            fail("load_state_dict")

    def once() -> torch.Tensor:
        state: dict[str, Any] = {"w": torch.zeros(6), "deep": Object()}
        load(state, Reader(place), planner=Planner(), raise_unretrieved=lambda: fail("errors"))
        return state["w"]

    steps = ("errors", "state_dict", "set_up_planner", "finish_plan", "load_state_dict")
    for failing, culprit in [
        *((step, 1) for step in steps),
        ("resolve", 0),
        ("create_global_plan", 0),
    ]:
        text = f"rank {culprit}: OwnError: {failing} fails on rank {culprit}"
        raised = OwnError if failing == "load_state_dict" and rank == 1 else client.LoadError
        with pytest.raises(raised, match="fails on rank" if raised is OwnError else text):
            once()
    failing = ""
    assert torch.equal(once(), torch.arange(6.0))


def an_error_of_many_megabytes_leaves_the_store_to_the_next_load_and_to_torch() -> None:
    import os
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from pannier import client

    rank, place = dist.get_rank(), os.environ["PLACE"] + "-of-a-wrapped-module"
    module = torch.nn.Module()
    for number in range(3000):
        parameter = torch.nn.Parameter(torch.ones(1))
        module.register_parameter(f"{number:04d}_{'expert' * 250}", parameter)

    class Wrapped:
        """Saved with another prefix than the module has: torch names each of its keys twice."""

        def state_dict(self) -> dict[str, Any]:
            return {f"_orig_mod:{key}": value for key, value in module.state_dict().items()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if rank in wrong:
                module.load_state_dict(state)

    if rank == 0:
        dcp.save({"model": Wrapped()}, checkpoint_id=place, no_dist=True)
    dist.barrier()
    for wrong in ([0, 1], [1]):
        # On its own rank, torch's error itself, and whole.
        expected = RuntimeError if rank in wrong else client.LoadError
        with pytest.raises(expected) as caught:
            client.load({"model": Wrapped()}, checkpoint_id=place)
        text = str(caught.value)
        if rank in wrong:
            assert len(text) > 8 << 20
        else:
            assert text.startswith(
                "rank 1: RuntimeError: Error(s) in loading state_dict for Module"
            )
            assert text.endswith("more bytes, which that rank's own error has)")
            assert len(text) < 2200
        del caught
    state = {"w": torch.zeros(6)}
    client.load(state, checkpoint_id=os.environ["PLACE"])
    assert torch.equal(state["w"], torch.arange(6.0))
    # torch's own keys go through the same store.
    dist.barrier(dist.new_group([0, 1]))


def an_exception_that_holds_a_large_tensor_ends_the_load_on_the_other_ranks_at_once() -> None:
    import os
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from pannier import client

    rank, place = dist.get_rank(), os.environ["PLACE"]

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            raise ValueError("can't be planned", torch.zeros(4 << 20))

    planner = Planner() if rank == 1 else None
    with pytest.raises(client.LoadError, match=r"rank 1: ValueError: .*can't be planned") as caught:
        client.load({"w": torch.zeros(6)}, checkpoint_id=place, planner=planner)
    # The exception itself stays on its rank.
    assert isinstance(caught.value.failures[1][0], ValueError) is (rank == 1)
    del caught
    client.load({"w": torch.zeros(6)}, checkpoint_id=place)


def an_interrupt_on_one_rank_is_raised_there_and_named_elsewhere() -> None:
    import os
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from pannier import client

    class Interrupted(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            raise KeyboardInterrupt

    rank, place = dist.get_rank(), os.environ["PLACE"]
    if rank == 1:
        with pytest.raises(KeyboardInterrupt):
            client.load({"w": torch.zeros(6)}, checkpoint_id=place, planner=Interrupted())
    else:
        with pytest.raises(client.LoadError, match="rank 1: KeyboardInterrupt"):
            client.load({"w": torch.zeros(6)}, checkpoint_id=place)
    client.load({"w": torch.zeros(6)}, checkpoint_id=place)


def groups_and_single_ranks_load_beside_each_other() -> None:
    import os

    import pytest
    import torch
    import torch.distributed as dist

    from pannier import client
    from pannier.common import timeouts
    from support.processes.stretch import stretched

    rank, place = dist.get_rank(), os.environ["PLACE"]
    pair = dist.new_group([1, 2])
    if rank == 1:
        with pytest.raises(client.LoadError, match=r"waiting for rank 2 \(host .*\) to call load"):
            client.load(
                {"w": torch.zeros(6)},
                checkpoint_id=place,
                process_group=pair,
                timeout=stretched(0.5),
            )
    state = {"w": torch.zeros(6)}
    client.load(state, checkpoint_id=place, no_dist=True)
    assert torch.equal(state["w"], torch.arange(6.0))
    client.load({"w": torch.zeros(6)}, checkpoint_id=place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "LOAD_REJOIN_S", stretched(60.0))
        # Rank 2 missed one, and joins the next.
        if rank:
            client.load({"w": torch.zeros(6)}, checkpoint_id=place, process_group=pair)


def a_rank_that_reads_on_is_waited_for_beyond_the_timeout() -> None:
    import os
    import time
    from typing import Any

    import pytest
    import torch
    import torch.distributed as dist

    from pannier.client.loading.load import load
    from pannier.client.loading.storage_reader import StorageReader
    from pannier.client.ranks import load_ranks
    from pannier.client.ranks.load_error import LoadError
    from pannier.common import timeouts
    from support.processes.stretch import stretched

    rank, place = dist.get_rank(), os.environ["PLACE"]
    began = time.monotonic()

    class Slow(StorageReader):
        stuck = False

        def progress_text(self) -> str:
            return "stuck" if self.stuck else f"{time.monotonic() - began:.3f} s read"

        def read_data(self, *arguments: Any) -> Any:
            if rank == 1:
                time.sleep(stretched(8.0))
            return super().read_data(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "READ_PROGRESS_S", stretched(0.05))
        patch.setattr(timeouts, "WAIT_LOOK_S", stretched(0.1))
        # Through a collective, as the .metadata of a large checkpoint.
        patch.setattr(load_ranks, "_INLINE_BYTES", 10)
        load({"w": torch.zeros(6)}, Slow(place), timeout=stretched(5.0))
        stuck = Slow(place)
        stuck.stuck = True
        with pytest.raises(
            LoadError, match=r"rank 1 \(host .*\) \(rank 1: stuck\) to read its part"
        ):
            load({"w": torch.zeros(6)}, stuck, timeout=stretched(5.0))
    load({"w": torch.zeros(6)}, checkpoint_id=place)


def loads_leave_as_many_keys_in_the_store_however_many_there_were() -> None:
    import os

    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from pannier import client
    from pannier.client.torch_compat import group_store

    place, store = os.environ["PLACE"], group_store(None)

    class Failing(DefaultLoadPlanner):
        def create_local_plan(self) -> None:
            raise ValueError("no plan")

    def load_and_count() -> int:
        client.load({"w": torch.zeros(6)}, checkpoint_id=place)
        dist.barrier()
        # Of all kinds of keys.
        count: int = store.num_keys()
        dist.barrier()
        return count

    counts = [load_and_count() for _ in range(3)]
    for _ in range(3):
        with pytest.raises(client.LoadError, match="no plan"):
            client.load({"w": torch.zeros(6)}, checkpoint_id=place, planner=Failing())
    counts += [load_and_count() for _ in range(2)]
    # Barriers of torch may count in the store, too; a load has more than a dozen keys.
    assert counts[-1] - counts[0] < 12, counts


def latest_has_one_answer_in_time_and_stays_in_step() -> None:
    import os
    import time
    from pathlib import Path
    from typing import Any

    import pytest
    import torch.distributed as dist

    from pannier import client
    from pannier.client.ranks.group_store import GroupStore
    from pannier.client.resume.latest import find_latest
    from pannier.common import timeouts

    rank, place = dist.get_rank(), os.environ["PLACE"]
    root = str(Path(place).parent)
    waits = []

    class Ingested:
        def resume_here(self) -> None:
            began = time.monotonic()
            while time.monotonic() == began:
                pass

        def finish_newest(
            self, root: object, pattern: object, options: object, timeout_s: float
        ) -> None:
            waits.append(timeout_s)

    def await_value(store: GroupStore, key: str, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return original(store, key, timeout_s)

    original = GroupStore.await_value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupStore, "await_value", await_value)
        assert find_latest(root, include="ingested", timeout=100, ingested=Ingested()) == place
    if rank == 0:
        # What resume_here has left.
        assert 0 < waits[0] < 100
    else:
        assert waits == [100 + timeouts.LATEST_S]
    # A call counts also where its arguments are refused.
    wrong = [{"include": "x"}, {"timeout": -1}, {"timeout": "1"}]
    for arguments in wrong:
        if rank == 0:
            assert client.latest(root) == place
        else:
            with pytest.raises(client.InvalidRequestError):
                client.latest(root, **arguments)
    for arguments in wrong:
        if rank == 0:
            with pytest.raises(client.InvalidRequestError):
                client.latest(root, **arguments)
        else:
            with pytest.raises(client.StorageError, match=r"include='x'|timeout=-1|timeout='1'"):
                client.latest(root)
    assert client.latest(place) is None
    assert client.latest(root) == place


SCENARIOS = (
    (2, loads_leave_as_many_keys_in_the_store_however_many_there_were),
    (2, latest_has_one_answer_in_time_and_stays_in_step),
    (3, a_rank_that_never_calls_load_is_named_and_the_next_load_works),
    (2, a_rank_that_left_loads_out_or_has_wrong_arguments_is_in_step_at_the_next_one),
    (3, what_raises_at_any_step_ends_the_load_on_all_ranks),
    (2, an_error_of_many_megabytes_leaves_the_store_to_the_next_load_and_to_torch),
    (2, an_exception_that_holds_a_large_tensor_ends_the_load_on_the_other_ranks_at_once),
    (2, an_interrupt_on_one_rank_is_raised_there_and_named_elsewhere),
    (3, groups_and_single_ranks_load_beside_each_other),
    (2, a_rank_that_reads_on_is_waited_for_beyond_the_timeout),
)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    place = tmp_path_factory.mktemp("root") / "step-1"
    state = {"w": torch.arange(6.0), "deep": {"b": torch.ones(2)}}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return run_in_turn(SCENARIOS, {"PLACE": str(Path(place))}, timeout=240)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("scenario", [scenario.__name__ for _, scenario in SCENARIOS])
def test_on_several_ranks(passed: set[str], scenario: str) -> None:
    assert scenario in passed, "see the ranks' output where they were started"


LOADS_AND_ENDS = """
import os, time, types
from pathlib import Path
import torch
import torch.distributed as dist
from pannier import client
from pannier.client.ranks import group_store

dist.init_process_group("gloo")
rank, looked = dist.get_rank(), Path(os.environ["LOOKED"])

def look_late(seconds):
    looked.touch()
    # It looks for the outcome again when rank 0 may have ended.
    time.sleep(1.5)

class Last:
    def state_dict(self):
        return {"v": torch.zeros(1)}

    def load_state_dict(self, state):
        if rank == 0:
            # The last one to come.
            while not looked.exists():
                time.sleep(0.01)
        else:
            group_store.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=look_late)

client.load({"s": Last()}, checkpoint_id=os.environ["PLACE"])
os._exit(0)
"""


def test_a_program_may_end_with_its_load(tmp_path: Path) -> None:
    dcp.save({"s": {"v": torch.ones(1)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    environment = {"PLACE": str(tmp_path / "a"), "LOOKED": str(tmp_path / "looked")}
    with start_ranks(LOADS_AND_ENDS, 2, environment, torchrun=False) as ranks:
        ranks.wait(BOUND_S).check()
