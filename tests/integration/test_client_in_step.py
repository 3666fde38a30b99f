"""Each way of ranks drifting apart: that save is over on all of them, the next is in step."""

import json
from typing import Any

import pytest

from support.daemons import Daemons
from support.ranks import start_ranks

_RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from pannier import client

dist.init_process_group("gloo")
rank = dist.get_rank()
root = os.environ["ROOT"]
both = dist.new_group([0, 1])
first = dist.new_group([0])
found = {}


class Broken(DefaultSavePlanner):
    def __init__(self, where):
        super().__init__()
        self.where = where
    def create_local_plan(self):
        if self.where == "plan":
            raise RuntimeError("no plan today")
        return super().create_local_plan()
    def resolve_data(self, item):
        if self.where == "data":
            raise RuntimeError("no data today")
        return super().resolve_data(item)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not to be pickled")


def say(error):
    failures = getattr(error, "failures", {})
    return [type(error).__name__, str(error), {r: f.message for r, f in failures.items()}]


def attempt(name, state=None, **arguments):
    state = {f"w{rank}": torch.full((100,), float(rank))} if state is None else state
    arguments.setdefault("checkpoint_id", f"{root}/{name}")
    try:
        client.async_save(state, timeout=30, **arguments).result(60)
        found[name] = "committed"
    except Exception as error:
        found[name] = say(error)
    dist.barrier()


attempt("good-1")
attempt("argument", **({"use_collectives": False} if rank else {}))
attempt("plan", planner=Broken("plan" if rank else ""))
attempt("data", planner=Broken("data" if rank else ""))
attempt("object", state={f"o{rank}": Unpicklable() if rank else 1, f"w{rank}": torch.ones(3)})
attempt("sparse", state={f"w{rank}": torch.eye(3).to_sparse() if rank else torch.eye(3)})
attempt("elsewhere", checkpoint_id=f"{root}/elsewhere-{rank}")
attempt("kinds", state={"k": torch.ones(3) if rank else "an object"})
slots = [client.default_client()._slots.take("raise", 1) for _ in range(2 * rank)]
attempt("skip", on_busy="skip")
attempt("busy", on_busy="raise")
for slot in slots:
    slot.free()
attempt("group", process_group=first)
attempt("good-2", process_group=both)
attempt("good-3")
if not rank:
    attempt("alone-1")
    attempt("alone-2")
    dist.barrier()
else:
    for _ in range(3):
        dist.barrier()
attempt("good-4")
attempt("good-5")
print("FOUND", json.dumps(found), flush=True)
client.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("in-step")
    with (
        Daemons(directory) as daemons,
        start_ranks(
            _RANKS, 2, {**daemons.env(PANNIER_PLAN_TIMEOUT="5"), "ROOT": str(directory / "run")}
        ) as ranks,
    ):
        outputs = ranks.wait(150).check().outputs
    lines = [line for output in outputs for line in output.splitlines() if "FOUND " in line]
    return [json.loads(line.split("FOUND ", 1)[1]) for line in lines], directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("argument", "use_collectives"),
        ("plan", "no plan today"),
        ("data", "no data today"),
        ("object", "not to be pickled"),
        ("sparse", "w1"),
        ("elsewhere", "elsewhere-1"),
        ("kinds", "k"),
        ("skip", "not ingested yet"),
        ("busy", "not ingested yet"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_by_name(found: Any, name: str, says: str) -> None:
    ranks, run = found
    for rank in ranks:
        assert rank[name] != "committed"
        kind, message, _ = rank[name]
        assert says in message, (kind, message)
    assert not list(run.glob(f"{name}*/.metadata"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["argument", "plan", "data", "object", "sparse"])
def test_the_other_rank_is_told_whose_fault_it_was(found: Any, name: str) -> None:
    (innocent, _), _ = found
    kind, _, failures = innocent[name]
    assert kind == "SaveAbortedError"
    assert list(failures) == ["1"], failures


@pytest.mark.slow
def test_a_skip_is_a_skip_on_all_ranks(found: Any) -> None:
    ranks, _ = found
    assert [rank["skip"][0] for rank in ranks] == ["SaveSkippedError"] * 2
    assert [rank["busy"][0] for rank in ranks] == ["SaveAbortedError", "BusyError"]


@pytest.mark.slow
def test_the_saves_before_and_after_are_committed(found: Any) -> None:
    ranks, run = found
    for name in ("good-1", "good-3", "good-4", "good-5"):
        assert [rank[name] for rank in ranks] == ["committed", "committed"]
        assert (run / name / ".metadata").exists()


@pytest.mark.slow
def test_a_rank_that_leaves_calls_out_is_named_and_joins_again(found: Any) -> None:
    ranks, _ = found
    for name in ("alone-1", "alone-2"):
        kind, message, failures = ranks[0][name]
        assert kind == "SaveAbortedError"
        assert "rank 1" in message
        assert list(failures) == ["1"]
        assert name not in ranks[1]


@pytest.mark.slow
def test_a_rank_outside_the_group_is_refused_without_losing_step(found: Any) -> None:
    ranks, _ = found
    assert ranks[0]["group"] == "committed"
    assert ranks[1]["group"][0] == "InvalidRequestError"
    assert "rank 1" in ranks[1]["group"][1]
