"""In a program that trains: what its model and optimizer are after each step, and where it waits for its test.

``PAUSE_AFTER=3,5`` lets every rank wait after these steps until the file ``<GO>/<step>`` is there.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Final

import torch

from support.states.bits import bits, parts

PAGE: Final = Path(__file__).parents[2] / "docs/frameworks.md"


def resumed(step: int) -> None:
    """Training begins after this step; 0: it is new."""
    print(f"resumes after {step}", flush=True)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of all bits of this rank's tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        for part in parts(tensor):
            found.update(bits(part))
    return found.hexdigest()


def stepped(step: int, tensors: Iterable[torch.Tensor]) -> None:
    """Reports a step with a digest of this rank's tensors, and waits where the test wants it."""
    print(f"step {step} {digest(tensors)}", flush=True)
    if str(step) in os.environ.get("PAUSE_AFTER", "").split(","):
        while not (Path(os.environ["GO"]) / str(step)).exists():
            time.sleep(0.01)


def tensors_of(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """The model's parameters and buffers and the optimizers' state, in a fixed order."""
    found = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                found += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
    return found


def documented(heading: str, changes: Mapping[str, str]) -> CodeType:
    """The lines that docs/frameworks.md has for a framework, with what is another's in a test replaced."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2]
    lines = section.partition("```python\n")[2].partition("```")[0]
    for old, new in changes.items():
        assert old in lines, f"{old} is not in {lines}"
        lines = lines.replace(old, new)
    return compile(lines, f"{PAGE.name}, {heading}", "exec")
