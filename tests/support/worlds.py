"""For ranks: process groups of several sizes, one after the other, in the same processes.

A process that imports torch takes seconds; what is to be shown for 1, 2 and 3 ranks needs 3 of them.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist


def worlds(*sizes: int) -> Iterator[int]:
    """Joins a process group of each size that has this rank; gives the size.

    Sizes must differ: torch remembers meshes by their shape. They descend, so that the first world's
    ranks have all come before one is left out. For ranks started without torchrun.
    """
    assert list(sizes) == sorted(set(sizes), reverse=True)
    rank = int(os.environ["RANK"])
    directory = Path(sys.argv[0]).resolve().parent
    for size in sizes:
        if rank < size:
            meeting = f"file://{directory}/world-of-{size}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
            yield size
            dist.barrier()
            dist.destroy_process_group()
