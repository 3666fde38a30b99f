"""A device ``tpu`` for processes without a TPU: what torch_tpu registers, over ``foreign_device.cpp``."""

import subprocess
import types
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_suffix(".cpp")


def build(library: Path) -> None:
    """Compiles the device: ten seconds of a core. Takes g++."""
    root = Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-O0", "-std=c++20", "-fPIC", "-shared", str(_SOURCE), "-o", str(library)),
            *(f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu"),
        ],
        check=True,
    )


def register(library: str) -> None:
    """Adds the device to this process."""
    module = types.ModuleType("torch.tpu")
    for name, answer in (
        *(("is_available", True), ("is_initialized", True), ("_is_in_bad_fork", False)),
        *(("device_count", 1), ("current_device", 0)),
    ):
        setattr(module, name, lambda answer=answer: answer)
    torch.utils.rename_privateuse1_backend("tpu")
    torch._register_device_module("tpu", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.load_library(library)
