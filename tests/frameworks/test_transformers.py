"""Transformers' Trainer with Pannier's callback."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from frameworks.killed_runs import PROGRAMS, check_resumes, listed, train
from pannier import client
from pannier.client.integrations.scratch_directory import ScratchDirectory
from pannier.wire import limits
from support.processes.daemons import Daemons
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S
from support.storage.gcs_server import GcsServer

PROGRAM = PROGRAMS / "transformers_job.py"


def test_a_killed_job_resumes_bit_for_bit_after_the_step_that_was_ingested(
    daemons: Daemons, server: GcsServer, tmp_path: Path
) -> None:
    name = "transformers"
    check_resumes(PROGRAM, name, daemons, server, tmp_path, lambda step: f"checkpoint-{step}")


def test_the_newest_directory_is_not_resumed_when_its_save_was_aborted(
    daemons: Daemons, tmp_path: Path
) -> None:
    root = "gs://bucket/transformers-aborted"
    env = {
        **daemons.env(**daemons.environment),
        "ROOT": root,
        "SCRATCH": str(tmp_path),
        "STEPS": "6",
    }
    dying = {**env, "DIE_BEFORE_SAVE": "4"}
    with start_ranks(PROGRAM, 2, dying, torchrun=False) as ranks:
        assert ranks.processes[1].wait(3 * BOUND_S) == -9
        ranks.kill()
    assert (tmp_path / "checkpoint-4").exists()
    assert listed(root, env) == ["checkpoint-2"]
    for output in train(PROGRAM, {**env, "RESUME": "True"}):
        assert "resumes after 2\n" in output
    assert listed(root, env)[-1] == "checkpoint-6"


def test_a_resumed_job_ends_with_the_best_model_of_all_hosts(
    server: GcsServer, tmp_path: Path
) -> None:
    # None is removed.
    with Daemons(tmp_path / "daemons", environment=server.env) as daemons:
        env = {**daemons.env(**server.env), "ROOT": "gs://bucket/best", "BEST": "yes"}
        ends = [
            re.findall(r"^ends with (\w+)$", output, re.M)
            for steps in ("4", "6")
            for output in train(PROGRAM, {**env, "STEPS": steps, "SCRATCH": str(tmp_path / steps)})
        ]
        assert listed(env["ROOT"], env) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all(ends)
    assert ends[:2] == ends[2:]


def test_a_best_model_without_a_checkpoint_is_not_looked_for(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pannier.client.integrations import transformers

    for name, value in daemons.env(**daemons.environment).items():
        monkeypatch.setenv(name, value)
    callback = transformers.PannierCallback(tmp_path / "run")
    callback._scratch = transformers.ScratchDirectory(tmp_path / "scratch", callback.root)
    state = SimpleNamespace(best_global_step=2, best_model_checkpoint="/left/by/an/abort")
    callback.on_train_begin(SimpleNamespace(load_best_model_at_end=True), state, None)
    assert state.best_model_checkpoint is state.best_global_step is None
    client.close()


def test_a_save_replaces_what_torch_has_written_at_its_name_unless_it_may_not(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pannier.client.integrations.transformers import PannierCallback

    for name, value in daemons.env(**daemons.environment).items():
        monkeypatch.setenv(name, value)
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path / "run/checkpoint-2", no_dist=True)
    state = SimpleNamespace(global_step=2, best_global_step=None, log_history=[])
    options = SimpleNamespace(metric_for_best_model=None)

    def save(**settings: Any) -> None:
        callback = PannierCallback(tmp_path / "run", **settings)
        callback._rank = 0
        callback._scratch = scratch = ScratchDirectory(tmp_path / "scratch", callback.root)
        scratch.directory.joinpath("checkpoint-2").mkdir(parents=True, exist_ok=True)
        scratch.save(Path("checkpoint-2/model"), {"w": torch.ones(4)})
        callback.on_save(options, state, None)
        client.wait_all()

    with pytest.raises(client.CheckpointExistsError):
        save(overwrite=None)
    save()
    loaded = {"model": {"w": torch.zeros(4)}}
    client.load(loaded, checkpoint_id=tmp_path / "run/checkpoint-2")
    assert torch.equal(loaded["model"]["w"], torch.ones(4))
    client.close()


def test_a_save_has_as_many_metrics_as_it_may_have_the_best_models_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from pannier.client.integrations.transformers import PannierCallback

    staged = []
    callback = PannierCallback(tmp_path / "run")
    callback._rank = 0
    callback._scratch = SimpleNamespace(
        directory=tmp_path, stage=lambda name, files, metrics, overwrite: staged.append(metrics)
    )
    (tmp_path / "checkpoint-2").mkdir()
    names = [f"eval_{number}_runtime" for number in range(limits.MAX_METRICS)]
    names += ["eval_" + "x" * limits.MAX_WORD, "eval_loss", "eval_best", "loss"]
    state = SimpleNamespace(
        global_step=2, best_global_step=None, log_history=[{"step": 2, **dict.fromkeys(names, 0.5)}]
    )
    for _ in range(2):
        callback.on_save(SimpleNamespace(metric_for_best_model="best"), state, None)
    for metrics in staged:
        limits.check_metrics(metrics)
        assert len(metrics) == limits.MAX_METRICS
        assert metrics.keys() >= {"eval_loss", "eval_best"}
    assert len(staged) == 2
    assert [each.message for each in caplog.records if "metrics" in each.message] == [
        "64 of 67 metrics are saved with the checkpoint: at most 64, with names of 128 characters"
    ]


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("save_total_limit", 3, r"save_total_limit=3 .*PANNIER_KEEP_NEWEST=3"),
        ("enable_jit_checkpoint", True, "enable_jit_checkpoint"),
        ("output_dir", "/root/of/checkpoints", "another output_dir"),
    ],
)
def test_settings_that_it_cannot_keep_are_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: object, named: str
) -> None:
    from pannier.client.integrations import transformers

    sharded = SimpleNamespace(state_dict_type=SimpleNamespace(name="SHARDED_STATE_DICT"))
    state = SimpleNamespace(fsdp_plugin=sharded)
    monkeypatch.setattr(transformers, "AcceleratorState", lambda: state)
    usual = {"save_total_limit": None, "enable_jit_checkpoint": False, "output_dir": "/tmp/scratch"}
    callback = transformers.PannierCallback("/root/of/checkpoints")
    with pytest.raises(ValueError, match=named):
        callback.on_init_end(SimpleNamespace(**{**usual, setting: value}), None, None)
    state.fsdp_plugin = None
    with pytest.raises(ValueError, match="SHARDED_STATE_DICT"):
        callback.on_init_end(SimpleNamespace(**usual), None, None)
