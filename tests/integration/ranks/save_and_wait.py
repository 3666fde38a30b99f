"""Saves one kind of state, says that the call has returned, and waits to be killed.

Between the plan and staging it waits for a file. Environment: ROOT, KIND, SEED, GATE (file).
"""

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from pannier import client
from support.states.bits import overwrite
from support.states.sharded_states import KINDS
from support.states.states import Layout

warnings.filterwarnings("ignore")


class Gated(DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        print("planned", flush=True)
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.01)
        return super().finish_plan(new_plan)


dist.init_process_group("gloo")
layout = Layout(dist.get_rank(), dist.get_world_size())
state = KINDS[os.environ["KIND"]].build(layout, int(os.environ["SEED"]))
target = f"{os.environ['ROOT']}/{os.environ['KIND']}"
handle = client.async_save(state, checkpoint_id=target, planner=Gated())
overwrite(state)
print("returned", handle.done(), flush=True)
time.sleep(100)
