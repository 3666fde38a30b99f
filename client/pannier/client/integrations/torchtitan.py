"""torchtitan's checkpointer: its ``CheckpointManager``, saving and loading with Pannier.

In: torchtitan's states and settings, on all ranks. Out: ``<folder>/step-N``, committed in the background.
torchtitan decides when to save and what; Pannier decides which checkpoint is the newest, and which are
removed. safetensors are left to torchtitan. For torchtitan 0.3.
"""

import contextlib
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components import checkpointer
from torchtitan.components.checkpointer import MODEL, AsyncMode
from torchtitan.tools.utils import GarbageCollection

from pannier import client


class CheckpointManager(checkpointer.CheckpointManager):
    """For ``Trainer.Config.checkpoint``: ``CheckpointManager.Config(enable=True, folder="gs://bucket/run")``."""

    @dataclass(kw_only=True, slots=True)
    class Config(checkpointer.CheckpointManager.Config):
        """torchtitan's settings, but for ``keep_latest_k``, which must be 0."""

        keep_latest_k: int = 0
        """The coordinator removes checkpoints: see ``PANNIER_KEEP_NEWEST``."""
        overwrite: bool | None = True
        """What a save may replace, as ``client.async_save`` takes it. True: any checkpoint, as torchtitan does."""

        def __post_init__(self) -> None:
            checkpointer.CheckpointManager.Config.__post_init__(self)
            if self.keep_latest_k:
                raise ValueError(
                    f"checkpoint.keep_latest_k={self.keep_latest_k} would remove committed checkpoints while "
                    "newer ones aren't committed yet: set it to 0, and PANNIER_KEEP_NEWEST (or `pannier "
                    f"coordinator --keep-newest`) to {self.keep_latest_k}"
                )

    save_future: Any

    def __init__(self, config: Config, *, optimizers: Any, **components: Any) -> None:
        super().__init__(config, optimizers=optimizers, **components)
        # With a stager set, torchtitan makes none of its own, with pinned memory. It closes this at the end.
        self.stager = contextlib.ExitStack()
        self._overwrite = config.overwrite
        if config.enable:
            self.stager.callback(_wait_for_saves)
            for optimizer in optimizers:
                # torchtitan itself waits for the copy before it steps.
                client.guard(optimizer, wait=False)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> client.SaveHandle | None:
        """Returns a handle, as torchtitan expects in either async mode; None: the save is committed."""
        if to_hf:
            super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return None
        handle = None
        if async_mode == AsyncMode.DISABLED:
            client.save(state_dict, checkpoint_id=checkpoint_id, overwrite=self._overwrite)
        else:
            pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            handle = client.async_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                overwrite=self._overwrite,
                staging="overlapped" if pinned else "blocking",
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return handle

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads in place, from the nearest copy."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        client.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """The step of the newest save that is committed, or was ingested when the job was killed."""
        newest = client.latest(folder or self.folder, include="ingested")
        if newest is None:
            return -1
        step = re.search(r"/step-(\d+)$", newest)
        if step is None:
            raise ValueError(f"the newest checkpoint, {newest}, is none of torchtitan's: step-N")
        return int(step[1])

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # Hidden from torchtitan, which would wait for the earlier save: saves may overlap. A later call
        # raises its error.
        earlier, self.save_future = self.save_future, None
        saved = bool(super()._save(curr_step, last_step))
        self.save_future = self.save_future or earlier
        if saved and last_step:
            client.wait_all()
        return saved


def _wait_for_saves() -> None:
    """Waits until all is committed; raises what failed."""
    # torchtitan also closes while it handles an error of training. That error must be the one that is raised; those
    # of saves are printed at the exit. And it closes in ``__del__``: when the interpreter ends, the exit has waited.
    if sys.exc_info()[0] is None and not sys.is_finalizing():
        client.wait_all()
