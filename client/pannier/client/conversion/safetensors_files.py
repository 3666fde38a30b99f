"""The safetensors files of an export, written by torch and checked by their headers.

In: planned tensors, and a planner that has them. Out: ``model-00001-of-00002.safetensors`` and so on, and
``model.safetensors.index.json``, which maps tensors to files. Imports the package safetensors. Blocking.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pannier.client.conversion.export_plan import PlannedTensor, keys_text
from pannier.client.conversion.lazy_planner import LazySavePlanner
from pannier.wire.errors import IntegrityError, InvalidRequestError

_UNKNOWN_DTYPE: Final = (
    *(KeyError, ValueError, TypeError, AttributeError, RuntimeError),
    safetensors.SafetensorError,
)
"""What safetensors raises for a dtype that it doesn't know, depending on its version."""


def check_dtypes(planned: Sequence[PlannedTensor]) -> None:
    """Raises InvalidRequestError, with the keys, for dtypes that safetensors can't write and read again."""
    for dtype in dict.fromkeys(each.dtype for each in planned):
        if not _is_supported(dtype):
            keys = [each.key for each in planned if each.dtype is dtype]
            raise InvalidRequestError(
                f"{keys_text(keys)} can't be exported as {dtype}, which safetensors {safetensors.__version__} "
                "doesn't know: give another dtype, or leave it out with exclude"
            )


def write_files(
    directory: Path, planned: Sequence[PlannedTensor], planner: LazySavePlanner
) -> None:
    """Writes all files, one after the other, and the index.

    Holds at most one file's tensors in memory, and two copies of its bytes.

    Raises:
        OSError: a file can't be written.
        IntegrityError: a file is not what was planned.
        Exception: whatever the planner raises while it reads.
    """
    writer = HuggingFaceStorageWriter(
        str(directory),
        fqn_to_index_mapping={each.name: each.file for each in planned},
        # With more, torch drops the errors of all threads but one, and holds several files in memory.
        thread_count=1,
    )
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    _check_files(directory, planned)


def _check_files(directory: Path, planned: Sequence[PlannedTensor]) -> None:
    """Compares the files' headers with the plan: torch's writer reports success without checking them."""
    wanted = {each.name: (each.dtype, each.shape) for each in planned}
    try:
        stored = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except safetensors.SafetensorError as error:
        raise IntegrityError(f"the files were written, but can't be read: {error}") from error
    found = {
        name: (value.properties.dtype, value.size)
        for name, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if wrong:
        raise IntegrityError(
            f"{keys_text(wrong)} was not written as planned: the first "
            + _difference(found.get(wrong[0]), wanted.get(wrong[0]))
        )


def _difference(
    found: tuple[torch.dtype, torch.Size] | None, planned: tuple[torch.dtype, torch.Size] | None
) -> str:
    """How a tensor in a file differs from the planned one, human-readable; None: there is none."""
    if found is None:
        return "is missing"
    if planned is None:
        return "was not planned"
    return (
        f"has dtype {found[0]} and shape {tuple(found[1])}, planned was {planned[0]} and "
        f"{tuple(planned[1])}"
    )


def _is_supported(dtype: torch.dtype) -> bool:
    try:
        content = safetensors.torch.save({"x": torch.empty(1, dtype=dtype)})
        return bool(safetensors.torch.load(content)["x"].dtype is dtype)
    except _UNKNOWN_DTYPE:
        return False
