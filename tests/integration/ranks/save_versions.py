"""Saves one checkpoint id again and again, each time with other values.

After the first version it waits for a reader. Environment: TARGETS (JSON: directories or URLs),
VERSIONS, READER (file).
"""

import json
import os
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pannier import client

warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for version in range(1, int(os.environ["VERSIONS"]) + 1):
    full = torch.full((1001, 64), float(version))
    state = {
        "sharded": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
        "plain": torch.full((10_000,), version),
        # The pieces of a checkpoint differ from version to version.
        **{f"more.{i}": torch.full((100 + i,), version) for i in range(version)},
        "version": version,
    }
    handles = [
        client.async_save(state, checkpoint_id=target)
        for target in json.loads(os.environ["TARGETS"])
    ]
    for handle in handles:
        handle.result(60)
    print("saved", version, flush=True)
    while not Path(os.environ["READER"]).exists():
        time.sleep(0.01)
    dist.barrier()
client.close()
dist.destroy_process_group()
