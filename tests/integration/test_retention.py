"""Retention after each commit, by a real coordinator: what is removed, what stays, and what is reported."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pannier.client import Client, InvalidRequestError, StorageWriter
from pannier.client.config import load_settings
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.processes.stretch import BOUND_S
from support.states.dcp_readers import plain_load
from support.storage.gcs_server import GcsServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZE = 1000


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), float(step)), "step": step}


@contextmanager
def running(tmp_path: Path, *rules: str, server: GcsServer | None = None) -> Iterator[Daemons]:
    environment = {} if server is None else server.env
    with Daemons(tmp_path, coordinator_arguments=rules, environment=environment) as daemons:
        yield daemons


def saving(daemons: Daemons, job: str = "job") -> Client:
    return Client(load_settings(sidecar=daemons.sidecar_address, job=job))


def names(root: str, **environment: str) -> list[str]:
    listed = pannier("ls", "--json", root, env=environment).json_lines()
    return [
        line["checkpoint"].removeprefix(root).lstrip("/")
        for line in listed
        if line["state"] == "committed"
    ]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.1)


@pytest.mark.parametrize("scheme", ["file", "gs"])
def test_after_each_commit_what_no_rule_keeps_goes(tmp_path: Path, scheme: str) -> None:
    rules = ("--keep-newest", "2", "--keep-every", "40", "--keep-best", "loss:min", "--keep", "x*")
    with GcsServer(tmp_path / "gcs") as server, running(tmp_path, *rules, server=server) as daemons:
        root = f"{tmp_path}/run" if scheme == "file" else "gs://bucket/run"
        with saving(daemons, "another") as other:
            other.save(state(5), checkpoint_id=f"{root}/step-5")
        with saving(daemons) as client:
            client.save(state(7), checkpoint_id=f"{root}/x-7")
            for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0), (50, 9.0), (60, 9.0)):
                client.save(
                    state(step), checkpoint_id=f"{root}/step-{step}", metrics={"loss": loss}
                )
        left = ["step-5", "x-7", "step-20", "step-40", "step-50", "step-60"]
        until(lambda: names(root, **server.env) == left, f"only {left}")
        listed = {
            line["checkpoint"].rpartition("/")[2]: line
            for line in pannier("ls", "--json", root, env=server.env).json_lines()
        }
        assert listed["step-20"]["metrics"] == {"loss": 1.0}
        until(lambda: "every 40" in pannier("ls", root, env=server.env).out, "the record for `ls`")
        assert listed["step-5"]["kept_for"] == ["newest"]
        if scheme == "file":
            # All of them, with their records.
            directories = sorted([*left, ".pannier"])
            until(
                lambda: sorted(each.name for each in Path(root).iterdir()) == directories, "empty"
            )
            blank = {"w": torch.zeros(SIZE), "step": 0}
            plain_load(blank, f"{root}/step-20")
            assert blank["step"] == 20
            log = daemons.coordinator.log()
            assert f"retention: {root}/step-10 is removed" in log
            assert "step-5 is removed" not in log


def test_with_a_pattern_deeper_checkpoints_go(tmp_path: Path) -> None:
    """As frameworks lay them out; a second start numbers its incarnation by itself in each directory."""
    root, pattern = tmp_path / "run", "checkpoint-*/dcp"
    rules = ("--keep-newest", "1", "--keep-every", "20", "--retention-pattern", pattern)
    with running(tmp_path, *rules) as daemons:
        for start in ((10, 20, 30), (25, 27)):
            with saving(daemons) as client:
                for step in start:
                    id_ = root / f"checkpoint-{step}" / "dcp"
                    client.save(state(step), checkpoint_id=id_)
                    # The newest of the save's start, though 30 is a higher step.
                    assert client.latest(root, pattern=pattern) == str(id_)
        left = ["checkpoint-20/dcp", "checkpoint-27/dcp"]
        # Without the pattern, `pannier ls` has no order of starts that were numbered apart.
        until(lambda: sorted(names(str(root))) == left, f"only {left}")
        until(lambda: len(list(root.glob("checkpoint-*"))) == 2, "the removal of their directories")
        assert [each.step for each in client.list(root, pattern=pattern)] == [20, 27]


def test_what_is_being_read_waits(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with running(tmp_path, "--keep-newest", "1") as daemons, saving(daemons) as client:
        client.save(state(1), checkpoint_id=str(root / "step-1"))
        with _lease(root):
            client.save(state(2), checkpoint_id=str(root / "step-2"))
            until(lambda: "step-1 stays: it is being read by" in daemons.coordinator.log(), "word")
            assert (root / "step-1" / ".metadata").exists()
        client.save(state(3), checkpoint_id=str(root / "step-3"))
        until(lambda: names(str(root)) == ["step-3"], "the removal of both")


@contextmanager
def _lease(root: Path) -> Iterator[None]:
    """A reader's, as another process would hold it."""
    (attempt,) = [
        path.name for path in (root / "step-1" / ".pannier").iterdir() if path.name.startswith("i")
    ]
    lease = root / "step-1" / ".pannier" / "leases" / f"{attempt}-0123456789abcdef"
    lease.parent.mkdir(exist_ok=True)
    lease.write_text(json.dumps({"attempt": attempt, "host": "h", "pid": 1, "renewS": 60}))
    yield
    lease.unlink()


def test_metrics_of_several_ranks(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    with running(tmp_path) as daemons:
        environment = {**daemons.env(), "ROOT": root}
        run_ranks(TWO_RANKS, 2, environment, torchrun=False)
        (line,) = pannier("ls", "--json", root).json_lines()
        # Of the lowest rank that reported each.
        assert line["metrics"] == {"loss": 0.5, "of-1": 1.0}


TWO_RANKS = """
    import math, os
    import torch
    import torch.distributed as dist
    from pannier import client

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    metrics = {"loss": 0.5, "nothing": math.nan} if rank == 0 else {"loss": 9, "of-1": torch.tensor(1.0)}
    client.save({"w": torch.ones(8)}, checkpoint_id=os.environ["ROOT"] + "/step-1", metrics=metrics)
    client.close()
    dist.destroy_process_group()
"""


def test_metrics_of_a_storage_writer(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    with running(tmp_path) as daemons, saving(daemons) as client:
        writer = StorageWriter(f"{root}/step-1", client=client, metrics={"loss": 2})
        dcp.save(state(1), storage_writer=writer)
        writer.metrics = {"loss": 0.5}
        dcp.save(state(2), checkpoint_id=f"{root}/step-2", storage_writer=writer)
        client.save(state(3), checkpoint_id=f"{root}/step-3", storage_writer=writer)
        given = {"loss": 4.0}
        client.save(state(4), checkpoint_id=f"{root}/step-4", storage_writer=writer, metrics=given)
        with pytest.raises(InvalidRequestError, match=r"metrics\['loss'\] is 'low'"):
            writer.metrics = {"loss": "low"}
        with pytest.raises(InvalidRequestError, match=r"metrics\['loss'\] is None"):
            StorageWriter(f"{root}/step-5", metrics={"loss": None})
        lines = pannier("ls", "--json", root).json_lines()
        assert [line["metrics"] for line in lines] == [{"loss": n} for n in (2.0, 0.5, 0.5, 4.0)]


def test_metrics_that_are_none_are_refused_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as daemons, saving(daemons) as client:
        for metrics, said in (
            ({"loss": "low"}, r"metrics\['loss'\] is 'low', no number"),
            ({"loss": torch.ones(2)}, r"metrics\['loss'\]"),
            ({"": 1.0}, "not a valid name of a metric"),
            ({f"m{n}": 1.0 for n in range(65)}, "65 metrics"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                client.save(state(1), checkpoint_id=f"{tmp_path}/run/step-1", metrics=metrics)
        client.save(state(1), checkpoint_id=f"{tmp_path}/run/step-1", metrics={"n": 3})


def test_by_hand_and_without_doing_it(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    with running(tmp_path) as daemons, saving(daemons) as client:
        for step in (1, 2, 3):
            client.save(state(step), checkpoint_id=f"{root}/step-{step}")
    asked = ("retain", root, "--job", "job", "--keep-newest", "2")
    result = pannier(*asked, "--dry-run")
    assert result.code == 0
    assert "would be removed" in result.out
    assert names(root) == ["step-1", "step-2", "step-3"]
    lines = pannier(*asked, "--json").json_lines()
    assert [bool(line["kept_for"]) for line in lines] == [False, True, True]
    assert lines[0]["bytes"] > 4 * SIZE
    assert names(root) == ["step-2", "step-3"]
    assert not os.path.exists(f"{root}/step-1")
    # Another job has none there; a rule that means nothing changes nothing.
    none = pannier("retain", root, "--job", "x", "--keep-newest", "1")
    assert (none.code, "no checkpoints of job x" in none.err) == (1, True), none
    assert "hint: there are some of job" in none.err
    assert pannier(*asked, "--keep-best", "loss").code == 2
    assert names(root) == ["step-2", "step-3"]
