"""Accelerate with FSDP2 on the CPU."""

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def cpu_accelerator() -> Accelerator:
    """With sharded states; it starts the process group."""
    PartialState(cpu=True)
    # Accelerate shards on accelerators only, which it infers from this.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    return Accelerator(cpu=True, fsdp_plugin=plugin)
