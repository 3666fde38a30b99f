"""Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), saving and loading with Pannier.

In: what Lightning's trainer saves, on all ranks. Out: the same directories as Lightning's own, the states as
DCP and the rest as ``meta.pt``, in one commit. Callbacks decide when to save; the coordinator decides which
checkpoints are removed. For Lightning 2.6.
"""

import io
import os
from typing import Any

import torch
from lightning.pytorch import Trainer, strategies
from lightning.pytorch.callbacks import LearningRateFinder, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from pannier import client

_META = "meta.pt"


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """For ``Trainer(strategy=...)``, with Lightning's arguments. ``ModelCheckpoint`` must have ``save_top_k=-1``.

    Args:
        arguments, options: Lightning's.
        overwrite: what a save may replace, as ``client.async_save`` takes it. True: any checkpoint, as Lightning does.
    """

    def __init__(self, *arguments: Any, overwrite: bool | None = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._overwrite = overwrite

    def setup(self, trainer: Trainer) -> None:
        """Raises ValueError for settings that are not supported."""
        if not self._save_distributed_checkpoint:
            raise ValueError(
                "save_distributed_checkpoint=False saves one file from rank 0: that is for Lightning's own strategy"
            )
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and any(isinstance(each, LearningRateFinder) for each in trainer.callbacks):
            raise ValueError(
                "LearningRateFinder removes a checkpoint that it saves: find the rate with Lightning's own strategy"
            )
        for callback in trainer.checkpoint_callbacks if fits else ():
            keep, last = getattr(callback, "save_top_k", -1), getattr(callback, "save_last", None)
            if keep > 0:
                _refuse_removal(f"{type(callback).__name__}(save_top_k={keep})")
            if last == "link":
                raise ValueError(
                    "save_last='link' would link to a checkpoint that isn't committed: leave it out, and resume "
                    "from pannier.client.latest(dirpath)"
                )
            name = getattr(callback, "CHECKPOINT_NAME_LAST", "")
            if last and "{" in name:
                _refuse_removal(f"CHECKPOINT_NAME_LAST={name!r}", "give it no placeholder")
        super().setup(trainer)

    # Pannier copies from the device itself: no copies of the states are made here.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, on its device."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """One optimizer's state dict, on its device, by names of parameters."""
        return get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str, storage_options: Any = None
    ) -> None:
        """Saves in the background; returns when all is staged, or committed before Slurm requeues the job."""
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r}: set PANNIER_STORAGE_OPTIONS of the daemons"
            )
        state = {"state_dict": checkpoint.pop("state_dict")}
        for index, each in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = each
        meta = io.BytesIO()
        torch.save(checkpoint, meta)
        path = self.broadcast(filepath)
        handle = client.async_save(
            state,
            checkpoint_id=path,
            extra_files={_META: meta.getvalue()} if self.global_rank == 0 else None,
            metrics=self._monitored(),
            overwrite=self._overwrite,
        )
        if os.path.basename(path).startswith("hpc_ckpt_"):
            # Lightning requeues the Slurm job next, and embedded daemons end with it.
            handle.result()

    def load_checkpoint(
        self, checkpoint_path: str, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads into the model and the optimizers; the rest is returned."""
        path = self.broadcast(checkpoint_path)
        if os.path.isfile(path):  # Lightning's other format
            found: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return found
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for index, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{index}"] = get_optimizer_state_dict(self.model, optimizer)
        loaded = client.load(state, checkpoint_id=path, extra_files=[_META])
        strict = self.lightning_module.strict_loading
        self.model.load_state_dict(state["state_dict"], strict=strict)
        for index, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{index}"])
        meta = io.BytesIO(loaded.extra_files[_META])
        rest: dict[str, Any] = torch.load(meta, weights_only=weights_only)
        return rest

    def remove_checkpoint(self, filepath: str) -> None:
        """Raises ValueError, except for ``OnExceptionCheckpoint``: only the coordinator removes checkpoints."""
        callbacks = self.lightning_module.trainer.callbacks
        exceptions = [each for each in callbacks if isinstance(each, OnExceptionCheckpoint)]
        # It removes its checkpoint whenever training succeeds. Mostly there is none; one of an earlier start stays.
        if filepath not in [each.ckpt_path for each in exceptions]:
            _refuse_removal(f"the removal of {filepath}")

    def on_train_end(self) -> None:
        """Waits until all is committed; raises what failed."""
        super().on_train_end()
        client.wait_all()

    def _monitored(self) -> dict[str, Any]:
        """What the callbacks monitor, for the coordinator's ``--keep-best``."""
        trainer = self.lightning_module.trainer
        names = {getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks}
        return {name: value for name, value in trainer.callback_metrics.items() if name in names}


def _refuse_removal(what: str, instead: str = "set save_top_k=-1") -> None:
    raise ValueError(
        f"{what} would remove checkpoints while newer ones aren't committed yet: {instead}, and set "
        "PANNIER_KEEP_NEWEST or PANNIER_KEEP_BEST (`pannier coordinator --keep-newest 3 --keep-best loss:min`)"
    )
