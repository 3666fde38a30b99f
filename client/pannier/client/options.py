"""Checks the arguments of ``async_save``: what can be honoured, and what is refused.

In: arguments with torch's names. Out: checked ones, or an InvalidRequestError
(a ValueError) that names what to use instead.
"""

import os
import posixpath
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from pannier.common.locations import absolute, parse
from pannier.wire import limits, object_names
from pannier.wire.errors import InvalidRequestError

OnBusy: TypeAlias = Literal["wait", "skip", "raise"]
Staging: TypeAlias = Literal["blocking", "overlapped"]


def checkpoint_path(checkpoint_id: str | os.PathLike[str] | None) -> str:
    """An absolute path or a URL. Raises InvalidRequestError."""
    if checkpoint_id is None:
        raise InvalidRequestError("checkpoint_id is missing: give a path or a URL")
    url = absolute(checkpoint_id)
    parse(url)
    object_names.split_checkpoint_id(url)
    return url


def prepared_path(checkpoint_root: str | os.PathLike[str]) -> str:
    """A checkpoint id in the root, under which nothing is saved. Raises InvalidRequestError."""
    return checkpoint_path(posixpath.join(absolute(checkpoint_root), "prepared"))


def reported_path(checkpoint_id: Any) -> str:
    """A checkpoint id, valid or not, as it is reported to the other ranks."""
    try:
        return checkpoint_path(checkpoint_id)
    except (InvalidRequestError, TypeError):
        return str(checkpoint_id)


def check_on_busy(on_busy: str) -> None:
    """Raises InvalidRequestError unless it is an :data:`OnBusy`."""
    if on_busy not in get_args(OnBusy):
        raise InvalidRequestError(f"on_busy={on_busy!r}: use 'wait', 'skip' or 'raise'")


def check_overwrite(overwrite: Any) -> bool | None:
    """``overwrite``. Raises InvalidRequestError unless it is None, True or False."""
    if overwrite is None or isinstance(overwrite, bool):
        return overwrite
    raise InvalidRequestError(f"overwrite={overwrite!r}: use None, True or False")


def check_on_commit(callback: Any) -> None:
    """Raises InvalidRequestError unless it is None or can be called."""
    if callback is not None and not callable(callback):
        raise InvalidRequestError(f"on_commit={callback!r}: give a function of the result, or None")


def check_extra_files(files: Any) -> dict[str, bytes]:
    """The small files that a save adds, by name. Raises InvalidRequestError naming what isn't one."""
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise InvalidRequestError(
            f"extra_files is a {type(files).__name__}: give a mapping of names to bytes"
        )
    for name, content in files.items():
        if not (isinstance(name, str) and isinstance(content, bytes | bytearray | memoryview)):
            raise InvalidRequestError(
                f"extra_files[{name!r}] is a {type(content).__name__}: names are text, contents bytes"
            )
    limits.check_extra_names(files)
    found = {name: bytes(content) for name, content in files.items()}
    size = sum(map(len, found.values()))
    if size > limits.MAX_EXTRA_BYTES:
        raise InvalidRequestError(
            f"extra_files has {size} bytes together, at most {limits.MAX_EXTRA_BYTES} are allowed on one "
            "rank: put what is large into the state dict"
        )
    return found


def check_staging(staging: str) -> None:
    """Raises InvalidRequestError unless it is a :data:`Staging`."""
    if staging not in get_args(Staging):
        raise InvalidRequestError(f"staging={staging!r}: use 'blocking' or 'overlapped'")


def check_torch_only(kind: Any, stager: Any, use_collectives: bool) -> None:
    """Raises InvalidRequestError for what only torch's own ``async_save`` can do."""
    if stager is not None:
        raise InvalidRequestError(
            f"async_stager={type(stager).__name__}: Pannier stages by itself, into memory it reuses; leave it out, "
            "or call torch's function within pannier.client.patch_dcp(), which does"
        )
    if kind not in (None, AsyncCheckpointerType.THREAD):
        raise InvalidRequestError(
            f"async_checkpointer_type={kind}: the sidecar is the other process; leave it out, or call torch's "
            "function within pannier.client.patch_dcp(), which does"
        )
    if not use_collectives:
        raise InvalidRequestError(
            "use_collectives=False writes a checkpoint per rank; Pannier needs no collectives "
            "anyway: leave it out, or give no_dist=True and a checkpoint_id per rank"
        )
