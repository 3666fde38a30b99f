"""One rank's planner blocks until it is killed; the others report how their saves end.

A first save connects all ranks. The second loses rank VICTIM before it is ingested. The
third misses it. Environment: ROOT, REPORT (directory), VICTIM.
"""

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from pannier import client
from pannier.wire.errors import PannierError

warnings.filterwarnings("ignore")


class Blocking(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == int(os.environ["VICTIM"]):
            print("blocked", flush=True)
            time.sleep(100)
        return super().resolve_data(write_item)


dist.init_process_group("gloo")
rank = dist.get_rank()
state = {f"weight.{rank}": torch.full((1000,), float(rank)), "step": 1}
client.save(state, checkpoint_id=f"{os.environ['ROOT']}/first")
report = {}
for name in ("lost", "missing"):
    began = time.monotonic()
    try:
        target = f"{os.environ['ROOT']}/{name}"
        handle = client.async_save(state, checkpoint_id=target, planner=Blocking())
        print("returned", name, flush=True)
        handle.result(60)
        report[name] = "committed"
    except PannierError as error:
        report[name] = {
            "type": type(error).__name__,
            "message": str(error),
            "kinds": {str(number): failure.kind for number, failure in error.failures.items()},
            "seconds": time.monotonic() - began,
        }
    print("ended", name, flush=True)
(Path(os.environ["REPORT"]) / f"{rank}.json").write_text(json.dumps(report))
# Without a goodbye to the process group: one of it is gone.
os._exit(0)
