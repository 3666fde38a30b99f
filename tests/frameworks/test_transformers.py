"""Transformers' Trainer with Pannier's callback."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from frameworks.killed_runs import PROGRAMS, check_resumes, listed, train
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
