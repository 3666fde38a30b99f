"""One rank of a process group whose others aren't there: what a collective would bring is any bytes.

For what a rank does by itself: sharding, planning, staging.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def alone_of(ranks: int, rank: int = -1) -> Iterator[None]:
    """Makes this process a rank of so many; by default the last."""
    dist.init_process_group("fake", rank=rank % ranks, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
