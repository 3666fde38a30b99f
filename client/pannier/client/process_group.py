"""Whether this process saves with others, or by itself.

In: torch.distributed and the launcher's environment variables. Out: answers; no state.
"""

import os

import torch.distributed as dist

from pannier.wire.errors import InvalidRequestError


def is_alone(no_dist: bool) -> bool:
    """Whether this process saves by itself."""
    return no_dist or not dist.is_available() or not dist.is_initialized()


def process_rank() -> int:
    """This process's global rank, as far as it is known; 0 for a process by itself."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    launched = launched_as()
    return 0 if launched is None else int(launched[0])


def check_single_process(no_dist: bool) -> None:
    """Refuses a save of this process alone where a launcher started several without a group.

    Each of them would be the only rank of its own job, and all would save to one checkpoint id.
    ``RANK`` and ``WORLD_SIZE`` are what torchrun sets, and what ``init_process_group`` reads.

    Raises:
        InvalidRequestError: ``torch.distributed`` is not initialised, and ``no_dist`` not given.
    """
    launched = launched_as()
    if no_dist or not is_alone(no_dist) or launched is None:
        return
    rank, size = launched
    raise InvalidRequestError(
        f"this process is rank {rank} of {size} (RANK and WORLD_SIZE, as torchrun sets them), but "
        "torch.distributed is not initialised, so that each rank would save alone to the same "
        "checkpoint: call torch.distributed.init_process_group() before the first save, or, where "
        "each process saves by itself, give no_dist=True and a checkpoint_id per process"
    )


def launched_as() -> tuple[str, str] | None:
    """This process's rank and the number of ranks, where a launcher started several."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    several = size.isdecimal() and rank.isdecimal() and int(size) > 1
    return (rank, size) if several else None
