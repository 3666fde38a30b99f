"""Checks the arguments of ``async_save``: what can be honoured, and what is refused.

In: arguments with torch's names. Out: checked ones, or an InvalidRequestError
(a ValueError) that names what to use instead.
"""

import os
import posixpath
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from pannier.client.config import check_metrics, check_timeout
from pannier.client.loading.filesystem import refuse_path
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


class Destination:
    """Where a :class:`pannier.client.StorageWriter` saves, and how; its attributes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        process_group: Any = None,
        no_dist: bool = False,
        timeout: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        overwrite: bool | None = None,
    ) -> None:
        self._overwrite = check_overwrite(overwrite)
        self._checkpoint_id = checkpoint_path(path)
        self._process_group = process_group
        self._no_dist = no_dist
        self._timeout = None if timeout is None else check_timeout(timeout)
        self.metrics = metrics
        self.extra_files = extra_files

    @property
    def checkpoint_id(self) -> str:
        """The directory that is written: an absolute path or a URL."""
        return self._checkpoint_id

    @property
    def process_group(self) -> Any:
        """The ranks that save together; None: all."""
        return self._process_group

    @property
    def no_dist(self) -> bool:
        """Whether this process saves by itself."""
        return self._no_dist

    @property
    def timeout(self) -> float | None:
        """Seconds until a save must be committed; None: the client's ``save_timeout``."""
        return self._timeout

    @property
    def overwrite(self) -> bool | None:
        """Whether a checkpoint is replaced; None: one of this job."""
        return self._overwrite

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers by name that go with the saves from now on; set them again before the next one.

        Setting raises InvalidRequestError naming what is no number.
        """
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Mapping[str, Any] | None) -> None:
        self._metrics = check_metrics(metrics)

    @property
    def extra_files(self) -> Mapping[str, bytes]:
        """Small files by name that go with the saves from now on; set them again before the next one.

        Setting raises InvalidRequestError naming what can't be added.
        """
        return self._extra_files

    @extra_files.setter
    def extra_files(self, files: Mapping[str, bytes] | None) -> None:
        self._extra_files = check_extra_files(files)


def target(checkpoint_id: Any, writer: Any) -> Any:
    """The checkpoint id, the storage writer's if it isn't given. Raises InvalidRequestError."""
    if writer is None:
        return checkpoint_id
    refuse_path("storage_writer", writer)
    if not isinstance(writer, Destination):
        raise InvalidRequestError(
            f"storage_writer={type(writer).__name__}: Pannier's own writes the checkpoint; give "
            "checkpoint_id, or pannier.client.StorageWriter"
        )
    return writer.checkpoint_id if checkpoint_id is None else checkpoint_id


def reported_target(checkpoint_id: Any, writer: Any) -> str:
    """The same, valid or not, as it is reported to the other ranks."""
    try:
        return reported_path(target(checkpoint_id, writer))
    except InvalidRequestError:
        return str(checkpoint_id)
