"""torchtitan's trainer with Pannier's ``CheckpointManager``."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from frameworks.killed_runs import PROGRAMS, check_resumes
from pannier import client
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.storage.gcs_server import GcsServer


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_killed_job_resumes_bit_for_bit_after_the_step_that_was_ingested(
    daemons: Daemons, server: GcsServer, tmp_path: Path, mode: str
) -> None:
    program = PROGRAMS / "torchtitan_job.py"
    check_resumes(program, mode, daemons, server, tmp_path, lambda step: f"step-{step}", MODE=mode)


def test_a_number_of_checkpoints_to_keep_is_refused_with_the_setting_that_has_it() -> None:
    from pannier.client.integrations.torchtitan import CheckpointManager

    with pytest.raises(
        ValueError, match=r"keep_latest_k=3 would remove committed .*PANNIER_KEEP_NEWEST"
    ):
        CheckpointManager.Config(enable=True, keep_latest_k=3)
    assert CheckpointManager.Config(enable=True).keep_latest_k == 0


@pytest.mark.parametrize("mode", ["DISABLED", "ASYNC"])
def test_a_save_replaces_what_torch_has_written_at_its_step(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from torchtitan.components.checkpointer import AsyncMode

    from pannier.client.integrations.torchtitan import CheckpointManager

    for name, value in daemons.env(**daemons.environment).items():
        monkeypatch.setenv(name, value)
    path = str(tmp_path / "step-1")
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=path, no_dist=True)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True),
        **dict.fromkeys(("dataloader", "lr_schedulers", "sd_adapter")),
        model_parts=[],
        optimizers=[],
        states={},
    )
    manager.dcp_save({"w": torch.ones(4)}, path, AsyncMode[mode])
    manager.close()
    loaded = {"w": torch.zeros(4)}
    client.load(loaded, checkpoint_id=path)
    assert torch.equal(loaded["w"], torch.ones(4))
    client.close()


def test_one_that_nothing_has_closed_ends_with_the_interpreter_and_says_nothing(
    daemons: Daemons, tmp_path: Path
) -> None:
    program = f"""
    import torch
    from torchtitan.components.checkpointer import AsyncMode
    from pannier.client.integrations.torchtitan import CheckpointManager

    manager = CheckpointManager(
        CheckpointManager.Config(enable=True),
        **dict.fromkeys(("dataloader", "lr_schedulers", "sd_adapter")),
        model_parts=[],
        optimizers=[],
        states={{}},
    )
    manager.dcp_save({{"w": torch.ones(4)}}, "{tmp_path}/step-1", AsyncMode.ASYNC)
    """
    (output,) = run_ranks(program, 1, daemons.env(**daemons.environment), torchrun=False).outputs
    assert (tmp_path / "step-1/.metadata").exists()
    assert "Exception ignored" not in output


def test_its_close_raises_what_a_save_has_failed_with_unless_training_has_failed(
    daemons: Daemons, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.components.checkpointer import AsyncMode

    from pannier.client.integrations.torchtitan import CheckpointManager

    for name, value in daemons.env(**daemons.environment).items():
        monkeypatch.setenv(name, value)

    def saving() -> CheckpointManager:
        manager = CheckpointManager(
            CheckpointManager.Config(enable=True),
            **dict.fromkeys(("dataloader", "lr_schedulers", "sd_adapter")),
            model_parts=[],
            optimizers=[],
            states={},
        )
        state = {"w": torch.zeros(3 << 20)}
        manager.dcp_save(state, "gs://bucket/denied/step-1", AsyncMode.ASYNC)
        return manager

    server.fault(
        kind="status",
        method="POST",
        path="uploadType=resumable",
        status=403,
        message="no such right",
        times=-1,
    )
    with pytest.raises(client.SaveAbortedError, match="no such right"):
        saving().close()
    manager = saving()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        # As torchtitan does before it raises the error again.
        manager.close()
    with pytest.raises(client.SaveAbortedError, match="no such right"):
        client.wait_all()
    server.clear()
    client.close()
