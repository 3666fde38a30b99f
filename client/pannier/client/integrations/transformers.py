"""Transformers' ``Trainer`` (and TRL's, Axolotl's, ...) with FSDP2: a callback by which Pannier saves.

In: the states that Trainer, through Accelerate, gives to DCP, and the small files that it writes beside them. Out:
``<root>/checkpoint-N``, all of them in one commit. Trainer's ``output_dir`` is scratch: its files are taken from
there, and put back for a resume. For transformers 5.23 and accelerate 1.15.
"""

import os
import posixpath
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from torch.distributed import checkpoint
from transformers import TrainerCallback, trainer

from pannier import client
from pannier.client.loading.catalog import find_commit
from pannier.client.loading.filesystem import open_dir
from pannier.common.locations import absolute

_dcp: Any = checkpoint
"""Accelerate looks its functions up at each call."""


class PannierCallback(TrainerCallback):
    """For ``Trainer(callbacks=[PannierCallback("gs://bucket/run")])``.

    Trainer must save sharded states: ``fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}``. All other
    uses of DCP in this process are as they were.

    Args:
        root: directory of the checkpoints, a path or a URL.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = absolute(root)
        self._output_dir: Path | None = None
        self._states: dict[str, Any] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Takes Trainer's calls of DCP from now on. Raises ValueError for settings that can't be kept."""
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if plugin is None or plugin.state_dict_type.name != "SHARDED_STATE_DICT":
            raise ValueError(
                "Trainer would save whole states from rank 0: set fsdp=True and "
                "fsdp_config={'state_dict_type': 'SHARDED_STATE_DICT'}"
            )
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
        self._output_dir = output_dir
        self._is_first_of_host = args.local_process_index == 0
        self._torch_save, self._torch_load = _dcp.save, _dcp.load
        _dcp.save, _dcp.load = self._save, self._load
        self._last_directory = trainer.get_last_checkpoint
        trainer.get_last_checkpoint = self._last_checkpoint

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stages what Trainer has just saved; the commit follows in the background."""
        folder, rank = self._folder(f"checkpoint-{state.global_step}"), args.process_index
        # One file per rank has its random state, and all others are the first rank's.
        files = {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if path.is_file()
            and (path.name == f"rng_state_{rank}.pth" if path.match("rng_state_*") else rank == 0)
        }
        logs = [log for log in state.log_history if log["step"] == state.global_step]
        numbers = {k: v for log in logs for k, v in log.items() if isinstance(v, int | float)}
        states, self._states = self._states, {}
        client.async_save(
            states,
            checkpoint_id=posixpath.join(self.root, folder.name),
            extra_files=files,
            metrics={name: v for name, v in numbers.items() if name.startswith("eval_")},
        )
        for name in files:
            (folder / name).unlink()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Waits until all is committed; raises what failed."""
        if self._states:
            raise RuntimeError(f"a save of {', '.join(self._states)} without a call of on_save")
        client.wait_all()

    def latest(self) -> str | None:
        """The newest checkpoint, for ``resume_from_checkpoint=``; None: there is none yet.

        All ranks call it, after the Trainer was made. It puts Trainer's files back into ``output_dir``.
        """
        newest = client.latest(self.root, include="ingested")
        if newest is None:
            return None
        folder = self._folder(posixpath.basename(newest))
        if self._is_first_of_host:
            for name in (FSDP_MODEL_NAME, OPTIMIZER_NAME):
                (folder / f"{name}_0").mkdir(parents=True, exist_ok=True)
            for name in _extra_files(newest):
                (folder / name).write_bytes(client.read_extra_file(newest, name))
        if dist.is_initialized():
            dist.barrier()
        return str(folder)

    def _folder(self, name: str) -> Path:
        if self._output_dir is None:
            raise RuntimeError("PannierCallback must be in the callbacks of a Trainer first")
        return self._output_dir / name

    def _place(self, storage: Any) -> tuple[str, str] | None:
        """Checkpoint and state for which Trainer made a DCP reader or writer; None: it isn't Trainer's."""
        path = Path(getattr(storage, "path", "")).absolute()
        ours = path.parent.parent == self._output_dir and path.match("checkpoint-*/*_0")
        return (path.parent.name, path.name) if ours else None

    def _save(self, state_dict: dict[str, Any], **arguments: Any) -> Any:
        if place := self._place(arguments.get("storage_writer")):
            self._states[place[1]] = state_dict
            return None
        return self._torch_save(state_dict, **arguments)

    def _load(self, state_dict: dict[str, Any], **arguments: Any) -> None:
        if place := self._place(arguments.get("storage_reader")):
            client.load({place[1]: state_dict}, checkpoint_id=posixpath.join(self.root, place[0]))
        else:
            self._torch_load(state_dict, **arguments)

    def _last_checkpoint(self, folder: str) -> str | None:
        ours = Path(folder).absolute() == self._output_dir
        return self.latest() if ours else self._last_directory(folder)


def _extra_files(checkpoint_id: str) -> list[str]:
    commit = find_commit(open_dir(checkpoint_id))
    return [] if commit is None else [file.name for file in commit.extra_files]
