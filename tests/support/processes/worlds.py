"""For ranks: several process groups, one after the other, in the same processes.

A process that imports torch takes seconds; what is to be shown for 1, 2 and 3 ranks needs 3 of them.
For ranks started without torchrun.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def worlds(*sizes: int) -> Iterator[int]:
    """Joins a process group of each size that has this rank; gives the size.

    Sizes must differ: torch remembers meshes by their shape.
    """
    assert len(sizes) == len(set(sizes))
    for size in sizes:
        with _world(f"of-{size}", size) as joined:
            if joined:
                yield size


def in_turn(scenarios: Sequence[tuple[int, Callable[[], object]]]) -> None:
    """Calls each function on its number of ranks; see :func:`support.processes.ranks.run_in_turn`."""
    for size, scenario in scenarios:
        with _world(scenario.__name__, size) as joined:
            if joined:
                scenario()
        if joined:
            print(f"passed {scenario.__name__}", flush=True)


@contextmanager
def _world(name: str, size: int) -> Iterator[bool]:
    """A process group of the first ``size`` ranks; whether this rank is in it."""
    rank = int(os.environ["RANK"])
    if rank >= size:
        yield False
        return
    meeting = f"file://{Path(sys.argv[0]).resolve().parent}/world-{name}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    yield True
    dist.barrier()
    # What a traceback holds, too: gloo's threads must not outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()
    if torch.__version__ < "2.10":
        # What DTensor found for one mesh it takes for a later one of the same shape.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
