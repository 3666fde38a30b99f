"""Checkpoints that a framework writes piece by piece into a local directory, each as one commit.

In: what the framework gives to DCP for ``<directory>/<name>/<state>``, and the files that it writes into
``<directory>/<name>``. Out: ``<root>/<name>``, with the states by their names, and the files as extra files.
To be called by the training thread.
"""

import posixpath
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pannier import client
from pannier.client.handle import SaveHandle
from pannier.client.integrations import dcp_patch
from pannier.wire.object_names import check_extra_name


class ScratchDirectory(dcp_patch.StateTaker):
    """A local directory whose states are kept for Pannier instead of written by DCP, from :meth:`start` on.

    Args:
        directory: absolute; used by one host or one rank alone.
        root: directory of the checkpoints, an absolute path or a URL; on all ranks the same.
    """

    def __init__(self, directory: Path, root: str) -> None:
        self.directory = directory
        self.root = root
        self.unsaved: dict[str, dict[str, Any]] = {}
        """States that were saved with DCP and not staged yet, by the checkpoint's and by their own name."""
        self._restored: dict[str, str] = {}
        """The attempt whose files were put back, by the name of the checkpoint."""

    def start(self) -> None:
        """Handles DCP's calls for the directory from now on."""
        dcp_patch.take_states(self.directory, self)

    def stop(self) -> None:
        """Leaves the directory to DCP again."""
        dcp_patch.leave_states(self.directory)

    def save(self, path: Path, state_dict: dict[str, Any]) -> bool:
        """Keeps a state for :meth:`stage`."""
        if len(path.parts) != 2:
            return False
        name, state = path.parts
        self.unsaved.setdefault(name, {})[state] = state_dict
        return True

    def load(self, path: Path, state_dict: dict[str, Any]) -> bool:
        """Loads a state of a checkpoint in place. Raises StorageError if it isn't of the restored attempt."""
        if len(path.parts) != 2:
            return False
        name, state = path.parts
        checkpoint_id = posixpath.join(self.root, name)
        dcp_patch.wait_for_saves(checkpoint_id)
        read = client.load({state: state_dict}, checkpoint_id=checkpoint_id).attempt
        if read != self._restored.setdefault(name, read):
            raise client.StorageError(
                f"{checkpoint_id} was replaced by another save while it was loaded: load all of it again"
            )
        return True

    def stage(self, name: str, files: Iterable[Path], **arguments: Any) -> SaveHandle:
        """Stages a checkpoint: the states that were kept, and this rank's files, which it then removes.

        All ranks call it. It takes the further arguments of ``client.async_save``, and raises what that raises, and
        RuntimeError when DCP was given no state.
        """
        folder, states = self.directory / name, self.unsaved.pop(name, {})
        if not states:
            raise RuntimeError(
                f"{folder} has no state: torch.distributed.checkpoint was not called to save one"
            )
        contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        handle = client.async_save(
            states,
            checkpoint_id=posixpath.join(self.root, name),
            extra_files=contents,
            **arguments,
        )
        dcp_patch.track(handle)
        # What was put back is replaced by this process itself.
        self._restored.pop(name, None)
        for file in contents:
            (folder / file).unlink()
        return handle

    def restore(self, name: str, wanted: Callable[[str], bool]) -> Path:
        """Writes the wanted extra files of a checkpoint into its local directory, which it returns.

        All ranks call it. Raises what ``client.load`` raises, and InvalidRequestError for a name that leads
        out of the directory.
        """
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint_id = posixpath.join(self.root, name)
        dcp_patch.wait_for_saves(checkpoint_id)
        found = client.load({}, checkpoint_id=checkpoint_id, extra_files=wanted)
        self._restored[name] = found.attempt
        for file, content in found.extra_files.items():
            # The name becomes a local path.
            check_extra_name(file)
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder
