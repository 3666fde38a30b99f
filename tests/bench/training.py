"""A rank's side of the bench: its state, a plain copy of it, and training steps.

The state is float32 tensors of equal size; a step is a CPU-bound matrix product of about 4 ms
on one thread.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

State = dict[str, torch.Tensor]
STEP_S: Final = 0.004


def start_rank() -> None:
    """A world of one rank, as torch's own saves need it."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


def make_state(size: int, tensors: int) -> State:
    """``size`` bytes in so many tensors, without the time that random numbers take."""
    state = {f"layer.{i}": torch.empty(size // tensors // 4) for i in range(tensors)}
    for number, tensor in enumerate(state.values()):
        tensor.fill_(number + 0.5)
    return state


def change(state: State) -> None:
    """What an optimizer does to the state between two saves."""
    for tensor in state.values():
        tensor.add_(1)


class Copies:
    """Memory for a copy of each tensor, touched before: a memcpy into it is warm."""

    def __init__(self, state: State) -> None:
        self._pairs = [
            (torch.empty_like(tensor).copy_(tensor), tensor) for tensor in state.values()
        ]

    def copy(self) -> None:
        """A plain loop of ``copy_`` over all tensors, on torch's threads."""
        for copy, tensor in self._pairs:
            copy.copy_(tensor)


class Training:
    """Steps of about 4 ms on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._a = torch.randn(192, 192)
        self._products = 1
        for _ in range(50):
            self.step()
        alone = statistics.median(self.step() for _ in range(50))
        self._products = max(1, round(STEP_S / alone))

    def step(self) -> float:
        """Seconds that one step took."""
        begun = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._a, self._a)
        return time.perf_counter() - begun

    def steps(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        return [self.step() for _ in range(count)]

    def until(self, done: Callable[[], bool]) -> list[float]:
        """Seconds of each step until ``done()``."""
        found = []
        while not done():
            found.append(self.step())
        return found
