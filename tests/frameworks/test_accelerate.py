"""Accelerate with Pannier's ``save_state`` and ``load_state``, and what calls DCP within ``client.patch_dcp()``."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from frameworks.killed_runs import PROGRAMS, check_resumes, listed, train
from support.processes.daemons import Daemons
from support.storage.gcs_server import GcsServer


@pytest.mark.parametrize("job", ["accelerate", "dcp"])
def test_a_killed_job_resumes_bit_for_bit_after_the_step_that_was_ingested(
    daemons: Daemons, server: GcsServer, tmp_path: Path, job: str
) -> None:
    program = PROGRAMS / f"{job}_job.py"
    check_resumes(program, job, daemons, server, tmp_path, lambda step: f"step-{step}")


def test_accelerates_own_functions_save_and_load_with_the_patch(
    daemons: Daemons, tmp_path: Path
) -> None:
    env = daemons.env(**daemons.environment, ROOT=str(tmp_path))
    for output in train(PROGRAMS / "accelerate_patched.py", env):
        assert "loaded bit for bit\n" in output
    names = ["optimizer_0", "pytorch_model_fsdp_0"]
    assert sorted(listed(str(tmp_path / "step-1"), env)) == names


@pytest.mark.parametrize(
    ("plugin", "automatic", "named"),
    [
        (None, False, "SHARDED_STATE_DICT"),
        ("FULL_STATE_DICT", False, "SHARDED_STATE_DICT"),
        ("SHARDED_STATE_DICT", True, "automatic_checkpoint_naming=True"),
    ],
)
def test_settings_that_it_cannot_keep_are_refused(
    tmp_path: Path, plugin: str | None, automatic: bool, named: str
) -> None:
    from pannier.client.integrations.accelerate import save_state

    kind = SimpleNamespace(name=plugin)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin and SimpleNamespace(state_dict_type=kind)),
        project_configuration=SimpleNamespace(automatic_checkpoint_naming=automatic),
    )
    with pytest.raises(ValueError, match=named):
        save_state(accelerator, tmp_path / "step-1")
