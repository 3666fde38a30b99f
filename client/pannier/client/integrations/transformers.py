"""Transformers' ``Trainer`` (and TRL's, Axolotl's, ...) with FSDP2: a callback that saves with Pannier.

In: the states that Trainer, through Accelerate, gives to DCP, and the small files that it writes beside them. Out:
``<root>/checkpoint-N``, all of them in one commit. Trainer's ``output_dir`` is scratch: its files are taken from
there, and put back for a resume. For transformers 5.23 and accelerate 1.15.
"""

import logging
import os
import posixpath
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from transformers import TrainerCallback, trainer

from pannier import client
from pannier.client.integrations.accelerate import check_sharded
from pannier.client.integrations.scratch_directory import ScratchDirectory
from pannier.client.loading.filesystem import MissingError
from pannier.common.locations import absolute
from pannier.wire import limits

_log = logging.getLogger(__name__)


class PannierCallback(TrainerCallback):
    """For ``Trainer(callbacks=[PannierCallback("gs://bucket/run")])``.

    Trainer must save sharded states: ``fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}``.
    Other uses of DCP in this process are not affected.

    Args:
        root: directory of the checkpoints, a path or a URL.
        overwrite: what a save may replace, as ``client.async_save`` takes it. True: any checkpoint, as Trainer does.
    """

    def __init__(self, root: str | os.PathLike[str], overwrite: bool | None = True) -> None:
        self.root = absolute(root)
        self._overwrite = overwrite
        self._scratch: ScratchDirectory | None = None
        self._has_warned = False

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Handles Trainer's calls of DCP from now on. Raises ValueError for unsupported settings."""
        check_sharded(getattr(AcceleratorState(), "fsdp_plugin", None))
        if keep := args.save_total_limit:
            raise ValueError(
                f"save_total_limit={keep} counts directories, committed or not: leave it out, and set "
                f"PANNIER_KEEP_NEWEST={keep} or PANNIER_KEEP_BEST=eval_loss:min:{keep}"
            )
        if args.enable_jit_checkpoint:
            raise ValueError("enable_jit_checkpoint saves without a call of on_save: leave it out")
        output_dir = Path(args.output_dir).absolute()
        if self.root == str(output_dir):
            raise ValueError(f"{self.root} is the root of checkpoints: give another output_dir")
        if self._scratch is None:
            self._last_directory = trainer.get_last_checkpoint
            trainer.get_last_checkpoint = self._last_checkpoint
        self._rank, self._is_first_of_host = args.process_index, args.local_process_index == 0
        self._scratch = ScratchDirectory(output_dir, self.root)
        self._scratch.start()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Finds the best checkpoint of an earlier start, for ``load_best_model_at_end``, on all ranks alike.

        Trainer looks for a directory, which only hosts that have saved or resumed the checkpoint have.
        """
        if not (args.load_best_model_at_end and state.best_global_step):
            return
        try:
            folder = self._started().restore(
                f"checkpoint-{state.best_global_step}", lambda file: False
            )
            state.best_model_checkpoint = str(folder)
        except MissingError:
            # Without the step, Trainer doesn't look for the directory again at its next save.
            state.best_model_checkpoint = state.best_global_step = None

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stages what Trainer has just saved; the commit follows in the background."""
        scratch, name = self._started(), f"checkpoint-{state.global_step}"
        if state.best_global_step == state.global_step:
            # Trainer looks for the directory before Accelerate makes it, so that some ranks may not find it.
            state.best_model_checkpoint = str(scratch.directory / name)
        # Each rank saves the file with its random state; the first rank saves all other files.
        files = [
            path
            for path in (scratch.directory / name).iterdir()
            if path.is_file()
            and (self._is_own(path.name) if _is_random(path.name) else self._rank == 0)
        ]
        logs = [log for log in state.log_history if log["step"] == state.global_step]
        numbers = {k: v for log in logs for k, v in log.items() if isinstance(v, int | float)}
        metrics = {k: v for k, v in numbers.items() if k.startswith("eval_")}
        kept = self._kept(metrics, args.metric_for_best_model)
        scratch.stage(name, files, metrics=kept, overwrite=self._overwrite)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Waits until all is committed; raises what failed."""
        if unsaved := self._started().unsaved:
            raise RuntimeError(f"a save of {', '.join(unsaved)} without a call of on_save")
        client.wait_all()

    def latest(self) -> str | None:
        """The newest checkpoint, for ``resume_from_checkpoint=``; None: there is none yet.

        All ranks call it, after the Trainer was made. It puts Trainer's files back into ``output_dir``.
        """
        scratch = self._started()
        newest = client.latest(self.root, include="ingested")
        if newest is None:
            return None
        name = posixpath.basename(newest)
        # The first rank of a host writes all files except the random states of the other ranks.
        folder = scratch.restore(
            name, lambda f: self._is_own(f) if _is_random(f) else self._is_first_of_host
        )
        for state in (FSDP_MODEL_NAME, OPTIMIZER_NAME):
            (folder / f"{state}_0").mkdir(exist_ok=True)
        if dist.is_initialized():
            dist.barrier()
        return str(folder)

    def _started(self) -> ScratchDirectory:
        if self._scratch is None:
            raise RuntimeError("PannierCallback must be in the callbacks of a Trainer first")
        return self._scratch

    def _kept(self, metrics: dict[str, float], best: str | None) -> dict[str, float]:
        """As many metrics as a save may have: that of the best model and the loss come first."""
        first = (best, f"eval_{best}", "eval_loss")
        names = [name for name in metrics if len(name) <= limits.MAX_WORD and name.isprintable()]
        names = sorted(names, key=lambda name: name not in first)[: limits.MAX_METRICS]
        if len(names) < len(metrics) and self._rank == 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d of %d metrics are saved with the checkpoint: at most %d, with names of %d characters",
                len(names),
                len(metrics),
                limits.MAX_METRICS,
                limits.MAX_WORD,
            )
        return {name: metrics[name] for name in names}

    def _is_own(self, file: str) -> bool:
        return file == f"rng_state_{self._rank}.pth"

    def _last_checkpoint(self, folder: str) -> str | None:
        ours = Path(folder).absolute() == self._started().directory
        return self.latest() if ours else self._last_directory(folder)


def _is_random(file: str) -> bool:
    return file.startswith("rng_state_")
