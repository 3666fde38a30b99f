"""``client.export``: the tensors of a checkpoint as safetensors files, which Hugging Face's libraries read.

In: a checkpoint, and a choice of its tensors. Out: a local directory that appears when it is complete. An
export takes memory and time that a training process can't spare: a rank of a process group is refused.
Blocking.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist

from pannier.client.conversion.export_plan import Choice, as_dtype, plan_export
from pannier.client.conversion.lazy_planner import LazySavePlanner
from pannier.client.conversion.output_directory import local_path, new_directory
from pannier.client.loading.storage_reader import StorageReader
from pannier.client.user_errors import at_call
from pannier.common.units import duration_text, size_text
from pannier.wire.errors import ConfigurationError, InvalidRequestError

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors that were read, and of all that are exported."""
Format: TypeAlias = Literal["safetensors"]
FORMAT: Final[Format] = "safetensors"
MAX_FILE_BYTES: Final = 2_000_000_000
"""Default limit of a file's size. An export takes three times as much memory."""


@dataclass(frozen=True)
class ExportResult:
    """What an export has written."""

    checkpoint_id: str
    directory: str
    """Absolute path."""
    files: dict[str, int]
    """Bytes by name: those with tensors, and the index."""
    tensors: int
    """How many."""
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def __str__(self) -> str:
        return (
            f"{self.directory}: {self.tensors} tensors in {len(self.files) - 1} files, "
            f"{size_text(self.total_bytes)}, in {duration_text(self.seconds)}"
        )


@at_call
def export(
    checkpoint_id: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: Format = FORMAT,
    prefix: str = "",
    keys: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    before: Callable[[], None] = lambda: None,
) -> ExportResult:
    """See :func:`pannier.client.export`.

    Args:
        before: called first.
    """
    began = time.monotonic()
    before()
    if format != FORMAT:
        raise InvalidRequestError(f"format={format!r} isn't known: give {FORMAT!r}")
    if dist.is_available() and dist.is_initialized():
        raise InvalidRequestError(
            f"this process is rank {dist.get_rank()} of a process group: an export takes memory and time "
            "that training hasn't; run `pannier export`, or call this after destroy_process_group()"
        )
    if max_file_bytes < 1:
        raise InvalidRequestError(f"max_file_bytes={max_file_bytes} must be positive")
    choice = Choice(
        prefix=prefix,
        keys=None if keys is None else _patterns("keys", keys),
        exclude=_patterns("exclude", exclude),
        dtype=as_dtype(dtype),
        max_file_bytes=max_file_bytes,
    )
    try:
        from pannier.client.conversion import safetensors_files
    except ImportError as error:
        raise ConfigurationError(
            f"an export needs safetensors, which can't be imported in {sys.prefix} ({error}): pip install "
            "safetensors there"
        ) from error
    path = local_path(directory)
    reader = StorageReader(checkpoint_id, storage_options=storage_options)
    with new_directory(path) as partial:
        try:
            # Reads one generation, even if the checkpoint is replaced meanwhile.
            reader.share_metadata(reader.resolve())
            metadata = reader.read_metadata()
            planned = plan_export(metadata.state_dict_metadata, choice)
            safetensors_files.check_dtypes(planned)
            total = sum(each.bytes for each in planned)
            planner = LazySavePlanner(
                planned,
                reader,
                metadata,
                lambda done: None if progress is None else progress(done, total),
            )
            safetensors_files.write_files(partial, planned, planner)
        finally:
            reader.release()
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    return ExportResult(
        checkpoint_id=reader.checkpoint_id,
        directory=str(path),
        files=sizes,
        tensors=len(planned),
        seconds=time.monotonic() - began,
    )


def _patterns(argument: str, given: Iterable[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidRequestError(f"{argument}: {pattern!r} is not a name")
    return patterns
