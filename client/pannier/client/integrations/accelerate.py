"""Accelerate's ``save_state`` and ``load_state`` with FSDP, as one checkpoint in one commit.

In: an ``Accelerator`` and a checkpoint id. Out: model and optimizers, and the small files that Accelerate writes beside
them (schedulers, samplers, random states, registered objects), all of them there or none. For accelerate 1.15.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from accelerate.utils.constants import RNG_STATE_NAME

from pannier.client.handle import SaveHandle
from pannier.client.integrations.scratch_directory import ScratchDirectory
from pannier.common.locations import absolute
from pannier.wire.object_names import split_checkpoint_id


def save_state(
    accelerator: Accelerator, checkpoint_id: str | os.PathLike[str], **arguments: Any
) -> SaveHandle:
    """``accelerator.save_state`` in the background: returns when all is staged, with the handle of the save.

    All ranks call it. If several ranks write a file of the same name, the first rank's is saved.

    Args:
        checkpoint_id: the checkpoint, a path or a URL.
        arguments: further arguments of ``client.async_save``, such as ``metrics``. By default the save replaces any
            checkpoint at this id, as Accelerate's does; with ``overwrite=None`` only one of this job.

    Raises:
        ValueError: a setting of the accelerator is not supported.
        PannierError: what ``client.async_save`` raises.
    """
    check_sharded(accelerator.state.fsdp_plugin)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "automatic_checkpoint_naming=True chooses and removes directories by itself: leave it out"
        )
    with _scratch(checkpoint_id) as (scratch, name):
        folder = scratch.directory / name
        accelerator.save_state(str(folder))
        files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
        (of_first,) = broadcast_object_list([[*files]])
        is_first = accelerator.is_main_process
        own = [path for file, path in files.items() if is_first or file not in of_first]
        return scratch.stage(name, own, **{"overwrite": True, **arguments})


def load_state(
    accelerator: Accelerator, checkpoint_id: str | os.PathLike[str], **arguments: Any
) -> None:
    """``accelerator.load_state`` of a checkpoint that :func:`save_state` made, from the nearest copy.

    All ranks call it.

    Args:
        checkpoint_id: a checkpoint, as ``client.latest`` finds it.
        arguments: further arguments of ``accelerator.load_state``.

    Raises:
        ValueError: a setting of the accelerator is not supported.
        PannierError: what ``client.load`` raises.
    """
    check_sharded(accelerator.state.fsdp_plugin)
    own = f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl"
    with _scratch(checkpoint_id) as (scratch, name):
        folder = scratch.restore(
            name, lambda file: file == own or not file.startswith(f"{RNG_STATE_NAME}_")
        )
        accelerator.load_state(str(folder), **arguments)


def check_sharded(fsdp_plugin: Any) -> None:
    """Raises ValueError unless Accelerate gives sharded states to DCP."""
    if fsdp_plugin is None or fsdp_plugin.state_dict_type.name != "SHARDED_STATE_DICT":
        raise ValueError(
            "Accelerate would save whole states from rank 0: use FSDP with "
            "state_dict_type='SHARDED_STATE_DICT' (Trainer: fsdp=True, fsdp_config={'state_dict_type': ...})"
        )


@contextmanager
def _scratch(checkpoint_id: str | os.PathLike[str]) -> Iterator[tuple[ScratchDirectory, str]]:
    """This rank's scratch directory for one call of Accelerate, and the checkpoint's name in it."""
    root, name = split_checkpoint_id(absolute(checkpoint_id))
    with tempfile.TemporaryDirectory(prefix="pannier-") as directory:
        scratch = ScratchDirectory(Path(directory).absolute(), root)
        scratch.start()
        try:
            yield scratch, name
        finally:
            scratch.stop()
