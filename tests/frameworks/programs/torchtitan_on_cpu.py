"""What torchtitan 0.3 needs on a CPU and with torch 2.13; import this before torchtitan."""

import types

import torch
import torch.distributed as dist
from torch import _utils


def _nothing(*arguments: object) -> None:
    pass


# Without an accelerator torchtitan assumes CUDA.
_utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device: "CPU"
torch.cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.current_device = lambda: 0
torch.cpu.memory_stats = lambda device: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = _nothing
# torchtitan's own torch is newer.
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _nothing
